"""Where the drive under the ranks' meeting place is full, or files may not be longer, a job ends with the place and
what to do. Nobody waits for the rest of a note that was cut off."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron.distributed import exit_codes, rank_status
from megatron.errors import StorageError
from megatron.launch import launcher
from tests.megatron.helpers import ROOT, TINY

LIMIT = 60.0
"""Seconds for a job that imports torch on a slow machine; without what is tested here it takes half an hour."""


@pytest.mark.parametrize("kibibytes", [1, 8, 4095])
def test_a_limit_on_the_size_of_files_ends_the_launcher_before_it_starts_ranks(
        kibibytes: int, tmp_path: Path) -> None:
    ended = subprocess.run(["bash", "-c", f'ulimit -f {kibibytes}; exec "$@"', "bash", sys.executable, "-m",
                            "megatron.launch", "--nproc-per-node", "2", "pretrain_gpt2.py"], cwd=ROOT, timeout=LIMIT,
                           capture_output=True, text=True, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert ended.returncode == 7 and ended.stdout == ""
    assert ended.stderr == (f"error: launcher: files may be no longer than {1024 * kibibytes} bytes (ulimit -f), and "
                            f"the one in which the ranks meet may need {launcher.STORE_FILE_BYTES}; raise the limit\n")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("which", ["store", "places", "folder"])
def test_a_temporary_folder_without_room_is_named(
        which: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capfd: pytest.CaptureFixture[str]) -> None:
    def fail(*arguments: object, **more: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    owner, name = {"store": (launcher, "_fallocate"), "places": (os, "posix_fallocate"), "folder": (os, "mkdir")}[which]
    monkeypatch.setattr(owner, name, fail)
    assert launcher.main(["--nproc-per-node", "2", __file__]) == 7
    assert capfd.readouterr().err == (
        f"error: launcher: the files through which the ranks meet cannot be made in {tmp_path}: {os.strerror(number)}; "
        "free space there, or name another folder in TMPDIR\n")
    assert not [*tmp_path.iterdir()]


def test_room_is_reserved_and_the_file_is_empty(tmp_path: Path) -> None:
    launcher.preallocate_store_file(str(tmp_path / "store"))
    status = (tmp_path / "store").stat()
    assert status.st_size == 0 and status.st_mode & 0o077 == 0
    if status.st_blocks:  # this file system keeps promises
        assert status.st_blocks * 512 >= launcher.STORE_FILE_BYTES


def test_a_file_system_that_promises_nothing_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "FALLOC_FL_KEEP_SIZE", 1 << 20)  # a mode that no kernel knows
    launcher.preallocate_store_file(str(tmp_path / "store"))
    assert (tmp_path / "store").exists()


def test_the_file_of_places_has_no_holes(tmp_path: Path) -> None:
    rank_status.StatusFile(str(tmp_path / "places"), 3)
    status = (tmp_path / "places").stat()
    assert status.st_size == 3 * rank_status.SLOT_BYTES <= status.st_blocks * 512


LIMITED = """
import os, resource, sys, time
import pretrain_gpt2
from megatron.distributed import exit_codes
from megatron.distributed.signals import StopListener
from megatron.train import loop
rank, place, store = int(os.environ["RANK"]), sys.argv.pop(1), os.environ["MEGATRON_STORE_FILE"]
forward = loop.forward_loss
def limit(room):
    there = os.path.getsize(store) if os.path.exists(store) else 0
    resource.setrlimit(resource.RLIMIT_FSIZE, (there + room, there + room))
def limited(*args, **more):
    if rank == 0:
        limit(20)
    else:
        time.sleep(1000)
    return forward(*args, **more)
if place == "the meeting" and rank == 0:
    limit(3000)
if place == "a pause":
    loop.forward_loss = limited
sys.exit(exit_codes.run(lambda: pretrain_gpt2.main(StopListener().listen()), is_job=True))
"""


@pytest.mark.parametrize("place", [pytest.param("the meeting", marks=pytest.mark.slow), "a pause"])
def test_a_note_that_does_not_fit_ends_the_job_with_the_place(place: str, tmp_path: Path) -> None:
    """In the middle of it: the file ends where nobody expects it."""
    (tmp_path / "program.py").write_text(LIMITED)
    begun = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-m", "megatron.launch", "--nproc-per-node", "2", str(tmp_path / "program.py"), place, *TINY,
         "--mock-data", "--train-iters", "20", "--zero-stage", "3"], capture_output=True, text=True, timeout=100,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)})
    assert ended.returncode == 7, ended.stderr
    assert ended.stderr.startswith(f"error: rank 0 cannot write {tmp_path}/megatron-launch-")
    assert "File too large; free space there or name another folder in TMPDIR" in ended.stderr
    assert ended.stderr.count("\n") == 1 and time.monotonic() - begun < LIMIT


def test_only_a_store_of_our_launcher_is_one_that_is_full() -> None:
    error = dist.DistStoreError(os.strerror(errno.ENOSPC))
    assert exit_codes.exit_reason_of(error, {"MEGATRON_STORE_FILE": "/tmp/x/store", "RANK": "1"}).code == 7
    assert exit_codes.exit_reason_of(error, {"RANK": "1"}).is_peer_loss
    assert exit_codes.exit_reason_of(dist.DistStoreError("wait timeout after 1ms"),
                                     {"MEGATRON_STORE_FILE": "x"}).is_peer_loss
    with pytest.raises(StorageError), launcher.explain_temp_dir_errors():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


CUT_OFF = """
import os, resource, sys
import torch.distributed as dist
from mpu.store import StoreKV
store = dist.FileStore(sys.argv[1], 2)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
board = StoreKV("b")
board.write("one", 1)
size = os.path.getsize(sys.argv[1]) + 10
resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
calls = dict(write=lambda: board.write("two", 100 * "x"), replace=lambda: board.compare_and_set("two", None, 100 * "x"),
             count=lambda: board.add(100 * "two"))
calls |= dict(read=lambda: board.read("one"), read_all=lambda: board.read_all(["one"]))
said = []
for name in [sys.argv[2], *calls]:
    try:
        calls[name]()
    except RuntimeError as error:
        said.append(f"{type(error).__name__}: {error}")
print(*said, sep="\\n", flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("call", ["write", "replace", "count"])
def test_a_board_is_not_asked_again_after_a_note_that_was_cut_off(call: str, tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", CUT_OFF, str(tmp_path / "store"), call], cwd=ROOT, timeout=LIMIT,
                           capture_output=True, text=True)
    first, *others = ended.stdout.splitlines()
    assert first == "DistStoreError: File too large"
    assert others == 5 * ["RuntimeError: a message could not be written to the store"]
