"""Tensorboard's writer, with errors that its caller hears: whose flag or key it is, which folder, and why.

A thread of tensorboard's writes the events. What goes wrong there comes up with the next event or at the end, and would
print a traceback of that thread besides. Not here: which scalars there are.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from megatron.errors import StorageError
from megatron.zero.homes.words import explain_os_error

WRITER_THREAD_CLASS = "_AsyncWriterThread"
"""Of tensorboard."""


class TensorboardWriter:
    """A folder of events, made here; `flag` is where its name comes from. Without the package it is an ImportError."""

    def __init__(self, flag: str, folder: str) -> None:
        from torch.utils.tensorboard import SummaryWriter  # heavy: only where asked for

        self._flag, self._folder = flag, folder
        _silence_writer_thread()
        with self.storage_errors():
            self.writer: Any = SummaryWriter(folder)
            self.events: Any = self.writer.file_writer

    def storage_errors(self) -> AbstractContextManager[None]:
        return storage_errors(self._flag, self._folder)

    def close(self) -> None:
        with self.storage_errors():
            self.writer.flush()  # the thread's error, if there is one
            thread = self.events.event_writer._async_writer._worker
            self.writer.close()
            if thread.exception is not None:  # it came up as the last event was counted as written
                raise thread.exception


@contextmanager
def storage_errors(flag: str, path: str) -> Iterator[None]:
    """An OSError inside is a StorageError that names both. Lack of memory is no matter of the drive."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise
        why, remedy = explain_os_error(error, Path(path).absolute().parent)
        raise StorageError(f"{flag} {path} cannot be written: {why}; {remedy}, or name another place, and start the "
                           "same command again") from error


def _silence_writer_thread() -> None:
    """From now on that thread ends without a traceback."""
    if not (isinstance(threading.excepthook, partial) and threading.excepthook.func is _thread_excepthook):
        threading.excepthook = partial(_thread_excepthook, threading.excepthook)


def _thread_excepthook(previous_hook: Callable[..., object], args: Any) -> None:
    if type(args.thread).__name__ != WRITER_THREAD_CLASS:
        previous_hook(args)
