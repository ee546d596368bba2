"""A request as it comes over the wire, and a response as it goes.

Strict where two programs could read the same bytes differently: one length, one Host, lines that end in CR LF, no
folded headers. A connection serves one request and is closed, so nothing that follows a request is ever read as one.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from http import HTTPStatus

from megatron.serve.limits import Limits
from megatron.serve.refusal import Refusal

TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
TARGET = re.compile(rb"/[!-~]*")
VALUE = re.compile(rb"[\t -~\x80-\xff]*")
MOST_HEADERS = 100
ONCE = frozenset({"host", "content-length", "content-type", "authorization", "transfer-encoding", "expect",
                  "content-encoding"})
"""Headers whose second occurrence another program might believe in place of the first."""


@dataclass
class Head:
    method: str = "-"
    target: str = "-"
    version: str = "1.1"
    headers: dict[str, str] = field(default_factory=dict)
    """Names in small letters."""

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]


class Reader:
    """One request. What is known of it so far is in `head`, also after a failure."""

    def __init__(self, stream: asyncio.StreamReader, limits: Limits) -> None:
        """The stream's own limit is that of the head."""
        self._stream, self._limits, self._left = stream, limits, limits.max_header_bytes
        self.head = Head()

    async def read_head(self) -> Head | None:
        """None: the client left without a word."""
        line = await self._line(first=True)
        if line is None:
            return None
        words = line.split(b" ")
        if len(words) != 3 or not TOKEN.fullmatch(words[0]) or not TARGET.fullmatch(words[1]):
            raise Refusal(400, "the request line is none of HTTP/1.1")
        if words[2] not in (b"HTTP/1.1", b"HTTP/1.0"):
            raise Refusal(400, "this server speaks HTTP/1.1 and HTTP/1.0")
        head = self.head
        head.method, head.target, head.version = words[0].decode(), words[1].decode(), words[2][5:].decode()
        for _ in range(MOST_HEADERS + 1):
            if not (line := await self._line()):
                if head.version == "1.1" and "host" not in head.headers:
                    raise Refusal(400, "a request of HTTP/1.1 has a Host header")
                return head
            self._take_header(line)
        raise Refusal(431, f"more than {MOST_HEADERS} headers")

    def _take_header(self, line: bytes) -> None:
        name, colon, value = line.partition(b":")
        if not colon or not TOKEN.fullmatch(name) or not VALUE.fullmatch(value):
            raise Refusal(400, "a header is none of HTTP/1.1")
        key, text = name.decode().lower(), value.decode("latin-1").strip(" \t")
        if key in self.head.headers:
            if key in ONCE:
                raise Refusal(400, f"the header {key} is given twice")
            text = f"{self.head.headers[key]}, {text}"
        self.head.headers[key] = text

    async def _line(self, first: bool = False) -> bytes | None:
        """Without its end. None: nothing more came, where a request would begin."""
        try:
            line = await self._stream.readuntil(b"\n")
        except asyncio.LimitOverrunError:
            raise Refusal(431, f"the head is longer than {self._limits.max_header_bytes} bytes") from None
        except asyncio.IncompleteReadError as error:
            if first and not error.partial:
                return None
            raise Refusal(400, "the request is cut off") from None
        self._left -= len(line)
        if self._left < 0:
            raise Refusal(431, f"the head is longer than {self._limits.max_header_bytes} bytes")
        if not line.endswith(b"\r\n"):
            raise Refusal(400, "a line does not end in CR LF")
        return line[:-2]

    def length(self) -> int | None:
        """Of the body; None: it comes in chunks."""
        headers = self.head.headers
        coding, length = headers.get("transfer-encoding"), headers.get("content-length")
        if coding is not None:
            if length is not None or coding.lower() != "chunked" or self.head.version == "1.0":
                raise Refusal(400, "expected either a Content-Length or Transfer-Encoding: chunked")
            return None
        if length is None:
            raise Refusal(411, "a body needs a Content-Length")
        if not re.fullmatch(r"[0-9]{1,15}", length):
            raise Refusal(400, "the Content-Length is no number")
        if int(length) > self._limits.max_body_bytes:
            raise self._too_large()
        return int(length)

    async def read_body(self) -> bytes:
        length = self.length()
        try:
            return await self._chunks() if length is None else await self._stream.readexactly(length)
        except asyncio.IncompleteReadError:
            raise Refusal(400, "the body is cut off") from None

    async def _chunks(self) -> bytes:
        found = bytearray()
        while True:
            self._left = self._limits.max_header_bytes
            size = (await self._line() or b"").partition(b";")[0].rstrip(b" \t")
            if not re.fullmatch(rb"[0-9A-Fa-f]{1,8}", size):
                raise Refusal(400, "the size of a chunk is no number")
            if len(found) + int(size, 16) > self._limits.max_body_bytes:
                raise self._too_large()
            if not int(size, 16):
                break
            found += await self._stream.readexactly(int(size, 16))
            if await self._stream.readexactly(2) != b"\r\n":
                raise Refusal(400, "a chunk is longer than its size")
        for _ in range(MOST_HEADERS):
            if not await self._line():
                return bytes(found)
        raise Refusal(431, f"more than {MOST_HEADERS} headers behind a body")

    def _too_large(self) -> Refusal:
        return Refusal(413, f"the body is longer than {self._limits.max_body_bytes} bytes")


def head_of_response(status: int, headers: Iterable[tuple[str, str]]) -> bytes:
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", *(f"{name}: {value}" for name, value in headers)]
    return "".join(f"{line}\r\n" for line in [*lines, "Connection: close", ""]).encode("latin-1")
