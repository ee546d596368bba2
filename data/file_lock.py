"""Advisory locks of the kernel (flock) on files and folders, the only ones of this program.

A lock ends with the process that holds it, so a killed holder blocks no other process. Some file systems have no locks
(`LockResult.UNSUPPORTED`): each caller decides what that means for its files.
"""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum, auto
from pathlib import Path
from typing import IO, Any


class LockResult(Enum):
    """Outcome of an attempt to lock."""

    ACQUIRED = auto()
    HELD_BY_OTHER = auto()
    UNSUPPORTED = auto()
    """The file system has no locks."""


def try_lock(file: IO[Any] | int) -> LockResult:
    """Lock an open file or descriptor without waiting. The lock lasts until all copies of the descriptor are closed."""
    try:
        _flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return LockResult.HELD_BY_OTHER
    except OSError:
        return LockResult.UNSUPPORTED
    return LockResult.ACQUIRED


def lock_when_free(file: IO[Any] | int) -> None:
    """Wait for the lock; an OSError if the file system has none."""
    _flock(file, fcntl.LOCK_EX)


def unlock(file: IO[Any] | int) -> None:
    """Release the lock, even if a forked child still has the descriptor."""
    with suppress(OSError):
        _flock(file, fcntl.LOCK_UN)


@contextmanager
def unlock_on_exit(file: IO[Any] | int) -> Iterator[None]:
    """Unlock at the end of the block; a forked child that leaves the block does not unlock."""
    owner = os.getpid()
    try:
        yield
    finally:
        if os.getpid() == owner:
            unlock(file)


def _flock(file: IO[Any] | int, operation: int) -> None:
    fcntl.flock(file, operation)


class LockFile:
    """A lock file that names its holder.

    `result` says whether it is locked, `holder` who holds it otherwise. Close the file to release it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open or create the file, try to lock it, and write this process's name into it."""
        self.path = Path(path)
        self.holder = ""
        while True:
            self.file = open(path, "a+", encoding="utf-8", errors="replace", opener=_open_without_following)
            try:
                self.result = try_lock(self.file)
                if self._is_current():
                    break
            except BaseException:
                self.file.close()
                raise
            self.file.close()  # a former holder has just deleted it

    def _is_current(self) -> bool:
        """Read or write the holder; False if the opened file was deleted meanwhile."""
        if self.result is LockResult.HELD_BY_OTHER:
            self.file.seek(0)
            self.holder = " ".join(self.file.read(200).split()) or "another process"
        elif self.result is LockResult.ACQUIRED:
            try:
                if not os.path.samestat(os.stat(self.path), os.fstat(self.file.fileno())):
                    return False
            except FileNotFoundError:
                return False
            self.file.truncate(0)
            self.file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            self.file.flush()
        return True


def _open_without_following(path: str, flags: int) -> int:
    """The file is truncated, which must not hit the target of a symbolic link."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
