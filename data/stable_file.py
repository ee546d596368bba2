"""Files read by position that must not change while open: `StableFile`, and `RowFile`, rows of integers with checksums.

Nothing is memory-mapped: a mapped file that is truncated kills the process. A change of size or mtime is a DataError;
after a change of ctime alone the owner's content check decides. A `RowFile` is a sequence of 4 KiB pages, each ending
with a CRC-32 seeded with the file's content name and the page number; page 0 is the header.
"""

from __future__ import annotations

import math
import os
import struct
import weakref
from collections.abc import Callable
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from data.storage import DataError, crc32, staged_file

MAX_READ_BYTES = 1 << 30
"""Bytes per read call; the kernel's limit is 2 GiB."""

PAGE_BYTES = 4096
PAGE_CONTENT_BYTES = PAGE_BYTES - 4
"""Bytes of a page before its checksum."""
PAGES_PER_WRITE = 512
ROW_FILE_VERSION = 1
ROW_FILE_MAGIC = b"\x89rows\r\n\x1a"
ROW_FILE_HEADER = struct.Struct("<8sI4sQI")
"""Magic, version, dtype, rows, columns (0: rows are scalars)."""
ROW_FILE_TYPES = (b"<i4\0", b"<i8\0")
REBUILD_HINT = "delete it, and it is built again"


@final
class StableFile:
    def __init__(self, path: str, remedy: str | None = None) -> None:
        """Raises OSError if it cannot be opened. `remedy` replaces the advice for a changed corpus."""
        self._path, self._remedy = path, remedy
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # stays readable after rename or deletion
        weakref.finalize(self, os.close, self._file)
        status = os.fstat(self._file)
        self.size = status.st_size
        self._mtime_ns, self._ctime_ns = status.st_mtime_ns, status.st_ctime_ns
        self._content_is_unchanged: Callable[[], bool] | None = None

    def set_content_check(self, content_is_unchanged: Callable[[], bool]) -> None:
        """Set the check, which may be slow, that decides after a ctime change whether the content is unchanged."""
        self._content_is_unchanged = content_is_unchanged

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
        was_written_to = bool(left) or status.st_mtime_ns != self._mtime_ns
        if not was_written_to and status.st_ctime_ns != self._ctime_ns and self._content_is_unchanged is not None:
            before, self._ctime_ns = self._ctime_ns, status.st_ctime_ns  # for reads of the check itself
            if was_written_to := not self._content_is_unchanged():
                self._ctime_ns = before  # so that the next read checks again
        if was_written_to:
            raise DataError(f"{self._path}: was written to while it was read; "
                            f"{self._remedy or 'give each corpus a name of its own'}")
        return found


