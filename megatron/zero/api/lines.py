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
from megatron.zero.api.curves import storing

BLOCK = 1 << 16


class Lines:
    """Lines, each whole or absent, that are in the file when `append` returns and on the disk when it is closed.

    `flag` is where its name comes from, and `say` is told of another writer of it. What has been left of a last line
    stays, as a line of its own; with `drops_half` it is taken away, where readers would take half a number for one.
    Until the first line is appended the file stays as it is."""

    def __init__(self, flag: str, path: str, say: Callable[[str], object], *, head: str = "",
                 drops_half: bool = False) -> None:
        self._flag, self._path, self._head, self._drops_half = flag, path, head, drops_half
        self._is_mended = False
        self._file = self._open()
        self._is_ours = not _is_held(self._file)
        if not self._is_ours:  # no error: a resumed run need not wait for its log
            say(f"warning: another process, or another part of this one, has {flag} {path} open to write into it: "
                "lines of two runs cannot be told apart; stop it, or start this run with another place")

    def _open(self) -> FileIO:
        try:
            file = open(self._path, "ab", buffering=0)
        except OSError as error:
            raise StorageError(f"{self._flag} {self._path} cannot be opened for appending: {error.strerror}; name a "
                               "file in a writable folder") from error
        finalize(self, _drop, file)  # of an engine that nobody closed
        return file

    def append(self, lines: str) -> None:
        """With their ends; behind `head` in a file that is empty."""
        with storing(self._flag, self._path):
            self._follow_name()
            begin = b"" if self._is_mended else self._mend()
            size = os.fstat(self._file.fileno()).st_size
            left = memoryview(begin + ("" if size else self._head).encode() + lines.encode())
            try:
                while left:
                    left = left[self._file.write(left):]
            except OSError:
                if self._is_ours:  # or else what another process has appended since would go as well
                    with suppress(OSError):  # a pipe
                        os.ftruncate(self._file.fileno(), size)
                self._is_mended = self._is_ours and self._is_mended
                raise
            self._is_mended = True

    def _follow_name(self) -> None:
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
        self._is_mended = False
        _drop(former)
        self._is_ours = not _is_held(self._file)

    def _mend(self) -> bytes:
        """What comes before the first line."""
        if not os.path.isfile(self._path):
            return b""
        with open(self._path, "rb") as file:
            end = file.seek(0, os.SEEK_END)
            whole = _end_of_whole_lines(file)
            file.seek(0)
            is_foreign = whole == 0 and not self._head.encode().startswith(file.read(BLOCK))  # lines that end otherwise
        if whole == end:
            return b""
        if is_foreign or not self._drops_half or not self._is_ours:
            return b"\n"
        os.ftruncate(self._file.fileno(), whole)
        return b""

    def leave(self) -> None:
        """Close it, and let the system bring the lines to the disk."""
        with storing(self._flag, self._path):
            with suppress(OSError):  # a forked process may have it, too, and keep the lock
                fcntl.flock(self._file, fcntl.LOCK_UN)
            self._file.close()

    def close(self) -> None:
        if self._file.closed:
            return
        with storing(self._flag, self._path):
            try:
                os.fsync(self._file.fileno())
            except OSError as error:
                if error.errno != errno.EINVAL:  # a pipe, a device
                    raise
            finally:
                self.leave()


def _drop(file: FileIO) -> None:
    with suppress(OSError):
        file.close()


def csv_line(values: Iterable[Any]) -> str:
    """A row of a table, with its end."""
    text = io.StringIO()
    csv.writer(text).writerow(values)
    return text.getvalue()


def _is_held(file: FileIO) -> bool:
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


def _end_of_whole_lines(file: BinaryIO) -> int:
    end = file.seek(0, os.SEEK_END)
    while end:
        begin = file.seek(max(0, end - BLOCK))
        if (found := file.read(end - begin).rfind(b"\n")) >= 0:
            return begin + found + 1
        end = begin
    return 0
