"""A connection: one request, one response, and then it is closed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from contextlib import suppress
from email.utils import formatdate
from typing import Any, final

from megatron.serve.limits import Limits
from megatron.serve.message import Head, Reader, head_of_response
from megatron.serve.refusal import Refusal

LINGER_SECONDS = 2.0
"""For a client to read what it was sent and close. Closing while bytes of its request are unread would cut that off."""
HASTY_SECONDS = 0.1
"""The same, where there are too many of them."""
JSON_TYPE = "application/json"


@final
class Exchange:
    def __init__(self, stream: asyncio.StreamReader, writer: asyncio.StreamWriter, limits: Limits) -> None:
        self._stream, self._writer, self._limits = stream, writer, limits
        self._reader = Reader(stream, limits)
        self._in_chunks = False
        self.status = 0
        """Of the response; 0: none has begun."""
        self.read = self.made = 0
        """Tokens, of a response that has some."""
        writer.transport.set_write_buffer_limits(0)  # so that waiting for a client means that it takes what is sent

    @property
    def head(self) -> Head:
        return self._reader.head

    @property
    def client(self) -> str:
        peer = self._writer.get_extra_info("peername")
        return str(peer[0]) if isinstance(peer, tuple) else "-"

    async def read_head(self) -> Head | None:
        return await self._reader.read_head()

    async def read_json(self) -> bytes:
        """The body of a request that says that it is JSON."""
        kind = self.head.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != JSON_TYPE:
            raise Refusal(415, f"expected JSON, announced with the header Content-Type: {JSON_TYPE}")
        if "content-encoding" in self.head.headers:
            raise Refusal(415, "expected a body without Content-Encoding")
        expected = self.head.headers.get("expect")
        if expected is not None and self.head.version == "1.1":  # HTTP/1.0 does not know it
            if expected.lower() != "100-continue":
                raise Refusal(417, "the only thing that can be expected is 100-continue")
            self._reader.length()  # or why the body is not taken
            await self._write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return await self._reader.read_body()

    async def reply(self, status: int, body: bytes, kind: str = JSON_TYPE,
                    headers: Iterable[tuple[str, str]] = ()) -> None:
        self.status = status
        head = head_of_response(status, [*self._headers(kind), ("Content-Length", str(len(body))), *headers])
        await self._write(head if self.head.method == "HEAD" else head + body)

    async def reply_json(self, value: Any, status: int = 200, headers: Iterable[tuple[str, str]] = ()) -> None:
        await self.reply(status, json.dumps(value, allow_nan=False).encode() + b"\n", headers=headers)

    async def begin_events(self) -> None:
        """A response that goes on: server-sent events."""
        self.status, self._in_chunks = 200, self.head.version == "1.1"
        chunked = [("Transfer-Encoding", "chunked")] if self._in_chunks else []
        await self._write(head_of_response(200, [*self._headers("text/event-stream"), *chunked]))

    async def send_event(self, text: str) -> None:
        data = f"data: {text}\n\n".encode()
        await self._write(b"%x\r\n%b\r\n" % (len(data), data) if self._in_chunks else data)

    async def end_events(self) -> None:
        if self._in_chunks:
            await self._write(b"0\r\n\r\n")

    async def until_left(self) -> None:
        """Until the client leaves. What it sends meanwhile is not read as anything."""
        with suppress(ConnectionError):
            while await self._stream.read(1 << 14):
                pass

    async def close(self, hastily: bool = False) -> None:
        with suppress(OSError):
            async with asyncio.timeout(HASTY_SECONDS if hastily else LINGER_SECONDS):
                if self._writer.can_write_eof():
                    self._writer.write_eof()
                while await self._stream.read(1 << 16):
                    pass

    @staticmethod
    def _headers(kind: str) -> list[tuple[str, str]]:
        return [("Date", formatdate(usegmt=True)), ("Content-Type", kind), ("Cache-Control", "no-store"),
                ("X-Content-Type-Options", "nosniff")]

    async def _write(self, data: bytes) -> None:
        try:
            async with asyncio.timeout(self._limits.write_seconds):
                self._writer.write(data)
                await self._writer.drain()
        except TimeoutError:
            raise ConnectionAbortedError("the client does not take what it is sent") from None
