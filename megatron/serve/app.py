"""The HTTP application: its routes, and how an answer goes from the model's thread to a client.

A completion passes four types on its way to the decoder: uvicorn's ASGI scope, an `ApiRequest` (api.py), a `Request`
for each text (scheduler.py), and a `GeneratedSequence`. Its tokens come back as `TokenEvent`s. uvicorn
parses HTTP/1.1, limits the head of a request and the number of connections, and shuts down gracefully; `TimedProtocol`
adds two time limits.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import ipaddress
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
from uvicorn.protocols.http.h11_impl import H11Protocol

from data.html_page import style_sheet
from megatron.inference.load import LoadedModel
from megatron.serve.api import ApiRequest, HttpError, ServedModel, parse_completion, parse_generation
from megatron.serve.cli import ServerLimits
from megatron.serve.scheduler import STOPPING_MESSAGE, RequestQueue, run_leader
from mpu.groups import Groups

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

COMMON_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Connection": "close"}
JSON_TYPE = "application/json"
READ_METHODS = ("GET", "HEAD")
PATHS_WITHOUT_KEY = ("/", "/health")
# Larger bodies are parsed on another thread: tokenizing them takes longer than a millisecond.
MAX_INLINE_BODY_BYTES = 4096


async def respond(scope: MutableMapping[str, Any], send: Send, body: Any = None, status: int = 200,
                  headers: Mapping[str, str] = {}) -> None:
    """Sends a text with its `headers`, any other value as JSON, and of None the head alone: the body follows."""
    data = (body if isinstance(body, str) else json.dumps(body, allow_nan=False) + "\n").encode()
    length = {} if body is None else {"Content-Type": JSON_TYPE, "Content-Length": str(len(data))}
    scope["status"] = status
    await send({"type": "http.response.start", "status": status, "headers": [
        (name.lower().encode(), value.encode()) for name, value in {**COMMON_HEADERS, **length, **headers}.items()]})
    if body is not None:
        await send({"type": "http.response.body", "body": data})


def error_body(path: str, error: HttpError) -> dict[str, Any]:
    """In the format of the API that was called."""
    if path == "/api":
        return {"message": error.message}
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def playground() -> tuple[str, dict[str, str]]:
    """The page to try the model, and its headers; its policy allows its own script and style alone."""
    text = Path(__file__).with_name("page.html").read_text("utf-8").replace("{{style}}", style_sheet())

    def allowed(tag: str) -> str:
        match = re.search(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        assert match is not None
        return f"'sha256-{base64.b64encode(hashlib.sha256(match[1].encode()).digest()).decode()}'"

    policy = (f"default-src 'none'; script-src {allowed('script')}; style-src {allowed('style')}; connect-src 'self'; "
              "img-src data:; form-action 'none'; base-uri 'none'; frame-ancestors 'none'")
    return text, {"Content-Type": "text/html; charset=utf-8", "Content-Security-Policy": policy,
                  "Referrer-Policy": "no-referrer", "X-Frame-Options": "DENY",
                  "Cross-Origin-Opener-Policy": "same-origin", "Cross-Origin-Resource-Policy": "same-origin"}


# ---- who is let in -------------------------------------------------------------------------------------------------

LOOPBACK_NAMES = frozenset({"localhost", "localhost.localdomain"})


def is_loopback(host: str) -> bool:
    if host.lower().rstrip(".") in LOOPBACK_NAMES:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@final
class AuthPolicy:
    """On the loopback only requests for loopback names, and for those of --allowed-host, are accepted: this stops DNS
    rebinding by a page of another site."""

    def __init__(self, host: str, key: str | None, allowed: Iterable[str] = ()) -> None:
        self._key = None if key is None else key.encode()
        self._any_host = not is_loopback(host)
        self._allowed_hosts = {host.lower(), *LOOPBACK_NAMES, *(name.lower() for name in allowed)}

    def check(self, headers: Mapping[str, str], needs_key: bool) -> None:
        """Refuses a Host header that is not one of our names, and a request without the key."""
        host = headers.get("host")
        if not self._any_host and host is not None:
            match = re.fullmatch(r"\[([0-9A-Fa-f:.]+)\](:\d*)?|([^:\[\]]+)(:\d*)?", host)
            name = (match[1] or match[3]).lower() if match else ""
            if name not in self._allowed_hosts and not is_loopback(name):
                raise HttpError(403, "this server answers on its own machine only, to requests for localhost; "
                                "--allowed-host admits another name")
        if needs_key and self._key is not None:
            scheme, _, given = headers.get("authorization", "").partition(" ")
            good = hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), self._key)
            if scheme.lower() != "bearer" or not good:
                raise HttpError(401, "this server wants a key: send it as Authorization: Bearer KEY",
                                code="invalid_api_key", headers=(("WWW-Authenticate", "Bearer"),))


# ---- the server ----------------------------------------------------------------------------------------------------


class TimedProtocol(H11Protocol):
    """One connection, with a time limit for the head of a request and for a client that reads nothing. Every response
    closes the connection, so there is one request head."""

    limits = ServerLimits()
    _timer: asyncio.TimerHandle

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # so that waiting for a client means that it reads what is sent
        self._timer = self.loop.call_later(self.limits.request_seconds, self._close_without_request)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._timer.cancel()
        self._timer = self.loop.call_later(self.limits.write_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._timer.cancel()

    def _close_without_request(self) -> None:
        if self.cycle is None:  # the head has not come
            self.transport.close()


START_SECONDS = 10.0  # seconds for uvicorn to listen
DRAIN_SECONDS = 5.0  # seconds for clients to read their responses, once the model has stopped
FAILURE_DRAIN_SECONDS = 1.0  # shorter than a launcher waits before it ends all ranks


@final
class HttpServer:
    """The ASGI application, and uvicorn that runs it on a thread beside the model's. The public methods are called by
    the model's thread, the others run on the clients'."""

    def __init__(self, model: ServedModel, queue: RequestQueue, auth: AuthPolicy, listener: socket.socket,
                 log: Callable[[str], None]) -> None:
        self._model, self._queue, self._auth, self._limits, self._log = model, queue, auth, model.limits, log
        # parses long requests and formats responses: (de)tokenizing long texts takes a while
        self._pool = ThreadPoolExecutor(1, "requests")
        page, info = playground(), {"id": model.name, "object": "model", "created": model.created, "owned_by": "local",
                                    "max_model_len": model.positions}
        self._pages: dict[str, Callable[[], tuple[Any, dict[str, str]]]] = {
            "/": lambda: page, "/health": self._health, "/metrics": self._metrics,
            "/v1/models": lambda: ({"object": "list", "data": [info]}, {}),
            f"/v1/models/{model.name}": lambda: (info, {})}
        self._apis: dict[str, tuple[tuple[str, ...], Callable[[bytes, ServedModel], ApiRequest]]] = {
            "/v1/completions": (("POST",), parse_completion), "/api": (("PUT", "POST"), parse_generation)}
        protocol = type("LimitedProtocol", (TimedProtocol,), {"limits": model.limits})
        self._server = uvicorn.Server(uvicorn.Config(
            self._answer, http=protocol, ws="none", lifespan="off", loop="asyncio", interface="asgi3", log_config=None,
            log_level="critical", access_log=False, server_header=False, backlog=128,
            limit_concurrency=model.limits.max_connections + 1,
            h11_max_incomplete_event_size=model.limits.max_header_bytes))
        self._listener, self._loop = listener, asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="clients", daemon=True)

    def start(self) -> None:
        """Return once the server listens."""
        self._thread.start()
        until = time.monotonic() + START_SECONDS
        while not self._server.started and self._thread.is_alive() and time.monotonic() < until:
            time.sleep(0.005)

    def call(self, action: Callable[..., object], *arguments: object) -> None:
        """Call it on the clients' thread."""
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

    async def _answer(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Admit a request, answer it, and log it. A failed request does not affect other clients."""
        began, path, method = time.monotonic(), scope["path"], scope["method"]
        scope.update({"status": 0, "usage": {"prompt_tokens": 0, "completion_tokens": 0}})
        error: HttpError | None = None
        try:
            # uvicorn's own limit holds for heads that come in several parts
            if self._limits.max_header_bytes < sum(len(name) + len(value) + 4 for name, value in (
                    *scope["headers"], (scope["raw_path"], scope["query_string"]))):
                raise HttpError(400, f"the head is longer than {self._limits.max_header_bytes} bytes")
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            if {"content-length", "transfer-encoding"} <= headers.keys():  # a proxy may read another body
                raise HttpError(400, "give Content-Length or Transfer-Encoding, not both")
            self._auth.check(headers, needs_key=path not in PATHS_WITHOUT_KEY)
            methods, parse = self._apis.get(path, (READ_METHODS, None))
            if parse is None and path not in self._pages:
                raise HttpError(404, "unknown path; POST /v1/completions or PUT /api continues a text (docs/serve.md)")
            if method not in methods:
                raise HttpError(405, f"expected {' or '.join(methods)}", headers=(("Allow", ", ".join(methods)),))
            if parse is None:
                body, more = self._pages[path]()
                await respond(scope, send, body, headers=more)
            else:
                await self._generate(scope, receive, send, headers, parse)
        except HttpError as refusal:
            error = refusal
        except (ConnectionError, asyncio.CancelledError):
            pass  # the client has left
        except Exception as problem:
            self._log(f"internal error: {problem!r}")
            error = HttpError(500, "internal error")
        if error is not None and not scope["status"]:
            await respond(scope, send, error_body(path, error), error.status, dict(error.headers))
        if scope["status"]:
            seconds = time.monotonic() - began
            route = path if path in self._pages or path in self._apis else "other"
            self._queue.requests[route, scope["status"]] += 1
            self._queue.request_seconds += seconds
            client, usage = scope["client"][0] if scope.get("client") else "-", scope["usage"]
            target = b"?".join(filter(None, (scope["raw_path"], scope["query_string"]))).decode("latin-1")
            self._log(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {client} {method} {target[:200]} {scope['status']} "
                      f"{usage['prompt_tokens']}+{usage['completion_tokens']} tokens {seconds:.3f} s")

    def _health(self) -> tuple[Any, dict[str, str]]:
        if self._queue.is_closed:
            raise HttpError(503, STOPPING_MESSAGE, code="stopping")
        return {"status": "ok"}, {}

    def _metrics(self) -> tuple[Any, dict[str, str]]:
        text = self._queue.format_prometheus(len(self._server.server_state.connections))
        return text, {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}

    async def _generate(self, scope: MutableMapping[str, Any], receive: Receive, send: Send, headers: Mapping[str, str],
                        parse: Callable[[bytes, ServedModel], ApiRequest]) -> None:
        """The answer to a generation request, whole or as server-sent events; ends it if the client leaves."""
        if headers.get("content-type", "").partition(";")[0].strip().lower() != JSON_TYPE:
            raise HttpError(415, f"expected JSON, announced with the header Content-Type: {JSON_TYPE}")
        if "content-encoding" in headers:
            raise HttpError(415, "expected a body without Content-Encoding")
        found, size, has_more = bytearray(), int(headers.get("content-length", 0)), True
        try:
            async with asyncio.timeout(self._limits.request_seconds):
                while has_more and size <= self._limits.max_body_bytes:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return
                    found += message["body"]
                    has_more, size = message["more_body"], max(size, len(found))
        except TimeoutError:
            raise HttpError(408, "the request did not arrive in time") from None
        if size > self._limits.max_body_bytes:
            raise HttpError(413, f"the body is longer than {self._limits.max_body_bytes} bytes")
        body, in_pool = bytes(found), partial(asyncio.get_running_loop().run_in_executor, self._pool)
        request = (parse(body, self._model) if len(body) <= MAX_INLINE_BODY_BYTES
                   else await in_pool(parse, body, self._model))
        self._queue.submit(request)
        watch = asyncio.create_task(self._cancel_on_disconnect(receive, request))
        try:
            if request.is_streaming:
                await self._stream(scope, send, request)
            else:
                await request.changed.wait()
                if request.error is not None:
                    raise request.error
                await respond(scope, send, await in_pool(request.full_response))
        finally:
            watch.cancel()
            scope["usage"] = request.usage()
            if request.num_open:
                self._queue.cancel(request, ConnectionResetError())

    async def _cancel_on_disconnect(self, receive: Receive, request: ApiRequest) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._queue.cancel(request, ConnectionResetError())

    async def _stream(self, scope: MutableMapping[str, Any], send: Send, request: ApiRequest) -> None:
        """Tokens that arrive while a part is sent go into the next one."""
        await respond(scope, send, headers={"Content-Type": "text/event-stream"})
        is_done = False
        while not is_done:
            try:
                await request.changed.wait()
                request.changed.clear()
                if request.error is not None:
                    raise request.error
                is_done = not request.num_open
                events = [json.dumps(chunk) for chunk in request.new_chunks()] + ["[DONE]"] * is_done
            except HttpError as error:  # the last event then, without [DONE]
                is_done, events = True, [json.dumps(error_body(scope["path"], error))]
            if events:
                await send({"type": "http.response.body", "more_body": not is_done,
                            "body": "".join(f"data: {event}\n\n" for event in events).encode()})


def run_server(loaded: LoadedModel, groups: Groups, *, rows: int, name: str, listener: socket.socket, auth: AuthPolicy,
               limits: ServerLimits, log: Callable[[str], None], on_ready: Callable[[], None],
               stop_requested: Callable[[], bool]) -> None:
    """Runs rank 0 until `stop_requested`. `on_ready` is called once the server listens."""
    generator, queue = loaded.generator(rows), RequestQueue(rows, limits.max_waiting)
    server = HttpServer(ServedModel(loaded, name, limits), queue, auth, listener, log)
    timeout_error = HttpError(503, f"{STOPPING_MESSAGE}, and this was not done in time", code="stopping")
    server.start()
    try:
        on_ready()
        if not run_leader(generator, groups.world, queue, partial(server.call, queue.handle_events), stop_requested,
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
