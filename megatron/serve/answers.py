"""Which request gets which answer."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, final

from megatron.serve import completions, megatron_api
from megatron.serve.asked import Job, Subject, parse
from megatron.serve.desk import STOPPING, Desk, Ticket
from megatron.serve.door import Door
from megatron.serve.message import Exchange, Head
from megatron.serve.limits import Limits, Refusal
from megatron.serve.metrics import Metrics
from megatron.serve.page import Page

READING = ("GET", "HEAD")


@dataclass(frozen=True)
class Route:
    methods: tuple[str, ...]
    answer: Callable[[Exchange], Awaitable[None]]
    is_open: bool = False
    """Without a key."""


@final
class Answers:
    def __init__(self, subject: Subject, desk: Desk, door: Door, metrics: Metrics, limits: Limits) -> None:
        self._subject, self._desk, self._door, self._metrics, self._limits = subject, desk, door, metrics, limits
        self._page = Page()
        self._pool = ThreadPoolExecutor(1, "requests")
        """Where requests are read and answers written: many tokens take a while to become text, and the other way."""
        self._routes = {
            "/": Route(READING, self._show_page, is_open=True),
            "/health": Route(READING, self._show_health, is_open=True),
            "/metrics": Route(READING, self._show_metrics),
            "/v1/models": Route(READING, self._list_models),
            f"/v1/models/{subject.name}": Route(READING, self._show_model),
            "/v1/completions": Route(("POST",), self._complete),
            "/api": Route(("PUT", "POST"), self._generate),
        }

    def name_of(self, head: Head) -> str:
        """Of what was asked for, for those who count."""
        return head.path if head.path in self._routes else "other"

    async def answer(self, exchange: Exchange) -> bool:
        """False: nothing was asked."""
        try:
            async with asyncio.timeout(self._limits.request_seconds):
                head = await exchange.read_head()
                if head is None:
                    return False
                route = self._route_of(head)
            await route.answer(exchange)
        except TimeoutError:
            await self.refuse(exchange, Refusal(408, "the request did not arrive in time"))
        except Refusal as refusal:
            await self.refuse(exchange, refusal)
        return True

    async def refuse(self, exchange: Exchange, refusal: Refusal) -> None:
        """In the words of the one who asked."""
        said: dict[str, Any] = {"message": refusal.message}
        if exchange.head.path != "/api":
            kind = "server_error" if refusal.status >= 500 else "invalid_request_error"
            said = {"error": {**said, "type": kind, "param": refusal.name, "code": refusal.code}}
        if exchange.status:
            await exchange.send_event(json.dumps(said))
            await exchange.end_events()
        else:
            await exchange.reply_json(said, refusal.status, refusal.headers)

    def _route_of(self, head: Head) -> Route:
        self._door.check_host(head.headers.get("host"))
        route = self._routes.get(head.path)
        if route is None or not route.is_open:
            self._door.check_key(head.headers.get("authorization"))
        if route is None:
            raise Refusal(404, "there is nothing here; docs/serve.md has the list")
        if head.method not in route.methods:
            raise Refusal(405, f"expected {' or '.join(route.methods)}", headers=(("Allow", ", ".join(route.methods)),))
        return route

    async def _show_page(self, exchange: Exchange) -> None:
        await exchange.reply(200, self._page.body, "text/html; charset=utf-8", self._page.headers)

    async def _show_health(self, exchange: Exchange) -> None:
        if self._desk.is_closed:
            raise Refusal(503, STOPPING, code="stopping")
        await exchange.reply_json({"status": "ok"})

    async def _show_metrics(self, exchange: Exchange) -> None:
        await exchange.reply(200, self._metrics.text().encode(), "text/plain; version=0.0.4; charset=utf-8")

    async def _list_models(self, exchange: Exchange) -> None:
        await exchange.reply_json({"object": "list", "data": [self._model()]})

    async def _show_model(self, exchange: Exchange) -> None:
        await exchange.reply_json(self._model())

    def _model(self) -> dict[str, Any]:
        subject = self._subject
        return {"id": subject.name, "object": "model", "created": subject.created, "owned_by": "local",
                "max_model_len": subject.positions}

    async def _complete(self, exchange: Exchange) -> None:
        identity = f"cmpl-{secrets.token_hex(12)}"
        await self._do(exchange, lambda body: completions.read(parse(body), self._subject, identity))

    async def _generate(self, exchange: Exchange) -> None:
        await self._do(exchange, lambda body: megatron_api.read(parse(body), self._subject))

    async def _do(self, exchange: Exchange, read: Callable[[bytes], Job]) -> None:
        async with asyncio.timeout(self._limits.request_seconds):
            body = await exchange.read_json()
        job = await asyncio.get_running_loop().run_in_executor(self._pool, read, body)
        ticket = self._desk.submit(job.asked.requests(), job.asked.top)
        exchange.read = job.asked.read
        watch = asyncio.create_task(self._watch(exchange, ticket))
        try:
            await (self._stream if job.streams else self._wait)(exchange, job, ticket)
        finally:
            watch.cancel()
            await asyncio.wait([watch])
            exchange.made = ticket.made
            if not ticket.is_done:
                self._desk.drop(ticket)

    async def _watch(self, exchange: Exchange, ticket: Ticket) -> None:
        await exchange.until_left()
        self._desk.drop(ticket)

    async def _wait(self, exchange: Exchange, job: Job, ticket: Ticket) -> None:
        while not ticket.is_done:
            await ticket.change()
        found = await asyncio.get_running_loop().run_in_executor(self._pool, job.whole, ticket.texts, ticket.verdicts)
        await exchange.reply_json(found)

    @staticmethod
    async def _stream(exchange: Exchange, job: Job, ticket: Ticket) -> None:
        """What has come while a part was sent goes with the next."""
        await exchange.begin_events()
        while True:
            await ticket.change()
            is_done = ticket.is_done
            for part in job.more(ticket.texts):
                await exchange.send_event(json.dumps(part))
            if is_done:
                break
        for part in job.last(ticket.texts):
            await exchange.send_event(json.dumps(part))
        await exchange.send_event("[DONE]")
        await exchange.end_events()
