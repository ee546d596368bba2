"""Read files through their compression, given by the name: `.gz`, `.xz`, `.zst`.

A compressed file is a sequence of streams (gzip members, zstd frames). Everything before damage is returned to the last
byte; the next read raises `CorruptStreamError`. So `readline` returns every complete line before it raises, and
`read_until_damage` everything; `read(n)` of a buffer discards its content when it raises. Checksums come last in a
stream: if one does not match, data returned before may be wrong, and it is unknown which.
"""

from __future__ import annotations

import importlib
import io
import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, BinaryIO, cast

from data.storage import DataError

COMPRESSED_SUFFIXES = (".gz", ".xz", ".zst")

INPUT_BYTES = 1 << 16
"""Bytes of a file that are decompressed at a time."""
OUTPUT_BYTES = 1 << 18


ZSTD: Any = None
with suppress(ImportError):
    ZSTD = importlib.import_module("backports.zstd")
with suppress(ImportError):
    ZSTD = importlib.import_module("compression.zstd")  # Python 3.14
DECOMPRESSION_ERRORS: tuple[type[Exception], ...] = (zlib.error, lzma.LZMAError, *((ZSTD.ZstdError,) if ZSTD else ()))


class CorruptStreamError(OSError):
    """A compressed file is damaged. The message gives the position in the file and in its content, and the reason."""


def is_compressed(path: str) -> bool:
    return path.lower().endswith(COMPRESSED_SUFFIXES)


def strip_compression_suffix(name: str) -> str:
    """The name in lower case, without a compression suffix."""
    name = name.lower()
    return name[:name.rindex(".")] if name.endswith(COMPRESSED_SUFFIXES) else name


class _GzipDecompressor:
    """`zlib` with the interface of `lzma` and `zstd`: it keeps unconsumed input for the next call."""

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


class _MultiStreamReader(io.RawIOBase):
    """Decompresses all streams of a file. Zero padding between and after them: any number of bytes for gzip, multiples
    of 4 for xz, none for zstd."""

    def __init__(self, file: io.RawIOBase, new_decompressor: Callable[[], _GzipDecompressor | lzma.LZMADecompressor],
                 padding_unit: int) -> None:
        self._file, self._new_decompressor, self._padding_unit = file, new_decompressor, padding_unit
        self._decompressor = new_decompressor()
        self._stream_start = 0
        """Offset of the current stream in the file."""
        self._block_start = self._block_end = 0
        """Offsets of the last block read from the file."""
        self._unread_input = b""
        """The rest of that block, not passed to the decompressor yet."""
        self._earlier_output_bytes = self._output_bytes = 0
        """Bytes decompressed from earlier streams, and from the current one."""
        self._is_at_end = False
        self._salvaged = b""
        self._corruption: CorruptStreamError | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        data = self._next_output(min(len(view), OUTPUT_BYTES)) if self._corruption is None else b""
        if self._corruption is not None:
            data, self._salvaged = self._salvaged[:len(view)], self._salvaged[len(view):]
            if not data:
                raise self._corruption
        view[:len(data)] = data
        return len(data)

    def _next_output(self, most: int) -> bytes:
        """At least one byte; b"" at the end or at damage."""
        while not self._is_at_end and (not self._decompressor.eof or self._next_stream()):
            if self._decompressor.needs_input and not self._unread_input and not self._read_block():
                self._corruption = self._corrupt_at(self._block_end, self._output_bytes, "it ends too early")
                return b""
            try:
                data = self._decompressor.decompress(self._unread_input, most)
            except DECOMPRESSION_ERRORS as error:
                self._salvage(error)
                return b""
            self._unread_input = b""
            self._output_bytes += len(data)
            if data:
                return data
        return b""

    def _read_block(self) -> bool:
        self._unread_input = self._file.read(INPUT_BYTES) or b""
        self._block_start, self._block_end = self._block_end, self._block_end + len(self._unread_input)
        return bool(self._unread_input)

    def _next_stream(self) -> bool:
        """Start the next stream; False if there is none."""
        self._unread_input = self._decompressor.unused_data
        end, zeros = self._block_end - len(self._unread_input), 0
        while self._unread_input or self._read_block():
            rest = self._unread_input.lstrip(b"\0") if self._padding_unit else self._unread_input
            zeros += len(self._unread_input) - len(rest)
            self._unread_input = rest
            if rest:
                break
        if self._padding_unit and zeros % self._padding_unit:
            self._corruption = self._corrupt_at(end, self._output_bytes, f"{zeros} zero bytes after a stream, expected "
                                                f"a multiple of {self._padding_unit}")
            return False
        self._is_at_end = not self._unread_input
        if self._unread_input:
            self._earlier_output_bytes += self._output_bytes
            self._output_bytes, self._stream_start = 0, self._block_end - len(self._unread_input)
            self._decompressor = self._new_decompressor()
        return bool(self._unread_input)

    def _corrupt_at(self, offset: int, given: int, why: str) -> CorruptStreamError:
        return CorruptStreamError(f"the compressed data is damaged at byte {offset} (after "
                                  f"{self._earlier_output_bytes + given} bytes of what is in it): {why}")

    def _salvage(self, error: Exception) -> None:
        """Recover the output of the failed call: a new decompressor gets the stream again, the last block byte by byte,
        so that only output of its last byte can be lost."""
        place, found = self._block_end - len(self._unread_input), 0
        if self._file.seekable():  # a pipe cannot be read again
            again, salvaged = self._new_decompressor(), bytearray()
            self._file.seek(self._stream_start)
            place = self._stream_start
            try:
                while not again.eof and (data := self._file.read(min(INPUT_BYTES, max(1, self._block_start - place)))):
                    place += len(data)
                    while data or not (again.needs_input or again.eof):
                        part, data = again.decompress(data, max(1, min(OUTPUT_BYTES, self._output_bytes - found))), b""
                        salvaged += part[max(0, self._output_bytes - found):]
                        found += len(part)
            except DECOMPRESSION_ERRORS as refusal:
                error = refusal
            self._salvaged = bytes(salvaged)
        self._corruption = self._corrupt_at(place, max(found, self._output_bytes), str(error))

    def close(self) -> None:
        self._file.close()
        super().close()


