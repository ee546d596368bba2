"""A rank's swap folder is its own while it lives, and gone when it has ended, however it ended."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from megatron.errors import ConfigError, StorageError
from megatron.zero.offload import swap_dir
from megatron.zero.offload.swap_dir import SwapDir, close_all_swap_dirs, remove_stale_swap_dirs

FLAG = "--offload-optimizer-nvme-path"

HOLDER = """
import os, sys
from megatron.zero.offload.swap_dir import SwapDir
with SwapDir(sys.argv[1], sys.argv[2], int(sys.argv[3]), flag="--f") as folder:
    os.write(folder.create_file("state"), b"x" * int(sys.argv[4]))
    print(folder.path, flush=True)
    sys.stdin.read()
"""


@contextmanager
def holder(root: Path, run: str = "run", rank: int = 0, size: int = 10_000) -> Iterator[subprocess.Popen[str]]:
    """Another process with a folder, ended by closing its input."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(root), run, str(rank), str(size)], text=True,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin and process.stdout
    process.stdout.readline()
    with process:
        yield process
        process.stdin.close()


def left_by_a_killed_one(root: Path, name: str, size: int = 10_000) -> Path:
    """Just what SIGKILL leaves: a folder whose lock is free."""
    folder = root / name
    folder.mkdir(0o700)
    (folder / "state.tiles").write_bytes(b"x" * size)
    return folder


def test_a_folder_and_its_files_are_nobody_elses_and_go_when_it_is_closed(tmp_path):
    with SwapDir(tmp_path, "run", 3, flag=FLAG) as folder:
        assert folder.path == tmp_path / "run-rank3"
        assert folder.path.stat().st_mode & 0o777 == 0o700
        descriptor = folder.create_file("state")
        assert os.fstat(descriptor).st_mode & 0o777 == 0o600
        os.close(descriptor)
        assert [path.name for path in folder.path.iterdir()] == ["state.tiles"]
    assert list(tmp_path.iterdir()) == []
    folder.close()


def test_a_folder_goes_with_its_object(tmp_path):
    folder = SwapDir(tmp_path, "run", 0, flag=FLAG)
    os.close(folder.create_file("state"))
    del folder
    assert list(tmp_path.iterdir()) == []


def test_ends_without_atexit_close_all(tmp_path):
    folders = [SwapDir(tmp_path, "run", rank, flag=FLAG) for rank in range(2)]
    close_all_swap_dirs()
    assert list(tmp_path.iterdir()) == []
    assert folders[0].close() is None


def test_what_uses_the_files_is_stopped_first(tmp_path):
    folder = SwapDir(tmp_path, "run", 0, flag=FLAG)
    os.close(folder.create_file("state"))
    seen: list[tuple[float, bool]] = []
    path = folder.path / "state.tiles"
    for _ in range(3):
        folder.add_stop_callback(lambda patience: seen.append((patience, path.exists())) is not None)
    folder.close()
    assert seen == [(swap_dir.CLOSE_TIMEOUT_SECONDS, True), (0, True),
                    (0, True)], "one that hangs is waited for, not all"


def test_a_name_that_a_living_process_has_is_left_alone_and_the_next_one_taken(tmp_path):
    with holder(tmp_path) as process:
        with SwapDir(tmp_path, "run", 0, flag=FLAG) as folder:
            assert folder.path.name == "run-rank0-2"
            with SwapDir(tmp_path, "run", 0, flag=FLAG) as third:
                assert third.path.name == "run-rank0-3"
        assert (tmp_path / "run-rank0" / "state.tiles").read_bytes() == b"x" * 10_000
        process.kill()
        process.wait()
        with SwapDir(tmp_path, "run", 0, flag=FLAG) as folder:  # the next start of the same run
            assert folder.path.name == "run-rank0"
            assert list(folder.path.iterdir()) == []
    assert list(tmp_path.iterdir()) == []


