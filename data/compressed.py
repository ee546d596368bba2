"""Reading a file through its compression, which its name says: `.gz`, `.xz`, `.zst`. Not what the file holds."""

from __future__ import annotations

import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, BinaryIO, cast

from data.storage import DataError

COMPRESSED = (".gz", ".xz", ".zst")

BLOCK = 1 << 16


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
DAMAGED: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error, lzma.LZMAError,
                                        *((ZSTD.ZstdError,) if ZSTD else ()))
"""What reading a compressed file that is truncated or damaged can raise."""


def is_compressed(path: str) -> bool:
    return path.lower().endswith(COMPRESSED)


def without_compression(name: str) -> str:
    """The name in lower case, without the suffix of its compression."""
    name = name.lower()
    return name[:name.rindex(".")] if name.endswith(COMPRESSED) else name


class _Xz(io.RawIOBase):
    """The streams of a file, with zeros between them in fours. Anything else after a stream is an error: `lzma.open`
    takes it for the end of the file, and so loses a second stream that is damaged, without a word."""

    def __init__(self, file: io.RawIOBase) -> None:
        self._file = file
        self._stream = lzma.LZMADecompressor()
        self._ahead = b""
        """What was read and not decompressed yet."""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        while not self._stream.eof or self._next_stream():
            if self._stream.needs_input:
                self._ahead = self._ahead or self._file.read(BLOCK) or b""
                if not self._ahead:
                    raise EOFError("Compressed file ended before the end-of-stream marker was reached")
            data = self._stream.decompress(self._ahead, len(view))
            self._ahead = b""
            if data:
                view[:len(data)] = data
                return len(data)
        return 0

    def _next_stream(self) -> bool:
        """Begin the one after the present one, if there is one."""
        rest, zeros = self._stream.unused_data or self._file.read(BLOCK) or b"", 0
        while rest:
            self._ahead = rest.lstrip(b"\0")
            zeros += len(rest) - len(self._ahead)
            if self._ahead:
                break
            rest = self._file.read(BLOCK) or b""
        if zeros % 4:
            raise lzma.LZMAError(f"{zeros} zero bytes after a stream, which must be a multiple of 4")
        if rest:
            self._stream = lzma.LZMADecompressor(lzma.FORMAT_XZ)
        return bool(rest)

    def close(self) -> None:
        self._file.close()
        super().close()


@contextmanager
def opened(path: str) -> Iterator[BinaryIO]:
    """The bytes of a file, decompressed by its name."""
    file: object
    name = path.lower()
    if name.endswith(".gz"):
        file = gzip.open(path)
    elif name.endswith(".xz"):
        file = _Xz(open(path, "rb", buffering=0))
    elif name.endswith(".zst"):
        if ZSTD is None:
            raise DataError(f"{path}: reading .zst needs a package: pip install backports.zstd")
        file = ZSTD.open(path)
    else:
        file = open(path, "rb", buffering=0)
    with io.BufferedReader(cast(io.RawIOBase, file), 1 << 18) as buffered:
        yield cast(BinaryIO, buffered)


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Any failure to read in the block is a DataError that names the file."""
    try:
        yield
    except DAMAGED as error:
        raise DataError(f"{path}: cannot read: {getattr(error, 'strerror', None) or error}") from error
