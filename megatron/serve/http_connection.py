"""An HTTP/1.1 connection: reads one request strictly, writes one response, and closes.

Strict where two programs could read the same bytes differently: one length, one Host, CR LF line ends, no folded
headers.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, final

from megatron.serve.admission import HttpError, ServerLimits

TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
TARGET = re.compile(rb"/[!-~]*")
VALUE = re.compile(rb"[\t -~\x80-\xff]*")
MAX_HEADERS = 100
SINGLE_HEADERS = frozenset({"host", "content-length", "content-type", "authorization", "transfer-encoding", "expect",
                            "content-encoding"})
"""Headers that must not be repeated: another program might use the second one."""


@dataclass
class RequestHead:
    method: str = "-"
    target: str = "-"
    version: str = "1.1"
    headers: dict[str, str] = field(default_factory=dict)
    """Names in lower case."""

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]


class HttpRequestReader:
    """Reads one request. After an error `head` has what was read so far."""

    def __init__(self, stream: asyncio.StreamReader, limits: ServerLimits) -> None:
        self._stream, self._limits, self._remaining_bytes = stream, limits, limits.max_header_bytes
        self.head = RequestHead()

    async def read_head(self) -> RequestHead | None:
        """None: the client closed without a request."""
        line = await self._read_line(first=True)
        if line is None:
            return None
        words = line.split(b" ")
        if len(words) != 3 or not TOKEN.fullmatch(words[0]) or not TARGET.fullmatch(words[1]):
            raise HttpError(400, "the request line is not one of HTTP/1.1")
        if words[2] not in (b"HTTP/1.1", b"HTTP/1.0"):
            raise HttpError(400, "this server speaks HTTP/1.1 and HTTP/1.0")
        head = self.head
        head.method, head.target, head.version = words[0].decode(), words[1].decode(), words[2][5:].decode()
        for _ in range(MAX_HEADERS + 1):
            if not (line := await self._read_line()):
                if head.version == "1.1" and "host" not in head.headers:
                    raise HttpError(400, "a request of HTTP/1.1 has a Host header")
                return head
            name, colon, value = line.partition(b":")
            if not colon or not TOKEN.fullmatch(name) or not VALUE.fullmatch(value):
                raise HttpError(400, "a header is not one of HTTP/1.1")
            key, text = name.decode().lower(), value.decode("latin-1").strip(" \t")
            if key in head.headers:
                if key in SINGLE_HEADERS:
                    raise HttpError(400, f"the header {key} is given twice")
                text = f"{head.headers[key]}, {text}"
            head.headers[key] = text
        raise HttpError(431, f"more than {MAX_HEADERS} headers")

    async def _read_line(self, first: bool = False) -> bytes | None:
        """A line without CR LF. None: the stream ended before the request (`first`)."""
        try:
            line = await self._stream.readuntil(b"\n")
        except asyncio.LimitOverrunError:
            raise HttpError(431, f"the head is longer than {self._limits.max_header_bytes} bytes") from None
        except asyncio.IncompleteReadError as error:
            if first and not error.partial:
                return None
            raise HttpError(400, "the request is cut off") from None
        self._remaining_bytes -= len(line)
        if self._remaining_bytes < 0:
            raise HttpError(431, f"the head is longer than {self._limits.max_header_bytes} bytes")
        if not line.endswith(b"\r\n"):
            raise HttpError(400, "a line does not end in CR LF")
        return line[:-2]

    def content_length(self) -> int | None:
        """Of the body; None: chunked."""
        headers = self.head.headers
        coding, length = headers.get("transfer-encoding"), headers.get("content-length")
        if coding is not None:
            if length is not None or coding.lower() != "chunked" or self.head.version == "1.0":
                raise HttpError(400, "expected either a Content-Length or Transfer-Encoding: chunked")
            return None
        if length is None:
            raise HttpError(411, "a body needs a Content-Length")
        if not re.fullmatch(r"[0-9]{1,15}", length):
            raise HttpError(400, "the Content-Length is no number")
        if int(length) > self._limits.max_body_bytes:
            raise self._too_large()
        return int(length)

    async def read_body(self) -> bytes:
        length = self.content_length()
        try:
            return await self._read_chunked() if length is None else await self._stream.readexactly(length)
        except asyncio.IncompleteReadError:
            raise HttpError(400, "the body is cut off") from None

    async def _read_chunked(self) -> bytes:
        found = bytearray()
        while True:
            self._remaining_bytes = self._limits.max_header_bytes
            size = (await self._read_line() or b"").partition(b";")[0].rstrip(b" \t")
            if not re.fullmatch(rb"[0-9A-Fa-f]{1,8}", size):
                raise HttpError(400, "the size of a chunk is no number")
            if len(found) + int(size, 16) > self._limits.max_body_bytes:
                raise self._too_large()
            if not int(size, 16):
                break
            found += await self._stream.readexactly(int(size, 16))
            if await self._stream.readexactly(2) != b"\r\n":
                raise HttpError(400, "a chunk is longer than its size")
        for _ in range(MAX_HEADERS):
            if not await self._read_line():
                return bytes(found)
        raise HttpError(431, f"more than {MAX_HEADERS} headers behind a body")

    def _too_large(self) -> HttpError:
        return HttpError(413, f"the body is longer than {self._limits.max_body_bytes} bytes")


def response_head(status: int, headers: Iterable[tuple[str, str]]) -> bytes:
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", *(f"{name}: {value}" for name, value in headers)]
    return "".join(f"{line}\r\n" for line in [*lines, "Connection: close", ""]).encode("latin-1")


LINGER_SECONDS = 2.0
"""For the client to read the response and close. Closing with unread request bytes would reset the connection."""
SHORT_LINGER_SECONDS = 0.1
"""The same, with too many open connections."""
JSON_TYPE = "application/json"


@final
class HttpConnection:
    def __init__(self, stream: asyncio.StreamReader, writer: asyncio.StreamWriter, limits: ServerLimits) -> None:
        self._stream, self._writer, self._limits = stream, writer, limits
        self._reader = HttpRequestReader(stream, limits)
        self._in_chunks = False
        self.status = 0
        """Of the response; 0: not begun."""
        self.prompt_tokens = self.generated_tokens = 0
        writer.transport.set_write_buffer_limits(0)  # so that waiting for a client means that it takes what is sent

    @property
    def head(self) -> RequestHead:
        return self._reader.head

    @property
    def client(self) -> str:
        peer = self._writer.get_extra_info("peername")
        return str(peer[0]) if isinstance(peer, tuple) else "-"

    async def read_head(self) -> RequestHead | None:
        return await self._reader.read_head()

    async def read_json(self) -> bytes:
        """The body of a JSON request."""
        kind = self.head.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != JSON_TYPE:
            raise HttpError(415, f"expected JSON, announced with the header Content-Type: {JSON_TYPE}")
        if "content-encoding" in self.head.headers:
            raise HttpError(415, "expected a body without Content-Encoding")
        expected = self.head.headers.get("expect")
        if expected is not None and self.head.version == "1.1":  # HTTP/1.0 does not know it
            if expected.lower() != "100-continue":
                raise HttpError(417, "the only thing that can be expected is 100-continue")
            self._reader.content_length()  # or why the body is not taken
            await self._write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return await self._reader.read_body()

    async def reply(self, status: int, body: bytes, content_type: str = JSON_TYPE,
                    headers: Iterable[tuple[str, str]] = ()) -> None:
        self.status = status
        head = response_head(status, [*self._headers(content_type), ("Content-Length", str(len(body))), *headers])
        await self._write(head if self.head.method == "HEAD" else head + body)

    async def reply_json(self, value: Any, status: int = 200, headers: Iterable[tuple[str, str]] = ()) -> None:
        await self.reply(status, json.dumps(value, allow_nan=False).encode() + b"\n", headers=headers)

    async def start_event_stream(self) -> None:
        """Begins a response of server-sent events."""
        self.status, self._in_chunks = 200, self.head.version == "1.1"
        chunked = [("Transfer-Encoding", "chunked")] if self._in_chunks else []
        await self._write(response_head(200, [*self._headers("text/event-stream"), *chunked]))

    async def send_event(self, text: str) -> None:
        data = f"data: {text}\n\n".encode()
        await self._write(b"%x\r\n%b\r\n" % (len(data), data) if self._in_chunks else data)

    async def end_event_stream(self) -> None:
        if self._in_chunks:
            await self._write(b"0\r\n\r\n")

    async def wait_for_disconnect(self) -> None:
        """Discards what the client sends."""
        with suppress(ConnectionError):
            while await self._stream.read(1 << 14):
                pass

    async def close(self, short_linger: bool = False) -> None:
        with suppress(OSError):
            async with asyncio.timeout(SHORT_LINGER_SECONDS if short_linger else LINGER_SECONDS):
                if self._writer.can_write_eof():
                    self._writer.write_eof()
                while await self._stream.read(1 << 16):
                    pass

    @staticmethod
    def _headers(content_type: str) -> list[tuple[str, str]]:
        return [("Date", formatdate(usegmt=True)), ("Content-Type", content_type), ("Cache-Control", "no-store"),
                ("X-Content-Type-Options", "nosniff")]

    async def _write(self, data: bytes) -> None:
        try:
            async with asyncio.timeout(self._limits.write_seconds):
                self._writer.write(data)
                await self._writer.drain()
        except TimeoutError:
            raise ConnectionAbortedError("the client does not take what it is sent") from None
