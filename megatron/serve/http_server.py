"""uvicorn on a thread of its own, beside the model's: starts, refuses new requests, and ends.

uvicorn parses HTTP/1.1, limits the head of a request and the number of connections, and shuts down gracefully.
`TimedProtocol` adds what it lacks: a time limit for the head of a request, and for a client that reads nothing.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, final

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from megatron.serve.admission import ServerLimits

START_SECONDS = 10.0
"""For uvicorn to listen."""


class TimedProtocol(H11Protocol):
    """One connection. Every response closes it, so there is one request head."""

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


@final
class HttpServer:
    """The public methods are called by the model's thread."""

    def __init__(self, app: Any, listener: socket.socket, limits: ServerLimits,
                 on_failure: Callable[[BaseException], None]) -> None:
        """`on_failure` is called, on the server's thread, with an error that ends it."""
        protocol = type("LimitedProtocol", (TimedProtocol,), {"limits": limits})
        self._server = uvicorn.Server(uvicorn.Config(
            app, http=protocol, ws="none", lifespan="off", loop="asyncio", interface="asgi3", log_config=None,
            log_level="critical", access_log=False, server_header=False, backlog=128,
            limit_concurrency=limits.max_connections + 1, h11_max_incomplete_event_size=limits.max_header_bytes))
        self._listener, self._on_failure = listener, on_failure
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="clients", daemon=True)

    def start(self) -> None:
        """Return once the server listens."""
        self._thread.start()
        until = time.monotonic() + START_SECONDS
        while not self._server.started and self._thread.is_alive() and time.monotonic() < until:
            time.sleep(0.005)

    @property
    def num_connections(self) -> int:
        return len(self._server.server_state.connections)

    def call(self, action: Callable[..., object], *arguments: object) -> None:
        """Call it on the server's thread."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(action, *arguments)

    def close(self) -> None:
        """Refuse new connections; the open ones are served."""
        self._server.should_exit = True

    def finish(self, seconds: float) -> None:
        """Wait up to `seconds` until the open connections have been served."""
        self.close()
        self._thread.join(seconds)
        self._server.force_exit = True
        self._thread.join(1.0)

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._server.serve(sockets=[self._listener]))
        except BaseException as error:
            self._on_failure(error)