@contextmanager
def open_decompressed(path: str) -> Iterator[io.BufferedReader]:
    """Open a file, decompressed according to its name."""
    file: io.RawIOBase = open(path, "rb", buffering=0)
    with file:
        name = path.lower()
        if name.endswith(".gz"):
            file = _MultiStreamReader(file, _GzipDecompressor, 1)
        elif name.endswith(".xz"):
            file = _MultiStreamReader(file, partial(lzma.LZMADecompressor, lzma.FORMAT_XZ), 4)
        elif name.endswith(".zst"):
            if ZSTD is None:
                raise DataError(f"{path}: reading .zst needs a package: pip install backports.zstd")
            file = _MultiStreamReader(file, ZSTD.ZstdDecompressor, 0)
        with io.BufferedReader(cast(Any, file), OUTPUT_BYTES) as buffered:
            yield buffered


def read_until_damage(file: io.BufferedReader, size: int) -> tuple[bytes, CorruptStreamError | None]:
    """`file.read(size)` of an opened file, and the damage if it ended the read early."""
    parts: list[bytes] = []
    try:
        while size > 0 and (part := file.read1(size)):
            parts.append(part)
            size -= len(part)
    except CorruptStreamError as damage:
        return b"".join(parts), damage
    return b"".join(parts), None


def readline_until_damage(file: io.BufferedReader, size: int) -> tuple[bytes, CorruptStreamError | None]:
    """`file.readline(size)` in the same way."""
    parts, last = [], b""
    try:
        while size > 0 and not last.endswith(b"\n") and (ahead := file.peek(1)[:size]):
            last = file.read(ahead.find(b"\n") + 1 or len(ahead))
            parts.append(last)
            size -= len(last)
    except CorruptStreamError as damage:
        return b"".join(parts), damage
    return b"".join(parts), None


def skip_line(file: BinaryIO, size: int = 1 << 20) -> int:
    """Read to the end of the line, `size` bytes at a time; returns the number of bytes."""
    skipped = 0
    while part := file.readline(size):
        skipped += len(part)
        if part.endswith(b"\n"):
            break
    return skipped


def find_damage(path: str) -> CorruptStreamError | None:
    """The damage of a compressed file, for a caller that found invalid content: checksums come last, so the damage may
    not have shown yet. Reads the whole file. None: no damage, or unknown."""
    if not is_compressed(path) or not os.path.isfile(path):  # a pipe cannot be read again
        return None
    try:
        with open_decompressed(path) as file:
            while file.read1(OUTPUT_BYTES):
                pass
    except CorruptStreamError as damage:
        return damage
    except OSError:
        pass  # an I/O error: report what was found before
    return None


@contextmanager
def read_errors_for(path: str) -> Iterator[None]:
    """Turn an OSError in the block into a DataError that names the file."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot read: {error.strerror or error}") from error
