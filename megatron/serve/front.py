"""Connections: the thread of the clients, one event loop for all of them."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, final

from megatron.serve.answers import Answers
from megatron.serve.desk import Desk
from megatron.serve.exchange import Exchange
from megatron.serve.judge import Verdict
from megatron.serve.leader import Inbox
from megatron.serve.limits import Limits
from megatron.serve.metrics import Metrics
from megatron.serve.orders import Broken, News
from megatron.serve.refusal import Refusal

Log = Callable[[str], None]


@final
class Front:
    """Its public methods are for the model's thread."""

    def __init__(self, listener: socket.socket, answers: Answers, desk: Desk, inbox: Inbox, metrics: Metrics,
                 limits: Limits, log: Log) -> None:
        self._listener, self._answers, self._desk, self._inbox = listener, answers, desk, inbox
        self._metrics, self._limits, self._log = metrics, limits, log
        self._loop = asyncio.new_event_loop()
        self._finish = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._work, name="clients", daemon=True)

    def start(self) -> None:
        self._listener.listen(128)
        self._thread.start()

    def tell(self, news: list[News | Verdict]) -> None:
        self._call(self._desk.deliver, news)

    def close(self) -> None:
        """No more connections, no more requests."""
        self._call(self._close)

    def fail(self, refusal: Refusal) -> None:
        """What is still open is answered so."""
        self._call(self._close)
        self._call(self._desk.fail, refusal)

    def finish(self, seconds: float) -> None:
        """Once all is said: for clients to hear it."""
        self._call(self._close)
        self._call(self._finish.set)
        self._thread.join(seconds)

    def _call(self, action: Callable[..., object], *arguments: object) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(action, *arguments)

    def _work(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._run())
        except BaseException as error:
            self._inbox.put(Broken(error))

    async def _run(self) -> None:
        self._loop.set_exception_handler(lambda loop, about: self._log(f"clients: {about.get('message')}: "
                                                                       f"{about.get('exception')!r}"))
        self._server = await asyncio.start_server(self._serve, sock=self._listener,
                                                  limit=self._limits.max_header_bytes)
        await self._finish.wait()
        while others := self._tasks - {asyncio.current_task()}:
            await asyncio.wait(others)

    def _close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._desk.close()

    async def _serve(self, stream: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._metrics.connections = len(self._tasks)
        began, exchange = time.monotonic(), Exchange(stream, writer, self._limits)
        try:
            await self._exchange(exchange)
            if exchange.status:
                self._note(exchange, time.monotonic() - began)
            await exchange.close(hastily=len(self._tasks) > self._limits.max_connections)
        finally:
            writer.transport.abort()
            self._tasks.discard(task)
            self._metrics.connections = len(self._tasks)

    async def _exchange(self, exchange: Exchange) -> None:
        """Whatever happens: one client's failure is nobody else's."""
        with suppress(ConnectionError):
            try:
                if len(self._tasks) > self._limits.max_connections:
                    raise Refusal(503, "too many connections", headers=(("Retry-After", "1"),))
                await self._answers.answer(exchange)
            except Refusal as refusal:
                await self._answers.refuse(exchange, refusal)
            except (ConnectionError, asyncio.CancelledError):
                raise
            except Exception as error:
                self._log(f"internal error: {error!r}")
                await self._answers.refuse(exchange, Refusal(500, "internal error"))

    def _note(self, exchange: Exchange, seconds: float) -> None:
        head = exchange.head
        self._metrics.count(self._answers.name_of(head), exchange.status, seconds)
        when = time.strftime("%Y-%m-%dT%H:%M:%S")
        tokens = f"{exchange.read}+{exchange.made}"
        self._log(f"{when} {exchange.client} {head.method} {head.target[:200]} {exchange.status} {tokens} tokens "
                  f"{seconds:.3f} s")
