"""The folder on a drive for swap files, and the I/O threads that read and write them.

Swap files have no names: the file system frees their space when they are closed or collected, or the process ends,
however it ends.
"""

from __future__ import annotations

import errno
import os
import secrets
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import BoundedSemaphore
from typing import TYPE_CHECKING, Self, final
from weakref import WeakSet

from megatron.errors import ConfigError, StorageError, explain_os_error
from megatron.zero.offload.direct_io import round_up_to_page

if TYPE_CHECKING:
    from megatron.zero.offload.async_file import AsyncSwapFile

UNSUPPORTED_ERRNOS = (errno.ENOENT, errno.EPERM, errno.EOPNOTSUPP)
"""Errors of creating a file in an existing folder of a file system that takes no new files, such as /proc."""


def free_space(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def explain_create_error(error: OSError, folder: Path) -> str:
    """Why nothing could be created in an existing folder, and what to do."""
    if error.errno in UNSUPPORTED_ERRNOS:
        return "its file system takes no new files; choose a folder on a drive"
    why, remedy = explain_os_error(error, folder)
    return f"{why}; {remedy}, or choose another folder"


@dataclass(frozen=True, kw_only=True)
class AioSettings:
    """DeepSpeed's `aio` section. One positioned system call transfers what DeepSpeed's queue would hold."""

    block_size: int = 1 << 20
    queue_depth: int = 8
    """Blocks in one system call; the disk works on all of them at once."""
    intra_op_parallelism: int = 1
    """Concurrent system calls, for reads and for writes each."""
    single_submit: bool = False
    """One block per system call; `queue_depth` is ignored."""
    overlap_events: bool = True
    """One more thread, so that a block is checksummed while the disk works on another."""

    @property
    def bytes_per_call(self) -> int:
        return round_up_to_page(self.block_size * (1 if self.single_submit else self.queue_depth))


class IoThreads:
    """Threads that read, or write, all files of a drive; at most `slots` of them are in a system call."""

    def __init__(self, name: str, aio: AioSettings) -> None:
        self.slots = BoundedSemaphore(aio.intra_op_parallelism)
        self.threads = ThreadPoolExecutor(aio.intra_op_parallelism + aio.overlap_events, f"swap files: {name}")


@final
class SwapDrive:
    """Creates the swap files of one engine on one rank, and closes them."""

    def __init__(self, nvme_path: str | os.PathLike[str], *, flag: str, aio: AioSettings = AioSettings()) -> None:
        """`flag` is the setting that gave `nvme_path`, for messages. Raises StorageError if it is not writable."""
        self.path, self.flag, self.aio = check_nvme_path(nvme_path, flag), flag, aio
        try:
            os.close(self.create_file())
        except OSError as error:
            raise StorageError(
                f"{flag} {self.path}: cannot write there: {explain_create_error(error, self.path)}") from error
        self.reads, self.writes = IoThreads("reads", aio), IoThreads("writes", aio)
        """Separate: an awaited read does not queue behind writes."""
        self.files: WeakSet[AsyncSwapFile] = WeakSet()
        self._owner_pid = os.getpid()

    def create_file(self) -> int:
        """The descriptor of a new file without a name. Raises OSError."""
        return create_unnamed_file(self.path)

    def check_same_process(self) -> None:
        """Raise ConfigError in a forked process: it has neither the threads nor the memory."""
        if os.getpid() != self._owner_pid:
            raise ConfigError(f"what an engine keeps in {self.path} belongs to process {self._owner_pid}, "
                              f"and this is a fork of it ({os.getpid()}): use it only in the process that made the "
                              "engine, not in a fork or a worker of a data loader")

    def close(self) -> None:
        """Close the files, which frees their space. Idempotent; a fork closes nothing of its parent."""
        if os.getpid() == self._owner_pid:
            for file in list(self.files):
                file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def create_unnamed_file(folder: Path) -> int:
    """The descriptor of a new file that no name leads to. Raises OSError."""
    try:
        return os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT):
            raise
    path = folder / f".swap-{secrets.token_hex(8)}"  # a file system without O_TMPFILE, such as NFS
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    os.unlink(path)
    return descriptor


def check_nvme_path(nvme_path: str | os.PathLike[str], flag: str) -> Path:
    """The resolved path. Raises ConfigError unless it exists: creating it would hide a drive that is not mounted."""
    path = Path(nvme_path)
    if not os.path.exists(path):
        raise ConfigError(f"{flag} {path}: there is no such folder; create it on the drive, or name one that exists")
    if not os.path.isdir(path):
        raise ConfigError(f"{flag} {path}: expected a folder, found a file")
    return path.resolve()
