"""The HTTP server: routes, connection handling on an asyncio thread, and its start and end beside the model's
thread."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import secrets
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from megatron.inference.decoder import Decoder
from megatron.inference.detokenizer import SequenceDetokenizer
from megatron.inference.frontends import build_generator
from megatron.inference.load import LoadedModel
from megatron.serve import megatron_api, openai_api
from megatron.serve.admission import AuthPolicy, HttpError, ServerLimits
from megatron.serve.api_request import ApiRequest, ServedModel, parse_json_object
from megatron.serve.http_connection import HttpConnection, RequestHead
from megatron.serve.scheduler import (STOPPING_MESSAGE, FrontendFailed, GenerationScheduler, Inbox, LogprobScorer,
                                      PendingRequest, RequestQueue, SequenceLogprobs, ServerMetrics, StepExecutor,
                                      TokenEvent, run_worker)
from mpu.groups import Groups


@final
class PlaygroundPage:
    def __init__(self) -> None:
        self.body = Path(__file__).with_name("page.html").read_bytes()
        text = self.body.decode()
        policy = (f"default-src 'none'; script-src {_csp_hash(text, 'script')}; style-src {_csp_hash(text, 'style')}; "
                  "connect-src 'self'; img-src data:; form-action 'none'; base-uri 'none'; frame-ancestors 'none'")
        self.headers = (("Content-Security-Policy", policy), ("Referrer-Policy", "no-referrer"),
                        ("X-Frame-Options", "DENY"), ("Cross-Origin-Opener-Policy", "same-origin"),
                        ("Cross-Origin-Resource-Policy", "same-origin"))


def _csp_hash(text: str, tag: str) -> str:
    """Allows the content of the tag and no other script or style."""
    match = re.search(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    assert match is not None
    return f"'sha256-{base64.b64encode(hashlib.sha256(match[1].encode()).digest()).decode()}'"


READ_METHODS = ("GET", "HEAD")


@dataclass(frozen=True)
class Route:
    methods: tuple[str, ...]
    handler: Callable[[HttpConnection], Awaitable[None]]
    needs_no_key: bool = False


@final
class RequestRouter:
    def __init__(self, model: ServedModel, queue: RequestQueue, auth: AuthPolicy, metrics: ServerMetrics,
                 limits: ServerLimits) -> None:
        self._served_model, self._queue, self._auth, self._metrics, self._limits = model, queue, auth, metrics, limits
        self._page = PlaygroundPage()
        self._pool = ThreadPoolExecutor(1, "requests")
        """Parses requests and formats responses: (de)tokenizing long texts takes a while."""
        self._routes = {
            "/": Route(READ_METHODS, self._show_page, needs_no_key=True),
            "/health": Route(READ_METHODS, self._show_health, needs_no_key=True),
            "/metrics": Route(READ_METHODS, self._show_metrics),
            "/v1/models": Route(READ_METHODS, self._list_models),
            f"/v1/models/{model.name}": Route(READ_METHODS, self._show_model),
            "/v1/completions": Route(("POST",), self._complete),
            "/api": Route(("PUT", "POST"), self._generate)}

    def route_name(self, head: RequestHead) -> str:
        """The label of a request in the metrics."""
        return head.path if head.path in self._routes else "other"

    async def handle(self, connection: HttpConnection) -> bool:
        """False: the client closed without a request."""
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
        """In the format of the API that was called."""
        body: dict[str, Any] = {"message": error.message}
        if connection.head.path != "/api":
            kind = "server_error" if error.status >= 500 else "invalid_request_error"
            body = {"error": {**body, "type": kind, "param": error.param, "code": error.code}}
        if connection.status:
            await connection.send_event(json.dumps(body))
            await connection.end_event_stream()
        else:
            await connection.reply_json(body, error.status, error.headers)

    def _find_route(self, head: RequestHead) -> Route:
        self._auth.check_host(head.headers.get("host"))
        route = self._routes.get(head.path)
        if route is None or not route.needs_no_key:
            self._auth.check_key(head.headers.get("authorization"))
        if route is None:
            raise HttpError(404, "there is nothing here; docs/serve.md has the list")
        if head.method not in route.methods:
            raise HttpError(405, f"expected {' or '.join(route.methods)}",
                            headers=(("Allow", ", ".join(route.methods)),))
        return route

    async def _show_page(self, connection: HttpConnection) -> None:
        await connection.reply(200, self._page.body, "text/html; charset=utf-8", self._page.headers)

    async def _show_health(self, connection: HttpConnection) -> None:
        if self._queue.is_closed:
            raise HttpError(503, STOPPING_MESSAGE, code="stopping")
        await connection.reply_json({"status": "ok"})

    async def _show_metrics(self, connection: HttpConnection) -> None:
        text = self._metrics.format_prometheus()
        await connection.reply(200, text.encode(), "text/plain; version=0.0.4; charset=utf-8")

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
            connection, lambda body: openai_api.parse_completion(parse_json_object(body), self._served_model, identity))

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
        await connection.reply_json(await asyncio.get_running_loop().run_in_executor(
            self._pool, request.full_response, pending.sequences, pending.logprobs))

    @staticmethod
    async def _reply_stream(connection: HttpConnection, request: ApiRequest, pending: PendingRequest) -> None:
        """Tokens that arrive while a chunk is sent go into the next one."""
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


@final
class HttpServer:
    """The public methods are called by the model's thread."""

    def __init__(self, listener: socket.socket, router: RequestRouter, queue: RequestQueue, inbox: Inbox,
                 metrics: ServerMetrics, limits: ServerLimits, log: Callable[[str], None]) -> None:
        self._listener, self._router, self._queue, self._inbox = listener, router, queue, inbox
        self._metrics, self._limits, self._log = metrics, limits, log
        self._loop = asyncio.new_event_loop()
        self._finish_event = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._run_loop, name="clients", daemon=True)

    def start(self) -> None:
        self._listener.listen(128)
        self._thread.start()

    def publish(self, events: list[TokenEvent | SequenceLogprobs]) -> None:
        self._call_soon(self._queue.handle_events, events)

    def close(self) -> None:
        """Refuses new connections and requests."""
        self._call_soon(self._close)

    def fail(self, error: HttpError) -> None:
        """Answers all open requests with `error`."""
        self._call_soon(self._close)
        self._call_soon(self._queue.fail, error)

    def finish(self, seconds: float) -> None:
        """Waits up to `seconds` until the open connections have been served."""
        self._call_soon(self._close)
        self._call_soon(self._finish_event.set)
        self._thread.join(seconds)

    def _call_soon(self, action: Callable[..., object], *arguments: object) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(action, *arguments)

    def _run_loop(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._accept_until_finished())
        except BaseException as error:
            self._inbox.put(FrontendFailed(error))

    async def _accept_until_finished(self) -> None:
        self._loop.set_exception_handler(lambda loop, about: self._log(f"clients: {about.get('message')}: "
                                                                       f"{about.get('exception')!r}"))
        self._server = await asyncio.start_server(self._handle_connection, sock=self._listener,
                                                  limit=self._limits.max_header_bytes)
        await self._finish_event.wait()
        while others := self._tasks - {asyncio.current_task()}:
            await asyncio.wait(others)

    def _close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._queue.close()

    async def _handle_connection(self, stream: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._metrics.connections = len(self._tasks)
        began, exchange = time.monotonic(), HttpConnection(stream, writer, self._limits)
        try:
            await self._handle_request(exchange)
            if exchange.status:
                self._log_request(exchange, time.monotonic() - began)
            await exchange.close(short_linger=len(self._tasks) > self._limits.max_connections)
        finally:
            writer.transport.abort()
            self._tasks.discard(task)
            self._metrics.connections = len(self._tasks)

    async def _handle_request(self, connection: HttpConnection) -> None:
        """Answers with an error instead of raising: a failed request does not affect other clients."""
        with suppress(ConnectionError):
            try:
                if len(self._tasks) > self._limits.max_connections:
                    raise HttpError(503, "too many connections", headers=(("Retry-After", "1"),))
                await self._router.handle(connection)
            except HttpError as refusal:
                await self._router.send_error(connection, refusal)
            except (ConnectionError, asyncio.CancelledError):
                raise
            except Exception as error:
                self._log(f"internal error: {error!r}")
                await self._router.send_error(connection, HttpError(500, "internal error"))

    def _log_request(self, connection: HttpConnection, seconds: float) -> None:
        head = connection.head
        self._metrics.count_request(self._router.route_name(head), connection.status, seconds)
        when = time.strftime("%Y-%m-%dT%H:%M:%S")
        tokens = f"{connection.prompt_tokens}+{connection.generated_tokens}"
        self._log(f"{when} {connection.client} {head.method} {head.target[:200]} {connection.status} {tokens} tokens "
                  f"{seconds:.3f} s")


DRAIN_SECONDS = 5.0
"""For clients to read their responses, once the model has stopped."""
FAILURE_DRAIN_SECONDS = 1.0
"""Shorter than a launcher waits before it ends all ranks."""


def build_executor(loaded: LoadedModel, rows: int) -> StepExecutor:
    generator = build_generator(loaded, Decoder(loaded.model, rows), SequenceDetokenizer(loaded.tokenizer),
                                sliding_window=False)
    return StepExecutor(generator, LogprobScorer(loaded.model, loaded.tokenizer.vocab_size))


def run_worker_rank(loaded: LoadedModel, groups: Groups, rows: int) -> None:
    run_worker(build_executor(loaded, rows), groups.world)


def run_server(loaded: LoadedModel, groups: Groups, *, rows: int, name: str, listener: socket.socket, host: str,
               key: str | None, allowed_hosts: Iterable[str], limits: ServerLimits, log: Callable[[str], None],
               on_ready: Callable[[], None], stop_requested: Callable[[], bool]) -> None:
    """Runs rank 0 until `stop_requested`. `on_ready` is called once the server listens."""
    executor, inbox, metrics = build_executor(loaded, rows), Inbox(), ServerMetrics()
    request_queue = RequestQueue(inbox, rows, limits.max_waiting, metrics)
    shape, tokenizer = loaded.model.config, loaded.tokenizer
    eod = tokenizer.eod if tokenizer.eod < shape.known_vocab_size else None
    model = ServedModel(name, tokenizer, shape.max_position_embeddings, eod, limits, int(time.time()))
    router = RequestRouter(model, request_queue, AuthPolicy(host, key, allowed_hosts), metrics, limits)
    server = HttpServer(listener, router, request_queue, inbox, metrics, limits, log)
    scheduler = GenerationScheduler(executor, groups.world, inbox, server.publish)
    timeout_error = HttpError(503, f"{STOPPING_MESSAGE}, and this was not done in time", code="stopping")
    server.start()
    try:
        on_ready()
        if not scheduler.run(stop_requested, server.close, limits.grace):
            server.fail(timeout_error)
    except BaseException as error:
        has_failed = isinstance(error, Exception)
        server.fail(HttpError(500, "the model has failed, and the server ends") if has_failed else timeout_error)
        server.finish(FAILURE_DRAIN_SECONDS)
        raise
    server.finish(DRAIN_SECONDS)
