"""A server: the thread of the clients, one event loop for all connections, beside the thread of the model."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, final

from megatron.inference.answers import build_generator
from megatron.inference.decoder import Decoder
from megatron.inference.loading import LoadedModel
from megatron.inference.wording import SequenceDetokenizer
from megatron.serve.answers import RequestRouter
from megatron.serve.asked import ServedModel
from megatron.serve.desk import STOPPING_MESSAGE, RequestQueue
from megatron.serve.door import AuthPolicy
from megatron.serve.leader import (FrontendFailed, GenerationScheduler, Inbox, LogprobScorer, SequenceLogprobs,
                                   StepExecutor, TokenEvent, run_worker)
from megatron.serve.limits import HttpError, ServerLimits
from megatron.serve.message import HttpConnection
from megatron.serve.metrics import ServerMetrics
from mpu.groups import Groups

LogFn = Callable[[str], None]


@final
class HttpServer:
    """Its public methods are for the model's thread."""

    def __init__(self, listener: socket.socket, router: RequestRouter, queue: RequestQueue, inbox: Inbox,
                 metrics: ServerMetrics, limits: ServerLimits, log: LogFn) -> None:
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
        """No more connections, no more requests."""
        self._call_soon(self._close)

    def fail(self, error: HttpError) -> None:
        """What is still open is answered so."""
        self._call_soon(self._close)
        self._call_soon(self._queue.fail, error)

    def finish(self, seconds: float) -> None:
        """Once all is said: for clients to hear it."""
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
        """Whatever happens: one client's failure is nobody else's."""
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
"""For clients to take what is left, once the model has stopped."""
FAILURE_DRAIN_SECONDS = 1.0
"""Shorter than a launcher waits before it ends all ranks."""


def build_executor(loaded: LoadedModel, rows: int) -> StepExecutor:
    generator = build_generator(loaded,
                                Decoder(loaded.model, rows),
                                SequenceDetokenizer(loaded.tokenizer),
                                sliding_window=False)
    return StepExecutor(generator, LogprobScorer(loaded.model, loaded.tokenizer.vocab_size))


def run_worker_rank(loaded: LoadedModel, groups: Groups, rows: int) -> None:
    """A rank that is told what to do."""
    run_worker(build_executor(loaded, rows), groups.world)


def build_served_model(loaded: LoadedModel, name: str, limits: ServerLimits) -> ServedModel:
    shape, tokenizer = loaded.model.config, loaded.tokenizer
    eod = tokenizer.eod if tokenizer.eod < shape.known_vocab_size else None
    return ServedModel(name, tokenizer, shape.max_position_embeddings, eod, limits, int(time.time()))


def run_server(loaded: LoadedModel, groups: Groups, *, rows: int, name: str, listener: socket.socket, host: str,
               key: str | None, allowed_hosts: Iterable[str], limits: ServerLimits, log: Callable[[str], None],
               on_ready: Callable[[], None], stop_requested: Callable[[], bool]) -> None:
    """The rank that hears the clients; until it is asked to stop. `ready` is called when it listens."""
    executor, inbox, metrics = build_executor(loaded, rows), Inbox(), ServerMetrics()
    request_queue = RequestQueue(inbox, rows, limits.max_waiting, metrics)
    router = RequestRouter(build_served_model(loaded, name, limits), request_queue,
                           AuthPolicy(host, key, allowed_hosts), metrics, limits)
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
