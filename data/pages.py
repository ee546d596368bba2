"""Rows of integers in a file, read by their numbers while a program runs, each as it was written or not at all.

The file is a row of *pages* of 4 KiB. The last four bytes of a page are the CRC-32 of the others, begun with the name
that the file was made for and the number of the page. So a page from any other place, in this file or in another one
that was copied to its name, is refused as a page with a flipped bit is. Page 0 says what follows (version, type, rows,
columns); zeros fill up the last one. Nothing is mapped, and one page is all that is held.
"""

from __future__ import annotations

import os
import struct
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from data.held import HeldFile
from data.storage import DataError, crc32, staged_file

PAGE = 4096
"""As in the kernel's cache: a page of ours is one of its."""
ROOM = PAGE - 4
"""Bytes before the checksum."""
AT_A_TIME = 512
"""Pages that are written together."""
VERSION = 1
MAGIC = b"\x89rows\r\n\x1a"
HEADER = struct.Struct("<8sI4sQI")
"""Magic, version, type, rows, columns (0: the rows are numbers)."""
TYPES = (b"<i4\0", b"<i8\0")
REMEDY = "delete it, and it is made anew"


def write_rows(path: str | os.PathLike[str], name: str, values: NDArray[np.integer]) -> None:
    """[rows] or [rows, columns], whole or not at all. `name` says what they are and what they were made from."""
    dtype, columns = values.dtype.newbyteorder("<"), values.shape[1] if values.ndim > 1 else 0
    together = _rows_of_a_page(dtype, columns)
    flat, width = np.ascontiguousarray(values).reshape(-1), together * max(1, columns)
    pages = np.zeros((AT_A_TIME, PAGE), np.uint8)  # used again and again: new memory costs more than the rest
    cells = pages[:, :width * dtype.itemsize].view(dtype)
    with staged_file(path) as file:
        header = HEADER.pack(MAGIC, VERSION, dtype.str.encode(), len(values), columns)
        pages[0, :len(header)] = np.frombuffer(header, np.uint8)
        file.write(_sealed(pages[:1], name, 0))
        pages[0] = 0
        for at in range(0, len(flat), AT_A_TIME * width):
            batch = flat[at:at + AT_A_TIME * width]
            whole, rest = divmod(len(batch), width)
            cells[:whole] = batch[:whole * width].reshape(whole, width)
            if rest:
                cells[whole, :rest], cells[whole, rest:] = batch[whole * width:], 0
            file.write(_sealed(pages[:whole + (rest > 0)], name, 1 + at // width))


def _rows_of_a_page(dtype: np.dtype[Any], columns: int) -> int:
    return ROOM // (dtype.itemsize * max(1, columns))


def _sealed(pages: NDArray[np.uint8], name: str, first: int) -> memoryview:
    """The bytes of [pages, PAGE], which have their checksums now; `first` is the number of the first."""
    content = pages.data.cast("B")
    sums = [crc32(content[at:at + ROOM], _seed(name, first + at // PAGE)) for at in range(0, len(content), PAGE)]
    pages[:, ROOM:] = np.array(sums, "<u4")[:, None].view(np.uint8)
    return content


def _seed(name: str, number: int) -> int:
    return crc32(f"{name} {number}".encode())


@final
class PagedRows:
    """What `write_rows` wrote under the same name: `rows[k]` is as in the array. What is not is a DataError."""

    def __init__(self, path: str | os.PathLike[str], name: str) -> None:
        self._path, self._name = os.fspath(path), name
        try:
            self._file = HeldFile(self._path, REMEDY)
        except OSError as error:
            raise DataError(f"{self._path}: cannot read: {error.strerror or error}") from error
        if self._file.size < PAGE:
            raise DataError(f"{self._path}: damaged: expected {PAGE} bytes or more, found {self._file.size}; {REMEDY}")
        magic, version, kind, rows, columns = HEADER.unpack_from(self._page(0).tobytes())
        if magic != MAGIC or version != VERSION or kind not in TYPES:
            raise DataError(f"{self._path}: expected rows of version {VERSION}, found version {version}; {REMEDY}")
        self.shape: tuple[int, ...] = (rows, columns) if columns else (rows,)
        self._dtype = np.dtype(kind[:3].decode())
        self._together = _rows_of_a_page(self._dtype, columns)
        expected = PAGE * (1 + -(-rows // self._together))
        if self._file.size != expected:
            raise DataError(f"{self._path}: damaged: expected {expected} bytes, found {self._file.size}; {REMEDY}")
        self._last: tuple[int, NDArray[Any]] = 0, np.empty(0, self._dtype)

    def __reduce__(self) -> tuple[type[PagedRows], tuple[str, str]]:
        return PagedRows, (self._path, self._name)  # another process opens it for itself

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, row: int) -> Any:
        """A number, or [columns]."""
        if not 0 <= row < self.shape[0]:
            raise IndexError(f"row {row}: expected 0 to {self.shape[0] - 1}")
        number, within = row // self._together + 1, row % self._together
        held, rows = self._last  # taken and replaced in one step: several threads may read
        if held != number:
            _, rows = self._last = number, self._rows(number)
        return rows[within]

    def _rows(self, number: int) -> NDArray[Any]:
        used = self._together * self._dtype.itemsize * (self.shape[1] if len(self.shape) > 1 else 1)
        rows: NDArray[Any] = self._page(number)[:used].view(self._dtype).reshape(self._together, *self.shape[1:])
        return rows

    def _page(self, number: int) -> NDArray[np.uint8]:
        """As it was written."""
        page: NDArray[np.uint8] = self._file.read(PAGE * number, PAGE, "u1")
        found, expected = crc32(page[:ROOM], _seed(self._name, number)), int(page[ROOM:].view("<u4")[0])
        if found != expected:
            raise DataError(f"{self._path}: damaged, or made from something else: page {number} (byte {PAGE * number}) "
                            f"has the checksum {found:08x}, expected {expected:08x}; {REMEDY}")
        return page
