"""How a checkpoint is deleted: renamed out of the way at once, then taken apart, in a thread where training goes on.

    discard        rename a folder to `.trash-<name>`: from then on nothing reads it
    delete_now     take it apart here
    BehindTheRun   take it apart in a thread: on a slow disk that lasts minutes, for which all ranks would wait

What a killed program leaves in the trash, the next save or start deletes (`sweep`, commit.py), behind the run as well.
No torch.
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
from megatron.checkpoint.tags import Say, say_stderr
from megatron.launch.distributed import after_shutdown, is_in_a_hurry
from megatron.whereabouts import HERE

TRASH = ".trash-"
MOST = 1
"""Folders in the trash beside which a save begins: where a disk deletes more slowly than checkpoints come, it waits."""
POLL_SECONDS = 0.2

Delete = Callable[[Path], object]
"""What is done with a folder in the trash."""


def discard(folder: Path, delete: Delete) -> None:
    """Delete a folder so that no part of it is ever seen under its name; what cannot be deleted waits in the trash."""
    trash = folder.with_name(f"{TRASH}{folder.name.lstrip('.')}-{secrets.token_hex(4)}")
    os.rename(folder, trash)
    fsync_directory(folder.parent)
    delete(trash)


def delete_now(path: Path) -> OSError | None:
    """As far as it can be deleted, or why not; a link goes without what it leads to."""
    try:
        if path.is_symlink() or path.is_file():
            path.unlink(missing_ok=True)
            return None
        shutil.rmtree(path, ignore_errors=True)  # all that can be, and what others delete meanwhile
        if os.path.lexists(path):
            shutil.rmtree(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        return error
    return None


@final
class BehindTheRun:
    """Deletes in a thread, one folder after the other. A save waits for it where room is short or too much is waiting,
    and so does the end of a program that ends well; one that fails, or is asked to stop, leaves the rest to the next
    start."""

    def __init__(self, say: Say = say_stderr) -> None:
        self._say, self._process = say, os.getpid()
        self._left: list[Path] = []
        """The first is being deleted."""
        self._is_at_work = False
        self._changed = threading.Condition()
        self._told: set[Path] = set()
        after_shutdown(self._finish)

    def delete(self, path: Path) -> None:
        """Returns at once. A folder may be given again while it waits."""
        if self._is_elsewhere():
            delete_now(path)
            return
        with self._changed:
            if path not in self._left:
                self._left.append(path)
            if self._is_at_work:
                return
            self._is_at_work = True
        try:
            threading.Thread(target=self._work, name="delete", daemon=True).start()
        except RuntimeError:  # no thread can be had
            self._work()

    @property
    def waiting(self) -> int:
        """Folders that somebody is about to delete."""
        return len(self._left) if self._is_at_work and not self._is_elsewhere() else 0

    def wait(self, most: int = 0, until: Callable[[], object] = lambda: False) -> None:
        """Until all but so many are deleted, or cannot be, or something has happened."""
        if self._is_elsewhere():
            return
        with self._changed:
            while self.waiting > most and not until():
                self._changed.wait(POLL_SECONDS)

    def _is_elsewhere(self) -> bool:
        """In a forked child, which has no such thread, and the lock as it was."""
        return os.getpid() != self._process

    def _finish(self) -> None:
        if self.waiting and not is_in_a_hurry():
            with HERE.doing("deletion of old checkpoints"):
                self.wait(until=is_in_a_hurry)

    def _work(self) -> None:
        is_at_work = True
        try:
            while is_at_work:
                path = self._left[0]
                try:
                    self._tell(path, delete_now(path))
                finally:
                    with self._changed:
                        self._left.remove(path)
                        is_at_work = self._is_at_work = bool(self._left)
                        self._changed.notify_all()
        except BaseException:
            with self._changed:
                self._is_at_work = False
                self._changed.notify_all()
            raise

    def _tell(self, path: Path, why: OSError | None) -> None:
        """Once of each folder."""
        if why is not None and path not in self._told:
            self._told.add(path)
            with suppress(OSError, ValueError):  # nobody reads it any more
                self._say(f"warning: {path}, an old checkpoint, cannot be deleted ({why.strerror or why}): the next "
                          "save tries again")