def test_a_child_that_outlives_a_killed_process_does_not_keep_its_name(tmp_path):
    program = HOLDER.replace("    print(", "    if os.fork() == 0: print(flush=True); import time; time.sleep(60)\n"
                             "    print(")
    process = subprocess.Popen([sys.executable, "-W", "ignore", "-c", program, str(tmp_path), "run", "0", "1"],
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0)
    try:
        assert process.stdin and process.stdout
        assert b"\n" in {process.stdout.readline(), process.stdout.readline()}
        process.kill()
        process.wait()
        with SwapDir(tmp_path, "run", 0, flag=FLAG) as folder:
            assert folder.path.name == "run-rank0"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.stdin.close()
        process.stdout.close()


IN_MULTIPROCESSING = """
import multiprocessing, os, sys
from pathlib import Path
from megatron.zero.offload.swap_dir import SwapDir

KEPT = []

def work(root, rank):
    KEPT.append(SwapDir(root, "run", rank, flag="--f"))
    os.close(KEPT[-1].create_file("state"))

def look(root):
    print(*sorted(path.name for path in Path(root).iterdir()), flush=True)

if __name__ == "__main__":
    how, root = sys.argv[1:]
    context = multiprocessing.get_context(how)
    if how == "fork":
        work(root, 0)
    for rank, target in enumerate([look, work], 1):
        child = context.Process(target=target, args=(root, rank)[:target.__code__.co_argcount])
        child.start()
        child.join(60)
        look(root)
        assert child.exitcode == 0
"""


