"""Old checkpoints are taken apart behind the run: nobody waits for a slow disk, what a kill leaves is swept, and what
cannot be deleted is told."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.checkpoint import trash, writer
from megatron.checkpoint.commit import Keep
from megatron.checkpoint.piece import Piece
from megatron.checkpoint.reader import open_checkpoint
from megatron.checkpoint.tags import tag_names, verify
from megatron.checkpoint.trash import TRASH, BehindTheRun, delete_now
from megatron.launch import distributed
from mpu.groups import SOLO, build
from tests.distributed import run_ranks
from tests.megatron.helpers import ROOT, TINY


def save(root: Path, step: int, behind: BehindTheRun | None, tag: str | None = None, last: int = 1) -> None:
    writer.save(root, tag or f"global_step{step}", pieces=[Piece("w", "weight", (4,), None, 0, 1, 0, torch.ones(4))],
                rank_state={}, shared_state={}, config={}, layout={"tp": 1, "dp": 1}, world=SOLO, run_id="run",
                iteration=step, say=lambda line: None, keep=Keep(last), trash=behind)


def in_trash(root: Path) -> list[str]:
    return [name for name in os.listdir(root) if name.startswith(TRASH)]


@contextmanager
def slow_disk(begun: list[Any] | None = None) -> Iterator[threading.Event]:
    """Nothing is deleted until the event is set; what was begun to be."""
    go, remove = threading.Event(), shutil.rmtree

    def later(*words: Any, **more: Any) -> None:
        if begun is not None:
            begun.append(words)
        assert go.wait(10)
        remove(*words, **more)

    with mock.patch.object(trash.shutil, "rmtree", later):
        yield go


def test_a_save_does_not_wait_for_what_it_deletes_and_the_next_one_does(tmp_path: Path) -> None:
    behind = BehindTheRun()
    save(tmp_path, 1, behind)
    begun: list[Any] = []
    with slow_disk(begun) as go:
        save(tmp_path, 2, behind)
        assert tag_names(tmp_path) == ["global_step2"] and len(in_trash(tmp_path)) == 1
        assert verify(tmp_path, "global_step2") and open_checkpoint(tmp_path, say=pytest.fail).tag == "global_step2"
        later = threading.Thread(target=save, args=(tmp_path, 3, behind))
        later.start()
        later.join(0.2)
        assert later.is_alive() and len(begun) == 1  # and it does not delete the same beside
        assert tag_names(tmp_path) == ["global_step2"]
        assert not [name for name in os.listdir(tmp_path) if name.startswith(".staging")]
        go.set()
        later.join(60)
    behind.wait()
    assert tag_names(tmp_path) == ["global_step3"] and in_trash(tmp_path) == []


def test_the_copy_that_a_save_of_the_same_name_replaces_goes_behind_the_run_too(tmp_path: Path) -> None:
    behind = BehindTheRun()
    save(tmp_path, 1, behind)
    with slow_disk() as go:
        save(tmp_path, 1, behind)
        assert len(in_trash(tmp_path)) == 1
        go.set()
    behind.wait()
    assert in_trash(tmp_path) == [] and tag_names(tmp_path) == ["global_step1"]


def test_without_a_trash_of_its_own_a_save_leaves_nothing(tmp_path: Path) -> None:
    for step in (1, 2, 2):
        save(tmp_path, step, None)
    assert sorted(os.listdir(tmp_path)) == ["global_step2", "latest", "zero_to_fp32.py"]


def test_a_program_that_ends_well_waits_and_one_that_fails_does_not(tmp_path: Path) -> None:
    behind = BehindTheRun()
    save(tmp_path, 1, behind)
    with slow_disk() as go:
        save(tmp_path, 2, behind)
        leaving = threading.Thread(target=distributed.take_leave)
        leaving.start()
        leaving.join(0.2)
        assert leaving.is_alive()
        go.set()
        leaving.join(60)
    assert in_trash(tmp_path) == []


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS, errno.EACCES])
def test_what_cannot_be_deleted_is_told_and_does_not_fail_the_save(number: int, tmp_path: Path) -> None:
    said: list[str] = []
    behind = BehindTheRun(said.append)
    save(tmp_path, 1, behind)
    with mock.patch.object(os, "unlink", side_effect=OSError(number, os.strerror(number))), \
            mock.patch.object(os, "rmdir", side_effect=OSError(number, os.strerror(number))):
        folder = tmp_path / f"{TRASH}global_step1-0"
        os.rename(tmp_path / "global_step1", folder)
        behind.delete(folder)
        behind.wait()
    assert said == [f"warning: {folder}, an old checkpoint, cannot be deleted ({os.strerror(number)}): the next save "
                    "tries again"]
    save(tmp_path, 2, behind)
    assert in_trash(tmp_path) == [] and len(said) == 1


def test_what_somebody_else_deletes_meanwhile_is_no_warning(tmp_path: Path) -> None:
    said: list[str] = []
    behind = BehindTheRun(said.append)
    save(tmp_path, 1, behind)
    with slow_disk() as go:
        save(tmp_path, 2, behind)
        for name in in_trash(tmp_path):
            subprocess.run(["rm", "-r", str(tmp_path / name)], check=True)
        go.set()
        behind.wait()
    assert said == []


def test_without_threads_it_is_deleted_at_once(tmp_path: Path) -> None:
    behind = BehindTheRun()
    save(tmp_path, 1, behind)
    with mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread")):
        save(tmp_path, 2, behind)
    assert in_trash(tmp_path) == []
    behind.wait()


def test_many_folders_from_several_threads_are_all_deleted(tmp_path: Path) -> None:
    behind = BehindTheRun()
    folders = [tmp_path / f"{TRASH}{number}" for number in range(200)]
    for folder in folders:
        (folder / "deeper").mkdir(parents=True)

    def give(share: list[Path]) -> None:
        for folder in share:
            behind.delete(folder)
            behind.wait()

    threads = [threading.Thread(target=give, args=(folders[start::4],)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    behind.wait()
    assert os.listdir(tmp_path) == []


def test_a_link_goes_without_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / f"{TRASH}link").symlink_to(tmp_path / "kept")
    assert delete_now(tmp_path / f"{TRASH}link") is None and os.listdir(tmp_path) == ["kept"]


def ranks_save(rank: int, world: int, root: str) -> float:
    """How long the slower of two saves took on this rank."""
    behind, seconds = BehindTheRun(), 0.0
    with mock.patch.object(trash.shutil, "rmtree", lambda *words, really=shutil.rmtree, **more:
                           (time.sleep(3), really(*words, **more))):
        for step in (1, 2):
            began = time.monotonic()
            piece = Piece("w", "weight", (4,), None, 0, 1, 0, torch.ones(4))
            writer.save(root, f"global_step{step}", pieces=[piece] if rank == 0 else [], tensors=[piece.tensor()],
                        rank_state={}, shared_state={}, config={}, layout={"tp": 1, "dp": world}, world=build().world,
                        run_id="run", iteration=step, keep=Keep(1), trash=behind)
            seconds = max(seconds, time.monotonic() - began)
        distributed.take_leave()
    return seconds


def test_no_rank_waits_for_a_deletion(tmp_path: Path) -> None:
    assert max(run_ranks(ranks_save, 2, str(tmp_path), timeout=60)) < 2.5
    assert sorted(os.listdir(tmp_path)) == ["global_step2", "latest", "zero_to_fp32.py"]


KILLED = """
import os, shutil, sys
import pretrain_gpt2
from megatron.checkpoint import trash

