"""The folder on a drive for swap files, and the I/O threads that read and write them.

Swap files have no names: the file system frees their space when the process closes them or ends, however it ends.
"""

from __future__ import annotations

import errno
import os
import secrets
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from threading import BoundedSemaphore, RLock, Thread, current_thread
from typing import Self, final

from megatron.errors import ConfigError, StorageError, explain_os_error

UNSUPPORTED_ERRNOS = (errno.ENOENT, errno.EPERM, errno.EOPNOTSUPP)
"""Errors of creating a file in an existing folder of a file system that takes no new files, such as /proc."""


def format_seconds(seconds: float) -> str:
    """`24.6 s`, `3.1 ms`."""
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-4 else "less than 0.1 ms"


def free_space(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def explain_create_error(error: OSError, folder: Path) -> str:
    """Why nothing could be created in an existing folder, and what to do."""
    if error.errno in UNSUPPORTED_ERRNOS:
        return "its file system takes no new files; choose a folder on a drive"
    why, remedy = explain_os_error(error, folder)
    return f"{why}; {remedy}, or choose another folder"


IoTask = Callable[[], None]
"""Must not raise: the thread has no handler."""


@final
class IoThreadPool:
    def __init__(self, name: str, slots: int, extra_threads: int) -> None:
        """`slots` tasks may be at the disk at once; `extra_threads` more may compute checksums."""
        self.io_slots = BoundedSemaphore(slots)
        self._name, self._num_threads = name, slots + extra_threads
        self._queue: SimpleQueue[IoTask | None] = SimpleQueue()
        self._threads: list[Thread] = []
        self._lock = RLock()

    def submit(self, task: IoTask) -> None:
        with self._lock:
            self._start_threads()
            if self._threads:
                return self._queue.put(task)
        return task()  # stopped, or threads cannot start (interpreter shutdown): run it here

    def stop(self, timeout: float) -> bool:
        """End the threads once the queue is empty; False if they are still running after about `timeout` seconds. Tasks
        that are submitted later run in the submitting thread."""
        with self._lock:
            threads, self._threads, self._num_threads = self._threads, [], 0
            for _ in threads:
                self._queue.put(None)
        others = [thread for thread in threads if thread is not current_thread()]  # finalizers run on any thread
        for thread in others:
            thread.join(timeout)
            timeout = timeout if not thread.is_alive() else 0.0
        return not any(thread.is_alive() for thread in others)

    def _start_threads(self) -> None:
        while len(self._threads) < self._num_threads:
            thread = Thread(target=_run_tasks, args=(self._queue,), name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:
                self._num_threads = len(self._threads)
            else:
                self._threads.append(thread)


def _run_tasks(queue: SimpleQueue[IoTask | None]) -> None:
    """Hold no reference while waiting, so that owners of finished tasks can be collected."""
    while (piece := queue.get()) is not None:
        piece()
        del piece


@final
class IoThreadPools:
    """Separate pools for reads and writes: an awaited read does not queue behind writes."""

    def __init__(self, slots: int, extra_threads: int) -> None:
        self.read, self.write = IoThreadPool("tiles: reads", slots,
                                             extra_threads), IoThreadPool("tiles: writes", slots, extra_threads)

    def stop(self, timeout: float) -> bool:
        ended = self.read.stop(timeout)
        return self.write.stop(timeout if ended else 0.0) and ended


CLOSE_TIMEOUT_SECONDS = 2.0
"""Seconds that closing waits for a running system call."""

StopCallback = Callable[[float], bool]
"""Timeout in seconds -> whether everything stopped in time."""


@dataclass(eq=False)
class _DriveResources:
    """What closing releases. Separate from `SwapDrive`, which may already be collected."""

    owner_pid: int = field(default_factory=os.getpid)
    is_closing: bool = False
    stop_callbacks: list[StopCallback] = field(default_factory=list)
    thread_pools: dict[tuple[int, int], IoThreadPools] = field(default_factory=dict)

    def close(self) -> None:
        if os.getpid() != self.owner_pid:  # at the exit of a forked child, which has none of the threads
            return
        self.is_closing = True
        timeout = CLOSE_TIMEOUT_SECONDS
        for stop in (*self.stop_callbacks, *(pools.stop for pools in self.thread_pools.values())):
            timeout = timeout if stop(timeout) else 0.0


@final
class SwapDrive:
    """Creates the swap files of one engine on one rank; closes them when it is closed or collected."""

    def __init__(self, nvme_path: str | os.PathLike[str], *, flag: str) -> None:
        """`flag` is the setting that gave `nvme_path`, for messages. Raises StorageError if it is not writable."""
        self.path, self.flag = check_nvme_path(nvme_path, flag), flag
        try:
            os.close(self.create_file())
        except OSError as error:
            raise StorageError(
                f"{flag} {self.path}: cannot write there: {explain_create_error(error, self.path)}") from error
        self._resources = _DriveResources()
        self.close = weakref.finalize(self, self._resources.close)
        """Close the files, which frees their space, and end the threads. Idempotent."""

    def create_file(self) -> int:
        """The descriptor of a new file without a name. Raises OSError."""
        return create_unnamed_file(self.path)

    def thread_pools(self, slots: int, extra_threads: int) -> IoThreadPools:
        """I/O threads, shared by all files with the same numbers."""
        return self._resources.thread_pools.setdefault((slots, extra_threads), IoThreadPools(slots, extra_threads))

    def check_same_process(self) -> None:
        """Raise ConfigError in a forked process: it has neither the threads nor the memory."""
        if os.getpid() != self._resources.owner_pid:
            raise ConfigError(f"what an engine keeps in {self.path} belongs to process {self._resources.owner_pid}, "
                              f"and this is a fork of it ({os.getpid()}): use it only in the process that made the "
                              "engine, not in a fork or a worker of a data loader")

    @property
    def is_closing(self) -> bool:
        """The files are being closed."""
        return self._resources.is_closing

    def add_stop_callback(self, stop: StopCallback) -> None:
        """Call `stop` at the close. It must not refer to this object."""
        self._resources.stop_callbacks.append(stop)

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
