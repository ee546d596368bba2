"""Room for the files of a launcher's private folder, made sure of before a rank is started.

The file in which the ranks meet is torch's FileStore, which only grows. A note that is cut off there, because the drive
is full or files may not be longer, is a trap: whoever reads it next asks the kernel for the rest of it for ever, with
the file locked, so that the other ranks wait for the lock and no time limit goes by. So the launcher reserves more than
ranks need. A rank that fails to write there nevertheless leaves at once, and touches the file no more (exits.py).

The file of places is mapped into memory, where a drive without room is a signal that ends a rank. Standard library
only.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from megatron.errors import StorageError

ROOM = 4 * 2**20
"""Some kilobytes a rank to begin with, and some for each pause of many seconds."""
KEEP_SIZE = 1
"""FALLOC_FL_KEEP_SIZE: a file gets longer only by what is written."""
CANNOT = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
"""Of a file system that promises nothing."""


@contextmanager
def making_room() -> Iterator[None]:
    """An OSError inside is told with the folder, and what to do."""
    try:
        yield
    except OSError as error:
        folder = tempfile.tempdir or os.environ.get("TMPDIR", "/tmp")
        raise StorageError(f"launcher: the files through which the ranks meet cannot be made in {folder}: "
                           f"{error.strerror}; free space there, or name another folder in TMPDIR") from error


def reserve(path: str, size: int = ROOM) -> None:
    """Make this file, empty, to which so much can be written."""
    most, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if most != resource.RLIM_INFINITY and most < size:
        raise StorageError(f"launcher: files may be no longer than {most} bytes (ulimit -f), and the one in which the "
                           f"ranks meet may need {size}; raise the limit")
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _allocate(file, size)
    finally:
        os.close(file)


def _allocate(file: int, size: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "fallocate"):  # not Linux
        return
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    while libc.fallocate(file, KEEP_SIZE, 0, size) != 0:
        number = ctypes.get_errno()
        if number in CANNOT:
            return
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))
