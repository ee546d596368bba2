"""The private folder of a launcher, where the ranks of one node meet: gone when the launcher ends, and swept by the
next one where it was killed.

A launcher holds a lock on a file in its folder, which the kernel gives back when its process has ended, however it
did. So a folder whose lock is free belongs to no launcher. Where the file system has no locks nothing is swept.

Room for its files is reserved before a rank is started. The one in which ranks meet is torch's FileStore: a rank that
reads a note which was cut off there asks the kernel for the rest of it forever, with the file locked; one that fails to
write there leaves at once (exits.py). The file of places is mapped into memory, where a drive without room is a signal
that ends a rank. Standard library only.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import resource
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron.errors import StorageError

TEMP_DIR_PREFIX = "megatron-launch-"
LOCK_NAME = "held"
ABANDONED_SECONDS = 3600.0
"""Of a folder without a lock: those of former versions had none, and were empty until the ranks met."""
STORE_FILE_BYTES = 4 * 2**20
"""Some kilobytes a rank to begin with, and some for each pause of many seconds."""
FALLOC_FL_KEEP_SIZE = 1
"""FALLOC_FL_KEEP_SIZE: a file gets longer only by what is written."""
UNSUPPORTED_ERRNOS = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
"""Of a file system that promises nothing."""


@contextmanager
def private_temp_dir() -> Iterator[str]:
    """For this user alone; swept before are those that launchers of the same user left beside it."""
    parent = Path(tempfile.gettempdir())
    for folder in parent.glob(f"{TEMP_DIR_PREFIX}*"):
        with suppress(OSError):
            _remove_if_abandoned(folder)
    path, lock = _create_locked_dir(parent)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _create_locked_dir(parent: Path) -> tuple[str, int]:
    while True:
        path = tempfile.mkdtemp(prefix=TEMP_DIR_PREFIX, dir=parent)
        try:
            lock = os.open(os.path.join(path, LOCK_NAME), os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            continue
        with suppress(OSError):  # no such locks here
            fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.exists(os.path.join(path, LOCK_NAME)):
            return path, lock
        os.close(lock)  # taken for one that was left, before it was locked


def _remove_if_abandoned(folder: Path) -> None:
    """Remove it, if it is this user's and nobody holds it."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        return
    try:
        lock = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        if time.time() - status.st_mtime > ABANDONED_SECONDS:
            folder.rmdir()  # if it is empty: its launcher was killed before it made the lock
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
    finally:
        os.close(lock)


@contextmanager
def explain_temp_dir_errors() -> Iterator[None]:
    """An OSError inside is told with the folder, and what to do."""
    try:
        yield
    except OSError as error:
        folder = tempfile.tempdir or os.environ.get("TMPDIR", "/tmp")
        raise StorageError(f"launcher: the files through which the ranks meet cannot be made in {folder}: "
                           f"{error.strerror}; free space there, or name another folder in TMPDIR") from error


def preallocate_store_file(path: str, size: int = STORE_FILE_BYTES) -> None:
    """Make this file, empty, to which so much can be written."""
    most, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if most != resource.RLIM_INFINITY and most < size:
        raise StorageError(f"launcher: files may be no longer than {most} bytes (ulimit -f), and the one in which the "
                           f"ranks meet may need {size}; raise the limit")
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _fallocate(file, size)
    finally:
        os.close(file)


def _fallocate(file: int, size: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "fallocate"):  # not Linux
        return
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    while libc.fallocate(file, FALLOC_FL_KEEP_SIZE, 0, size) != 0:
        number = ctypes.get_errno()
        if number in UNSUPPORTED_ERRNOS:
            return
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))
