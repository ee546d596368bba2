"""The continuous-batching scheduler on the model's thread, and the request queue on the clients' thread.

Rank 0 schedules: before each step it broadcasts a StepPlan (sequences to start, cancel and score) and all ranks
execute it. While idle it broadcasts an empty plan every few seconds, so that no collective times out. The two
threads exchange only the records of this file: commands go through `Inbox`, token events come back.
"""

from __future__ import annotations

import asyncio
import queue
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, final

import torch

from megatron.inference.generation import FinishReason, GeneratedSequence, Generator
from megatron.inference.request import Request, Sampling
from megatron.model.gpt2 import GPT2
from megatron.serve.admission import HttpError
from mpu.collectives import broadcast_json
from mpu.groups import Group


@final
class ServerMetrics:
    """Used by the clients' thread only."""

    def __init__(self) -> None:
        self._began = time.time()
        self._requests: Counter[tuple[str, int]] = Counter()
        self._seconds = 0.0
        self.prompt_tokens = self.generated_tokens = 0
        self.texts_running = self.texts_waiting = self.texts_dropped = 0
        self.count_connections: Callable[[], int] = lambda: 0

    def count_request(self, route: str, status: int, seconds: float) -> None:
        """`route` is one of ours or "other", so that clients cannot create labels."""
        self._requests[route, status] += 1
        self._seconds += seconds

    def format_prometheus(self) -> str:
        lines = ["# HELP gpt2_requests_total Requests by route and status.", "# TYPE gpt2_requests_total counter"]
        lines += [f'gpt2_requests_total{{route="{route}",status="{status}"}} {count}'
                  for (route, status), count in sorted(self._requests.items())]
        for name, kind, value, about in (
                ("request_seconds_total", "counter", self._seconds, "Time that requests took, added up."),
                ("prompt_tokens_total", "counter", self.prompt_tokens, "Tokens of prompts."),
                ("generated_tokens_total", "counter", self.generated_tokens, "Tokens of texts."),
                ("texts_dropped_total", "counter", self.texts_dropped, "Texts whose client left."),
                ("texts_running", "gauge", self.texts_running, "Texts that have a row of the model."),
                ("texts_waiting", "gauge", self.texts_waiting, "Texts that wait for a row."),
                ("connections", "gauge", self.count_connections(), "Open connections."),
                ("start_time_seconds", "gauge", self._began, "When the server began, in seconds since 1970.")):
            lines += [f"# HELP gpt2_{name} {about}", f"# TYPE gpt2_{name} {kind}", f"gpt2_{name} {value:.15g}"]
        return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class StartSequences:
    requests: tuple[Request, ...]


@dataclass(frozen=True)
class ScoreSequence:
    """A finished text whose tokens LogprobScorer scores."""

    number: int
    ids: tuple[int, ...]
    top_logprobs: int
    """Number of likeliest tokens at each position."""


@dataclass(frozen=True)
class CancelSequences:
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class QueueClosed:
    """No more requests will come."""


@dataclass(frozen=True)
class FrontendFailed:
    error: BaseException


SchedulerCommand = StartSequences | ScoreSequence | CancelSequences | QueueClosed | FrontendFailed


@dataclass(frozen=True)
class TokenEvent:
    """A text got a token, or ended."""

    number: int
    count: int
    """Tokens of the text now."""
    token: int
    logprob: float
    finish_reason: FinishReason | None


LOGITS_CHUNK_BYTES = 64 << 20
"""Logits of a chunk of positions."""


@dataclass(frozen=True)
class SequenceLogprobs:
    """Log-probabilities of the tokens of a text, without the first, which has no context."""

    number: int
    logprobs: tuple[float, ...]
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...]
    """At each position: (token, log-probability), the likeliest first."""


