"""A file of the log that cannot be written ends a run with the flag, the file and the reason; lack of memory does not
pass for a full disk."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.compat.tensorflow_stub.io.gfile import LocalFileSystem

from megatron.config.tree import LogConfig
from megatron.distributed import exit_codes
from megatron.errors import NumericsError, StorageError
from megatron.metrics import sinks
from megatron.metrics.sinks import AppendOnlyFile
from megatron.train.run_log import RunLog
from tests.megatron.helpers import ROOT, TINY, steps, train

DISK = [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ESTALE, errno.EFBIG]


def failing(number: int, calls: list[object] | None = None) -> Callable[..., Any]:
    def fail(*arguments: object, **more: object) -> Any:
        if calls is not None:
            calls.append(arguments)
        raise OSError(number, os.strerror(number))
    return fail


class Broken:
    """A file whose k-th call of one kind fails; half of what is to be written by then is."""

    def __init__(self, file: Any, call: str, number: int) -> None:
        self._file, self._call, self._number = file, call, number
        self.written = 0

    def write(self, data: bytes) -> int:
        self.written += 1
        if self._call == "write" and self.written > 1:
            if self.written == 2:
                return int(self._file.write(data[:len(data) // 2]))
            raise OSError(self._number, os.strerror(self._number))
        return int(self._file.write(data))

    @property
    def closed(self) -> bool:
        return bool(self._file.closed)

    def fileno(self) -> int:
        return int(self._file.fileno())

    def close(self) -> None:
        self._file.close()
        if self._call == "close":
            raise OSError(self._number, os.strerror(self._number))


@pytest.mark.parametrize("number", DISK)
@pytest.mark.parametrize("call", ["write", "fsync", "close"])
def test_a_metrics_file_that_fails_is_named_with_its_flag_and_keeps_whole_lines(
        call: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.jsonl"
    monkeypatch.setattr(sinks, "open", lambda path, mode, **more: Broken(
        open(path, mode, **more), call, number) if mode == "ab" else open(path, mode, **more), raising=False)
    file = AppendOnlyFile("--metrics-file", str(path), print)
    file.append('{"iteration": 1}\n')
    if call == "fsync":
        monkeypatch.setattr(os, "fsync", failing(number))
    with pytest.raises(StorageError) as caught:
        file.append('{"iteration": 2}\n') if call == "write" else file.close()
    if call == "write":
        file.close()
    failure = exit_codes.exit_reason_of(caught.value)
    assert failure.code == 7
    assert failure.text.startswith(f"--metrics-file {path} cannot be written: {os.strerror(number)}")
    assert path.read_text() == '{"iteration": 1}\n'


@pytest.mark.parametrize(("left", "found"), [
    (b"", ""), (b'{"iteration": 1}\n', '{"iteration": 1}\n'), (b'{"iterat', '{"iterat\n')])
def test_what_a_kill_has_cut_does_not_join_the_next_line(left: bytes, found: str, tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_bytes(left)
    file = AppendOnlyFile("--metrics-file", str(path), print)
    assert path.read_bytes() == left, "a run with nothing to say leaves it as it is"
    file.append("{}\n")
    file.append("{}\n")
    file.close()
    assert path.read_text() == found + "{}\n{}\n"


def test_the_lock_goes_with_the_file_though_a_fork_has_it_too(tmp_path: Path) -> None:
    told: list[str] = []
    file = AppendOnlyFile("--metrics-file", str(tmp_path / "m"), told.append)
    other = os.dup(file._file.fileno())  # as a forked worker has it
    file.close()
    AppendOnlyFile("--metrics-file", str(tmp_path / "m"), told.append).close()
    os.close(other)
    assert not told


def test_lack_of_memory_is_no_matter_of_the_metrics_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = AppendOnlyFile("--metrics-file", str(tmp_path / "m"), print)
    monkeypatch.setattr(os, "fsync", failing(errno.ENOMEM))
    with pytest.raises(OSError) as caught:
        file.close()
    failure = exit_codes.exit_reason_of(caught.value, {})
    assert failure.code == 5 and "out of memory" in failure.text and "--metrics-file" not in failure.text


def test_a_pipe_and_a_device_are_written_as_they_come(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen(["cat", str(tmp_path / "pipe")], stdout=subprocess.PIPE, text=True) as reader:
        file = AppendOnlyFile("--metrics-file", str(tmp_path / "pipe"), print)
        file.append("{}\n")
        file.close()
        assert reader.communicate()[0] == "{}\n"
    null = AppendOnlyFile("--metrics-file", os.devnull, print)
    null.append("{}\n")
    null.close()


HOLDING = """
import sys
from megatron.metrics.sinks import AppendOnlyFile
held = AppendOnlyFile("--metrics-file", sys.argv[1], print)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_run_that_writes_into_the_file_is_told_and_goes_on(tmp_path: Path) -> None:
    run = [*TINY, "--mock-data", "--train-iters", 1, "--metrics-file", tmp_path / "m"]
    words = (f"warning: another process, or another part of this one, has --metrics-file {tmp_path / 'm'} open to "
             "write into it")
    with subprocess.Popen([sys.executable, "-c", HOLDING, tmp_path / "m"], stdin=subprocess.PIPE, cwd=ROOT,
                          stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        assert train(run).count(words) == 1 and steps(tmp_path / "m")
        holder.kill()
    assert words not in train(run), "a lock goes with its process"


def test_another_error_is_not_hidden_by_a_file_that_cannot_be_closed(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NumericsError, match="^first$"):
        with RunLog(LogConfig(metrics_file=str(tmp_path / "m"), log_interval=0), 1, 0, writes=True):
            monkeypatch.setattr(os, "fsync", failing(errno.EIO))
            raise NumericsError("first")


@pytest.mark.parametrize("number", DISK)
def test_a_tensorboard_folder_that_fails_is_named_with_its_flag(
        number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "board"
    log = RunLog(LogConfig(tensorboard_dir=str(folder), log_interval=0), 3, 0, writes=True)
    monkeypatch.setattr(LocalFileSystem, "append", failing(number, calls := []))
    with pytest.raises(StorageError) as caught:
        log.evaluation("validation", 1, 2.0)
        log.close()
    assert calls and exit_codes.exit_reason_of(caught.value).code == 7
    assert str(caught.value).startswith(f"--tensorboard-dir {folder} cannot be written: {os.strerror(number)}")
    assert capfd.readouterr().err == ""


def test_the_rank_that_reports_ends_the_job_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "m").symlink_to("/dev/full")
    ended = subprocess.run(
        [sys.executable, "-m", "megatron.launch", "--nproc-per-node", "2", "pretrain_gpt2.py", *TINY, "--mock-data",
         "--train-iters", "100000", "--metrics-file", str(tmp_path / "m")], cwd=ROOT, capture_output=True, text=True,
        timeout=120, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert ended.returncode == 7 and ended.stderr.count("\n") == 1, ended.stderr
    assert ended.stderr.startswith(f"error: --metrics-file {tmp_path / 'm'} cannot be written: No space left on device")
