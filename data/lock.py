"""One process at a time writes what belongs to a name: `alone`. A second one is refused (`storage.exclusive` waits).

The lock is the kernel's (flock) on a hidden file beside the name, where links lead: it goes with the process that holds
it, so a dead one blocks nobody, and whatever temporary files are found under the lock belong to nobody. What the file
says only names the holder, for people; it is deleted when the lock is given back.
"""

from __future__ import annotations

import fcntl
import os
import socket
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from data.storage import StorageFault, unlock_on_exit, write_errors_for


@contextmanager
def hold_writer_lock(path: str | os.PathLike[str], *targets: str | os.PathLike[str]) -> Iterator[bool]:
    """Nobody else is alone with this name meanwhile, nor with the real paths to which its files lead (`targets`).
    False: the file system has no locks, so that is not known."""
    name = os.fspath(path)
    with ExitStack() as stack:  # in one order for all, so that one of two gets everything
        are_locked = [
            stack.enter_context(_hold_lock_file(place, name))
            for place in sorted({*map(_canonical_path, (path, *targets))})
        ]
        yield all(are_locked)


def _canonical_path(path: str | os.PathLike[str]) -> str:
    """One name, whatever links lead to the folder."""
    folder, name = os.path.split(os.path.abspath(path))
    return os.path.join(os.path.realpath(folder), name)


@contextmanager
def _hold_lock_file(path: str, name: str) -> Iterator[bool]:
    lock = Path(path).with_name(f".{Path(path).name}.writing")
    with write_errors_for(name):
        file, is_locked = _acquire_lock_file(lock, name)
    owner = os.getpid()
    with file, unlock_on_exit(file):
        try:
            yield is_locked
        finally:
            with suppress(OSError):
                if is_locked and os.getpid() == owner:  # no forked child that ends its copy of the block
                    os.unlink(lock)  # before the lock goes: whoever opened the file meanwhile finds that it is gone


def remove_stale_files(name: str, paths: Iterable[Path], reason: str = "") -> None:
    """Files that nobody writes any more, found while alone with this name; says so."""
    found = [(path, path.lstat().st_size) for path in paths]
    for path, _ in found:
        path.unlink()
    if found:
        print(f"{name}: removed what a process that ended early had left{reason} "
              f"({sum(size for _, size in found) / 1e6:.1f} MB)", file=sys.stderr, flush=True)


def _acquire_lock_file(lock: Path, name: str) -> tuple[IO[str], bool]:
    """The lock file, and whether it is locked."""
    while True:
        file = open(lock, "a+", encoding="utf-8", errors="replace", opener=_open_without_following)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            with file:
                file.seek(0)
                holder = " ".join(file.read(200).split()) or "another process"
            raise StorageFault(f"{name}: {holder} is writing under this name now; wait for its end, or choose another "
                               "name") from error
        except OSError:  # no such locks here
            with suppress(OSError):
                os.unlink(lock)
            return file, False
        if _is_same_file(lock, file):
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
            return file, True
        file.close()  # of a holder that has just ended


def _open_without_following(path: str, flags: int) -> int:
    """The file is emptied: a symbolic link in its place must not lead to another one."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def _is_same_file(lock: Path, file: IO[str]) -> bool:
    try:
        return os.path.samestat(os.stat(lock), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
