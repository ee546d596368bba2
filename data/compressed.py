"""Read files through their compression, given by the name: `.gz`, `.xz`, `.zst`.

A compressed file is a sequence of streams (gzip members, zstd frames). Everything before damage is returned to the last
byte. Then reads raise `CorruptStreamError` or, of a file opened with `until_damage`, see the end of the file, and
`file.damage` is the error. Checksums come last in a stream: if one does not match, data returned before may be wrong,
and it is unknown which.
"""

from __future__ import annotations

import importlib
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, cast

from data.storage import DataError, open_binary

COMPRESSED_SUFFIXES = (".gz", ".xz", ".zst")

INPUT_BYTES = 1 << 16  # bytes of a file that are decompressed at a time
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

    def __getattr__(self, name: str) -> Any:  # eof, unused_data
        return getattr(self._inflate, name)

    def decompress(self, data: bytes, max_length: int = 0, /) -> bytes:
        found = self._inflate.decompress(self._inflate.unconsumed_tail + data, max_length)
        self.needs_input = len(found) < max_length and not self._inflate.unconsumed_tail
        return found


def _decompressed_blocks(file: io.RawIOBase, new_decompressor: Callable[[], Any], padding_unit: int
                         ) -> Iterator[bytes]:
    """The content of all streams of a file in blocks; after the last block before damage `CorruptStreamError`. Zero
    padding between and after streams: any number of bytes for gzip, multiples of 4 for xz, none for zstd.

    The call of a decompressor that fails discards what it had found. So a new one gets the stream again, the block at
    fault byte by byte, and only output of its last byte can be lost."""
    data = b""  # read, and not passed to a decompressor yet
    block_start = position = 0  # of the last block that was read, and its end
    found = found_earlier = 0  # bytes decompressed from this stream, and from those before

    def corrupt_at(offset: int, why: object) -> CorruptStreamError:
        return CorruptStreamError(f"the compressed data is damaged at byte {offset} (after {found_earlier + found} "
                                  f"bytes of what is in it): {why}")

    def next_block(size: int = INPUT_BYTES) -> bytes:
        nonlocal block_start, position
        block = file.read(size) or b""
        block_start, position = position, position + len(block)
        return block

    while True:
        decompressor, stream_start = new_decompressor(), position - len(data)
        block_at_fault, known = None, 0  # start of the block; bytes of this stream returned before the fault
        while not decompressor.eof:
            if not data and decompressor.needs_input:
                data = next_block(INPUT_BYTES if block_at_fault is None else
                                  min(INPUT_BYTES, max(1, block_at_fault - position)))
                if not data:
                    raise corrupt_at(position, "it ends too early")
            most = OUTPUT_BYTES if block_at_fault is None else max(1, min(OUTPUT_BYTES, known - found))
            try:
                part = decompressor.decompress(data, most)
            except DECOMPRESSION_ERRORS as error:
                if block_at_fault is not None:
                    raise corrupt_at(position, error) from None
                if not file.seekable():  # a pipe cannot be read again
                    raise corrupt_at(position - len(data), error) from None
                decompressor, block_at_fault, known, found, data = new_decompressor(), block_start, found, 0, b""
                position = file.seek(stream_start)
                continue
            data = b""
            if fresh := part[max(0, known - found):]:
                yield fresh
            found += len(part)
        data = decompressor.unused_data
        end = position - len(data)
        if padding_unit:
            data = data.lstrip(b"\0")
        while not data and (block := next_block()):
            data = block.lstrip(b"\0") if padding_unit else block
        zeros = position - len(data) - end
        if padding_unit and zeros % padding_unit:
            raise corrupt_at(end, f"{zeros} zero bytes after a stream, expected a multiple of {padding_unit}")
        if not data:
            return
        found_earlier, found = found_earlier + found, 0


# Suffix -> new decompressor, unit of zero padding.
DECOMPRESSORS: dict[str, tuple[Any, int]] = {
    ".gz": (_GzipDecompressor, 1), ".xz": (partial(lzma.LZMADecompressor, lzma.FORMAT_XZ), 4),
    ".zst": (ZSTD and ZSTD.ZstdDecompressor, 0)}


class _DecompressedBlocks(io.RawIOBase):
    """The blocks of `_decompressed_blocks` as a file."""

    def __init__(self, blocks: Iterator[bytes], until_damage: bool) -> None:
        self._blocks, self._until_damage = blocks, until_damage
        self._rest, self._position = memoryview(b""), 0
        self.damage: CorruptStreamError | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            if not self._rest:
                self._rest = memoryview(next(self._blocks, b""))
        except CorruptStreamError as damage:
            self.damage = damage
        if self.damage is not None and not self._until_damage:
            raise self.damage
        count = min(len(buffer), len(self._rest))
        buffer[:count], self._rest = self._rest[:count], self._rest[count:]
        self._position += count
        return count

    def tell(self) -> int:
        return self._position


class DecompressedFile(io.BufferedReader):
    """What `open_decompressed` gives."""

    @property
    def damage(self) -> CorruptStreamError | None:
        """Why the file ended early, once a read has met its end."""
        return getattr(self.raw, "damage", None)


@contextmanager
def open_decompressed(path: str, *, until_damage: bool = False) -> Iterator[DecompressedFile]:
    """Open a file, decompressed according to its name. `until_damage`: damage is its end, and not an error."""
    with open_binary(path) as file:
        readable = cast(io.RawIOBase, file)
        if is_compressed(path):
            new_decompressor, padding_unit = DECOMPRESSORS[path[path.rindex("."):].lower()]
            if new_decompressor is None:
                raise DataError(f"{path}: reading .zst needs a package: pip install backports.zstd")
            readable = _DecompressedBlocks(_decompressed_blocks(file, new_decompressor, padding_unit), until_damage)
        with DecompressedFile(readable, OUTPUT_BYTES) as buffered:
            yield buffered


@contextmanager
def read_errors_for(path: str) -> Iterator[None]:
    """Turn an OSError in the block into a DataError that names the file."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot read: {error.strerror or error}") from error
