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


def _decompressed_blocks(file: io.RawIOBase, new_decompressor: Callable[[], _GzipDecompressor | lzma.LZMADecompressor],
                         padding_unit: int) -> Iterator[bytes]:
    """The content of all streams of a file in blocks; after the last block before damage `CorruptStreamError`. Zero
    padding between and after streams: any number of bytes for gzip, multiples of 4 for xz, none for zstd."""
    data = b""  # read, and not passed to a decompressor yet
    block_start = position = 0  # of the last block that was read, and its end
    found = found_earlier = 0  # bytes decompressed from this stream, and from those before

    def corrupt_at(offset: int, why: object) -> CorruptStreamError:
        return CorruptStreamError(f"the compressed data is damaged at byte {offset} (after {found_earlier + found} "
                                  f"bytes of what is in it): {why}")

    def next_block() -> bytes:
        nonlocal block_start, position
        block = file.read(INPUT_BYTES) or b""
        block_start, position = position, position + len(block)
        return block

    while True:
        decompressor, stream_start = new_decompressor(), position - len(data)
        while not decompressor.eof:
            if not data and decompressor.needs_input:
                data = next_block()
                if not data:
                    raise corrupt_at(position, "it ends too early")
            try:
                part = decompressor.decompress(data, OUTPUT_BYTES)
            except DECOMPRESSION_ERRORS as error:
                place, reason = position - len(data), error
                if file.seekable():  # a pipe cannot be read again
                    part, place, reason = _salvage(file, new_decompressor(), stream_start, block_start, found, error)
                    yield part
                    found += len(part)
                raise corrupt_at(place, reason) from None
            data = b""
            found += len(part)
            if part:
                yield part
        data = decompressor.unused_data
        end, zeros = position - len(data), 0
        while True:
            data = data or next_block()
            rest = data.lstrip(b"\0") if padding_unit else data
            zeros, is_end, data = zeros + len(data) - len(rest), not data, rest
            if data or is_end:
                break
        if padding_unit and zeros % padding_unit:
            raise corrupt_at(end, f"{zeros} zero bytes after a stream, expected a multiple of {padding_unit}")
        if not data:
            return
        found_earlier, found = found_earlier + found, 0


def _salvage(file: io.RawIOBase, decompressor: _GzipDecompressor | lzma.LZMADecompressor, stream_start: int,
             last_block: int, skip: int, error: Exception) -> tuple[bytes, int, Exception]:
    """(output of the call that raised `error`, position of the damage, its reason): a new decompressor gets the stream
    again, the last block byte by byte, so that only output of its last byte can be lost. The first `skip` bytes of the
    stream's content are known."""
    salvaged, found, place = bytearray(), 0, stream_start
    file.seek(stream_start)
    try:
        while not decompressor.eof and (data := file.read(min(INPUT_BYTES, max(1, last_block - place)))):
            place += len(data)
            while data or not (decompressor.needs_input or decompressor.eof):
                part, data = decompressor.decompress(data, max(1, min(OUTPUT_BYTES, skip - found))), b""
                salvaged += part[max(0, skip - found):]
                found += len(part)
    except DECOMPRESSION_ERRORS as refusal:
        error = refusal
    return bytes(salvaged), place, error


class _DecompressedFile(io.RawIOBase):
    """A readable file of the blocks of `_decompressed_blocks`."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks
        self._rest = memoryview(b"")
        self._damage: CorruptStreamError | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            while not self._rest and self._damage is None and (block := next(self._blocks, None)) is not None:
                self._rest = memoryview(block)  # empty if nothing could be salvaged
        except CorruptStreamError as damage:
            self._damage = damage
        if not self._rest and self._damage is not None:
            raise self._damage
        view = memoryview(buffer).cast("B")
        data, self._rest = self._rest[:len(view)], self._rest[len(view):]
        view[:len(data)] = data
        return len(data)


@contextmanager
def open_decompressed(path: str) -> Iterator[io.BufferedReader]:
    """Open a file, decompressed according to its name."""
    with open(path, "rb", buffering=0) as file:
        name, readable = path.lower(), cast(io.RawIOBase, file)
        if name.endswith(".gz"):
            readable = _DecompressedFile(_decompressed_blocks(file, _GzipDecompressor, 1))
        elif name.endswith(".xz"):
            readable = _DecompressedFile(_decompressed_blocks(file, partial(lzma.LZMADecompressor, lzma.FORMAT_XZ), 4))
        elif name.endswith(".zst"):
            if ZSTD is None:
                raise DataError(f"{path}: reading .zst needs a package: pip install backports.zstd")
            readable = _DecompressedFile(_decompressed_blocks(file, ZSTD.ZstdDecompressor, 0))
        with io.BufferedReader(cast(Any, readable), OUTPUT_BYTES) as buffered:
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
    damage: CorruptStreamError | None = None
    more = b"more"
    with suppress(OSError), open_decompressed(path) as file:  # an I/O error: report what was found before
        while more and not damage:
            more, damage = read_until_damage(file, OUTPUT_BYTES)
    return damage


@contextmanager
def read_errors_for(path: str) -> Iterator[None]:
    """Turn an OSError in the block into a DataError that names the file."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot read: {error.strerror or error}") from error
