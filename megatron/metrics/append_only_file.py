"""Appends whole lines to a text file, and repairs what a kill, a power cut or a full disk left of the last one.

Errors name the flag or key that names the file.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from weakref import finalize

from data.storage import LockResult, try_lock, unlock
from megatron.errors import StorageError, explain_os_error

TAIL_BYTES = 1 << 20
"""Where the end of the last whole line is looked for."""


@contextmanager
def storage_errors(flag: str, path: str) -> Iterator[None]:
    """Convert an OSError to a StorageError that names the flag and the path. ENOMEM is not a storage error and passes
    through."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise
        why, remedy = explain_os_error(error, Path(path).absolute().parent)
        raise StorageError(f"{flag} {path} cannot be written: {why}; {remedy}, or name another place, and start the "
                           "same command again") from error


class AppendOnlyFile:
    """Appends lines, each complete or absent: in the file when `append` returns, on disk after `close`.

    `flag` is the setting that names the file; `warn` is called if another process writes to it. A partial last line of
    a killed run is completed as a line, or removed with `drops_partial_line`, where readers would take half a number
    for one. The file is unchanged until the first `append`.
    """

    def __init__(self, flag: str, path: str, warn: Callable[[str], object], *, header: str = "",
                 drops_partial_line: bool = False) -> None:
        self._flag, self._path, self._header, self._drops_partial_line = flag, path, header, drops_partial_line
        self._is_repaired = False
        try:
            self._file = open(path, "ab", buffering=0)
        except OSError as error:
            raise StorageError(f"{flag} {path} cannot be opened for appending: {error.strerror}; name a file in a "
                               "writable folder") from error
        finalize(self, _close_quietly, self._file)  # for engines that are never closed
        self._holds_lock = not _is_locked_by_other(self._file)
        if not self._holds_lock:  # only a warning: logging must not stop a resumed run
            warn(f"warning: another process, or another part of this one, has {flag} {path} open to write into it: "
                 "lines of two runs cannot be told apart; stop it, or start this run with another place")

    def append(self, lines: str) -> None:
        """Append lines, with their line ends; the header first if the file is empty."""
        with storage_errors(self._flag, self._path):
            begin = b"" if self._is_repaired else self._repair()
            size = os.fstat(self._file.fileno()).st_size
            left = memoryview(begin + ("" if size else self._header).encode() + lines.encode())
            try:
                while left:
                    left = left[self._file.write(left):]
            except OSError:
                if self._holds_lock:  # else truncating would drop another process's lines
                    with suppress(OSError):  # a pipe
                        os.ftruncate(self._file.fileno(), size)
                raise
            self._is_repaired = True

    def _repair(self) -> bytes:
        """Bytes to write before the first line; may truncate a partial last line."""
        if not os.path.isfile(self._path):
            return b""
        with open(self._path, "rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES)
            file.seek(start)
            tail = file.read()
        full_lines_end = tail.rfind(b"\n") + 1
        if full_lines_end == len(tail):
            return b""
        is_foreign = full_lines_end == 0 and (start > 0 or not self._header.encode().startswith(tail))
        if is_foreign or not self._drops_partial_line or not self._holds_lock:
            return b"\n"
        os.ftruncate(self._file.fileno(), start + full_lines_end)
        return b""

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
                unlock(self._file)  # a forked process may keep the descriptor, and so the lock
                self._file.close()


def _close_quietly(file: FileIO) -> None:
    with suppress(OSError):
        file.close()


def _is_locked_by_other(file: FileIO) -> bool:
    """False after taking the kernel's lock without blocking; it is held until the file is closed or the process ends.
    On file systems without locks, or with locks local to a machine, other writers are not detected."""
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return False
    return try_lock(file) is LockResult.HELD_BY_OTHER
