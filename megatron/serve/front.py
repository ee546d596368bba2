"""A server: the thread of the clients, one event loop for all connections, beside the thread of the model."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, final

from megatron.inference.answers import generator_of
from megatron.inference.decoder import Decoder
from megatron.inference.loading import Loaded
from megatron.inference.wording import Wording
from megatron.serve.answers import Answers
from megatron.serve.asked import Subject
from megatron.serve.desk import STOPPING, Desk
from megatron.serve.door import Door
from megatron.serve.leader import Broken, Hands, Inbox, Judge, Leader, News, Verdict, follow
from megatron.serve.limits import Limits, Refusal
from megatron.serve.message import Exchange
from megatron.serve.metrics import Metrics
from mpu.groups import Groups

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


LAST_SECONDS = 5.0
"""For clients to take what is left, once the model has stopped."""
LAST_SECONDS_OF_FAILURE = 1.0
"""Shorter than a launcher waits before it ends all ranks."""


def hands_of(loaded: Loaded, rows: int) -> Hands:
    generator = generator_of(loaded, Decoder(loaded.model, rows), Wording(loaded.tokenizer), slides=False)
    return Hands(generator, Judge(loaded.model, loaded.tokenizer.vocab_size))


def work(loaded: Loaded, groups: Groups, rows: int) -> None:
    """A rank that is told what to do."""
    follow(hands_of(loaded, rows), groups.world)


def subject_of(loaded: Loaded, name: str, limits: Limits) -> Subject:
    shape, tokenizer = loaded.model.config, loaded.tokenizer
    eod = tokenizer.eod if tokenizer.eod < shape.known_vocab_size else None
    return Subject(name, tokenizer, shape.max_position_embeddings, eod, limits, int(time.time()))


def serve(loaded: Loaded, groups: Groups, *, rows: int, name: str, listener: socket.socket, host: str, key: str | None,
          allowed: Iterable[str], limits: Limits, log: Callable[[str], None], ready: Callable[[], None],
          asked_to_stop: Callable[[], bool]) -> None:
    """The rank that hears the clients; until it is asked to stop. `ready` is called when it listens."""
    hands, inbox, metrics = hands_of(loaded, rows), Inbox(), Metrics()
    desk = Desk(inbox, rows, limits.max_waiting, metrics)
    answers = Answers(subject_of(loaded, name, limits), desk, Door(host, key, allowed), metrics, limits)
    front = Front(listener, answers, desk, inbox, metrics, limits, log)
    leader = Leader(hands, groups.world, inbox, front.tell)
    late = Refusal(503, f"{STOPPING}, and this was not done in time", code="stopping")
    front.start()
    try:
        ready()
        if not leader.run(asked_to_stop, front.close, limits.grace):
            front.fail(late)
    except BaseException as error:
        has_failed = isinstance(error, Exception)
        front.fail(Refusal(500, "the model has failed, and the server ends") if has_failed else late)
        front.finish(LAST_SECONDS_OF_FAILURE)
        raise
    front.finish(LAST_SECONDS)
