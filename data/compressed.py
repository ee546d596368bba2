"""Reading a file through its compression, which its name says: `.gz`, `.xz`, `.zst`. Not what the file holds.

A compressed file is a row of streams (members of gzip, frames of zstd). What can be decompressed before a damaged place
is given, to the last byte; the read after that raises `Damaged`. So `readline` gives every whole line before it raises,
and `before_damage` everything; `read(n)` of a buffer forgets what it holds when it raises. Checksums come last in a
stream: where one does not match, some of what was given before it may be changed, and nobody can know which.
"""

from __future__ import annotations

import io
import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any, Protocol, cast

from data.storage import DataError

COMPRESSED = (".gz", ".xz", ".zst")

BLOCK = 1 << 16
"""Bytes of a file that are decompressed at a time."""
BUFFER = 1 << 18


def _zstandard() -> ModuleType | None:
    try:
        from compression import zstd  # Python 3.14
    except ImportError:
        try:
            from backports import zstd
        except ImportError:
            return None
    return cast(ModuleType, zstd)


ZSTD = _zstandard()
REFUSALS: tuple[type[Exception], ...] = (zlib.error, lzma.LZMAError, *((ZSTD.ZstdError,) if ZSTD else ()))
"""What a decompressor raises."""


class Damaged(OSError):
    """A compressed file cannot be read on. The message says where, in the file and in what is in it, and why."""


def is_compressed(path: str) -> bool:
    return path.lower().endswith(COMPRESSED)


def without_compression(name: str) -> str:
    """The name in lower case, without the suffix of its compression."""
    name = name.lower()
    return name[:name.rindex(".")] if name.endswith(COMPRESSED) else name


