"""Continuous batching: the request queue that clients and model share, and the loops of the model's ranks.

Rank 0 leads: before each step it takes a plan from the queue (the sequences to cancel and to start) and broadcasts it,
and all ranks execute it. While idle it broadcasts an empty plan every few seconds, so that no collective times out.
Tokens come back to the clients' thread as records, for `RequestQueue.handle_events`: no object that changes is shared.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple, final

from megatron.inference.generation import Detokenizer, FinishReason, GeneratedSequence, Generator, TokenScores
from megatron.inference.request import Request, Sampling
from megatron.serve.api import ApiRequest, HttpError
from mpu.collectives import broadcast_json
from mpu.groups import Group


# ---- the model's ranks -------------------------------------------------------------------------------------------


def request_from_json(values: dict[str, Any]) -> Request:
    given: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return Request(**{**given, "sampling": Sampling(**values["sampling"])})


def execute(generator: Generator, cancelled: Iterable[int],
            requests: Sequence[Request]) -> Iterator[list[GeneratedSequence]]:
    """Yields the sequences that got a token or ended: first those that start, so that no client waits for the others'
    next token to see the first one. All ranks call it with the same plans."""
    for number in cancelled:
        generator.cancel(number)
    if requests:
        yield generator.start(requests)
    yield generator.step()


class TokenEvent(NamedTuple):
    """A sequence got a token, ended, or was scored."""

    number: int
    num_tokens: int  # new tokens of the sequence so far
    token: int
    logprob: float
    finish_reason: FinishReason | None
    scores: TokenScores | None


POLL_SECONDS = 0.2  # while idle, the time until a stop request is noticed
HEARTBEAT_SECONDS = 5.0  # between empty plans to idle ranks


def run_leader(generator: Generator, world: Group, queue: RequestQueue,
               publish: Callable[[list[TokenEvent]], None], stop_requested: Callable[[], bool],
               on_stop: Callable[[], None], grace: float) -> bool:
    """The loop of rank 0: runs until a stop is requested and the open requests are done (True), or `grace` seconds
    later (False)."""
    until, last_broadcast = float("inf"), time.monotonic()
    while (plan := queue.next_plan(generator.free_slots, generator.is_idle)) is not None and time.monotonic() < until:
        cancelled, requests = plan
        has_work = bool(cancelled or requests) or not generator.is_idle
        if world.size > 1 and (has_work or time.monotonic() - last_broadcast >= HEARTBEAT_SECONDS):
            broadcast_json([cancelled, [asdict(request) for request in requests]], world)
            last_broadcast = time.monotonic()
        for sequences in execute(generator, cancelled, requests) if has_work else ():
            publish([TokenEvent(one.request.number, len(one.tokens), one.tokens[-1] if one.tokens else 0,
                                one.logprobs[-1] if one.tokens else 0.0, one.finish_reason, one.scores)
                     for one in sequences])
        if until == float("inf") and stop_requested():
            until = time.monotonic() + grace
            queue.close()
            on_stop()
    if world.size > 1:
        broadcast_json(None, world)
    return plan is None


def run_worker(generator: Generator, world: Group) -> None:
    """The loop of every other rank."""
    while (plan := broadcast_json(None, world)) is not None:
        cancelled, requests = plan
        for _ in execute(generator, cancelled, [*map(request_from_json, requests)]):
            pass


# ---- the queue ---------------------------------------------------------------------------------------------------

STOPPING_MESSAGE = "the server is stopping"
NON_FINITE_MESSAGE = ("the model produced non-finite logits after this prompt: the operator of the server may start it "
                      "with --dtype fp32 or bf16")


@final
class RequestQueue:
    """Requests that wait or run, and the server's metrics. The model's thread calls `next_plan` and `close`, the
    clients' thread the rest."""

    def __init__(self, rows: int, max_waiting: int) -> None:
        """`rows` texts run at a time, and `max_waiting` more may wait."""
        self._rows, self._max_waiting, self._began = rows, max_waiting, time.time()
        self._active: dict[int, tuple[ApiRequest, GeneratedSequence]] = {}
        self._number = 0
        # By route and status. A route is one of ours or "other", so that clients cannot create labels.
        self.requests: Counter[tuple[str, int]] = Counter()
        self.request_seconds = 0.0
        self._prompt_tokens = self._generated_tokens = self._texts_dropped = 0
        # Guards the attributes below, which both threads use. `_active` is changed by the clients' thread alone; the
        # model's thread only asks whether it is empty.
        self._condition = threading.Condition()
        self._to_start: deque[Request] = deque()
        self._to_cancel: set[int] = set()
        self.is_closed = False
        self.frontend_error: BaseException | None = None  # what ended the clients' thread

    def next_plan(self, free_slots: int, is_idle: bool) -> tuple[list[int], list[Request]] | None:
        """Takes the work of the next step, the sequences to cancel and to start; an idle model waits up to POLL_SECONDS
        for it. None: the queue is closed and no request is open."""
        with self._condition:
            is_last = self.is_closed and not self._active
            if is_idle and not (is_last or self._to_start or self._to_cancel):
                self._condition.wait(POLL_SECONDS)
            if self.frontend_error is not None:
                raise self.frontend_error
            cancelled, self._to_cancel = [*self._to_cancel], set()
            count = min(free_slots, len(self._to_start))
            requests = [self._to_start.popleft() for _ in range(count)]
            return None if is_last else (cancelled, requests)

    def close(self) -> None:
        """Later requests are refused."""
        with self._condition:
            self.is_closed = True

    def submit(self, request: ApiRequest) -> None:
        """Gives the request its sequences, in the order of the prompts, each with its own random numbers."""
        prompts = [prompt for prompt in request.prompts for _ in range(request.num_samples)]
        if len(self._active) + len(prompts) > self._rows + self._max_waiting:
            raise HttpError(503, f"{len(self._active)} texts are under way, and this request asks for "
                            f"{len(prompts)} more than there is room for: come again", code="queue_full",
                            headers=(("Retry-After", "1"),))
        requests = [Request(self._number + place, prompt, request.max_new_tokens, request.sampling,
                            f"{request.seed}/{place}", request.stops, top_logprobs=request.top_logprobs)
                    for place, prompt in enumerate(prompts)]
        request.sequences = [GeneratedSequence(one, Detokenizer(request.model.tokenizer.decode)) for one in requests]
        request.num_open = len(requests)
        with self._condition:
            if self.is_closed:
                raise HttpError(503, STOPPING_MESSAGE, code="stopping", headers=(("Retry-After", "5"),))
            self._active |= {sequence.request.number: (request, sequence) for sequence in request.sequences}
            self._to_start += requests
            self._condition.notify()
        self._number += len(requests)
        self._prompt_tokens += sum(map(len, prompts))

    def cancel(self, request: ApiRequest, error: Exception) -> None:
        """Stops the running sequences of a request, which ends with `error`."""
        numbers = {sequence.request.number for sequence in request.sequences} & self._active.keys()
        for number in numbers:
            del self._active[number]
        with self._condition:
            self._to_start = deque(one for one in self._to_start if one.number not in numbers)
            self._to_cancel |= numbers
        self._texts_dropped += len(numbers)
        request.error = error
        request.changed.set()

    def handle_events(self, events: Iterable[TokenEvent]) -> None:
        """Clients are woken for each token of a stream, else once their sequences have ended: each wake-up delays the
        model's next step, as one thread runs at a time."""
        for event in events:
            if event.number not in self._active:
                continue  # its client left meanwhile
            request, sequence = self._active[event.number]
            if event.num_tokens > len(sequence.tokens):
                sequence.tokens.append(event.token)
                sequence.logprobs.append(event.logprob)
                self._generated_tokens += 1
            sequence.finish_reason, sequence.scores = event.finish_reason, event.scores
            if sequence.finish_reason == "not finite":
                self.cancel(request, HttpError(500, NON_FINITE_MESSAGE, code="not_finite"))
            elif sequence.finish_reason is not None and (
                    sequence.request.top_logprobs is None or sequence.scores is not None):
                del self._active[event.number]
                request.num_open -= 1
            if request.is_streaming or not request.num_open:
                request.changed.set()

    def fail(self, error: HttpError) -> None:
        """Ends all open requests with `error`."""
        self.close()
        for request, _ in self._active.values():
            request.error = error
            request.changed.set()
        self._active.clear()

    def format_prometheus(self, connections: int) -> str:
        running = min(len(self._active), self._rows)
        lines = ["# HELP gpt2_requests_total Requests by route and status.", "# TYPE gpt2_requests_total counter"]
        lines += [f'gpt2_requests_total{{route="{route}",status="{status}"}} {count}'
                  for (route, status), count in sorted(self.requests.items())]
        for name, kind, value, about in (
                ("request_seconds_total", "counter", self.request_seconds, "Time that requests took, added up."),
                ("prompt_tokens_total", "counter", self._prompt_tokens, "Tokens of prompts."),
                ("generated_tokens_total", "counter", self._generated_tokens, "Tokens of texts."),
                ("texts_dropped_total", "counter", self._texts_dropped,
                 "Texts that ended early: their client left, or the output was not finite."),
                ("texts_running", "gauge", running, "Texts that have a row of the model."),
                ("texts_waiting", "gauge", len(self._active) - running, "Texts that wait for a row."),
                ("connections", "gauge", connections, "Open connections."),
                ("start_time_seconds", "gauge", self._began, "When the server began, in seconds since 1970.")):
            lines += [f"# HELP gpt2_{name} {about}", f"# TYPE gpt2_{name} {kind}", f"gpt2_{name} {value:.15g}"]
        return "\n".join(lines) + "\n"
