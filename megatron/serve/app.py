"""The HTTP application: its routes, and how an answer goes from the model's thread to a client.

A request passes four types: Starlette's `Request`, the API's `OpenAICompletion` or `MegatronGeneration`, a
`PendingRequest` of the queue, and the generator's `Request` for each sequence. uvicorn parses HTTP/1.1, limits the head
of a request and the number of connections, and shuts down gracefully; `TimedProtocol` adds two time limits.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, final

import uvicorn
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route, Router
from uvicorn.protocols.http.h11_impl import H11Protocol

from megatron.inference.decoder import Decoder
from megatron.inference.frontends import build_generator
from megatron.inference.generation import SequenceDetokenizer
from megatron.inference.load import LoadedModel
from megatron.serve.admission import AuthPolicy, HttpError, ServerLimits
from megatron.serve.api_request import ApiRequest, ServedModel, parse_json_object
from megatron.serve.megatron_api import parse_generation
from megatron.serve.openai_api import parse_completion
from megatron.serve.scheduler import (STOPPING_MESSAGE, PendingRequest, RequestQueue, ServerMetrics, StepExecutor,
                                      run_leader)
from mpu.groups import Groups

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

COMMON_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Connection": "close"}
PATHS_WITHOUT_KEY = ("/", "/health")
JSON_TYPE = "application/json"


def json_response(value: Any, status: int = 200, headers: Iterable[tuple[str, str]] = ()) -> Response:
    return Response(json.dumps(value, allow_nan=False) + "\n", status, {**COMMON_HEADERS, **dict(headers)}, JSON_TYPE)


def error_body(path: str, error: HttpError) -> dict[str, Any]:
    """In the format of the API that was called."""
    if path == "/api":
        return {"message": error.message}
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def playground_response() -> Response:
    """The page to try the model; its policy allows its own script and style alone."""
    text = Path(__file__).with_name("page.html").read_text("utf-8")

    def allowed(tag: str) -> str:
        match = re.search(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        assert match is not None
        return f"'sha256-{base64.b64encode(hashlib.sha256(match[1].encode()).digest()).decode()}'"

    policy = (f"default-src 'none'; script-src {allowed('script')}; style-src {allowed('style')}; connect-src 'self'; "
              "img-src data:; form-action 'none'; base-uri 'none'; frame-ancestors 'none'")
    return Response(text, 200, {**COMMON_HEADERS, "Content-Security-Policy": policy, "Referrer-Policy": "no-referrer",
                                "X-Frame-Options": "DENY", "Cross-Origin-Opener-Policy": "same-origin",
                                "Cross-Origin-Resource-Policy": "same-origin"}, "text/html")


@final
class ServeApp:
    """The routes. All methods run on the server's thread."""

    def __init__(self, model: ServedModel, queue: RequestQueue, auth: AuthPolicy, metrics: ServerMetrics,
                 log: Callable[[str], None]) -> None:
        self._model, self._queue, self._auth = model, queue, auth
        self._metrics, self._limits, self._log = metrics, model.limits, log
        self.count_connections: Callable[[], int] = lambda: 0
        self._page = playground_response()
        # parses requests and formats responses: (de)tokenizing long texts takes a while
        self._pool = ThreadPoolExecutor(1, "requests")
        routes = [Route("/", self._show_page), Route("/health", self._show_health),
                  Route("/metrics", self._show_metrics), Route("/v1/models", self._show_models),
                  Route("/v1/models/{name}", self._show_models),
                  Route("/v1/completions", partial(self._generate, parse_completion), methods=["POST"]),
                  Route("/api", partial(self._generate, parse_generation), methods=["PUT", "POST"])]
        self._paths = {route.path for route in routes} | {f"/v1/models/{model.name}"}
        self._router = Router(routes, redirect_slashes=False)

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Admit a request, answer it, and log it. A failed request does not affect other clients."""
        began, status, path = time.monotonic(), 0, scope["path"]
        scope.update({"app": self, "tokens": (0, 0)})  # with "app" the router raises its errors

        async def send_and_note(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        error: HttpError | None = None
        try:
            # uvicorn's own limit holds for heads that come in several parts
            if self._limits.max_header_bytes < sum(len(name) + len(value) + 4 for name, value in (
                    *scope["headers"], (scope["raw_path"], scope["query_string"]))):
                raise HttpError(400, f"the head is longer than {self._limits.max_header_bytes} bytes")
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            self._auth.check_host(headers.get("host"))
            if path not in PATHS_WITHOUT_KEY:
                self._auth.check_key(headers.get("authorization"))
            await self._router(scope, receive, send_and_note)
        except HttpError as refusal:
            error = refusal
        except HTTPException as refusal:  # of Starlette's router
            error = HttpError(refusal.status_code, "there is nothing here; docs/serve.md has the list"
                              if refusal.status_code == 404 else f"expected {(refusal.headers or {}).get('Allow')}",
                              headers=tuple((refusal.headers or {}).items()))
        except (ClientDisconnect, ConnectionError, asyncio.CancelledError):
            pass  # the client has left
        except Exception as problem:
            self._log(f"internal error: {problem!r}")
            error = HttpError(500, "internal error")
        if error is not None and not status:
            await json_response(error_body(path, error), error.status, error.headers)(scope, receive, send_and_note)
        if status:
            self._log_request(scope, status, time.monotonic() - began)

    def _log_request(self, scope: Mapping[str, Any], status: int, seconds: float) -> None:
        path = scope["path"]
        self._metrics.count_request(path if path in self._paths else "other", status, seconds)
        client = scope["client"][0] if scope.get("client") else "-"
        target = scope["raw_path"].decode("latin-1") + ("?" if scope["query_string"] else "") + \
            scope["query_string"].decode("latin-1")
        self._log(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {client} {scope['method']} {target[:200]} {status} "
                  f"{scope['tokens'][0]}+{scope['tokens'][1]} tokens {seconds:.3f} s")

    async def _show_page(self, request: Request) -> Response:
        return self._page

    async def _show_health(self, request: Request) -> Response:
        if self._queue.is_closed:
            raise HttpError(503, STOPPING_MESSAGE, code="stopping")
        return json_response({"status": "ok"})

    async def _show_metrics(self, request: Request) -> Response:
        text = self._metrics.format_prometheus(*self._queue.count_texts(), self.count_connections())
        return Response(text, 200, {**COMMON_HEADERS, "Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _show_models(self, request: Request) -> Response:
        """The list of models, or the model of the path."""
        model, name = self._model, request.path_params.get("name")
        found = {"id": model.name, "object": "model", "created": model.created, "owned_by": "local",
                 "max_model_len": model.positions}
        if name not in (None, model.name):
            raise HTTPException(404)
        return json_response({"object": "list", "data": [found]} if name is None else found)

    async def _generate(self, parse: Callable[[dict[str, Any], ServedModel], ApiRequest], request: Request) -> Response:
        try:
            async with asyncio.timeout(self._limits.request_seconds):
                body = await self._read_json_body(request)
        except TimeoutError:
            raise HttpError(408, "the request did not arrive in time") from None
        asked = await asyncio.get_running_loop().run_in_executor(
            self._pool, lambda: parse(parse_json_object(body), self._model))
        pending = self._queue.submit(asked.generation_requests())
        return GenerationResponse(asked, pending, self._queue, self._pool)

    async def _read_json_body(self, request: Request) -> bytes:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != JSON_TYPE:
            raise HttpError(415, f"expected JSON, announced with the header Content-Type: {JSON_TYPE}")
        if "content-encoding" in request.headers:
            raise HttpError(415, "expected a body without Content-Encoding")
        too_large = HttpError(413, f"the body is longer than {self._limits.max_body_bytes} bytes")
        if int(request.headers.get("content-length", 0)) > self._limits.max_body_bytes:
            raise too_large
        found = bytearray()
        async for part in request.stream():
            found += part
            if len(found) > self._limits.max_body_bytes:
                raise too_large
        return bytes(found)


class GenerationResponse(Response):
    """The answer to a generation request, whole or as server-sent events; ends it if the client leaves."""

    def __init__(self, asked: ApiRequest, pending: PendingRequest, queue: RequestQueue,
                 pool: ThreadPoolExecutor) -> None:
        super().__init__()
        self._asked, self._pending, self._queue, self._pool = asked, pending, queue, pool

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        pending = self._pending
        watch = asyncio.create_task(self._cancel_on_disconnect(receive))
        try:
            if self._asked.is_streaming:
                await self._send_stream(scope, send)
            else:
                while not pending.is_done:
                    await pending.wait_for_change()
                found = await asyncio.get_running_loop().run_in_executor(
                    self._pool, self._asked.full_response, pending.sequences, pending.logprobs)
                await json_response(found)(scope, receive, send)
        finally:
            watch.cancel()
            scope["tokens"] = (self._asked.num_prompt_tokens, sum(len(text.tokens) for text in pending.sequences))
            if not pending.is_done:
                self._queue.cancel(pending, ConnectionResetError())

    async def _cancel_on_disconnect(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._queue.cancel(self._pending, ConnectionResetError())

    async def _send_stream(self, scope: Mapping[str, Any], send: Send) -> None:
        """Tokens that arrive while a chunk is sent go into the next one."""
        headers = {**COMMON_HEADERS, "Content-Type": "text/event-stream"}
        await send({"type": "http.response.start", "status": 200,
                    "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()]})

        async def send_event(value: Any, more: bool = True) -> None:
            text = value if isinstance(value, str) else json.dumps(value)
            await send({"type": "http.response.body", "body": f"data: {text}\n\n".encode(), "more_body": more})

        is_done = False
        try:
            while not is_done:
                await self._pending.wait_for_change()
                is_done = self._pending.is_done
                for part in self._asked.new_chunks(self._pending.sequences):
                    await send_event(part)
        except HttpError as error:  # the last event then, without [DONE]
            await send_event(error_body(scope["path"], error), more=False)
            return
        await send_event("[DONE]", more=False)


# ---- uvicorn, on a thread beside the model's ---------------------------------------------------------------------


class TimedProtocol(H11Protocol):
    """One connection, with a time limit for the head of a request and for a client that reads nothing. Every response
    closes the connection, so there is one request head."""

    limits = ServerLimits()
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # so that waiting for a client means that it reads what is sent
        self._start_timer(self.limits.request_seconds, self._close_without_request)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_timer(self.limits.write_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_timer()

    def _close_without_request(self) -> None:
        if self.cycle is None:  # the head has not come
            self.transport.close()

    def _start_timer(self, seconds: float, action: Callable[[], None]) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, action)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


START_SECONDS = 10.0
"""For uvicorn to listen."""
DRAIN_SECONDS = 5.0
"""For clients to read their responses, once the model has stopped."""
FAILURE_DRAIN_SECONDS = 1.0
"""Shorter than a launcher waits before it ends all ranks."""


@final
class HttpServer:
    """The public methods are called by the model's thread."""

    def __init__(self, app: ServeApp, listener: socket.socket, limits: ServerLimits, queue: RequestQueue) -> None:
        protocol = type("LimitedProtocol", (TimedProtocol,), {"limits": limits})
        self._server = uvicorn.Server(uvicorn.Config(
            app, http=protocol, ws="none", lifespan="off", loop="asyncio", interface="asgi3", log_config=None,
            log_level="critical", access_log=False, server_header=False, backlog=128,
            limit_concurrency=limits.max_connections + 1, h11_max_incomplete_event_size=limits.max_header_bytes))
        app.count_connections = lambda: len(self._server.server_state.connections)
        self._listener, self._queue = listener, queue
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="clients", daemon=True)

    def start(self) -> None:
        """Return once the server listens."""
        self._thread.start()
        until = time.monotonic() + START_SECONDS
        while not self._server.started and self._thread.is_alive() and time.monotonic() < until:
            time.sleep(0.005)

    def call(self, action: Callable[..., object], *arguments: object) -> None:
        """Call it on the server's thread."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(action, *arguments)

    def refuse_connections(self) -> None:
        """The open ones are served."""
        self._server.should_exit = True

    def finish(self, seconds: float) -> None:
        """Wait up to `seconds` until the open connections have been served."""
        self.refuse_connections()
        self._thread.join(seconds)
        self._server.force_exit = True
        self._thread.join(1.0)

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._server.serve(sockets=[self._listener]))
        except BaseException as error:
            self._queue.frontend_error = error


def build_executor(loaded: LoadedModel, rows: int) -> StepExecutor:
    generator = build_generator(loaded, Decoder(loaded.model, rows), SequenceDetokenizer(loaded.tokenizer),
                                sliding_window=False)
    return StepExecutor(generator, loaded.model, loaded.tokenizer.vocab_size)


def run_server(loaded: LoadedModel, groups: Groups, *, rows: int, name: str, listener: socket.socket, auth: AuthPolicy,
               limits: ServerLimits, log: Callable[[str], None], on_ready: Callable[[], None],
               stop_requested: Callable[[], bool]) -> None:
    """Runs rank 0 until `stop_requested`. `on_ready` is called once the server listens."""
    executor, metrics = build_executor(loaded, rows), ServerMetrics()
    queue = RequestQueue(rows, limits.max_waiting, metrics)
    shape, tokenizer = loaded.model.config, loaded.tokenizer
    eod = tokenizer.eod if tokenizer.eod < shape.known_vocab_size else None
    model = ServedModel(name, tokenizer, shape.max_position_embeddings, eod, limits, int(time.time()))
    server = HttpServer(ServeApp(model, queue, auth, metrics, log), listener, limits, queue)
    timeout_error = HttpError(503, f"{STOPPING_MESSAGE}, and this was not done in time", code="stopping")
    server.start()
    try:
        on_ready()
        if not run_leader(executor, groups.world, queue, partial(server.call, queue.handle_events), stop_requested,
                          server.refuse_connections, limits.grace):
            server.call(queue.fail, timeout_error)
    except BaseException as error:
        has_failed = isinstance(error, Exception)
        server.call(queue.fail, HttpError(500, "the model has failed, and the server ends") if has_failed
                    else timeout_error)
        with suppress(KeyboardInterrupt):
            server.finish(FAILURE_DRAIN_SECONDS)
        raise
    server.finish(DRAIN_SECONDS)
