"""Commit a checkpoint: stage, fsync, rename, update `latest`, and clean up what an interrupted save left. No torch.

    <tag>                    a committed checkpoint
    .aside-<tag>             the old copy of a tag being replaced; it is the tag while no `<tag>` exists
    .staging-<tag>-<run>     a save in progress, locked by its program (flock); never read
    .trash-<name>            being deleted; never read
    .latest-pending          what `latest` is about to say (tags.py)

Order: fsync files and manifest in staging, write `.latest-pending`, [rename <tag> aside], rename staging to <tag>,
fsync the root, write `latest`, remove `.latest-pending`. A kill before the second rename leaves the old checkpoint,
after it the new one. Nothing is deleted in place. Several saves into one root commit one after the other.
"""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from data.storage import LockFile, LockResult, StorageFault, fsync_directory, staged_file, try_lock, unlock_on_exit
from megatron.checkpoint.manifest import (LATEST, MANIFEST, CommitRecord, check_safe_name, iteration_of_tag,
                                          read_manifest_end)
from megatron.checkpoint.tags import (ASIDE_PREFIX, PENDING_LATEST, commit_records, committed_pending_tag,
                                      format_file_names, latest_tag, print_to_stderr, read_latest, read_tag_manifest,
                                      tag_folder, unknown_files)
from megatron.distributed.process_group import after_shutdown, is_stop_requested
from megatron.distributed.rank_status import STATUS
from megatron.errors import CheckpointError, ConfigError, StorageError

STAGING_PREFIX = ".staging-"
TRASH_PREFIX = ".trash-"
# Locked (flock) by the training job that saves into the folder; its content names the job. The kernel releases the lock
# of a dead process.
LOCK_FILE = ".lock"
# Copied beside the tags: converts them to one state dict where this package is not installed.
FP32_SCRIPT = "zero_to_fp32.py"
LOCK_SECONDS = 300.0  # seconds to wait for a commit of another process
POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Keep:
    """Which step tags to keep after a save: the newest `last`, and those whose step is a multiple of `every`."""

    last: int | None = None  # None keeps all
    every: int | None = None


# ---- locks ----------------------------------------------------------------------------------------------------------

@contextmanager
def exclusive_access(root: Path) -> Iterator[None]:
    """Lock the save root against other commits and clean-ups; waits up to LOCK_SECONDS, then raises StorageError."""
    end = time.monotonic() + LOCK_SECONDS
    with _open_folder(root) as descriptor:
        while descriptor is not None and try_lock(descriptor) is LockResult.HELD_BY_OTHER:
            if time.monotonic() > end:
                raise StorageError(f"--save {root}: another program has been changing this folder for "
                                   f"{LOCK_SECONDS:.0f} seconds; stop it or choose another folder")
            time.sleep(0.02)
        yield


