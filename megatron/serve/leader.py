"""The thread of the model: its loop, and what it and the thread of the clients say to each other.

Between two steps texts begin where rows are free, and those go whose client has left. Rank 0 leads: it alone hears the
clients, and before each step it tells the others what to do. While there is nothing to do they wait for its word, which
comes every few seconds, so that no collective times out.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, final

import torch

from megatron.inference.generation import FinishReason, GeneratedSequence, Generator
from megatron.inference.request import Request, Sampling
from megatron.model.gpt2 import GPT2
from mpu.collectives import broadcast_json
from mpu.groups import Group


@dataclass(frozen=True)
class StartSequences:
    requests: tuple[Request, ...]


@dataclass(frozen=True)
class ScoreSequence:
    """A text that has ended, once more, for a verdict (Judge)."""

    number: int
    ids: tuple[int, ...]
    top_logprobs: int
    """How many of the likeliest tokens are wanted in each place."""


@dataclass(frozen=True)
class CancelSequences:
    """Texts that nobody waits for any longer."""

    numbers: tuple[int, ...]


@dataclass(frozen=True)
class QueueClosed:
    """No more will be asked for."""


@dataclass(frozen=True)
class FrontendFailed:
    """The thread of the clients has failed."""

    error: BaseException


SchedulerCommand = StartSequences | ScoreSequence | CancelSequences | QueueClosed | FrontendFailed


@dataclass(frozen=True)
class TokenEvent:
    """Of a text: it has so many tokens now, and this is the last of them; or it has ended."""

    number: int
    count: int
    token: int
    logprob: float
    finish_reason: FinishReason | None


LOGITS_CHUNK_BYTES = 64 << 20
"""Of logits that exist together."""


@dataclass(frozen=True)
class SequenceLogprobs:
    """Of a text's tokens from the second on: the first has nothing before it."""

    number: int
    logprobs: tuple[float, ...]
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...]
    """In each place: tokens with their log-probabilities, the likeliest first."""