@pytest.mark.parametrize("how, seen", [("spawn", [""] * 3), ("forkserver", [""] * 3), ("fork", ["run-rank0"] * 3)])
def test_folders_go_with_a_child_of_multiprocessing_that_made_them(tmp_path: Path, how: str, seen: list[str]) -> None:
    """And not with another one: a fork closes nothing of its parent's."""
    program = tmp_path / "program.py"
    program.write_text(IN_MULTIPROCESSING)
    (tmp_path / "drive").mkdir()
    done = subprocess.run([sys.executable, str(program), how, str(tmp_path / "drive")], text=True, capture_output=True,
                          timeout=100, env={**os.environ, "PYTHONPATH": os.getcwd()})
    assert (done.stdout.splitlines(), done.stderr, done.returncode) == (seen, "", 0)
    assert list((tmp_path / "drive").iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_without_locks_only_a_new_folder_is_taken(tmp_path, monkeypatch, number):
    def refuse(*args: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    stale = left_by_a_killed_one(tmp_path, "run-rank0")
    with SwapDir(tmp_path, "run", 0, flag=FLAG) as folder:
        assert folder.path.name == "run-rank0-2"
    remove_stale_swap_dirs(tmp_path, "run", ())
    assert list(tmp_path.iterdir()) == [stale]


def test_a_folder_removed_between_its_opening_and_its_lock_is_not_used(tmp_path, monkeypatch):
    flock = fcntl.flock

    def remove_first(descriptor: int, flags: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        os.rmdir(tmp_path / "run-rank0")
        flock(descriptor, flags)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    with SwapDir(tmp_path, "run", 0, flag=FLAG) as folder:
        os.close(folder.create_file("state"))
        assert (folder.path / "state.tiles").exists()


@pytest.mark.parametrize("kind", ["link to a folder", "dangling link", "file"])
def test_nothing_but_a_folder_is_accepted_in_its_place(tmp_path, kind):
    elsewhere, place = tmp_path / "elsewhere", tmp_path / "run-rank0"
    elsewhere.mkdir()
    (elsewhere / "precious.tiles").write_text("mine")
    if kind == "file":
        place.write_text("mine")
    else:
        place.symlink_to(elsewhere if kind == "link to a folder" else tmp_path / "nowhere")
    with pytest.raises(StorageError, match=f"{place}: expected a swap folder, found a file or a symbolic link"):
        SwapDir(tmp_path, "run", 0, flag=FLAG)
    assert (elsewhere / "precious.tiles").read_text() == "mine"


@pytest.mark.parametrize("kind", ["link", "other file", "folder"])
def test_a_folder_with_other_content_is_no_swap_folder(tmp_path, kind):
    place = left_by_a_killed_one(tmp_path, "run-rank0")
    if kind == "link":
        (place / "weights.tiles").symlink_to("/etc/passwd")
    elif kind == "folder":
        (place / "weights.tiles").mkdir()
    else:
        (place / "thesis.tex").write_text("mine")
    with pytest.raises(StorageError, match="expected a swap folder, found (weights.tiles|thesis.tex) in it"):
        SwapDir(tmp_path, "run", 0, flag=FLAG)
    assert len(list(place.iterdir())) == 2
    remove_stale_swap_dirs(tmp_path, "run", ())
    assert len(list(place.iterdir())) == 2


def test_a_file_is_never_made_over_something(tmp_path):
    with SwapDir(tmp_path, "run", 0, flag=FLAG) as folder:
        target = tmp_path / "precious"
        target.write_text("mine")
        (folder.path / "state.tiles").symlink_to(target)
        with pytest.raises(FileExistsError):
            folder.create_file("state")
        (folder.path / "state.tiles").unlink()
    assert target.read_text() == "mine"


def test_a_folder_that_is_not_there_is_the_settings_fault(tmp_path):
    with pytest.raises(ConfigError, match=f"{FLAG} {tmp_path}/nowhere: there is no such folder"):
        SwapDir(tmp_path / "nowhere", "run", 0, flag=FLAG)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=f"{FLAG} {tmp_path}/file: expected a folder, found a file"):
        SwapDir(tmp_path / "file", "run", 0, flag=FLAG)


@pytest.mark.parametrize("number, remedy", [
    (errno.EACCES, "Permission denied; make it writable, or"), (errno.EROFS, "Read-only file system; make it writable"),
    (errno.ENOSPC, "No space left on device, .* free; free space, or"), (errno.EIO, "Input/output error; check"),
    (errno.EDQUOT, "Disk quota exceeded, .* free; free space, or"), (errno.EPERM, "its file system takes no new")])
def test_a_folder_that_cannot_be_written_is_named_with_its_flag(tmp_path, monkeypatch, number, remedy):
    def refuse(*args: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "mkdir", refuse)  # root may write anywhere
    with pytest.raises(StorageError, match=f"{FLAG} {tmp_path}: cannot write there: {remedy}"):
        SwapDir(tmp_path, "run", 0, flag=FLAG)


def test_a_file_system_that_keeps_no_files_is_told_as_such():
    with pytest.raises(StorageError, match=f"{FLAG} /proc: cannot write there: its file system takes no new files; "
                                           "choose a folder on a drive"):
        SwapDir("/proc", "run", 0, flag=FLAG)


def test_tidying_removes_what_this_run_left_and_tells_of_others(tmp_path):
    for name in ("run-rank0", "run-rank1", "run-rank1-2", "run-rank7", "runner-rank0"):
        left_by_a_killed_one(tmp_path, name)
    left_by_a_killed_one(tmp_path, "older-rank0", 200_000_000)
    (tmp_path / "other-rank0").mkdir()  # may be one that is being made
    (tmp_path / "older-rank5").symlink_to(tmp_path / "older-rank0")
    said: list[str] = []
    with ExitStack() as living:
        living.enter_context(holder(tmp_path, rank=8))
        living.enter_context(holder(tmp_path, "third"))
        remove_stale_swap_dirs(tmp_path, "run", range(2), said.append)
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            "older-rank0", "older-rank5", "other-rank0", "run-rank0", "run-rank1", "run-rank8", "runner-rank0",
            "third-rank0"]
        assert len(list((tmp_path / "older-rank0").iterdir())) == 1
    assert said == [f"warning: {tmp_path}: 200 MB are left of other runs that have ended: older-rank0, runner-rank0; "
                    "remove what is not needed"]


def test_another_users_folder_is_somebody_elses(tmp_path, monkeypatch):
    place = left_by_a_killed_one(tmp_path, "run-rank0")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert swap_dir._open_and_lock(place, is_new=False) is None
