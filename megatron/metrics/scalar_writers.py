"""Outputs for scalars: append-only text files, TensorBoard event files, Weights & Biases runs. Errors name the flag or
key.

`AppendOnlyFile` appends whole lines and repairs what a kill, a power cut or a full disk left of the last one.
`TensorboardWriter` raises the errors of TensorBoard's writer thread in the caller.
`WandbRun` imports wandb only if asked for; WANDB_MODE=offline writes to ./wandb. A lost connection is a warning, not an
error.
"""

from __future__ import annotations

import csv
import errno
import io
import os
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from weakref import finalize

from data.file_lock import LockResult, try_lock, unlock
from megatron.config.run_config import check_wandb
from megatron.errors import ConfigError, StorageError, explain_os_error

WRITER_THREAD_CLASS = "_AsyncWriterThread"
"""Class of TensorBoard's writer thread."""


class TensorboardWriter:
    """Creates a folder of event files. `flag` is the setting that names it. Raises ImportError without the package."""

    def __init__(self, flag: str, folder: str) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow import

        self._flag, self._folder = flag, folder
        _silence_writer_thread()
        with self.storage_errors():
            self.writer: Any = SummaryWriter(folder)
            self.events: Any = self.writer.file_writer

    def storage_errors(self) -> AbstractContextManager[None]:
        return storage_errors(self._flag, self._folder)

    def close(self) -> None:
        with self.storage_errors():
            self.writer.flush()  # raises the thread's error
            thread = self.events.event_writer._async_writer._worker
            self.writer.close()
            if thread.exception is not None:  # raised after flush had counted the last event
                raise thread.exception


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


def _silence_writer_thread() -> None:
    """TensorBoard's writer thread prints no traceback from now on."""
    if not (isinstance(threading.excepthook, partial) and threading.excepthook.func is _thread_excepthook):
        threading.excepthook = partial(_thread_excepthook, threading.excepthook)


def _thread_excepthook(previous_hook: Callable[..., object], args: Any) -> None:
    if type(args.thread).__name__ != WRITER_THREAD_CLASS:
        previous_hook(args)


READ_BLOCK_BYTES = 1 << 16


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
        self._file = self._open()
        self._holds_lock = not _is_locked_by_other(self._file)
        if not self._holds_lock:  # only a warning: logging must not stop a resumed run
            warn(f"warning: another process, or another part of this one, has {flag} {path} open to write into it: "
                 "lines of two runs cannot be told apart; stop it, or start this run with another place")

    def _open(self) -> FileIO:
        try:
            file = open(self._path, "ab", buffering=0)
        except OSError as error:
            raise StorageError(f"{self._flag} {self._path} cannot be opened for appending: {error.strerror}; name a "
                               "file in a writable folder") from error
        finalize(self, _close_quietly, file)  # for engines that are never closed
        return file

    def append(self, lines: str) -> None:
        """Append lines, with their line ends; the header first if the file is empty."""
        with storage_errors(self._flag, self._path):
            self._reopen_if_replaced()
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
                self._is_repaired = self._holds_lock and self._is_repaired
                raise
            self._is_repaired = True

    def _reopen_if_replaced(self) -> None:
        """Create the file again if it was deleted or moved: writes to the old one would be invisible."""
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
        self._is_repaired = False
        _close_quietly(former)
        self._holds_lock = not _is_locked_by_other(self._file)

    def _repair(self) -> bytes:
        """Bytes to write before the first line; may truncate a partial last line."""
        if not os.path.isfile(self._path):
            return b""
        with open(self._path, "rb") as file:
            end = file.seek(0, os.SEEK_END)
            full_lines_end = _end_of_last_full_line(file)
            file.seek(0)
            is_foreign = full_lines_end == 0 and not self._header.encode().startswith(
                file.read(READ_BLOCK_BYTES))  # no line end in the file, and not our header
        if full_lines_end == end:
            return b""
        if is_foreign or not self._drops_partial_line or not self._holds_lock:
            return b"\n"
        os.ftruncate(self._file.fileno(), full_lines_end)
        return b""

    def close_without_sync(self) -> None:
        with storage_errors(self._flag, self._path):
            unlock(self._file)  # a forked process may keep the descriptor, and so the lock
            self._file.close()

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
                self.close_without_sync()


def _close_quietly(file: FileIO) -> None:
    with suppress(OSError):
        file.close()


def format_csv_row(values: Iterable[Any]) -> str:
    text = io.StringIO()
    csv.writer(text).writerow(values)
    return text.getvalue()


def _is_locked_by_other(file: FileIO) -> bool:
    """False after taking the kernel's lock without blocking; it is held until the file is closed or the process ends.
    On file systems without locks, or with locks local to a machine, other writers are not detected."""
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return False
    return try_lock(file) is LockResult.HELD_BY_OTHER


def _end_of_last_full_line(file: BinaryIO) -> int:
    end = file.seek(0, os.SEEK_END)
    while end:
        begin = file.seek(max(0, end - READ_BLOCK_BYTES))
        if (line_end := file.read(end - begin).rfind(b"\n")) >= 0:
            return begin + line_end + 1
        end = begin
    return 0


class WandbProject(NamedTuple):
    """The project, group and team of a run."""

    name: str
    group: str | None = None
    team: str | None = None


class WandbRun:
    def __init__(self, flag: str, project: WandbProject, step_metric: str) -> None:
        """`step_metric`: the scalar that is the x axis of the charts."""
        check_wandb(flag)
        import wandb

        try:
            self._run = wandb.init(project=project.name, group=project.group, entity=project.team)
        except (wandb.errors.Error, OSError) as error:
            why = " ".join(str(error).split())
            raise ConfigError(f"{flag} {project.name}: wandb cannot start: {why}; log in with `wandb login`, or set "
                              "WANDB_MODE=offline to write to a folder") from error
        self._has_failed = False
        self._run.define_metric("*", step_metric=step_metric)

    def configure(self, settings: Mapping[str, Any]) -> None:
        """Store the configuration with the run."""
        self._warn_on_failure(lambda: self._run.config.update(dict(settings), allow_val_change=True))

    def log(self, scalars: Mapping[str, float]) -> None:
        self._warn_on_failure(lambda: self._run.log(dict(scalars)))

    def close(self, *, failed: bool = False) -> None:
        """Block until all scalars are uploaded (if a server is used)."""
        self._warn_on_failure(lambda: self._run.finish(exit_code=int(failed)))

    def _warn_on_failure(self, action: Callable[[], Any]) -> None:
        """wandb's service may die before the run does; that must not end the job."""
        if self._has_failed:
            return
        try:
            action()
        except Exception as error:
            self._has_failed = True
            why = " ".join(f"{type(error).__name__}: {error}".split())
            print(f"warning: wandb takes no more scalars ({why}); training goes on without it", file=sys.stderr,
                  flush=True)