def write_row_file(path: str | os.PathLike[str], name: str, values: NDArray[np.integer]) -> None:
    """Write [rows] or [rows, columns] atomically. `name` identifies the content and seeds the checksums."""
    dtype, columns = values.dtype.newbyteorder("<"), values.shape[1] if values.ndim > 1 else 0
    rows_per_page = _rows_per_page(dtype, columns)
    flat, width = np.ascontiguousarray(values).reshape(-1), rows_per_page * max(1, columns)
    pages = np.zeros((PAGES_PER_WRITE, PAGE_BYTES), np.uint8)  # reused: fresh memory costs more than the rest
    cells = pages[:, :width * dtype.itemsize].view(dtype)
    with staged_file(path) as file:
        header = ROW_FILE_HEADER.pack(ROW_FILE_MAGIC, ROW_FILE_VERSION, dtype.str.encode(), len(values), columns)
        pages[0, :len(header)] = np.frombuffer(header, np.uint8)
        file.write(_with_checksums(pages[:1], name, 0))
        pages[0] = 0
        for at in range(0, len(flat), PAGES_PER_WRITE * width):
            batch = flat[at:at + PAGES_PER_WRITE * width]
            whole, rest = divmod(len(batch), width)
            cells[:whole] = batch[:whole * width].reshape(whole, width)
            if rest:
                cells[whole, :rest], cells[whole, rest:] = batch[whole * width:], 0
            file.write(_with_checksums(pages[:whole + (rest > 0)], name, 1 + at // width))


def _rows_per_page(dtype: np.dtype[Any], columns: int) -> int:
    return PAGE_CONTENT_BYTES // (dtype.itemsize * max(1, columns))


def _with_checksums(pages: NDArray[np.uint8], name: str, first: int) -> memoryview:
    """The bytes of [pages, PAGE_BYTES] after filling in the checksums; `first` is the number of the first page."""
    content = pages.data.cast("B")
    sums = [crc32(content[at:at + PAGE_CONTENT_BYTES], crc32(f"{name} {first + at // PAGE_BYTES}".encode()))
            for at in range(0, len(content), PAGE_BYTES)]
    pages[:, PAGE_CONTENT_BYTES:] = np.array(sums, "<u4")[:, None].view(np.uint8)
    return content


@final
class RowFile:
    """Reads what `write_row_file` wrote under the same name: `rows[k]` is as in the array, or raises DataError."""

    def __init__(self, path: str | os.PathLike[str], name: str) -> None:
        self._path, self._name = os.fspath(path), name
        try:
            self._file = StableFile(self._path, REBUILD_HINT)
        except OSError as error:
            raise DataError(f"{self._path}: cannot read: {error.strerror or error}") from error
        if self._file.size < PAGE_BYTES:
            raise DataError(
                f"{self._path}: damaged: expected {PAGE_BYTES} bytes or more, found {self._file.size}; {REBUILD_HINT}")
        magic, version, kind, rows, columns = ROW_FILE_HEADER.unpack_from(self._read_page(0).tobytes())
        if magic != ROW_FILE_MAGIC or version != ROW_FILE_VERSION or kind not in ROW_FILE_TYPES:
            raise DataError(
                f"{self._path}: expected rows of version {ROW_FILE_VERSION}, found version {version}; {REBUILD_HINT}")
        self.shape: tuple[int, ...] = (rows, columns) if columns else (rows,)
        self._dtype = np.dtype(kind[:3].decode())
        self._page_rows = _rows_per_page(self._dtype, columns)
        expected = PAGE_BYTES * (1 + -(-rows // self._page_rows))
        if self._file.size != expected:
            raise DataError(
                f"{self._path}: damaged: expected {expected} bytes, found {self._file.size}; {REBUILD_HINT}")
        self._cached_page: tuple[int, NDArray[Any]] = 0, np.empty(0, self._dtype)

    def __reduce__(self) -> tuple[type[RowFile], tuple[str, str]]:
        return RowFile, (self._path, self._name)  # another process opens the file itself

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, row: int) -> Any:
        """A scalar, or [columns]."""
        if not 0 <= row < self.shape[0]:
            raise IndexError(f"row {row}: expected 0 to {self.shape[0] - 1}")
        number, within = row // self._page_rows + 1, row % self._page_rows
        cached, rows = self._cached_page  # read and replaced as one tuple, for thread safety
        if cached != number:
            used = self._page_rows * self._dtype.itemsize * math.prod(self.shape[1:])
            rows = self._read_page(number)[:used].view(self._dtype).reshape(self._page_rows, *self.shape[1:])
            self._cached_page = number, rows
        return rows[within]

    def _read_page(self, number: int) -> NDArray[np.uint8]:
        """A page, after checking its checksum."""
        page: NDArray[np.uint8] = self._file.read(PAGE_BYTES * number, PAGE_BYTES, "u1")
        found = crc32(page[:PAGE_CONTENT_BYTES], crc32(f"{self._name} {number}".encode()))
        expected = int(page[PAGE_CONTENT_BYTES:].view("<u4")[0])
        if found != expected:
            raise DataError(
                f"{self._path}: damaged, or made from something else: page {number} (byte {PAGE_BYTES * number}) "
                f"has the checksum {found:08x}, expected {expected:08x}; {REBUILD_HINT}")
        return page
