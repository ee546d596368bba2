"""A file to which whole lines are appended, whatever state a kill, a power cut or a full disk has left it in.

Not here: what the lines say (monitor.py; train/log.py and train/table.py).
"""

from __future__ import annotations

import csv
import errno
import fcntl
import io
import os
import stat
from collections.abc import Callable, Iterable
from contextlib import suppress
from io import FileIO
from typing import Any, BinaryIO
from weakref import finalize

from megatron.errors import StorageError
from megatron.zero.api.curves import storage_errors

READ_BLOCK_BYTES = 1 << 16


class AppendOnlyFile:
    """Lines, each whole or absent, that are in the file when `append` returns and on the disk when it is closed.

    `flag` is where its name comes from, and `say` is told of another writer of it. What has been left of a last line
    stays, as a line of its own; with `drops_half` it is taken away, where readers would take half a number for one.
    Until the first line is appended the file stays as it is."""

    def __init__(self, flag: str, path: str, warn: Callable[[str], object], *, header: str = "",
                 drops_partial_line: bool = False) -> None:
        self._flag, self._path, self._header, self._drops_partial_line = flag, path, header, drops_partial_line
        self._is_repaired = False
        self._file = self._open()
        self._holds_lock = not _is_locked_by_other(self._file)
        if not self._holds_lock:  # no error: a resumed run need not wait for its log
            warn(f"warning: another process, or another part of this one, has {flag} {path} open to write into it: "
                 "lines of two runs cannot be told apart; stop it, or start this run with another place")

    def _open(self) -> FileIO:
        try:
            file = open(self._path, "ab", buffering=0)
        except OSError as error:
            raise StorageError(f"{self._flag} {self._path} cannot be opened for appending: {error.strerror}; name a "
                               "file in a writable folder") from error
        finalize(self, _close_quietly, file)  # of an engine that nobody closed
        return file

    def append(self, lines: str) -> None:
        """With their ends; behind `head` in a file that is empty."""
        with storage_errors(self._flag, self._path):
            self._reopen_if_replaced()
            begin = b"" if self._is_repaired else self._repair()
            size = os.fstat(self._file.fileno()).st_size
            left = memoryview(begin + ("" if size else self._header).encode() + lines.encode())
            try:
                while left:
                    left = left[self._file.write(left):]
            except OSError:
                if self._holds_lock:  # or else what another process has appended since would go as well
                    with suppress(OSError):  # a pipe
                        os.ftruncate(self._file.fileno(), size)
                self._is_repaired = self._holds_lock and self._is_repaired
                raise
            self._is_repaired = True

    def _reopen_if_replaced(self) -> None:
        """A file that was deleted or moved away meanwhile begins again: what is written would go where nobody looks."""
        opened = os.fstat(self._file.fileno())
        if not stat.S_ISREG(opened.st_mode):
            return
        try:
            if os.path.samestat(opened, os.stat(self._path)):
                return
        except FileNotFoundError:
            with suppress(OSError):
                os.makedirs(os.path.dirname(os.path.abspath(self._path)), exist_ok=True)
        former, self._file = self._file, self._open()
        self._is_repaired = False
        _close_quietly(former)
        self._holds_lock = not _is_locked_by_other(self._file)

    def _repair(self) -> bytes:
        """What comes before the first line."""
        if not os.path.isfile(self._path):
            return b""
        with open(self._path, "rb") as file:
            end = file.seek(0, os.SEEK_END)
            full_lines_end = _end_of_last_full_line(file)
            file.seek(0)
            is_foreign = full_lines_end == 0 and not self._header.encode().startswith(
                file.read(READ_BLOCK_BYTES))  # lines that end otherwise
        if full_lines_end == end:
            return b""
        if is_foreign or not self._drops_partial_line or not self._holds_lock:
            return b"\n"
        os.ftruncate(self._file.fileno(), full_lines_end)
        return b""

    def close_without_sync(self) -> None:
        """Close it, and let the system bring the lines to the disk."""
        with storage_errors(self._flag, self._path):
            with suppress(OSError):  # a forked process may have it, too, and keep the lock
                fcntl.flock(self._file, fcntl.LOCK_UN)
            self._file.close()

    def close(self) -> None:
        if self._file.closed:
            return
        with storage_errors(self._flag, self._path):
            try:
                os.fsync(self._file.fileno())
            except OSError as error:
                if error.errno != errno.EINVAL:  # a pipe, a device
                    raise
            finally:
                self.close_without_sync()


def _close_quietly(file: FileIO) -> None:
    with suppress(OSError):
        file.close()


def format_csv_row(values: Iterable[Any]) -> str:
    """A row of a table, with its end."""
    text = io.StringIO()
    csv.writer(text).writerow(values)
    return text.getvalue()


def _is_locked_by_other(file: FileIO) -> bool:
    """If not, it is from now on, until it is closed or its process ends. The kernel's lock, which nobody waits for:
    where the file system has none, or keeps it from other machines, nobody is seen."""
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def _end_of_last_full_line(file: BinaryIO) -> int:
    end = file.seek(0, os.SEEK_END)
    while end:
        begin = file.seek(max(0, end - READ_BLOCK_BYTES))
        if (found := file.read(end - begin).rfind(b"\n")) >= 0:
            return begin + found + 1
        end = begin
    return 0
