"""Reading a file through its compression, which its name says: `.gz`, `.xz`, `.zst`. Not what the file holds."""

from __future__ import annotations

import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import BinaryIO, cast

from data.storage import DataError

COMPRESSED = (".gz", ".xz", ".zst")


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


@contextmanager
def opened(path: str) -> Iterator[BinaryIO]:
    """The bytes of a file, decompressed by its name."""
    file: object
    name = path.lower()
    if name.endswith(".gz"):
        file = gzip.open(path)
    elif name.endswith(".xz"):
        file = lzma.open(path)
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
