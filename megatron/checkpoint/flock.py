"""The kernel's locks on folders: several programs, and several engines of one, may save into one folder at a time.

A save *holds* its staging folder until it has ended: a folder that no process holds was left by a killed save. Renames,
deletions and writes in the save root itself are made *alone*. A lock goes with its process. Where the file system has
no locks, or keeps them from other machines (NFS), there is no waiting. No torch.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from data.storage import unlock_on_exit
from megatron.errors import StorageError

LOCK_SECONDS = 300.0
"""Seconds that a commit of somebody else is waited for."""


@contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Nobody finds the folder `is_abandoned` meanwhile."""
    with _open_folder(folder) as descriptor:
        if descriptor is not None:
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


def is_abandoned(folder: Path) -> bool:
    """The folder is there, and nobody holds it."""
    with _open_folder(folder) as descriptor:
        try:
            if descriptor is not None:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            pass
        return os.path.lexists(folder)


@contextmanager
def exclusive_access(root: Path) -> Iterator[None]:
    """Nobody else is alone in the folder meanwhile."""
    with _open_folder(root) as descriptor:
        if descriptor is not None:
            _wait_for_lock(descriptor, root)
        yield


def _wait_for_lock(descriptor: int, root: Path) -> None:
    end = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                raise StorageError(
                    f"--save {root}: another program has been changing this folder for {LOCK_SECONDS:.0f} "
                    "seconds; stop it or choose another folder") from None
            time.sleep(0.02)
        except OSError:  # no such locks here
            return None


@contextmanager
def _open_folder(folder: Path) -> Iterator[int | None]:
    """Of the open folder; None where it cannot be opened, which whoever uses it will be told better."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        yield None
        return
    try:
        with unlock_on_exit(descriptor):
            yield descriptor
    finally:
        with suppress(OSError):  # nothing was written through it
            os.close(descriptor)
