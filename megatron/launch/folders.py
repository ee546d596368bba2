"""The private folder of a launcher, where the ranks of one node meet: gone when the launcher ends, and swept by the
next one where it was killed.

A launcher holds a lock on a file in its folder, which the kernel gives back when its process has ended, however it
did. So a folder whose lock is free is nobody's. Where the file system has no locks nothing is swept.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "megatron-launch-"
LOCK = "held"
OLD_SECONDS = 3600.0
"""Of a folder without a lock: those of former versions had none, and were empty until the ranks met."""


@contextmanager
def private_folder() -> Iterator[str]:
    """For this user alone; swept before are those that launchers of the same user left beside it."""
    parent = Path(tempfile.gettempdir())
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):
            _sweep(folder)
    path, lock = _make(parent)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _make(parent: Path) -> tuple[str, int]:
    while True:
        path = tempfile.mkdtemp(prefix=PREFIX, dir=parent)
        try:
            lock = os.open(os.path.join(path, LOCK), os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            continue
        with suppress(OSError):  # no such locks here
            fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.exists(os.path.join(path, LOCK)):
            return path, lock
        os.close(lock)  # taken for one that was left, before it was locked


def _sweep(folder: Path) -> None:
    """Remove it, if it is this user's and nobody holds it."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        return
    try:
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        if time.time() - status.st_mtime > OLD_SECONDS:
            folder.rmdir()  # if it is empty: its launcher was killed before it made the lock
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
    finally:
        os.close(lock)
