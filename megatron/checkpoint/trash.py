"""How a checkpoint is deleted: renamed out of the way at once, then taken apart, in a thread where training goes on.

    discard        rename a folder to `.trash-<name>`: from then on nothing reads it
    delete_now     take it apart here
    BehindTheRun   take it apart in a thread: on a slow disk that lasts minutes, for which all ranks would wait

What a killed program leaves in the trash, the next save or start deletes (`sweep`, commit.py). No torch.
"""

from __future__ import annotations

import os
import secrets
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import final

from data.storage import fsync_directory
from megatron.checkpoint.tags import Say, say_stderr
from megatron.launch.distributed import before_shutdown

TRASH = ".trash-"

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
    """Deletes in a thread, one folder after the other. The next save waits for it, and so does the end of a program
    that ends well; one that fails leaves the rest to the next save."""

    def __init__(self, say: Say = say_stderr) -> None:
        self._say, self._thread = say, threading.Thread()
        self._left: list[Path] = []
        self._lock = threading.Lock()
        self._is_at_work = False
        before_shutdown(self.wait)

    def delete(self, path: Path) -> None:
        """Returns at once."""
        with self._lock:
            self._left.append(path)
            if self._is_at_work:
                return
            self._is_at_work = True
            try:
                self._thread = threading.Thread(target=self._work, name="delete", daemon=True)
                return self._thread.start()
            except RuntimeError:  # no thread can be had
                pass
        self._work()

    def wait(self) -> None:
        """Until everything is deleted, or cannot be."""
        with self._lock:
            is_at_work, thread = self._is_at_work, self._thread
        if is_at_work and thread.is_alive():  # a forked child has no such thread
            thread.join()

    def _work(self) -> None:
        while (path := self._next()) is not None:
            if (why := delete_now(path)) is not None:
                self._say(f"warning: {path}, an old checkpoint, cannot be deleted ({why.strerror or why}): the next "
                          "save tries again")

    def _next(self) -> Path | None:
        with self._lock:
            self._is_at_work = bool(self._left)
            return self._left.pop(0) if self._left else None
