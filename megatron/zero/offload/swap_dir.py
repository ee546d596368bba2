"""The NVMe swap directory of one rank: locked while its process lives, removed when it ends.

    <nvme_path>/<run>-rank<k>       mode 0700, flock-ed by its process, with files `*.tiles` of mode 0600
    <nvme_path>/<run>-rank<k>-2     if another process holds the first one

A directory whose lock is free was left by a killed process; the next start of the same run empties and reuses it.
`remove_stale_swap_dirs` reports those of other runs. Symbolic links and directories with other content are never
followed or deleted. Normal exits clean up by themselves; before `os._exit` call `close_all_swap_dirs`. The directory
also owns the I/O threads of its files (`IoThreadPools`).
"""

from __future__ import annotations

import errno
import os
import re
import sys
import weakref
from collections.abc import Callable, Container, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.util import Finalize
from pathlib import Path
from queue import SimpleQueue
from threading import BoundedSemaphore, RLock, Thread, current_thread
from typing import Self, final

from data.file_lock import LockResult, try_lock
from megatron.errors import ConfigError, StorageError, explain_os_error, format_bytes

UNSUPPORTED_ERRNOS = (errno.ENOENT, errno.EPERM, errno.EOPNOTSUPP)
"""Errors of mkdir in an existing directory of a file system that takes no new files, such as /proc."""


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


SWAP_FILE_SUFFIX = ".tiles"

CLOSE_TIMEOUT_SECONDS = 2.0
"""Seconds that closing waits for a running system call."""

PrintLine = Callable[[str], None]
StopCallback = Callable[[float], bool]
"""Timeout in seconds -> whether everything stopped in time."""


def print_to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@dataclass(eq=False)
class _LockedDir:
    """The resources that closing releases. Separate from `SwapDir`, which may already be collected."""

    path: Path
    descriptor: int
    """Of the directory; holds the flock. -1 once closed."""
    is_closing: bool = False
    stop_callbacks: list[StopCallback] = field(default_factory=list)
    thread_pools: dict[tuple[int, int], IoThreadPools] = field(default_factory=dict)

    def close(self) -> None:
        if self.descriptor < 0:  # closed, or a forked child's copy
            return
        _LOCKED_DIRS.discard(self)
        self.is_closing = True
        timeout = CLOSE_TIMEOUT_SECONDS
        for stop in (*self.stop_callbacks, *(lanes.stop for lanes in self.thread_pools.values())):
            timeout = timeout if stop(timeout) else 0.0
        with suppress(OSError, StorageError):
            _remove_files(self.descriptor, self.path)
            os.rmdir(self.path)
        os.close(self.descriptor)
        self.descriptor = -1


_LOCKED_DIRS: weakref.WeakSet[_LockedDir] = weakref.WeakSet()
"""All open swap directories of this process."""


def _drop_locks_in_child() -> None:
    """A forked child that outlives this process must not keep its lock."""
    for hold in _LOCKED_DIRS:
        os.close(hold.descriptor)
        hold.descriptor = -1
    _LOCKED_DIRS.clear()


os.register_at_fork(after_in_child=_drop_locks_in_child)


