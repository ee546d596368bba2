"""Requests on their way to the model, and what has come back of them. Everything here belongs to the clients' thread.

A *ticket* is a request of a client, with the texts it is to get; they grow as news of them arrive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import final

from megatron.inference.generation import GeneratedSequence
from megatron.inference.request import Request
from megatron.serve.leader import (CancelSequences, Inbox, QueueClosed, ScoreSequence, SequenceLogprobs, StartSequences,
                                   TokenEvent)
from megatron.serve.limits import HttpError
from megatron.serve.metrics import ServerMetrics

STOPPING_MESSAGE = "the server is stopping"
NON_FINITE_MESSAGE = (
    "the model gives logits that are no numbers, or infinite, after this prompt: whoever runs the server may "
    "start it with --dtype fp32 or bf16")


@final
class PendingRequest:
    def __init__(self, requests: Sequence[Request], top_logprobs: int | None) -> None:
        """With a `top`, each text gets a verdict at its end, with so many of the likeliest tokens in each place."""
        self.sequences = [
            GeneratedSequence(request, finish_reason=None if request.max_new_tokens else "length")
            for request in requests
        ]
        self.top_logprobs = top_logprobs
        self.logprobs: dict[int, SequenceLogprobs] = {}
        """By the number of a text's request."""
        self.error: HttpError | None = None
        self.is_cancelled = False
        """Nobody waits for it any longer."""
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
        """Wait for news; raises why there will be none."""
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
        """`rows` texts run at a time, and so many more may wait."""
        self._inbox, self._rows, self._max_waiting, self._metrics = inbox, rows, max_waiting, metrics
        self._active: dict[int, tuple[PendingRequest, GeneratedSequence]] = {}
        self._number = 0
        self.is_closed = False

    def submit(self, requests: Sequence[Request], top_logprobs: int | None = None) -> PendingRequest:
        """Those that ask for no new token are read for a verdict."""
        if self.is_closed:
            raise HttpError(503, STOPPING_MESSAGE, code="stopping", headers=(("Retry-After", "5"),))
        if len(self._active) + len(requests) > self._rows + self._max_waiting:
            raise HttpError(503,
                            f"{len(self._active)} texts are under way, and this request asks for {len(requests)} more "
                            f"than there is room for: come again",
                            code="queue_full",
                            headers=(("Retry-After", "1"), ))
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
        """The client has left."""
        pending.is_cancelled = True
        self._cancel_sequences(pending)

    def _cancel_sequences(self, pending: PendingRequest) -> None:
        """No more news of it are wanted."""
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
                self._append_token(text, one)
                self._finish_or_score(ticket, text)
                if one.finish_reason == "not finite":
                    ticket.error = HttpError(500, NON_FINITE_MESSAGE, code="not_finite")
                    self._cancel_sequences(ticket)
            ticket.notify()
        self._update_metrics()

    def _append_token(self, sequence: GeneratedSequence, event: TokenEvent) -> None:
        if event.count > len(sequence.tokens):
            sequence.tokens.append(event.token)
            sequence.logprobs.append(event.logprob)
            self._metrics.generated_tokens += 1
        sequence.finish_reason = event.finish_reason

    def _finish_or_score(self, pending: PendingRequest, sequence: GeneratedSequence) -> None:
        """Of a text that has ended: it is done, or to be judged."""
        if sequence.finish_reason is not None and pending.top_logprobs is None:
            del self._active[sequence.request.number]
        elif sequence.finish_reason is not None and pending.top_logprobs is not None:
            self._inbox.put(ScoreSequence(sequence.request.number, tuple(sequence.ids), pending.top_logprobs))

    def close(self) -> None:
        """Nothing more is taken."""
        if not self.is_closed:
            self.is_closed = True
            self._inbox.put(QueueClosed())

    def fail(self, error: HttpError) -> None:
        """There will be no more news."""
        self.is_closed = True
        for ticket, _ in self._active.values():
            ticket.error = error
            ticket.notify()
        self._active.clear()
        self._update_metrics()

    def _update_metrics(self) -> None:
        self._metrics.texts_running = min(len(self._active), self._rows)
        self._metrics.texts_waiting = len(self._active) - self._metrics.texts_running
