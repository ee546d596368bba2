"""Killed at any call of a save, nothing committed is lost; the next save tidies up, and says so in one line."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from megatron.checkpoint import commit, writer
from megatron.checkpoint.commit import (Keep, check_save_root_is_writable, clean_up_save_root, exclusive_access,
                                        lock_save_root)
from megatron.checkpoint.manifest import Lineage
from megatron.checkpoint.reader import open_checkpoint
from megatron.checkpoint.tags import commit_records, tag_names
from megatron.checkpoint.verify import verify_tag
from megatron.checkpoint.writer import AsyncSaver, SavePlan
from megatron.errors import ConfigError, StorageError
from mpu.groups import SOLO
from tests.distributed import run_ranks
from tests.megatron.checkpoint.faults import Killed, dying_at
from tests.megatron.checkpoint.made import load_candidates, printed, save_solo, weight
from tests.megatron.helpers import ROOT


def changes_of_a_save(root: Path, step: int) -> int:
    with dying_at(root, 10**9) as made:
        save_solo(root, step, seed=20)
    return len(made)


def value(root: Path, tag: str) -> float:
    """The one number that a `save_solo` checkpoint holds."""
    (number,) = {*weight(root, tag)}
    return number


def check_next_save(root: Path) -> None:
    """The next save works, and leaves nothing hidden behind."""
    save_solo(root, 3)
    assert set(os.listdir(root)) - {"global_step2"} == {"global_step1", "global_step3", "latest", "zero_to_fp32.py"}
    assert value(root, "global_step3") == 3 and (root / "latest").read_text() == "global_step3\n"


def in_background(plan: SavePlan) -> None:
    """As --async-save completes it."""
    saver = AsyncSaver(SOLO)
    saver.start(plan)
    saver.wait_for_save()


@pytest.fixture(params=[writer.finish, in_background], ids=["foreground", "background"])
def saves(request: pytest.FixtureRequest) -> Iterator[None]:
    with mock.patch.object(writer, "finish", request.param):
        yield


@pytest.mark.parametrize("step", [2, 1], ids=["a new tag", "a replacement"])
@pytest.mark.usefixtures("saves")
def test_killed_anywhere_in_a_save_one_whole_copy_is_found_and_the_previous_tag(step: int, tmp_path: Path) -> None:
    save_solo(tmp_path / "rehearsal", 1, seed=10)
    values, aside = [], 0
    for call in range(changes_of_a_save(tmp_path / "rehearsal", step)):
        root = tmp_path / str(call)
        save_solo(root, 1, seed=10)
        with pytest.raises(Killed), dying_at(root, call):
            save_solo(root, step, seed=20)
        newest = tag_names(root)[-1]
        values.append(value(root, newest))
        assert step == 1 or value(root, "global_step1") == 10 and (newest == "global_step2") == (values[-1] == 20)
        assert open_checkpoint(root).tag == newest
        aside += not (root / "global_step1").exists()
        assert sum(name.startswith(".staging") for name in os.listdir(root)) <= 1
        check_next_save(root)
        assert value(root, newest) == values[-1]
    assert values == sorted(values) and set(values) == {10, 20}  # once committed, for good
    assert bool(aside) == (step == 1)  # the gap between the two renames of a replacement was met


def test_killed_while_tidying_up_nothing_is_lost(tmp_path: Path) -> None:
    save_solo(tmp_path / "rehearsal", 1)
    for first in range(changes_of_a_save(tmp_path / "rehearsal", 1)):
        for second in range(0, 6, 2):
            root = tmp_path / f"{first}-{second}"
            save_solo(root, 1, seed=10)
            with pytest.raises(Killed), dying_at(root, first):
                save_solo(root, 1, seed=20)
            before = value(root, "global_step1")
            with pytest.raises(Killed), dying_at(root, second + first % 2):
                save_solo(root, 3)
            assert value(root, "global_step1") == before
            shutil.rmtree(root)


@pytest.mark.parametrize("name", [".staging-global_step2-dead", ".latest.123.abcd.tmp", ".zero_to_fp32.py.1.ab.tmp"])
def test_what_a_kill_left_is_swept_by_the_next_save_and_a_save_that_it_left_is_told(name: str, tmp_path: Path) -> None:
    save_solo(tmp_path, 1)
    left = tmp_path / name
    if name.startswith(".staging"):
        left.mkdir()
        (left / "rank0.safetensors").write_bytes(b"half")
    else:
        left.touch()
    with printed() as lines:
        save_solo(tmp_path, 2)
    assert lines == ([f"removing {left}, left by an interrupted save"] if left.suffix != ".tmp" else [])
    assert not [other for other in os.listdir(tmp_path) if other.startswith(".")]


HOLD = """
import sys
from pathlib import Path
from megatron.checkpoint.commit import lock_save_root, open_staging_folder
with {}:
    print("held", flush=True)
    input()
