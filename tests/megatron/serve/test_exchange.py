"""A connection whose other side does nothing that it should."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from megatron.serve.admission import ServerLimits
from megatron.serve.http_connection import HttpConnection


@asynccontextmanager
async def exchange_with(limits: ServerLimits) -> AsyncIterator[tuple[HttpConnection, socket.socket]]:
    """And the client's side, where little fits between."""
    ours, theirs = socket.socketpair()
    for side in (ours, theirs):
        side.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    stream, writer = await asyncio.open_connection(sock=ours, limit=limits.max_header_bytes)
    with theirs:
        yield HttpConnection(stream, writer, limits), theirs
    writer.transport.abort()
    await asyncio.sleep(0)


def test_a_client_that_takes_nothing_is_given_up_and_others_go_on_meanwhile() -> None:
    async def work() -> tuple[float, int]:
        ticks, began = 0, time.monotonic()

        async def others() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        beside = asyncio.create_task(others())
        async with exchange_with(ServerLimits(write_seconds=0.3)) as (exchange, _):
            with pytest.raises(ConnectionAbortedError):
                await exchange.reply(200, b"x" * 1_000_000)
            await exchange.close(short_linger=True)
        beside.cancel()
        return time.monotonic() - began, ticks

    seconds, ticks = asyncio.run(work())
    assert 0.3 <= seconds < 20 and ticks > 5


def test_a_client_that_reads_slowly_gets_all() -> None:
    async def work() -> bytes:
        async with exchange_with(ServerLimits(write_seconds=5)) as (exchange, theirs):
            theirs.setblocking(False)
            sending = asyncio.create_task(exchange.reply(200, b"x" * 100_000))
            found = b""
            while not found.endswith(b"x" * 100_000):
                found += await asyncio.get_running_loop().sock_recv(theirs, 3000)
                await asyncio.sleep(0.001)
            await sending
            closing = asyncio.create_task(exchange.close())
            assert await asyncio.get_running_loop().sock_recv(theirs, 10) == b""
            theirs.shutdown(socket.SHUT_WR)
            await closing
        return found

    assert b"Content-Length: 100000" in asyncio.run(work())


@pytest.mark.parametrize(("version", "first"), [("1.1", b"HTTP/1.1 100 Continue\r\n\r\n"), ("1.0", b"HTTP/1.1 200 OK")])
def test_only_a_client_of_http_1_1_is_told_to_continue(version: str, first: bytes) -> None:
    async def work() -> bytes:
        async with exchange_with(ServerLimits()) as (exchange, theirs):
            theirs.sendall(f"POST / HTTP/{version}\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 2\r\n"
                           "Content-Type: application/json\r\n\r\n{}".encode())
            await exchange.read_head()
            assert await exchange.read_json() == b"{}"
            await exchange.reply(200, b"")
            return theirs.recv(4096)

    assert asyncio.run(work()).startswith(first)