@final
class LogprobScorer:
    """How likely the model finds each token of a text, and which it finds likeliest there: another reading of the whole
    text, for clients that ask for more than the tokens that were taken."""

    def __init__(self, model: GPT2, vocabulary: int) -> None:
        """Tokens from `vocabulary` on are padding."""
        self._model, self._vocabulary = model, vocabulary
        self._rows = max(1, LOGITS_CHUNK_BYTES // (4 * vocabulary))

    @torch.inference_mode()
    def __call__(self, number: int, ids: tuple[int, ...], num_top: int) -> SequenceLogprobs:
        """Collective."""
        tokens = torch.tensor(ids, device=self._model.wpe.weight.device)
        logprobs: list[float] = []
        likeliest: list[tuple[tuple[int, float], ...]] = []
        if len(ids) > 1:
            hidden = self._model.hidden_states(tokens[None, :-1])[0]  # [s - 1, h]
            for rows, targets in zip(hidden.split(self._rows), tokens[1:].split(self._rows), strict=True):
                found = self._model.logits(rows)[:, : self._vocabulary].float().log_softmax(-1)  # [n, V]
                logprobs += found.gather(1, targets[:, None])[:, 0].tolist()
                values, places = found.topk(min(num_top, self._vocabulary))
                likeliest += [tuple(zip(*pair)) for pair in zip(places.tolist(), values.tolist(), strict=True)]
        return SequenceLogprobs(number, tuple(logprobs), tuple(likeliest))


POLL_SECONDS = 0.2
"""How long a request to stop may go unnoticed while there is nothing to do."""
HEARTBEAT_SECONDS = 5.0
"""Between two words to ranks that have nothing to do."""

Inbox = queue.SimpleQueue[SchedulerCommand]


@dataclass(frozen=True)
class StepPlan:
    """What every rank does next, before a step."""

    drop: tuple[int, ...] = ()
    begin: tuple[Request, ...] = ()
    read: tuple[ScoreSequence, ...] = ()
    last: bool = False

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> StepPlan:
        return cls(tuple(found["drop"]), tuple(_request(one) for one in found["begin"]),
                   tuple(ScoreSequence(**{**one, "ids": tuple(one["ids"])}) for one in found["read"]), found["last"])


def _request(found: dict[str, Any]) -> Request:
    return Request(**{**found, "prompt": tuple(found["prompt"]), "stops": tuple(found["stops"]),
                      "sampling": Sampling(**found["sampling"])})


@final
class StepExecutor:
    """What every rank does in a turn."""

    def __init__(self, generator: Generator, scorer: LogprobScorer) -> None:
        self.generator, self._scorer = generator, scorer

    def __call__(self, plan: StepPlan) -> Iterator[GeneratedSequence | SequenceLogprobs]:
        """The texts that got a token or ended, as they do."""
        for number in plan.drop:
            self.generator.cancel(number)
        yield from self.generator.start(plan.begin)
        yield from self.generator.step()
        for one in plan.read:
            yield self._scorer(one.number, one.ids, one.top_logprobs)


def run_worker(executor: StepExecutor, world: Group) -> None:
    """The loop of every rank but the first."""
    while not (plan := StepPlan.from_json(broadcast_json(None, world))).last:
        for _ in executor(plan):
            pass


@final
class GenerationScheduler:
    def __init__(self, executor: StepExecutor, world: Group, inbox: Inbox,
                 publish: Callable[[list[TokenEvent | SequenceLogprobs]], None]) -> None:
        self._executor, self._world, self._inbox, self._publish = executor, world, inbox, publish
        self._running: set[int] = set()
        self._waiting: deque[Request] = deque()
        self._cancelled: list[int] = []
        self._to_score: deque[ScoreSequence] = deque()
        self._queue_is_closed = False
        self._last_broadcast = time.monotonic()

    @property
    def _is_idle(self) -> bool:
        return not self._waiting and not self._running and not self._to_score

    def run(self, stop_requested: Callable[[], bool], close_queue: Callable[[], None], grace: float) -> bool:
        """Until asked to stop, and what has been asked for by then is done, or `grace` seconds have gone: False.
        `close` makes the thread of the clients say Closed."""
        until = float("inf")
        while not (self._queue_is_closed and self._is_idle) and time.monotonic() < until:
            self._receive_commands()
            self._run_step()
            if until == float("inf") and stop_requested():
                until = time.monotonic() + grace
                close_queue()
        self._broadcast_plan(StepPlan(last=True))
        return self._is_idle

    def _receive_commands(self) -> None:
        """To all that has been said by now; where there is nothing to do, for a moment."""
        try:
            order = self._inbox.get(timeout=POLL_SECONDS) if self._is_idle else self._inbox.get_nowait()
            while True:
                self._handle_command(order)
                order = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _handle_command(self, order: SchedulerCommand) -> None:
        match order:
            case StartSequences(requests):
                self._waiting += requests
            case ScoreSequence():
                self._to_score.append(order)
            case CancelSequences(numbers):
                self._to_score = deque(read for read in self._to_score if read.number not in numbers)
                self._waiting = deque(request for request in self._waiting if request.number not in numbers)
                self._cancelled += [number for number in numbers if number in self._running]
            case QueueClosed():
                self._queue_is_closed = True
            case FrontendFailed(error):
                raise error

    def _run_step(self) -> None:
        if self._is_idle:
            if self._world.size > 1 and time.monotonic() - self._last_broadcast >= HEARTBEAT_SECONDS:
                self._broadcast_plan(StepPlan())
            return
        free_slots = self._executor.generator.free_slots + len(self._cancelled)
        plan = StepPlan(tuple(self._cancelled),
                        tuple(self._waiting.popleft() for _ in range(min(free_slots, len(self._waiting)))),
                        (self._to_score.popleft(), ) if self._to_score else
                        ())  # one at a time: the others wait for tokens
        self._cancelled.clear()
        self._running.difference_update(plan.drop)
        self._broadcast_plan(plan)
        self._publish([
            found if isinstance(found, SequenceLogprobs) else self._token_event(found) for found in self._executor(plan)
        ])

    def _token_event(self, sequence: GeneratedSequence) -> TokenEvent:
        number, tokens = sequence.request.number, sequence.tokens
        (self._running.add if sequence.finish_reason is None else self._running.discard)(number)
        return TokenEvent(number, len(tokens), tokens[-1] if tokens else 0, sequence.logprobs[-1] if tokens else 0.0,
                          sequence.finish_reason)

    def _broadcast_plan(self, plan: StepPlan) -> None:
        if self._world.size > 1:
            broadcast_json(asdict(plan), self._world)
            self._last_broadcast = time.monotonic()