"""


@contextmanager
def another_program(holds: str, root: Path) -> Iterator[int]:
    """A program that holds this until it is killed at the end of the block; its process id."""
    with subprocess.Popen([sys.executable, "-c", HOLD.format(holds), str(root)], cwd=ROOT, stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        yield other.pid
        other.kill()


def test_a_staging_folder_of_a_program_that_saves_now_is_left_alone_until_that_is_dead(tmp_path: Path) -> None:
    with another_program('open_staging_folder(Path(sys.argv[1]), "global_step2", "other")', tmp_path):
        save_solo(tmp_path, 2, run="other")  # of the same name: both went on from one checkpoint
        assert (tmp_path / ".staging-global_step2-other").exists() and value(tmp_path, "global_step2") == 2
    save_solo(tmp_path, 3)
    assert not (tmp_path / ".staging-global_step2-other").exists()


@pytest.mark.parametrize("work", [clean_up_save_root, lambda root: save_solo(root, 2)])
def test_one_at_a_time_renames_in_the_folder(work: Callable[[Path], None], tmp_path: Path) -> None:
    """Between the two renames of a replacement nobody else puts the old copy back."""
    save_solo(tmp_path, 1)
    with exclusive_access(tmp_path):
        os.rename(tmp_path / "global_step1", tmp_path / ".aside-global_step1")
        thread = threading.Thread(target=work, args=(tmp_path,))
        thread.start()
        thread.join(0.1)
        assert thread.is_alive() and not (tmp_path / "global_step1").exists()
    thread.join()
    assert value(tmp_path, "global_step1") == 1
    with exclusive_access(tmp_path), mock.patch.object(commit, "LOCK_SECONDS",
                                                       0), pytest.raises(StorageError, match="another program"):
        work(tmp_path)


def test_without_locks_of_the_file_system_a_save_works_as_ever(tmp_path: Path) -> None:
    left = tmp_path / ".staging-global_step2-dead"
    left.mkdir()
    with mock.patch.object(fcntl, "flock", side_effect=OSError(errno.ENOLCK, "no locks")):
        save_solo(tmp_path, 1)
    assert not left.exists() and value(tmp_path, "global_step1") == 1


def test_a_good_copy_aside_outlives_a_damaged_new_one(tmp_path: Path) -> None:
    save_solo(tmp_path, 1, seed=10)
    shutil.copytree(tmp_path / "global_step1", tmp_path / ".aside-global_step1")
    (tmp_path / "global_step1" / "manifest.json").write_bytes(b"")
    commit.clean_up_save_root(tmp_path)
    assert (tmp_path / ".aside-global_step1").exists()
    save_solo(tmp_path, 1, seed=20)
    assert value(tmp_path, "global_step1") == 20
    assert sorted(os.listdir(tmp_path)) == ["global_step1", "latest", "zero_to_fp32.py"]


def test_prune_keeps_every_nth_step_as_well(tmp_path: Path) -> None:
    for step in range(1, 10):
        save_solo(tmp_path, step, keep=Keep(last=2, every=3))
    assert tag_names(tmp_path) == [f"global_step{step}" for step in (3, 6, 8, 9)]


def test_an_old_tag_that_cannot_be_deleted_does_not_fail_the_save(tmp_path: Path) -> None:
    save_solo(tmp_path, 1)
    with mock.patch.object(commit, "discard_folder", side_effect=StorageError("busy")), printed() as lines:
        save_solo(tmp_path, 2, keep=Keep(last=1))
    assert lines == ["warning: global_step2 is saved; older tags that --keep-last would delete are left: busy"]
    assert tag_names(tmp_path) == ["global_step1", "global_step2"] and value(tmp_path, "global_step2") == 2


def test_keep_last_counts_and_deletes_the_tags_of_its_own_run_only(tmp_path: Path) -> None:
    for step in (1, 2, 3, 50):
        save_solo(tmp_path, step, run="old")
    with printed() as said:
        for step in (4, 5, 6, 7):
            save_solo(tmp_path, step, run="new", keep=Keep(2))
    assert tag_names(tmp_path) == [f"global_step{step}" for step in (1, 2, 3, 6, 7, 50)]
    assert said == [f"note: {tmp_path} holds global_step1, global_step2, global_step3 and 1 more of another run: "
                    "--keep-last counts and deletes the checkpoints of this run only"]
    with printed() as said:
        save_solo(tmp_path, 8, run="old", after="global_step3", keep=Keep(2))  # that run, resumed
    assert tag_names(tmp_path) == [f"global_step{step}" for step in (3, 6, 7, 8, 50)] and said == []


def test_probe_names_the_flag_and_the_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name, reason in [("file", "is a file"), ("link", "dangling"),
                         ("file/a/b", "cannot be written .Not a directory"), ("x" * 300, "File name too long")]:
        with pytest.raises(StorageError, match=f"^--save {tmp_path / name}: .*{reason}"):
            check_save_root_is_writable(tmp_path / name)
    check_save_root_is_writable(tmp_path / "new" / "run")
    assert os.listdir(tmp_path / "new" / "run") == []
    with mock.patch.object(os, "mkdir", side_effect=PermissionError(13, "Permission denied")), \
            pytest.raises(StorageError, match=f"--save {tmp_path}: cannot be written .Permission denied"):
        check_save_root_is_writable(tmp_path)


# ---- two jobs, one folder --------------------------------------------------------------------------------------------

def test_the_second_job_is_told_who_was_first_under_every_name_of_the_folder(tmp_path: Path) -> None:
    names = names_of(tmp_path)
    with another_program("lock_save_root(sys.argv[1])", names[0]) as first:
        for name in names:
            with pytest.raises(ConfigError, match=f"--save {name}: locked by process {first} on "), \
                    lock_save_root(name):
                pass
    with lock_save_root(names[0]):
        save_solo(names[0], 1)


def test_the_lock_goes_with_its_end_or_an_error_though_a_fork_has_it_too(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), lock_save_root(tmp_path):
        ours, theirs = os.pipe()
        if (child := os.fork()) == 0:
            os.close(theirs)
            os.read(ours, 1)  # until the test is over
            os._exit(0)
        os.close(ours)
        _ = 1 / 0
    try:
        with lock_save_root(tmp_path):
            pass
    finally:
        os.close(theirs)
        os.waitpid(child, 0)


def names_of(root: Path) -> list[Path]:
    """A folder by several names."""
    (root / "s").mkdir()
    (root / "beside").mkdir()
    (root / "link").symlink_to("s")
    return [root / name for name in ("s", "link", "s/../s", "beside/../s")]


def save_many(rank: int, world: int, names: list[Path], count: int) -> None:
    """A program with a loop of its own, beside others in the same folder; a branch of its own, two tags kept."""
    lineage = Lineage()
    for step in range(1, count + 1):
        tag = "shared" if step % 3 == 0 else f"global_step{rank * 100 + step}"
        save_solo(names[rank], rank * 100 + step, tag=tag, run=f"run{rank}", lineage=lineage, keep=Keep(2))
    commit.DELETER.wait_for_deletions()


@pytest.mark.parametrize("count", [7, pytest.param(60, marks=pytest.mark.slow)])
def test_programs_that_save_into_one_folder_have_numbers_and_branches_of_their_own(count: int, tmp_path: Path) -> None:
    run_ranks(save_many, 4 if count > 10 else 2, names_of(tmp_path), count, init=False, timeout=300)
    found = commit_records(tmp_path / "s")
    assert len({manifest.commit for manifest in found}) == len(found)
    assert max(manifest.commit for manifest in found) == (4 if count > 10 else 2) * count, "no number was given twice"
    for manifest in found:
        verify_tag(tmp_path / "s", manifest.tag)
        (tmp_path / "s" / "latest").write_text(manifest.tag)
        owners = {other.run_id for other in found if other.tag in load_candidates(tmp_path / "s")}
        assert owners == {manifest.run_id}
    assert not [name for name in os.listdir(tmp_path / "s") if name.startswith((".staging", ".aside", ".trash"))]
