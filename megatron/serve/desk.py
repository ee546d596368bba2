"""Requests on their way to the model, and what has come back of them. Everything here belongs to the clients' thread.

A *ticket* is a request of a client, with the texts it is to get; they grow as news of them arrive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import final

from megatron.inference.generation import Text
from megatron.inference.request import Request
from megatron.serve.leader import Begin, Closed, Drop, Inbox, News, Read, Verdict
from megatron.serve.metrics import Metrics
from megatron.serve.limits import Refusal

STOPPING = "the server is stopping"
NO_NUMBERS = ("the model gives logits that are no numbers, or infinite, after this prompt: whoever runs the server may "
              "start it with --dtype fp32 or bf16")


@final
class Ticket:
    def __init__(self, requests: Sequence[Request], top: int | None) -> None:
        """With a `top`, each text gets a verdict at its end, with so many of the likeliest tokens in each place."""
        self.texts = [Text(request, ended=None if request.most else "length") for request in requests]
        self.top = top
        self.verdicts: dict[int, Verdict] = {}
        """By the number of a text's request."""
        self.failure: Refusal | None = None
        self.left = False
        """Nobody waits for it any longer."""
        self._changed = asyncio.Event()

    @property
    def is_done(self) -> bool:
        ended = all(text.ended is not None for text in self.texts)
        return ended and (self.top is None or len(self.verdicts) == len(self.texts))

    @property
    def made(self) -> int:
        return sum(len(text.tokens) for text in self.texts)

    def touch(self) -> None:
        self._changed.set()

    async def change(self) -> None:
        """Wait for news; raises why there will be none."""
        if not self.is_done:
            await self._changed.wait()
            self._changed.clear()
        if self.left:
            raise ConnectionResetError
        if self.failure is not None:
            raise self.failure


@final
class Desk:
    def __init__(self, inbox: Inbox, rows: int, waiting: int, metrics: Metrics) -> None:
        """`rows` texts run at a time, and so many more may wait."""
        self._inbox, self._rows, self._waiting, self._metrics = inbox, rows, waiting, metrics
        self._open: dict[int, tuple[Ticket, Text]] = {}
        self._number = 0
        self.is_closed = False

    def submit(self, requests: Sequence[Request], top: int | None = None) -> Ticket:
        """Those that ask for no new token are read for a verdict."""
        if self.is_closed:
            raise Refusal(503, STOPPING, code="stopping", headers=(("Retry-After", "5"),))
        if len(self._open) + len(requests) > self._rows + self._waiting:
            raise Refusal(503, f"{len(self._open)} texts are under way, and this request asks for {len(requests)} more "
                          f"than there is room for: come again", code="queue_full", headers=(("Retry-After", "1"),))
        numbered = [replace(request, number=self._number + place) for place, request in enumerate(requests)]
        self._number += len(numbered)
        ticket = Ticket(numbered, top)
        self._open |= {text.request.number: (ticket, text) for text in ticket.texts}
        if to_begin := tuple(request for request in numbered if request.most):
            self._inbox.put(Begin(to_begin))
        for text in ticket.texts:
            self._after(ticket, text)
        self._metrics.tokens_read += sum(len(request.prompt) for request in numbered)
        self._count()
        return ticket

    def drop(self, ticket: Ticket) -> None:
        """The client has left."""
        ticket.left = True
        self._withdraw(ticket)

    def _withdraw(self, ticket: Ticket) -> None:
        """No more news of it are wanted."""
        numbers = tuple(text.request.number for text in ticket.texts if text.request.number in self._open)
        for number in numbers:
            del self._open[number]
        if numbers:
            self._metrics.texts_dropped += len(numbers)
            self._inbox.put(Drop(numbers))
        self._count()
        ticket.touch()

    def deliver(self, news: Iterable[News | Verdict]) -> None:
        for one in news:
            if one.number not in self._open:
                continue  # its client left meanwhile
            ticket, text = self._open[one.number]
            if isinstance(one, Verdict):
                ticket.verdicts[one.number] = one
                del self._open[one.number]
            else:
                self._grow(text, one)
                self._after(ticket, text)
                if one.ended == "not finite":
                    ticket.failure = Refusal(500, NO_NUMBERS, code="not_finite")
                    self._withdraw(ticket)
            ticket.touch()
        self._count()

    def _grow(self, text: Text, news: News) -> None:
        if news.count > len(text.tokens):
            text.tokens.append(news.token)
            text.logprobs.append(news.logprob)
            self._metrics.tokens_made += 1
        text.ended = news.ended

    def _after(self, ticket: Ticket, text: Text) -> None:
        """Of a text that has ended: it is done, or to be judged."""
        if text.ended is not None and ticket.top is None:
            del self._open[text.request.number]
        elif text.ended is not None and ticket.top is not None:
            self._inbox.put(Read(text.request.number, tuple(text.ids), ticket.top))

    def close(self) -> None:
        """Nothing more is taken."""
        if not self.is_closed:
            self.is_closed = True
            self._inbox.put(Closed())

    def fail(self, refusal: Refusal) -> None:
        """There will be no more news."""
        self.is_closed = True
        for ticket, _ in self._open.values():
            ticket.failure = refusal
            ticket.touch()
        self._open.clear()
        self._count()

    def _count(self) -> None:
        self._metrics.texts_running = min(len(self._open), self._rows)
        self._metrics.texts_waiting = len(self._open) - self._metrics.texts_running
