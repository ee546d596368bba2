"""Files read by position that must not change while open: `StableFile`, and `RowFile`, checksummed rows of integers.

Nothing is memory-mapped: a mapped file that is truncated kills the process. A change of size or mtime is a DataError.
"""

from __future__ import annotations

import os
import struct
import weakref
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from data.storage import READ_BYTES, DataError, crc32, staged_file

MAX_READ_BYTES = 1 << 30
"""Bytes per read call; the kernel's limit is 2 GiB."""

ROW_FILE_VERSION = 2
ROW_FILE_MAGIC = b"\x89rows\r\n\x1a"
ROW_FILE_HEADER = struct.Struct("<8sI4sQII")
"""Magic, version, dtype, rows, columns (0: rows are scalars), CRC-32 of the content name, the shape and the rows."""
REBUILD_HINT = "delete it, and it is built again"


@final
class StableFile:
    def __init__(self, path: str, remedy: str | None = None) -> None:
        """Raises OSError if it cannot be opened. `remedy` replaces the advice for a changed corpus."""
        self._path, self._remedy = path, remedy
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # stays readable after rename or deletion
        weakref.finalize(self, os.close, self._file)
        status = os.fstat(self._file)
        self.size, self._mtime_ns = status.st_size, status.st_mtime_ns

    def is_still_at_path(self) -> bool:
        """Whether its path still names this file."""
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._file))
        except OSError:
            return False

    def read(self, offset: int, count: int, dtype: np.dtype[Any] | str) -> NDArray[Any]:
        """`count` values from byte `offset` on; DataError if the file has changed."""
        found = np.empty(count, dtype)
        left = found.data.cast("B") if count else memoryview(b"")
        try:
            while left:
                got = os.preadv(self._file, [left[:MAX_READ_BYTES]], offset)
                if not got:
                    break
                left, offset = left[got:], offset + got
            status = os.fstat(self._file)
        except OSError as error:
            raise DataError(f"{self._path}: cannot read: {error.strerror or error}") from error
        if status.st_size != self.size:
            raise DataError(f"{self._path}: size: {self.size} bytes when it was opened, {status.st_size} now; " + (
                            self._remedy or "put the whole file there again, under another name while a program reads "
                            "this one"))
        if left or status.st_mtime_ns != self._mtime_ns:
            raise DataError(f"{self._path}: was written to while it was read; "
                            f"{self._remedy or 'give each corpus a name of its own'}")
        return found

    def checksum(self, crc: int = 0, start: int = 0) -> int:
        """CRC-32 of the bytes from `start` on, continued from `crc`."""
        for at in range(start, self.size, READ_BYTES):
            crc = crc32(self.read(at, min(READ_BYTES, self.size - at), "u1").data, crc)
        return crc


def write_row_file(path: str | os.PathLike[str], name: str, values: NDArray[np.integer]) -> None:
    """Write [rows] or [rows, columns] atomically. `name` identifies the content."""
    rows = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
    kind, columns = rows.dtype.str.encode(), rows.shape[1] if rows.ndim > 1 else 0
    content = rows.reshape(-1).view(np.uint8).data
    crc = crc32(content, _row_file_seed(name, kind, len(rows), columns))
    with staged_file(path) as file:
        file.write(ROW_FILE_HEADER.pack(ROW_FILE_MAGIC, ROW_FILE_VERSION, kind, len(rows), columns, crc))
        file.write(content)


def _row_file_seed(name: str, kind: bytes, rows: int, columns: int) -> int:
    """Start of the checksum, so that another content name or shape does not fit the same rows."""
    return crc32(repr((name, kind, rows, columns)).encode())


@final
class RowFile:
    """Reads what `write_row_file` wrote under the same name. Opening it reads all rows once and checks their checksum;
    raises DataError."""

    def __init__(self, path: str | os.PathLike[str], name: str) -> None:
        self._path, self._name = os.fspath(path), name
        try:
            self._file = StableFile(self._path, REBUILD_HINT)
        except OSError as error:
            raise DataError(f"{self._path}: cannot read: {error.strerror or error}") from error
        header = self._file.read(0, min(ROW_FILE_HEADER.size, self._file.size), "u1").tobytes()
        magic, version, padded_kind, rows, columns, expected = ROW_FILE_HEADER.unpack(
            header.ljust(ROW_FILE_HEADER.size, b"\0"))
        kind = padded_kind.rstrip(b"\0")
        found = self._file.checksum(_row_file_seed(name, kind, rows, columns), ROW_FILE_HEADER.size)
        if (magic, version) != (ROW_FILE_MAGIC, ROW_FILE_VERSION) or found != expected:
            raise DataError(f"{self._path}: damaged, or made from something else: has the checksum {found:08x}, "
                            f"expected {expected:08x}; {REBUILD_HINT}")
        self.shape: tuple[int, ...] = (rows, columns) if columns else (rows,)
        self._dtype = np.dtype(kind.decode())

    def __reduce__(self) -> tuple[type[RowFile], tuple[str, str]]:
        return RowFile, (self._path, self._name)  # another process opens the file itself

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, row: int) -> Any:
        """A scalar, or [columns]."""
        if not 0 <= row < self.shape[0]:
            raise IndexError(f"row {row}: expected 0 to {self.shape[0] - 1}")
        columns = self.shape[1] if len(self.shape) > 1 else 1
        offset = ROW_FILE_HEADER.size + row * columns * self._dtype.itemsize
        values = self._file.read(offset, columns, self._dtype)
        return values if len(self.shape) > 1 else values[0]
