"""Two jobs, one folder: the second is told who was first, and a dead first one is not in the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.checkpoint.commit import lock_save_root
from megatron.errors import ConfigError, StorageError
from tests.megatron.checkpoint.made import save_solo

HOLD = """
import sys
from megatron.checkpoint.commit import lock_save_root
with lock_save_root(sys.argv[1]):
    print("held", flush=True)
    input()
"""


def test_the_second_job_is_told_who_was_first(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], cwd=Path(__file__).parents[3],
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        assert first.stdout is not None and first.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError,
                           match=f"--save {tmp_path}: locked by process {first.pid} on "), lock_save_root(tmp_path):
            pass
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
    with lock_save_root(tmp_path):
        save_solo(tmp_path, 1)


def test_the_lock_is_given_back(tmp_path: Path) -> None:
    for _ in range(2):
        with lock_save_root(tmp_path):
            pass
    with pytest.raises(ZeroDivisionError), lock_save_root(tmp_path):
        _ = 1 / 0
    with lock_save_root(tmp_path):
        pass


def test_the_lock_goes_with_its_end_though_a_fork_has_it_too(tmp_path: Path) -> None:
    with lock_save_root(tmp_path):
        ours, theirs = os.pipe()
        if (child := os.fork()) == 0:
            os.close(theirs)
            os.read(ours, 1)  # until the test is over
            os._exit(0)
        os.close(ours)
    try:
        with lock_save_root(tmp_path):
            pass
    finally:
        os.close(theirs)
        os.waitpid(child, 0)


def test_a_forked_child_that_leaves_does_not_let_go_for_us(tmp_path: Path) -> None:
    block = lock_save_root(tmp_path)
    with block:
        if (child := os.fork()) == 0:
            block.__exit__(None, None, None)
            os._exit(0)
        os.waitpid(child, 0)
        told = subprocess.run([sys.executable, "-c", HOLD, str(tmp_path)], cwd=Path(__file__).parents[3],
                              input=b"", capture_output=True)
        assert b"held" not in told.stdout and f"locked by process {os.getpid()}".encode() in told.stderr


def test_a_link_in_place_of_the_lock_does_not_empty_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "thesis").write_text("two years of work")
    (tmp_path / ".lock").symlink_to("thesis")
    with pytest.raises(StorageError, match="cannot write .*/.lock: Too many levels of symbolic links"), \
            lock_save_root(tmp_path):
        pass
    assert (tmp_path / "thesis").read_text() == "two years of work"