@contextmanager
def _open_folder(folder: Path) -> Iterator[int | None]:
    """A descriptor of the folder; None if it cannot be opened, which its user reports better."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        yield None
        return
    try:
        with unlock_on_exit(descriptor):
            yield descriptor
    finally:
        with suppress(OSError):  # read-only descriptor: nothing is lost
            os.close(descriptor)


@contextmanager
def lock_save_root(root: str | Path) -> Iterator[None]:
    """Hold the lock of the existing save root for a training job, or raise a ConfigError naming the holder."""
    path = Path(root) / LOCK_FILE
    with explain_disk_errors(path, 0):
        lock = LockFile(path)
    with lock.file, unlock_on_exit(lock.file):
        if lock.result is LockResult.HELD_BY_OTHER:
            raise ConfigError(f"--save {root}: locked by {lock.holder}; stop it or choose another folder")
        yield


# ---- deletion -------------------------------------------------------------------------------------------------------

def discard_folder(folder: Path) -> None:
    """Rename the folder into the trash, so that it is never partially visible, then delete it in the background."""
    trash = folder.with_name(f"{TRASH_PREFIX}{folder.name.lstrip('.')}-{secrets.token_hex(4)}")
    os.rename(folder, trash)
    fsync_directory(folder.parent)
    DELETER.delete(trash)


class BackgroundDeleter:
    """Deletes folders in threads. A save waits for them only if it needs their space, a successful program at its end.
    """

    def __init__(self) -> None:
        self._threads: dict[Path, threading.Thread] = {}
        self._lock = threading.Lock()  # saves into several folders may delete at the same time

    def delete(self, path: Path) -> None:
        """Delete the folder in a thread. A second call meanwhile has no effect."""
        with self._lock:
            self._threads = {other: thread for other, thread in self._threads.items() if thread.is_alive()}
            if not self._threads:
                after_shutdown(self._finish_at_shutdown)
            if path not in self._threads:
                thread = threading.Thread(target=self._delete, args=(path,), name="delete", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # no new threads during interpreter shutdown
                    self._delete(path)
                else:
                    self._threads[path] = thread

    @property
    def is_deleting(self) -> bool:
        return any(thread.is_alive() for thread in list(self._threads.values()))

    def wait_for_deletions(self, until: Callable[[], object] = lambda: False) -> None:
        """Wait until all folders are deleted, or `until()` is true."""
        while self.is_deleting and not until():
            time.sleep(POLL_SECONDS)

    def _finish_at_shutdown(self) -> None:
        # A stopped program does not wait: the next start deletes the rest.
        with STATUS.in_activity("deletion of old checkpoints"):
            self.wait_for_deletions(until=is_stop_requested)

    def _delete(self, path: Path) -> None:
        """Delete as much as possible. Of a link, only the link is deleted."""
        try:
            if path.is_symlink() or path.is_file():
                path.unlink(missing_ok=True)
            else:
                shutil.rmtree(path, ignore_errors=True)  # deletes what it can, and tolerates concurrent deletions
                shutil.rmtree(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            with suppress(OSError, ValueError):  # the output is closed
                print_to_stderr(f"warning: {path}, an old checkpoint, cannot be deleted ({error.strerror or error}): "
                                "the next save tries again")


DELETER = BackgroundDeleter()


# ---- disk errors ----------------------------------------------------------------------------------------------------

@contextmanager
def explain_disk_errors(path: Path, needed: int, flag: str = "--save") -> Iterator[None]:
    """Turn an OSError inside into a StorageError with flag, path, reason, bytes needed and bytes free. ENOMEM passes
    through."""
    untouched = "; earlier checkpoints are untouched" if flag == "--save" else ""
    try:
        yield
    except (StorageFault, CheckpointError) as error:  # they already name their file
        if isinstance(error, CheckpointError) and not isinstance(error.__cause__, OSError):
            raise
        raise StorageError(f"{flag}: {error}{untouched}") from error
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise
        reason, free = error.strerror or str(error), _free_bytes(path)
        raise StorageError(f"{flag}: cannot write {path}: {reason}; {needed} bytes needed, "
                           f"{'unknown' if free == math.inf else free} free{untouched}") from error


def _free_bytes(path: Path) -> float:
    """Infinity if unknown."""
    with suppress(OSError):
        disk = shutil.disk_usage(next((known for known in (path, *path.parents) if known.exists()), path))
        # Some network file systems do not report it.
        return disk.free if disk.total else math.inf
    return math.inf


def check_save_root_is_writable(root: Path, flag: str = "--save") -> None:
    """Create `root` and its parents if need be and write into it: a bad --save fails before the first step."""
    root = Path(root)
    try:
        if root.is_symlink() and not root.exists():
            raise StorageError(f"{flag} {root}: dangling symbolic link to {os.readlink(root)}")
        if root.exists() and not root.is_dir():
            raise StorageError(f"{flag} {root}: is a file; a folder is needed")
        root.mkdir(parents=True, exist_ok=True)
        trial = root / f"{TRASH_PREFIX}probe-{secrets.token_hex(8)}"
        trial.mkdir()
        with suppress(FileNotFoundError):  # another program's clean-up removed it
            trial.rmdir()
    except OSError as error:
        raise StorageError(f"{flag} {root}: cannot be written ({error.strerror})") from error


@contextmanager
def open_staging_folder(root: Path, tag: str, run_id: str, needed: int = 0) -> Iterator[Path]:
    """Yield an empty, locked staging folder for `tag`, after cleaning up interrupted saves. Raises StorageError unless
    `needed` bytes are free, so that no half checkpoint is written. Waits for background deletions only if their space
    is needed."""
    staging = root / f"{STAGING_PREFIX}{check_safe_name(tag, 'tag')}-{check_safe_name(run_id, 'run id')}"
    with ExitStack() as until_saved:
        with explain_disk_errors(staging, needed):
            if not root.is_dir():
                root.mkdir(exist_ok=True)
                fsync_directory(root.parent)
            clean_up_save_root(root)
            # Without the lock of the save root, so that others may save meanwhile.
            if _free_bytes(root) < needed and DELETER.is_deleting:
                print_to_stderr(f"waiting for the deletion of old checkpoints in {root}, for {needed} bytes of room")
                DELETER.wait_for_deletions(until=lambda: _free_bytes(root) >= needed)
            if _free_bytes(root) < needed:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            with exclusive_access(root):
                while staging.exists():  # another engine resumed from the same checkpoint is saving this tag
                    staging = staging.with_name(f"{staging.name}-{secrets.token_hex(4)}")
                staging.mkdir()
                # Locked, so that no clean-up removes it. It is new, so no other process holds its lock.
                descriptor = until_saved.enter_context(_open_folder(staging))
                if descriptor is not None:
                    try_lock(descriptor)
        yield staging


def clean_up_save_root(root: Path) -> None:
    """Remove leftovers of killed saves, and restore a tag that was moved aside."""
    with exclusive_access(root):
        for name in sorted(os.listdir(root)):
            path = root / name
            if name.startswith(ASIDE_PREFIX):
                _finish_replacement(root, name.removeprefix(ASIDE_PREFIX))
            elif name == PENDING_LATEST:
                if tag := committed_pending_tag(root):
                    print_to_stderr(f"{root / LATEST} now names {tag}, whose save was interrupted after its commit")
                    _write_latest(root, tag)
                else:
                    path.unlink(missing_ok=True)
            elif name.startswith(STAGING_PREFIX):
                with _open_folder(path) as descriptor:
                    # Its save goes on as long as a program holds the lock.
                    is_locked = descriptor is not None and try_lock(descriptor) is LockResult.HELD_BY_OTHER
                if not is_locked and os.path.lexists(path):
                    print_to_stderr(f"removing {path}, left by an interrupted save")
                    discard_folder(path)
            elif name.startswith(TRASH_PREFIX):
                DELETER.delete(path)
            elif name.startswith((f".{LATEST}.", f".{PENDING_LATEST}.", f".{FP32_SCRIPT}.")):
                path.unlink(missing_ok=True)


def _finish_replacement(root: Path, tag: str) -> None:
    """Complete an interrupted replacement of a tag: keep the new copy if it is valid, otherwise restore the old one."""
    folder, aside = root / tag, root / (ASIDE_PREFIX + tag)
    if not folder.exists() and (aside / MANIFEST).exists():
        print_to_stderr(f"restoring {folder}, moved aside by an interrupted save")
        os.rename(aside, folder)
        fsync_directory(root)
        return
    with suppress(CheckpointError):  # if the new copy is damaged, the old one stays aside
        read_tag_manifest(root, tag)
        discard_folder(aside)


# ---- commit ---------------------------------------------------------------------------------------------------------

def commit_tag(staging: Path, root: Path, tag: str, latest: bool = True) -> None:
    """Rename the complete folder `staging` to the tag, replacing one of that name, and name it in `latest`."""
    folder, aside = root / tag, root / (ASIDE_PREFIX + tag)
    with explain_disk_errors(folder, 0):
        fsync_directory(staging)
        script, copy = Path(__file__).with_name(FP32_SCRIPT).read_bytes(), root / FP32_SCRIPT
        if copy.is_symlink() or not copy.is_file() or copy.read_bytes() != script:
            _replace_file(copy, script)
        try:
            if latest:
                # What `latest` will say, for a kill between the second rename and its writing.
                pending = {"tag": tag, "seal": read_manifest_end(staging)[1], "was": read_latest(root)}
                _replace_file(root / PENDING_LATEST, json.dumps(pending, indent=1).encode() + b"\n")
            if folder.exists() and aside.exists():
                discard_folder(folder)  # `clean_up_save_root` kept the aside copy because this one is damaged
            elif os.path.lexists(folder):
                os.rename(folder, aside)
            os.rename(staging, folder)
        except OSError:
            (root / PENDING_LATEST).unlink(missing_ok=True)
            raise
        fsync_directory(root)  # from here on a power cut keeps the new tag
        if latest:
            _write_latest(root, tag)
        if os.path.lexists(aside):
            discard_folder(aside)


def _write_latest(root: Path, tag: str) -> None:
    _replace_file(root / LATEST, f"{tag}\n".encode())
    (root / PENDING_LATEST).unlink(missing_ok=True)


def _replace_file(path: Path, content: bytes) -> None:
    """Write a file of the save root, complete or not at all. A link in its place goes; what it leads to stays."""
    if path.is_symlink():
        path.unlink()
    with staged_file(path) as file:
        file.write(content)


def delete_old_tags(root: Path, keep: Keep, saved: CommitRecord) -> None:
    """Delete complete step tags that `keep` does not name, after the save `saved`.

    Kept are the newest `keep.last` of this save and its ancestors, and every tag committed after the oldest of these.
    Of earlier ones only tags of this run are deleted. Never deleted: the tag that `latest` names, tags with user-chosen
    names, tags of other runs, tags of later steps (of a branch this run has not reached), and links out of the root.
    Warns of unknown files in a deleted tag and, at the first save of a run, notes other runs' tags."""
    if keep.last is None:
        return
    with explain_disk_errors(root, 0):
        steps = [record for record in commit_records(root) if iteration_of_tag(record.tag) is not None]
        ancestors = [record for record in steps if saved.descends_from(record)]
        others = [record.tag for record in steps if record.run_id != saved.run_id and record not in ancestors]
        if others and len(ancestors) == 1:
            more = f" and {len(others) - 3} more" if len(others) > 3 else ""
            print_to_stderr(f"note: {root} holds {', '.join(others[:3])}{more} of another run: --keep-last counts and "
                            "deletes the checkpoints of this run only")
        if len(ancestors) < keep.last:
            return
        # Everything committed since the oldest one that counts is kept, also of a branch that this run has left.
        oldest_kept, latest = ancestors[-keep.last].commit_order, latest_tag(root)
        for record in steps:
            is_kept_step = keep.every and record.iteration % keep.every == 0
            if record.commit_order >= oldest_kept or record.iteration > saved.iteration or is_kept_step \
                    or record.tag in (latest, *others):
                continue
            folder = tag_folder(root, record.tag)
            if unknown := unknown_files(folder):
                print_to_stderr(f"warning: --keep-last deletes {root / record.tag}, and what no save wrote with it: "
                                f"{format_file_names(unknown)}")
            discard_folder(folder)
