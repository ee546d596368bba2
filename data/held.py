"""A file that is read, a piece at a time, for as long as a program runs, and has to stay what it was.

It is read by position and not through a memory map: where a file is cut off under a map, the kernel ends the process
without a word, or gives it zeros up to the end of a page. Here it is an error with the name of the file.

Size and time tell what is written to it. A write whose time was set back leaves another trace, the time of its last
change (ctime). A file also gets that when it is renamed, linked, deleted or given other rights, and all of these are
allowed. So after such a change, whoever knows how to tell the content (`set_content_check`) is asked once.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from data.storage import DataError

MAX_READ_BYTES = 1 << 30
"""Bytes; the kernel gives no more than two gigabytes."""


@final
class StableFile:
    def __init__(self, path: str, remedy: str | None = None) -> None:
        """OSError where it cannot be opened. `remedy`: what to do about one that has changed, if it is no corpus."""
        self._path, self._remedy = path, remedy
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # a file that is renamed or deleted can be read on
        weakref.finalize(self, os.close, self._file)
        status = os.fstat(self._file)
        self.size = status.st_size
        self._mtime_ns, self._ctime_ns = status.st_mtime_ns, status.st_ctime_ns
        self._content_is_unchanged: Callable[[], bool] | None = None

    def set_content_check(self, content_is_unchanged: Callable[[], bool]) -> None:
        """How to find out whether the content is what it was, which may take a while; it reads with `read`."""
        self._content_is_unchanged = content_is_unchanged

    def is_still_at_path(self) -> bool:
        """Whether its name still leads to it."""
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._file))
        except OSError:
            return False

    def read(self, offset: int, count: int, dtype: np.dtype[Any] | str) -> NDArray[Any]:
        """`count` numbers from byte `offset` on."""
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
        if status.st_mtime_ns != self._mtime_ns or left or not self._is_unchanged_since(status.st_ctime_ns):
            raise DataError(f"{self._path}: was written to while it was read; "
                            f"{self._remedy or 'give each corpus a name of its own'}")
        return found

    def _is_unchanged_since(self, ctime_ns: int) -> bool:
        """Whether the content is what it was, for all that the time of the last change says."""
        if ctime_ns == self._ctime_ns or self._content_is_unchanged is None:
            return True
        before, self._ctime_ns = self._ctime_ns, ctime_ns  # for the reads that find out
        if not self._content_is_unchanged():
            self._ctime_ns = before  # another read finds the same
            return False
        return True