class Decompressor(Protocol):
    """Of one stream, as `lzma` and `zstd` have them."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int = ..., /) -> bytes: ...


class _Gzip:
    """`zlib`, which keeps no input for the next call."""

    def __init__(self) -> None:
        self._inflate = zlib.decompressobj(wbits=31)
        self.needs_input = True

    @property
    def eof(self) -> bool:
        return self._inflate.eof

    @property
    def unused_data(self) -> bytes:
        return self._inflate.unused_data

    def decompress(self, data: bytes, max_length: int = 0, /) -> bytes:
        found = self._inflate.decompress(self._inflate.unconsumed_tail + data, max_length)
        self.needs_input = len(found) < max_length and not self._inflate.unconsumed_tail
        return found


class _Streams(io.RawIOBase):
    """The streams of a file, with zeros between and after them: any number for gzip, fours for xz, none for zstd."""

    def __init__(self, file: io.RawIOBase, begin: Callable[[], Decompressor], zeros: int) -> None:
        self._file, self._begin, self._zeros = file, begin, zeros
        self._stream = begin()
        self._start = 0
        """Of the present stream in the file."""
        self._block = self._read = 0
        """Where the last block that was read begins and ends in the file."""
        self._ahead = b""
        """The end of that block, as far as it was not given to the decompressor."""
        self._before = self._given = 0
        """Bytes decompressed from the streams before, and from the present one."""
        self._ended = False
        self._salvaged = b""
        self._damage: Damaged | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        data = self._next(min(len(view), BUFFER)) if self._damage is None else b""
        if self._damage is not None:
            data, self._salvaged = self._salvaged[:len(view)], self._salvaged[len(view):]
            if not data:
                raise self._damage
        view[:len(data)] = data
        return len(data)

    def _next(self, most: int) -> bytes:
        """At least one byte; none at the end, or where there is damage."""
        while not self._ended and (not self._stream.eof or self._next_stream()):
            if self._stream.needs_input and not self._ahead and not self._fill():
                self._damage = self._damaged(self._read, self._given, "it ends too early")
                return b""
            try:
                data = self._stream.decompress(self._ahead, most)
            except REFUSALS as error:
                self._salvage(error)
                return b""
            self._ahead = b""
            self._given += len(data)
            if data:
                return data
        return b""

    def _fill(self) -> bool:
        self._ahead = self._file.read(BLOCK) or b""
        self._block, self._read = self._read, self._read + len(self._ahead)
        return bool(self._ahead)

    def _next_stream(self) -> bool:
        """Begin the one after the present one, if there is one."""
        self._ahead = self._stream.unused_data
        end, zeros = self._read - len(self._ahead), 0
        while self._ahead or self._fill():
            rest = self._ahead.lstrip(b"\0") if self._zeros else self._ahead
            zeros += len(self._ahead) - len(rest)
            self._ahead = rest
            if rest:
                break
        if self._zeros and zeros % self._zeros:
            self._damage = self._damaged(end, self._given, f"{zeros} zero bytes after a stream, expected a multiple of "
                                         f"{self._zeros}")
            return False
        self._ended = not self._ahead
        if self._ahead:
            self._before, self._given, self._start = self._before + self._given, 0, self._read - len(self._ahead)
            self._stream = self._begin()
        return bool(self._ahead)

    def _damaged(self, place: int, given: int, why: str) -> Damaged:
        return Damaged(f"the compressed data is damaged at byte {place} (after {self._before + given} bytes of what is "
                       f"in it): {why}")

    def _salvage(self, error: Exception) -> None:
        """What the call that was refused had decompressed by then is lost. Another decompressor is given the same bytes
        one by one, so that only what belongs to the last of them can be."""
        place, found = self._read - len(self._ahead), 0
        if self._file.seekable():  # a pipe gives nothing twice
            again, salvaged = self._begin(), bytearray()
            self._file.seek(self._start)
            place = self._start
            try:
                while not again.eof and (data := self._file.read(min(BLOCK, max(1, self._block - place)))):
                    place += len(data)
                    while data or not (again.needs_input or again.eof):
                        part, data = again.decompress(data, max(1, min(BUFFER, self._given - found))), b""
                        salvaged += part[max(0, self._given - found):]
                        found += len(part)
            except REFUSALS as refusal:
                error = refusal
            self._salvaged = bytes(salvaged)
        self._damage = self._damaged(place, max(found, self._given), str(error))

    def close(self) -> None:
        self._file.close()
        super().close()


@contextmanager
def opened(path: str) -> Iterator[io.BufferedReader]:
    """The bytes of a file, decompressed by its name."""
    file: io.RawIOBase = open(path, "rb", buffering=0)
    with file:
        name = path.lower()
        if name.endswith(".gz"):
            file = _Streams(file, _Gzip, 1)
        elif name.endswith(".xz"):
            file = _Streams(file, partial(lzma.LZMADecompressor, lzma.FORMAT_XZ), 4)
        elif name.endswith(".zst"):
            if ZSTD is None:
                raise DataError(f"{path}: reading .zst needs a package: pip install backports.zstd")
            file = _Streams(file, ZSTD.ZstdDecompressor, 0)
        with io.BufferedReader(cast(Any, file), BUFFER) as buffered:
            yield buffered


def before_damage(file: io.BufferedReader, size: int) -> tuple[bytes, Damaged | None]:
    """`file.read(size)` of an `opened` file; with less than that before damage comes the damage."""
    parts: list[bytes] = []
    try:
        while size > 0 and (part := file.read1(size)):
            parts.append(part)
            size -= len(part)
    except Damaged as damage:
        return b"".join(parts), damage
    return b"".join(parts), None


def line_before_damage(file: io.BufferedReader, size: int) -> tuple[bytes, Damaged | None]:
    """`file.readline(size)` of one, in the same way."""
    parts, last = [], b""
    try:
        while size > 0 and not last.endswith(b"\n") and (ahead := file.peek(1)[:size]):
            last = file.read(ahead.find(b"\n") + 1 or len(ahead))
            parts.append(last)
            size -= len(last)
    except Damaged as damage:
        return b"".join(parts), damage
    return b"".join(parts), None


def damage_in(path: str) -> Damaged | None:
    """For whoever found nonsense in a file: what is wrong with its compression, of which the checksums at the end may
    know first. All of it is read for that, to the end or the damage. None: nothing, or nobody can tell."""
    if not is_compressed(path) or not os.path.isfile(path):  # a pipe gives nothing twice
        return None
    try:
        with opened(path) as file:
            while file.read1(BUFFER):
                pass
    except Damaged as damage:
        return damage
    except OSError:
        pass  # the drive's: what was found stands
    return None


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Any failure to read in the block is a DataError that names the file."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot read: {error.strerror or error}") from error
