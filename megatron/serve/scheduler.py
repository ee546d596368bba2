"""Continuous batching: the request queue that clients and model share, and the loops of the model's ranks.

Rank 0 leads: before each step it takes a StepPlan from the queue (sequences to start, cancel and score) and broadcasts
it, and all ranks execute it. While idle it broadcasts an empty plan every few seconds, so that no collective times out.
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
        self.prompt_tokens = self.generated_tokens = 0
        self.texts_running = self.texts_waiting = self.texts_dropped = 0

    def count_request(self, route: str, status: int, seconds: float) -> None:
        """`route` is one of ours or "other", so that clients cannot create labels."""
        self._requests[route, status] += 1
        self._seconds += seconds

    def format_prometheus(self, connections: int) -> str:
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
                ("connections", "gauge", connections, "Open connections."),
                ("start_time_seconds", "gauge", self._began, "When the server began, in seconds since 1970.")):
            lines += [f"# HELP gpt2_{name} {about}", f"# TYPE gpt2_{name} {kind}", f"gpt2_{name} {value:.15g}"]
        return "\n".join(lines) + "\n"


# ---- the model's ranks -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScoreRequest:
    """A finished text whose tokens LogprobScorer scores."""

    number: int
    ids: tuple[int, ...]
    top_logprobs: int
    """Number of likeliest tokens at each position."""


@dataclass(frozen=True)
class StepPlan:
    """What every rank does in the next step."""

    cancel: tuple[int, ...] = ()
    start: tuple[Request, ...] = ()
    score: tuple[ScoreRequest, ...] = ()
    is_last: bool = False

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> StepPlan:
        start = (Request(**{**one, "prompt": tuple(one["prompt"]), "stops": tuple(one["stops"]),
                            "sampling": Sampling(**one["sampling"])}) for one in values["start"])
        score = (ScoreRequest(**{**one, "ids": tuple(one["ids"])}) for one in values["score"])
        return cls(tuple(values["cancel"]), tuple(start), tuple(score), values["is_last"])


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

    def __call__(self, plan: StepPlan) -> Iterator[TokenEvent | SequenceLogprobs]:
        """Yields the new token of each running text, and the scores."""
        for number in plan.cancel:
            self.generator.cancel(number)
        yield from map(TokenEvent.of, self.generator.start(plan.start))
        yield from map(TokenEvent.of, self.generator.step())
        yield from map(self.score, plan.score)

    @torch.inference_mode()
    def score(self, request: ScoreRequest) -> SequenceLogprobs:
        """Scores every token of a text, and the likeliest tokens there, in another forward over the text."""
        tokens = torch.tensor(request.ids, device=self._model.device)
        logprobs: list[float] = []
        likeliest: list[tuple[tuple[int, float], ...]] = []
        if len(tokens) > 1:
            hidden = self._model.hidden_states(tokens[None, :-1])[0]  # [s - 1, h]
            chunk = max(1, LOGITS_CHUNK_BYTES // (4 * self._vocabulary))
            for rows, targets in zip(hidden.split(chunk), tokens[1:].split(chunk), strict=True):
                found = self._model.logits(rows)[:, : self._vocabulary].float().log_softmax(-1)  # [n, V]
                logprobs += found.gather(1, targets[:, None])[:, 0].tolist()
                values, places = found.topk(min(request.top_logprobs, self._vocabulary))
                likeliest += [tuple(zip(*pair)) for pair in zip(places.tolist(), values.tolist(), strict=True)]
        return SequenceLogprobs(request.number, tuple(logprobs), tuple(likeliest))


POLL_SECONDS = 0.2
"""While idle, the time until a stop request is noticed."""
HEARTBEAT_SECONDS = 5.0
"""Between empty plans to idle ranks."""


def run_leader(executor: StepExecutor, world: Group, queue: RequestQueue,
               publish: Callable[[list[TokenEvent | SequenceLogprobs]], None], stop_requested: Callable[[], bool],
               on_stop: Callable[[], None], grace: float) -> bool:
    """The loop of rank 0: runs until a stop is requested and the open requests are done (True), or `grace` seconds
    later (False)."""
    running, until, last_broadcast = set[int](), float("inf"), time.monotonic()
    while not queue.is_finished and time.monotonic() < until:
        plan = queue.next_plan(executor.generator.free_slots, running)
        is_idle = plan == StepPlan() and not running
        if world.size > 1 and (not is_idle or time.monotonic() - last_broadcast >= HEARTBEAT_SECONDS):
            broadcast_json(asdict(plan), world)
            last_broadcast = time.monotonic()
        if not is_idle:
            running.difference_update(plan.cancel)
            events = list(executor(plan))
            for event in events:
                if isinstance(event, TokenEvent):
                    (running.add if event.finish_reason is None else running.discard)(event.number)
            publish(events)
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

    def __init__(self, requests: Sequence[Request], top_logprobs: int | None) -> None:
        """With `top_logprobs`, each finished text is scored, with this many likeliest tokens at each position."""
        self.sequences = [GeneratedSequence(request, finish_reason=None if request.max_new_tokens else "length")
                          for request in requests]
        self.top_logprobs = top_logprobs
        self.logprobs: dict[int, SequenceLogprobs] = {}
        """By request number."""
        self.error: Exception | None = None
        self.changed = asyncio.Event()

    @property
    def is_done(self) -> bool:
        ended = all(text.finish_reason is not None for text in self.sequences)
        return ended and (self.top_logprobs is None or len(self.logprobs) == len(self.sequences))

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
        self._to_score: deque[ScoreRequest] = deque()
        self._to_cancel: set[int] = set()
        self.is_closed = False
        self.frontend_error: BaseException | None = None
        """What ended the clients' thread."""

    def next_plan(self, free_slots: int, running: set[int]) -> StepPlan:
        """Takes the work of the next step; if there is none and no text is running, waits up to POLL_SECONDS for it."""
        with self._condition:
            if not (self._to_start or self._to_score or running):
                self._condition.wait(POLL_SECONDS)
            if self.frontend_error is not None:
                raise self.frontend_error
            cancelled = tuple(self._to_cancel & running)
            self._to_cancel.clear()
            count = min(free_slots + len(cancelled), len(self._to_start))
            return StepPlan(cancelled, tuple(self._to_start.popleft() for _ in range(count)),
                            (self._to_score.popleft(),) if self._to_score else ())  # one: the others wait for tokens

    def close(self) -> None:
        """Later requests are refused."""
        with self._condition:
            self.is_closed = True

    @property
    def is_finished(self) -> bool:
        with self._condition:
            return self.is_closed and not self._active

    def submit(self, requests: Sequence[Request], top_logprobs: int | None = None) -> PendingRequest:
        """Requests for no new token are only scored."""
        if len(self._active) + len(requests) > self._rows + self._max_waiting:
            raise HttpError(503, f"{len(self._active)} texts are under way, and this request asks for {len(requests)} "
                            "more than there is room for: come again", code="queue_full",
                            headers=(("Retry-After", "1"),))
        pending = PendingRequest([replace(request, number=self._number + place)
                                  for place, request in enumerate(requests)], top_logprobs)
        with self._condition:
            if self.is_closed:
                raise HttpError(503, STOPPING_MESSAGE, code="stopping", headers=(("Retry-After", "5"),))
            self._active |= {text.request.number: (pending, text) for text in pending.sequences}
            self._to_start += (text.request for text in pending.sequences if text.finish_reason is None)
            self._condition.notify()
        self._number += len(requests)
        for text in pending.sequences:
            self._finish_or_score(pending, text)
        self._metrics.prompt_tokens += sum(len(request.prompt) for request in requests)
        self._update_metrics()
        return pending

    def cancel(self, pending: PendingRequest, error: Exception) -> None:
        """Stops the running texts of a request, which ends with `error`."""
        numbers = {text.request.number for text in pending.sequences} & self._active.keys()
        for number in numbers:
            del self._active[number]
        with self._condition:
            self._to_start = deque(one for one in self._to_start if one.number not in numbers)
            self._to_score = deque(one for one in self._to_score if one.number not in numbers)
            self._to_cancel |= numbers
        self._metrics.texts_dropped += len(numbers)
        self._update_metrics()
        pending.error = error
        pending.changed.set()

    def handle_events(self, events: Iterable[TokenEvent | SequenceLogprobs]) -> None:
        for event in events:
            if event.number not in self._active:
                continue  # its client left meanwhile
            pending, text = self._active[event.number]
            if isinstance(event, SequenceLogprobs):
                pending.logprobs[event.number] = event
                del self._active[event.number]
            else:
                if event.count > len(text.tokens):
                    text.tokens.append(event.token)
                    text.logprobs.append(event.logprob)
                    self._metrics.generated_tokens += 1
                text.finish_reason = event.finish_reason
                self._finish_or_score(pending, text)
                if event.finish_reason == "not finite":
                    self.cancel(pending, HttpError(500, NON_FINITE_MESSAGE, code="not_finite"))
            pending.changed.set()
        self._update_metrics()

    def _finish_or_score(self, pending: PendingRequest, sequence: GeneratedSequence) -> None:
        if sequence.finish_reason is None:
            return
        number = sequence.request.number
        if pending.top_logprobs is None:
            del self._active[number]
            return
        with self._condition:
            self._to_score.append(ScoreRequest(number, tuple(sequence.ids), pending.top_logprobs))
            self._condition.notify()

    def fail(self, error: HttpError) -> None:
        """Ends all open requests with `error`."""
        self.close()
        for pending, _ in self._active.values():
            pending.error = error
            pending.changed.set()
        self._active.clear()
        self._update_metrics()

    def _update_metrics(self) -> None:
        self._metrics.texts_running = min(len(self._active), self._rows)
        self._metrics.texts_waiting = len(self._active) - self._metrics.texts_running
