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
from megatron.serve.asked import ApiRequest, ServedModel, parse_json_object
from megatron.serve.desk import STOPPING_MESSAGE, PendingRequest, RequestQueue
from megatron.serve.door import AuthPolicy
from megatron.serve.limits import HttpError, ServerLimits
from megatron.serve.message import HttpConnection, RequestHead
from megatron.serve.metrics import ServerMetrics
from megatron.serve.page import PlaygroundPage

READ_METHODS = ("GET", "HEAD")


@dataclass(frozen=True)
class Route:
    methods: tuple[str, ...]
    handler: Callable[[HttpConnection], Awaitable[None]]
    needs_no_key: bool = False
    """Without a key."""


@final
class RequestRouter:
    def __init__(self, model: ServedModel, queue: RequestQueue, auth: AuthPolicy, metrics: ServerMetrics,
                 limits: ServerLimits) -> None:
        self._served_model, self._queue, self._auth, self._metrics, self._limits = model, queue, auth, metrics, limits
        self._page = PlaygroundPage()
        self._pool = ThreadPoolExecutor(1, "requests")
        """Where requests are read and answers written: many tokens take a while to become text, and the other way."""
        self._routes = {
            "/": Route(READ_METHODS, self._show_page, needs_no_key=True),
            "/health": Route(READ_METHODS, self._show_health, needs_no_key=True),
            "/metrics": Route(READ_METHODS, self._show_metrics),
            "/v1/models": Route(READ_METHODS, self._list_models),
            f"/v1/models/{model.name}": Route(READ_METHODS, self._show_model),
            "/v1/completions": Route(("POST",), self._complete),
            "/api": Route(("PUT", "POST"), self._generate),
        }

    def route_name(self, head: RequestHead) -> str:
        """Of what was asked for, for those who count."""
        return head.path if head.path in self._routes else "other"

    async def handle(self, connection: HttpConnection) -> bool:
        """False: nothing was asked."""
        try:
            async with asyncio.timeout(self._limits.request_seconds):
                head = await connection.read_head()
                if head is None:
                    return False
                route = self._find_route(head)
            await route.handler(connection)
        except TimeoutError:
            await self.send_error(connection, HttpError(408, "the request did not arrive in time"))
        except HttpError as refusal:
            await self.send_error(connection, refusal)
        return True

    async def send_error(self, connection: HttpConnection, error: HttpError) -> None:
        """In the words of the one who asked."""
        said: dict[str, Any] = {"message": error.message}
        if connection.head.path != "/api":
            kind = "server_error" if error.status >= 500 else "invalid_request_error"
            said = {"error": {**said, "type": kind, "param": error.param, "code": error.code}}
        if connection.status:
            await connection.send_event(json.dumps(said))
            await connection.end_event_stream()
        else:
            await connection.reply_json(said, error.status, error.headers)

    def _find_route(self, head: RequestHead) -> Route:
        self._auth.check_host(head.headers.get("host"))
        route = self._routes.get(head.path)
        if route is None or not route.needs_no_key:
            self._auth.check_key(head.headers.get("authorization"))
        if route is None:
            raise HttpError(404, "there is nothing here; docs/serve.md has the list")
        if head.method not in route.methods:
            raise HttpError(405,
                            f"expected {' or '.join(route.methods)}",
                            headers=(("Allow", ", ".join(route.methods)), ))
        return route

    async def _show_page(self, connection: HttpConnection) -> None:
        await connection.reply(200, self._page.body, "text/html; charset=utf-8", self._page.headers)

    async def _show_health(self, connection: HttpConnection) -> None:
        if self._queue.is_closed:
            raise HttpError(503, STOPPING_MESSAGE, code="stopping")
        await connection.reply_json({"status": "ok"})

    async def _show_metrics(self, connection: HttpConnection) -> None:
        await connection.reply(200,
                               self._metrics.format_prometheus().encode(), "text/plain; version=0.0.4; charset=utf-8")

    async def _list_models(self, connection: HttpConnection) -> None:
        await connection.reply_json({"object": "list", "data": [self._model_info()]})

    async def _show_model(self, connection: HttpConnection) -> None:
        await connection.reply_json(self._model_info())

    def _model_info(self) -> dict[str, Any]:
        subject = self._served_model
        return {"id": subject.name, "object": "model", "created": subject.created, "owned_by": "local",
                "max_model_len": subject.positions}

    async def _complete(self, connection: HttpConnection) -> None:
        identity = f"cmpl-{secrets.token_hex(12)}"
        await self._generate_and_reply(
            connection,
            lambda body: completions.parse_completion(parse_json_object(body), self._served_model, identity))

    async def _generate(self, connection: HttpConnection) -> None:
        await self._generate_and_reply(
            connection, lambda body: megatron_api.parse_generation(parse_json_object(body), self._served_model))

    async def _generate_and_reply(self, connection: HttpConnection, read: Callable[[bytes], ApiRequest]) -> None:
        async with asyncio.timeout(self._limits.request_seconds):
            body = await connection.read_json()
        job = await asyncio.get_running_loop().run_in_executor(self._pool, read, body)
        ticket = self._queue.submit(job.generation.requests(), job.generation.top_logprobs)
        connection.prompt_tokens = job.generation.num_prompt_tokens
        watch = asyncio.create_task(self._cancel_on_disconnect(connection, ticket))
        try:
            await (self._reply_stream if job.is_streaming else self._reply_whole)(connection, job, ticket)
        finally:
            watch.cancel()
            await asyncio.wait([watch])
            connection.generated_tokens = ticket.num_generated
            if not ticket.is_done:
                self._queue.cancel(ticket)

    async def _cancel_on_disconnect(self, connection: HttpConnection, pending: PendingRequest) -> None:
        await connection.wait_for_disconnect()
        self._queue.cancel(pending)

    async def _reply_whole(self, connection: HttpConnection, request: ApiRequest, pending: PendingRequest) -> None:
        while not pending.is_done:
            await pending.wait_for_change()
        found = await asyncio.get_running_loop().run_in_executor(self._pool, request.full_response, pending.sequences,
                                                                 pending.logprobs)
        await connection.reply_json(found)

    @staticmethod
    async def _reply_stream(connection: HttpConnection, request: ApiRequest, pending: PendingRequest) -> None:
        """What has come while a part was sent goes with the next."""
        await connection.start_event_stream()
        while True:
            await pending.wait_for_change()
            is_done = pending.is_done
            for part in request.new_chunks(pending.sequences):
                await connection.send_event(json.dumps(part))
            if is_done:
                break
        for part in request.final_chunks(pending.sequences):
            await connection.send_event(json.dumps(part))
        await connection.send_event("[DONE]")
        await connection.end_event_stream()