@final
class LogprobScorer:
    """Scores every token of a finished text, and the likeliest tokens there, in another forward over the text."""

    def __init__(self, model: GPT2, vocabulary: int) -> None:
        """Tokens from `vocabulary` on are padding."""
        self._model, self._vocabulary = model, vocabulary
        self._rows = max(1, LOGITS_CHUNK_BYTES // (4 * vocabulary))

    @torch.inference_mode()
    def __call__(self, number: int, ids: tuple[int, ...], num_top: int) -> SequenceLogprobs:
        """Collective."""
        tokens = torch.tensor(ids, device=self._model.device)
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
"""While idle, the time until a stop request is noticed."""
HEARTBEAT_SECONDS = 5.0
"""Between empty plans to idle ranks."""

Inbox = queue.SimpleQueue[SchedulerCommand]


@dataclass(frozen=True)
class StepPlan:
    """What every rank does in the next step."""

    drop: tuple[int, ...] = ()
    begin: tuple[Request, ...] = ()
    read: tuple[ScoreSequence, ...] = ()
    last: bool = False

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> StepPlan:
        begin = (Request(**{**one, "prompt": tuple(one["prompt"]), "stops": tuple(one["stops"]),
                            "sampling": Sampling(**one["sampling"])}) for one in values["begin"])
        read = (ScoreSequence(**{**one, "ids": tuple(one["ids"])}) for one in values["read"])
        return cls(tuple(values["drop"]), tuple(begin), tuple(read), values["last"])


@final
class StepExecutor:
    def __init__(self, generator: Generator, scorer: LogprobScorer) -> None:
        self.generator, self._scorer = generator, scorer

    def __call__(self, plan: StepPlan) -> Iterator[GeneratedSequence | SequenceLogprobs]:
        """Yields the texts that got a token or ended."""
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
        """Runs until a stop is requested and the open requests are done (True), or `grace` seconds later (False).
        `close_queue` makes the clients' thread send QueueClosed."""
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
        """Handles all commands in the inbox; while idle, waits up to POLL_SECONDS for one."""
        try:
            command = self._inbox.get(timeout=POLL_SECONDS) if self._is_idle else self._inbox.get_nowait()
            while True:
                match command:
                    case StartSequences(requests):
                        self._waiting += requests
                    case ScoreSequence():
                        self._to_score.append(command)
                    case CancelSequences(numbers):
                        self._to_score = deque(read for read in self._to_score if read.number not in numbers)
                        self._waiting = deque(request for request in self._waiting if request.number not in numbers)
                        self._cancelled += [number for number in numbers if number in self._running]
                    case QueueClosed():
                        self._queue_is_closed = True
                    case FrontendFailed(error):
                        raise error
                command = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _run_step(self) -> None:
        if self._is_idle:
            if self._world.size > 1 and time.monotonic() - self._last_broadcast >= HEARTBEAT_SECONDS:
                self._broadcast_plan(StepPlan())
            return
        free_slots = self._executor.generator.free_slots + len(self._cancelled)
        plan = StepPlan(
            tuple(self._cancelled), tuple(self._waiting.popleft() for _ in range(min(free_slots, len(self._waiting)))),
            (self._to_score.popleft(),) if self._to_score else ())  # one at a time: the others wait for tokens
        self._cancelled.clear()
        self._running.difference_update(plan.drop)
        self._broadcast_plan(plan)
        self._publish([found if isinstance(found, SequenceLogprobs) else self._token_event(found)
                       for found in self._executor(plan)])

    def _token_event(self, sequence: GeneratedSequence) -> TokenEvent:
        number, tokens = sequence.request.number, sequence.tokens
        (self._running.add if sequence.finish_reason is None else self._running.discard)(number)
        return TokenEvent(number, len(tokens), tokens[-1] if tokens else 0, sequence.logprobs[-1] if tokens else 0.0,
                          sequence.finish_reason)

    def _broadcast_plan(self, plan: StepPlan) -> None:
        if self._world.size > 1:
            broadcast_json(asdict(plan), self._world)
            self._last_broadcast = time.monotonic()


STOPPING_MESSAGE = "the server is stopping"
NON_FINITE_MESSAGE = ("the model produced non-finite logits after this prompt: the operator of the server may start it "
                      "with --dtype fp32 or bf16")


@final
class PendingRequest:
    def __init__(self, requests: Sequence[Request], top_logprobs: int | None) -> None:
        """With `top_logprobs`, each finished text is scored, with this many likeliest tokens at each position."""
        self.sequences = [GeneratedSequence(request, finish_reason=None if request.max_new_tokens else "length")
                          for request in requests]
        self.top_logprobs = top_logprobs
        self.logprobs: dict[int, SequenceLogprobs] = {}
        """By request number."""
        self.error: HttpError | None = None
        self.is_cancelled = False
        self._changed = asyncio.Event()

    @property
    def is_done(self) -> bool:
        ended = all(text.finish_reason is not None for text in self.sequences)
        return ended and (self.top_logprobs is None or len(self.logprobs) == len(self.sequences))

    @property
    def num_generated(self) -> int:
        return sum(len(text.tokens) for text in self.sequences)

    def notify(self) -> None:
        self._changed.set()

    async def wait_for_change(self) -> None:
        """Raises the error of a failed request, and ConnectionResetError for a cancelled one."""
        if not self.is_done:
            await self._changed.wait()
            self._changed.clear()
        if self.is_cancelled:
            raise ConnectionResetError
        if self.error is not None:
            raise self.error


@final
class RequestQueue:
    def __init__(self, inbox: Inbox, rows: int, max_waiting: int, metrics: ServerMetrics) -> None:
        """`rows` texts run at a time, and `max_waiting` more may wait."""
        self._inbox, self._rows, self._max_waiting, self._metrics = inbox, rows, max_waiting, metrics
        self._active: dict[int, tuple[PendingRequest, GeneratedSequence]] = {}
        self._number = 0
        self.is_closed = False

    def submit(self, requests: Sequence[Request], top_logprobs: int | None = None) -> PendingRequest:
        """Requests for no new token are only scored."""
        if self.is_closed:
            raise HttpError(503, STOPPING_MESSAGE, code="stopping", headers=(("Retry-After", "5"),))
        if len(self._active) + len(requests) > self._rows + self._max_waiting:
            raise HttpError(503, f"{len(self._active)} texts are under way, and this request asks for {len(requests)} "
                            "more than there is room for: come again", code="queue_full",
                            headers=(("Retry-After", "1"),))
        numbered = [replace(request, number=self._number + place) for place, request in enumerate(requests)]
        self._number += len(numbered)
        ticket = PendingRequest(numbered, top_logprobs)
        self._active |= {text.request.number: (ticket, text) for text in ticket.sequences}
        if to_begin := tuple(request for request in numbered if request.max_new_tokens):
            self._inbox.put(StartSequences(to_begin))
        for text in ticket.sequences:
            self._finish_or_score(ticket, text)
        self._metrics.prompt_tokens += sum(len(request.prompt) for request in numbered)
        self._update_metrics()
        return ticket

    def cancel(self, pending: PendingRequest) -> None:
        pending.is_cancelled = True
        self._cancel_sequences(pending)

    def _cancel_sequences(self, pending: PendingRequest) -> None:
        """Stops the running texts of a request."""
        numbers = tuple(text.request.number for text in pending.sequences if text.request.number in self._active)
        for number in numbers:
            del self._active[number]
        if numbers:
            self._metrics.texts_dropped += len(numbers)
            self._inbox.put(CancelSequences(numbers))
        self._update_metrics()
        pending.notify()

    def handle_events(self, events: Iterable[TokenEvent | SequenceLogprobs]) -> None:
        for one in events:
            if one.number not in self._active:
                continue  # its client left meanwhile
            ticket, text = self._active[one.number]
            if isinstance(one, SequenceLogprobs):
                ticket.logprobs[one.number] = one
                del self._active[one.number]
            else:
                if one.count > len(text.tokens):
                    text.tokens.append(one.token)
                    text.logprobs.append(one.logprob)
                    self._metrics.generated_tokens += 1
                text.finish_reason = one.finish_reason
                self._finish_or_score(ticket, text)
                if one.finish_reason == "not finite":
                    ticket.error = HttpError(500, NON_FINITE_MESSAGE, code="not_finite")
                    self._cancel_sequences(ticket)
            ticket.notify()
        self._update_metrics()

    def _finish_or_score(self, pending: PendingRequest, sequence: GeneratedSequence) -> None:
        if sequence.finish_reason is None:
            return
        if pending.top_logprobs is None:
            del self._active[sequence.request.number]
        else:
            self._inbox.put(ScoreSequence(sequence.request.number, tuple(sequence.ids), pending.top_logprobs))

    def close(self) -> None:
        """Later requests are refused."""
        if not self.is_closed:
            self.is_closed = True
            self._inbox.put(QueueClosed())

    def fail(self, error: HttpError) -> None:
        """Ends all open requests with `error`."""
        self.is_closed = True
        for ticket, _ in self._active.values():
            ticket.error = error
            ticket.notify()
        self._active.clear()
        self._update_metrics()

    def _update_metrics(self) -> None:
        self._metrics.texts_running = min(len(self._active), self._rows)
        self._metrics.texts_waiting = len(self._active) - self._metrics.texts_running