def half(path, *words, **more):
    for name in sorted(os.listdir(path))[:2]:
        os.unlink(os.path.join(path, name))
    print("half deleted", path, flush=True)
    os.kill(os.getpid(), 9)

trash.shutil.rmtree = half
pretrain_gpt2.main()
"""


def test_a_program_that_is_killed_while_it_deletes_leaves_what_the_next_start_sweeps(tmp_path: Path) -> None:
    flags = [*TINY, "--mock-data", "--train-iters", "3", "--save-interval", "1", "--keep-last", "1",
             "--save", str(tmp_path / "s"), "--load", str(tmp_path / "s")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    killed = subprocess.run([sys.executable, "-c", KILLED, *flags], env=environment, capture_output=True, text=True)
    assert killed.returncode == -9 and "half deleted" in killed.stdout, killed.stderr
    assert len(in_trash(tmp_path / "s")) == 1
    for tag in tag_names(tmp_path / "s"):
        verify(tmp_path / "s", tag)
    subprocess.run([sys.executable, "pretrain_gpt2.py", *flags], env=environment, cwd=ROOT, check=True,
                   capture_output=True)
    assert sorted(name for name in os.listdir(tmp_path / "s") if name != ".lock") == [
        "global_step3", "latest", "zero_to_fp32.py"]
