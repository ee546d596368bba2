"""Continuous batching: the request queue that clients and model share, and the loops of the model's ranks.

Rank 0 leads: before each step it takes a StepPlan from the queue (sequences to start and to cancel) and broadcasts it,
and all ranks execute it. While idle it broadcasts an empty plan every few seconds, so that no collective times out.
Tokens come back to the clients' thread as records, for `RequestQueue.handle_events`.
"""

from __future__ import annotations

import asyncio
import threading
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
        self.prompt_tokens = self.generated_tokens = self.texts_dropped = 0

    def count_request(self, route: str, status: int, seconds: float) -> None:
        """`route` is one of ours or "other", so that clients cannot create labels."""
        self._requests[route, status] += 1
        self._seconds += seconds

    def format_prometheus(self, texts_running: int, texts_waiting: int, connections: int) -> str:
        lines = ["# HELP gpt2_requests_total Requests by route and status.", "# TYPE gpt2_requests_total counter"]
        lines += [f'gpt2_requests_total{{route="{route}",status="{status}"}} {count}'
                  for (route, status), count in sorted(self._requests.items())]
        for name, kind, value, about in (
                ("request_seconds_total", "counter", self._seconds, "Time that requests took, added up."),
                ("prompt_tokens_total", "counter", self.prompt_tokens, "Tokens of prompts."),
                ("generated_tokens_total", "counter", self.generated_tokens, "Tokens of texts."),
                ("texts_dropped_total", "counter", self.texts_dropped, "Texts whose client left."),
                ("texts_running", "gauge", texts_running, "Texts that have a row of the model."),
                ("texts_waiting", "gauge", texts_waiting, "Texts that wait for a row."),
                ("connections", "gauge", connections, "Open connections."),
                ("start_time_seconds", "gauge", self._began, "When the server began, in seconds since 1970.")):
            lines += [f"# HELP gpt2_{name} {about}", f"# TYPE gpt2_{name} {kind}", f"gpt2_{name} {value:.15g}"]
        return "\n".join(lines) + "\n"


# ---- the model's ranks -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepPlan:
    """What every rank does in the next step."""

    cancel: tuple[int, ...] = ()
    start: tuple[Request, ...] = ()
    is_last: bool = False

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> StepPlan:
        start = (Request(**{**one, "prompt": tuple(one["prompt"]), "stops": tuple(one["stops"]),
                            "sampling": Sampling(**one["sampling"])}) for one in values["start"])
        return cls(tuple(values["cancel"]), tuple(start), values["is_last"])


@dataclass(frozen=True)
class TokenEvent:
    """A text got a token, or ended."""

    number: int
    count: int
    """Tokens of the text now."""
    token: int
    logprob: float
    finish_reason: FinishReason | None

    @classmethod
    def of(cls, sequence: GeneratedSequence) -> TokenEvent:
        number, tokens = sequence.request.number, sequence.tokens
        token, logprob = (tokens[-1], sequence.logprobs[-1]) if tokens else (0, 0.0)
        return cls(number, len(tokens), token, logprob, sequence.finish_reason)


@dataclass(frozen=True)
class SequenceLogprobs:
    """Log-probabilities of the tokens of a text, without the first, which has no context."""

    number: int
    logprobs: tuple[float, ...]
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...]
    """At each position: (token, log-probability), the likeliest first."""


LOGITS_CHUNK_BYTES = 64 << 20
"""Logits of a chunk of positions."""


