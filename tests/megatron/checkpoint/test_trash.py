"""Old checkpoints are taken apart behind the run: nobody waits for a slow disk, what a kill leaves is swept, and what
cannot be deleted is told."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron.checkpoint import commit
from megatron.checkpoint.commit import DELETER, TRASH_PREFIX, BackgroundDeleter, Keep, clean_up_save_root
from megatron.checkpoint.tags import tag_names
from megatron.checkpoint.verify import verify_tag
from megatron.distributed import process_group
from megatron.distributed.rank_status import STATUS
from megatron.distributed.signals import StopListener
from tests.megatron.checkpoint.faults import failing
from tests.megatron.checkpoint.made import printed, save_solo

IN_BACKGROUND = BackgroundDeleter.delete  # which conftest.py replaces


@pytest.fixture(autouse=True)
def in_background() -> Iterator[None]:
    with mock.patch.object(BackgroundDeleter, "delete", IN_BACKGROUND):
        yield
        DELETER.wait_for_deletions()


def save(root: Path, step: int) -> None:
    save_solo(root, step, keep=Keep(1))


def in_trash(root: Path) -> list[str]:
    return [name for name in os.listdir(root) if name.startswith(TRASH_PREFIX)]


@contextmanager
def slow_disk() -> Iterator[threading.Event]:
    """Nothing is deleted until the event is set."""
    go, remove = threading.Event(), shutil.rmtree

    def later(*words: Any, **more: Any) -> None:
        assert go.wait(10)
        remove(*words, **more)

    with mock.patch.object(commit.shutil, "rmtree", later):
        yield go


def in_thread(action: Callable[[], object]) -> threading.Thread:
    """Under way after a moment, unless it has ended."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(0.3)
    return thread


def test_a_save_does_not_wait_for_what_it_deletes(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with slow_disk() as go:
        for step in (2, 3):
            save(tmp_path, step)
            assert tag_names(tmp_path) == [f"global_step{step}"] and len(in_trash(tmp_path)) == step - 1
            verify_tag(tmp_path, f"global_step{step}")
        go.set()
    DELETER.wait_for_deletions()
    assert tag_names(tmp_path) == ["global_step3"] and in_trash(tmp_path) == []


def test_a_save_waits_for_what_is_deleted_where_its_room_is_needed(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with slow_disk() as go, mock.patch.object(commit, "_free_bytes", lambda path: 0 if in_trash(tmp_path) else 1 << 30):
        save(tmp_path, 2)
        later = in_thread(lambda: save(tmp_path, 3))
        assert later.is_alive() and tag_names(tmp_path) == ["global_step2"]
        go.set()
        later.join(60)
    assert tag_names(tmp_path) == ["global_step3"]


def test_what_a_kill_left_in_the_trash_is_no_work_of_a_save_or_a_start(tmp_path: Path) -> None:
    """All ranks wait for both."""
    for name in (f"{TRASH_PREFIX}left", ".staging-global_step1-killed"):
        (tmp_path / name).mkdir()
    with slow_disk() as go:
        with printed() as lines:
            clean_up_save_root(tmp_path)
        assert len(in_trash(tmp_path)) == 2 and len(lines) == 1
        save(tmp_path, 1)
        assert sum(thread.name == "delete" for thread in threading.enumerate()) == 2  # each once
        go.set()
        DELETER.wait_for_deletions()
    assert in_trash(tmp_path) == []


@pytest.mark.parametrize("is_stopped", [False, True])
@pytest.mark.parametrize("leave", [process_group.run_shutdown_callbacks, process_group.shutdown])
def test_a_program_that_ends_well_waits_where_it_has_left_the_others_until_it_is_asked_to_stop(
        leave: Callable[[], None], is_stopped: bool, tmp_path: Path) -> None:
    stop, events = StopListener(), list[str]()
    save(tmp_path, 1)
    process_group.register_stop_check(stop.is_stop_pending)
    with slow_disk() as go, mock.patch("torch.distributed.is_initialized", return_value=True), \
            mock.patch("torch.distributed.destroy_process_group", lambda: events.append("left")):
        save(tmp_path, 2)
        leaving = in_thread(leave)
        assert leaving.is_alive() and STATUS.snapshot.activity == "deletion of old checkpoints"
        assert events == (["left"] if leave is process_group.shutdown else [])
        stop.signal = signal.SIGTERM if is_stopped else None
        go.set() if not is_stopped else None
        leaving.join(5)
        assert not leaving.is_alive() and len(in_trash(tmp_path)) == is_stopped
        go.set()
        DELETER.wait_for_deletions()


def test_what_cannot_be_deleted_is_told_and_does_not_fail_the_save(tmp_path: Path, capsys: pytest.CaptureFixture[str]
                                                                   ) -> None:
    save(tmp_path, 1)
    with failing(tmp_path, errno.EROFS, lambda operation, path: TRASH_PREFIX in path, ["unlink", "rmdir"]):
        save(tmp_path, 2)
        DELETER.wait_for_deletions()
    (folder,) = in_trash(tmp_path)
    assert capsys.readouterr().err == (f"warning: {tmp_path / folder}, an old checkpoint, cannot be deleted (Read-only "
                                       "file system): the next save tries again\n")
    save(tmp_path, 3)
    DELETER.wait_for_deletions()
    assert in_trash(tmp_path) == [] and capsys.readouterr().err == ""


def test_without_threads_it_is_deleted_at_once(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with mock.patch.object(commit.threading.Thread, "start", side_effect=RuntimeError("can't start new thread")):
        DELETER.delete((tmp_path / "global_step1").rename(tmp_path / f"{TRASH_PREFIX}1"))
    assert in_trash(tmp_path) == []