@final
class SwapDir:
    def __init__(self, nvme_path: str | os.PathLike[str], run: str, rank: int, *, flag: str) -> None:
        """`run` names the run and is the same at its next start; `flag` is the setting that gave `nvme_path`, for
        messages."""
        assert re.fullmatch(r"[\w.-]+", run), run
        self.flag = flag
        self.path, descriptor = _claim_dir(check_nvme_path(nvme_path, flag), f"{run}-rank{rank}", flag)
        self._owner_pid = os.getpid()
        self._locked_dir = _LockedDir(self.path, descriptor)
        try:
            _remove_files(descriptor, self.path)
            os.fchmod(descriptor, 0o700)
        except BaseException:
            os.close(descriptor)
            raise
        _LOCKED_DIRS.add(self._locked_dir)
        _close_at_exit()
        self.close = weakref.finalize(self, self._locked_dir.close)
        """Remove the directory and its files. Idempotent; also runs when the object is collected or the process
        exits."""

    def create_file(self, name: str) -> int:
        """The descriptor of the new file `name`.tiles. Raises OSError."""
        return os.open(name + SWAP_FILE_SUFFIX, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC,
                       0o600, dir_fd=self._locked_dir.descriptor)

    def thread_pools(self, slots: int, extra_threads: int) -> IoThreadPools:
        """I/O threads, shared by all files with the same numbers."""
        return self._locked_dir.thread_pools.setdefault((slots, extra_threads), IoThreadPools(slots, extra_threads))

    def check_same_process(self) -> None:
        """Raise ConfigError in a forked process: it has neither the threads nor the memory nor the lock."""
        if os.getpid() != self._owner_pid:
            raise ConfigError(f"{self.path} belongs to process {self._owner_pid}, and this is a fork of it "
                              f"({os.getpid()}): what an engine keeps on a drive can be used only in the process that "
                              "made the engine; use it there, not in a fork or a worker of a data loader")

    @property
    def is_closing(self) -> bool:
        """The files are about to be removed."""
        return self._locked_dir.is_closing

    def add_stop_callback(self, stop: StopCallback) -> None:
        """Call `stop` before the files are removed. It must not refer to this object."""
        self._locked_dir.stop_callbacks.append(stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def close_all_swap_dirs() -> None:
    """Close every swap directory of this process. For exits that run no atexit handlers."""
    for hold in list(_LOCKED_DIRS):
        hold.close()


_PIDS_WITH_FINALIZER: set[int] = set()
"""Processes (this one and its ancestors) that registered a `multiprocessing` finalizer."""


def _close_at_exit() -> None:
    if os.getpid() not in _PIDS_WITH_FINALIZER:
        _PIDS_WITH_FINALIZER.add(os.getpid())
        Finalize(None, close_all_swap_dirs, exitpriority=0)


def check_nvme_path(nvme_path: str | os.PathLike[str], flag: str) -> Path:
    """The resolved path. Raises ConfigError unless it exists: creating it would hide a drive that is not mounted."""
    path = Path(nvme_path)
    if not os.path.exists(path):
        raise ConfigError(f"{flag} {path}: there is no such folder; create it on the drive, or name one that exists")
    if not os.path.isdir(path):
        raise ConfigError(f"{flag} {path}: expected a folder, found a file")
    return path.resolve()


def remove_stale_swap_dirs(nvme_path: str | os.PathLike[str], run: str, ranks: Container[int],
                           warn: PrintLine = print_to_stderr) -> None:
    """Remove directories that killed starts of this run left and that none of `ranks` reuses; warn about those of other
    runs. Call it once per node."""
    sizes_by_name: dict[str, int] = {}
    for path, owner, rank, again in _find_swap_dirs(Path(nvme_path)):
        descriptor = None if owner == run and rank in ranks and not again else _open_and_lock(path, is_new=False)
        if descriptor is not None:
            with suppress(OSError, StorageError):
                if owner == run:
                    _remove_files(descriptor, path)
                    os.rmdir(path)
                elif size := _disk_usage(descriptor, path):
                    sizes_by_name[path.name] = size
            os.close(descriptor)
    if sizes_by_name:
        names = sorted(sizes_by_name)
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        warn(f"warning: {nvme_path}: {format_bytes(sum(sizes_by_name.values()))} are left of other runs that have "
             f"ended: {', '.join(names[:3])}{more}; remove what is not needed")


def _find_swap_dirs(root: Path) -> Iterator[tuple[Path, str, int, bool]]:
    """(path, run, rank, whether the name has a numeric suffix) of each directory."""
    with os.scandir(root) as entries:
        for entry in entries:
            found = re.fullmatch(r"(.+)-rank(\d+)(-\d+)?", entry.name)
            if found and entry.is_dir(follow_symlinks=False):
                yield Path(entry.path), found[1], int(found[2]), bool(found[3])


def _claim_dir(root: Path, name: str, flag: str) -> tuple[Path, int]:
    """Create or take over the first directory that no other process holds; its path and descriptor."""
    for number in count(1):
        path = root / (f"{name}-{number}" if number > 1 else name)
        descriptor = _open_and_lock(path, _create_dir(path, flag))
        if descriptor is not None:
            return path, descriptor
    raise AssertionError("there are always more numbers")


def _create_dir(path: Path, flag: str) -> bool:
    """True if the directory is new."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        return False
    except OSError as error:
        raise StorageError(
            f"{flag} {path.parent}: cannot write there: {explain_create_error(error, path.parent)}") from error
    return True


def _open_and_lock(path: Path, is_new: bool) -> int | None:
    """The locked descriptor, or None if another process holds or may hold the directory: on a file system without locks
    only a new directory is certainly ours."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except NotADirectoryError:
        raise StorageError(f"{path}: expected a swap folder, found a file or a symbolic link; remove it, or choose "
                           "another folder") from None
    except OSError:  # another user's, or just removed
        return None
    if _try_lock(descriptor, path, is_new):
        return descriptor
    os.close(descriptor)
    return None


def _try_lock(descriptor: int, path: Path, is_new: bool) -> bool:
    result = try_lock(descriptor)
    if result is not LockResult.ACQUIRED:
        return is_new and result is LockResult.UNSUPPORTED
    status = os.fstat(descriptor)
    try:  # the previous holder of the lock may have removed the directory
        return status.st_uid == os.geteuid() and os.path.samestat(status, os.lstat(path))
    except OSError:
        return False


def _remove_files(descriptor: int, path: Path) -> None:
    for name in _list_swap_files(descriptor, path):
        os.unlink(name, dir_fd=descriptor)


def _disk_usage(descriptor: int, path: Path) -> int:
    return sum(os.stat(name, dir_fd=descriptor).st_blocks * 512 for name in _list_swap_files(descriptor, path))


def _list_swap_files(descriptor: int, path: Path) -> list[str]:
    """Names of the swap files. Raises StorageError if there is anything else: then it is not a swap directory."""
    names = []
    with os.scandir(descriptor) as entries:
        for entry in entries:
            if not (entry.name.endswith(SWAP_FILE_SUFFIX) and entry.is_file(follow_symlinks=False)):
                raise StorageError(f"{path}: expected a swap folder, found {entry.name} in it; move that elsewhere, or "
                                   "choose another folder")
            names.append(entry.name)
    return names