@final
class StepExecutor:
    """Executes plans on one rank. All ranks call it with the same plans."""

    def __init__(self, generator: Generator, model: GPT2, vocabulary: int) -> None:
        """Tokens from `vocabulary` on are padding."""
        self.generator, self._model, self._vocabulary = generator, model, vocabulary
        self._to_score = deque[GeneratedSequence]()

    @property
    def is_idle(self) -> bool:
        return not (self.generator.num_running or self._to_score)

    def __call__(self, plan: StepPlan) -> Iterator[TokenEvent | SequenceLogprobs]:
        """Yields the new token of each running text, and the scores of a text that has ended."""
        for number in plan.cancel:
            self.generator.cancel(number)
        self._to_score = deque(text for text in self._to_score if text.request.number not in plan.cancel)
        yield from self._events([GeneratedSequence(request, finish_reason="length") for request in plan.start
                                 if not request.max_new_tokens])
        yield from self._events(self.generator.start([request for request in plan.start if request.max_new_tokens]))
        yield from self._events(self.generator.step())
        if self._to_score:  # one a step: the running texts wait for it
            yield self._score(self._to_score.popleft())

    def _events(self, sequences: Sequence[GeneratedSequence]) -> Iterator[TokenEvent]:
        for text in sequences:
            if text.request.top_logprobs is not None and text.finish_reason not in (None, "not finite"):
                self._to_score.append(text)
            yield TokenEvent.of(text)

    @torch.inference_mode()
    def _score(self, sequence: GeneratedSequence) -> SequenceLogprobs:
        """Scores every token of a text, and the likeliest tokens there, in another forward over the text."""
        tokens = torch.tensor(sequence.ids, device=self._model.device)
        logprobs: list[float] = []
        likeliest: list[tuple[tuple[int, float], ...]] = []
        if len(tokens) > 1:
            hidden = self._model.hidden_states(tokens[None, :-1])[0]  # [s - 1, h]
            chunk = max(1, LOGITS_CHUNK_BYTES // (4 * self._vocabulary))
            for rows, targets in zip(hidden.split(chunk), tokens[1:].split(chunk), strict=True):
                found = self._model.logits(rows)[:, : self._vocabulary].float().log_softmax(-1)  # [n, V]
                logprobs += found.gather(1, targets[:, None])[:, 0].tolist()
                values, places = found.topk(min(sequence.request.top_logprobs or 0, self._vocabulary))
                likeliest += [tuple(zip(*pair)) for pair in zip(places.tolist(), values.tolist(), strict=True)]
        return SequenceLogprobs(sequence.request.number, tuple(logprobs), tuple(likeliest))


POLL_SECONDS = 0.2
"""While idle, the time until a stop request is noticed."""
HEARTBEAT_SECONDS = 5.0
"""Between empty plans to idle ranks."""


def run_leader(executor: StepExecutor, world: Group, queue: RequestQueue,
               publish: Callable[[list[TokenEvent | SequenceLogprobs]], None], stop_requested: Callable[[], bool],
               on_stop: Callable[[], None], grace: float) -> bool:
    """The loop of rank 0: runs until a stop is requested and the open requests are done (True), or `grace` seconds
    later (False)."""
    until, last_broadcast = float("inf"), time.monotonic()
    while not queue.is_finished and time.monotonic() < until:
        plan = queue.next_plan(executor.generator.free_slots, executor.is_idle)
        is_idle = executor.is_idle and plan == StepPlan()
        if world.size > 1 and (not is_idle or time.monotonic() - last_broadcast >= HEARTBEAT_SECONDS):
            broadcast_json(asdict(plan), world)
            last_broadcast = time.monotonic()
        if not is_idle:
            publish(list(executor(plan)))
        if until == float("inf") and stop_requested():
            until = time.monotonic() + grace
            queue.close()
            on_stop()
    if world.size > 1:
        broadcast_json(asdict(StepPlan(is_last=True)), world)
    return queue.is_finished


def run_worker(executor: StepExecutor, world: Group) -> None:
    """The loop of every other rank."""
    while not (plan := StepPlan.from_json(broadcast_json(None, world))).is_last:
        for _ in executor(plan):
            pass


# ---- the queue ---------------------------------------------------------------------------------------------------

STOPPING_MESSAGE = "the server is stopping"
NON_FINITE_MESSAGE = ("the model produced non-finite logits after this prompt: the operator of the server may start it "
                      "with --dtype fp32 or bf16")


@final
class PendingRequest:
    """Used by the clients' thread only."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.sequences = list(map(GeneratedSequence, requests))
        self.logprobs: dict[int, SequenceLogprobs] = {}
        """By request number, of requests with `top_logprobs`."""
        self.error: Exception | None = None
        self.changed = asyncio.Event()

    def has_ended(self, sequence: GeneratedSequence) -> bool:
        request = sequence.request
        return sequence.finish_reason is not None and (request.top_logprobs is None or request.number in self.logprobs)

    @property
    def is_done(self) -> bool:
        return all(map(self.has_ended, self.sequences))

    async def wait_for_change(self) -> None:
        """Raises the error of a failed request, and ConnectionResetError for a cancelled one."""
        if not self.is_done:
            await self.changed.wait()
            self.changed.clear()
        if self.error is not None:
            raise self.error


@final
class RequestQueue:
    """Requests that wait or run. The model's thread calls `next_plan` and `close`, the clients' thread the rest."""

    def __init__(self, rows: int, max_waiting: int, metrics: ServerMetrics) -> None:
        """`rows` texts run at a time, and `max_waiting` more may wait."""
        self._rows, self._max_waiting, self._metrics = rows, max_waiting, metrics
        self._active: dict[int, tuple[PendingRequest, GeneratedSequence]] = {}
        self._number = 0
        self._condition = threading.Condition()
        """Guards the attributes below, which both threads use."""
        self._to_start: deque[Request] = deque()
        self._to_cancel: set[int] = set()
        self.is_closed = False
        self.frontend_error: BaseException | None = None
        """What ended the clients' thread."""

    def next_plan(self, free_slots: int, is_idle: bool) -> StepPlan:
        """Takes the work of the next step; an idle model waits up to POLL_SECONDS for it."""
        with self._condition:
            if is_idle and not (self._to_start or self._to_cancel):
                self._condition.wait(POLL_SECONDS)
            if self.frontend_error is not None:
                raise self.frontend_error
            cancelled, self._to_cancel = tuple(self._to_cancel), set()
            count = min(free_slots, len(self._to_start))
            return StepPlan(cancelled, tuple(self._to_start.popleft() for _ in range(count)))

    def close(self) -> None:
        """Later requests are refused."""
        with self._condition:
            self.is_closed = True

    @property
    def is_finished(self) -> bool:
        with self._condition:
            return self.is_closed and not self._active

    def count_texts(self) -> tuple[int, int]:
        """(running, waiting)"""
        running = min(len(self._active), self._rows)
        return running, len(self._active) - running

    def submit(self, requests: Sequence[Request]) -> PendingRequest:
        if len(self._active) + len(requests) > self._rows + self._max_waiting:
            raise HttpError(503, f"{len(self._active)} texts are under way, and this request asks for {len(requests)} "
                            "more than there is room for: come again", code="queue_full",
                            headers=(("Retry-After", "1"),))
        pending = PendingRequest([replace(request, number=self._number + place)
                                  for place, request in enumerate(requests)])
        with self._condition:
            if self.is_closed:
                raise HttpError(503, STOPPING_MESSAGE, code="stopping", headers=(("Retry-After", "5"),))
            self._active |= {text.request.number: (pending, text) for text in pending.sequences}
            self._to_start += (text.request for text in pending.sequences)
            self._condition.notify()
        self._number += len(requests)
        self._metrics.prompt_tokens += sum(len(request.prompt) for request in requests)
        return pending

    def cancel(self, pending: PendingRequest, error: Exception) -> None:
        """Stops the running texts of a request, which ends with `error`."""
        numbers = {text.request.number for text in pending.sequences} & self._active.keys()
        for number in numbers:
            del self._active[number]
        with self._condition:
            self._to_start = deque(one for one in self._to_start if one.number not in numbers)
            self._to_cancel |= numbers
        self._metrics.texts_dropped += len(numbers)
        pending.error = error
        pending.changed.set()

    def handle_events(self, events: Iterable[TokenEvent | SequenceLogprobs]) -> None:
        for event in events:
            if event.number not in self._active:
                continue  # its client left meanwhile
            pending, text = self._active[event.number]
            if isinstance(event, SequenceLogprobs):
                pending.logprobs[event.number] = event
            else:
                if event.count > len(text.tokens):
                    text.tokens.append(event.token)
                    text.logprobs.append(event.logprob)
                    self._metrics.generated_tokens += 1
                text.finish_reason = event.finish_reason
            if text.finish_reason == "not finite":
                self.cancel(pending, HttpError(500, NON_FINITE_MESSAGE, code="not_finite"))
            elif pending.has_ended(text):
                del self._active[event.number]
            pending.changed.set()

    def fail(self, error: HttpError) -> None:
        """Ends all open requests with `error`."""
        self.close()
        for pending, _ in self._active.values():
            pending.error = error
            pending.changed.set()
        self._active.clear()
