"""Delete checkpoints: rename to `.trash-<name>` at once, then remove the files in a background thread during training.

The next start or save deletes what a killed program left in the trash (commit.py). No torch.
"""

from __future__ import annotations

import os
import secrets
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import final

from data.storage import fsync_directory
from megatron.checkpoint.tags import PrintLine, print_to_stderr
from megatron.distributed.process_group import after_shutdown, is_stop_requested
from megatron.distributed.rank_status import STATUS

TRASH_PREFIX = ".trash-"
MAX_PENDING_FOLDERS = 1
"""Pending folders with which a save still starts; with more it waits, since the disk deletes too slowly."""
POLL_SECONDS = 0.2

DeleteFolder = Callable[[Path], object]
"""Deletes a folder in the trash."""


def discard_folder(folder: Path, delete: DeleteFolder) -> None:
    """Rename the folder into the trash at once, so that it is never partially visible, then `delete` it."""
    trash = folder.with_name(f"{TRASH_PREFIX}{folder.name.lstrip('.')}-{secrets.token_hex(4)}")
    os.rename(folder, trash)
    fsync_directory(folder.parent)
    delete(trash)


def delete_folder(path: Path) -> OSError | None:
    """Delete as much as possible; returns the error if something is left. Of a link, only the link is deleted."""
    try:
        if path.is_symlink() or path.is_file():
            path.unlink(missing_ok=True)
            return None
        shutil.rmtree(path, ignore_errors=True)  # deletes what it can, and tolerates concurrent deletions
        if os.path.lexists(path):
            shutil.rmtree(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        return error
    return None


@final
class BackgroundDeleter:
    """Deletes folders one by one in a thread. A save waits for it if disk space is short or too many folders are
    pending, and a successful program waits at its end; a failed or stopped one leaves the rest to the next start."""

    def __init__(self, print_line: PrintLine = print_to_stderr) -> None:
        self._print_line, self._pid = print_line, os.getpid()
        self._pending: list[Path] = []
        """The first one is being deleted."""
        self._is_deleting = False
        self._changed = threading.Condition()
        self._warned: set[Path] = set()
        after_shutdown(self._finish_at_shutdown)

    def delete(self, path: Path) -> None:
        """Queue the folder and return at once. Queuing it again has no effect."""
        if self._is_in_forked_child():
            delete_folder(path)
            return
        with self._changed:
            if path not in self._pending:
                self._pending.append(path)
            if self._is_deleting:
                return
            self._is_deleting = True
        try:
            threading.Thread(target=self._delete_pending, name="delete", daemon=True).start()
        except RuntimeError:  # no thread can be started
            self._delete_pending()

    @property
    def pending_count(self) -> int:
        """Folders waiting to be deleted."""
        return len(self._pending) if self._is_deleting and not self._is_in_forked_child() else 0

    def wait_for_deletions(self, most: int = 0, until: Callable[[], object] = lambda: False) -> None:
        """Wait until at most `most` folders are pending, or `until()` is true."""
        if self._is_in_forked_child():
            return
        with self._changed:
            while self.pending_count > most and not until():
                self._changed.wait(POLL_SECONDS)

    def _is_in_forked_child(self) -> bool:
        """Whether this is a forked child: it has no deleting thread, and the lock may be held forever."""
        return os.getpid() != self._pid

    def _finish_at_shutdown(self) -> None:
        if self.pending_count and not is_stop_requested():
            with STATUS.in_activity("deletion of old checkpoints"):
                self.wait_for_deletions(until=is_stop_requested)

    def _delete_pending(self) -> None:
        is_at_work = True
        while is_at_work:
            path, is_at_work = self._pending[0], False  # if an error ends this thread, the next folder starts another
            try:
                error = delete_folder(path)
                if error is not None and path not in self._warned:
                    self._warned.add(path)
                    with suppress(OSError, ValueError):  # the output is closed
                        self._print_line(f"warning: {path}, an old checkpoint, cannot be deleted "
                                         f"({error.strerror or error}): the next save tries again")
                is_at_work = True
            finally:
                with self._changed:
                    self._pending.remove(path)
                    is_at_work = self._is_deleting = is_at_work and bool(self._pending)
                    self._changed.notify_all()
