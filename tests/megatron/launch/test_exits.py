"""One failure, one line, one exit code; and the place of a rank, read from three kinds of launchers."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from data.storage import DataError, UsageError
from megatron import zero
from megatron.distributed import exit_codes
from megatron.distributed.process_group import Environment, init_process_group, read_environment
from megatron.errors import CheckpointError, ConfigError, NumericsError, PeerError, StorageError
from mpu.split import ParallelError
from tests.megatron.launch.processes import PATIENCE, begin, python

ROOT = Path(__file__).resolve().parents[3]


class DistBackendError(RuntimeError):
    """Named like torch's own."""


class OutOfMemoryError(RuntimeError):
    """Named like torch's own."""


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MEGATRON_LAUNCHER", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)


def failing(error: BaseException):
    def main() -> int:
        raise error
    return main


CODES: list[tuple[BaseException, int]] = [
    (ConfigError("x"), 2), (ParallelError("x"), 2), (DataError("x"), 3), (CheckpointError("x"), 4), (PeerError("x"), 5),
    (NumericsError("x"), 6), (StorageError("x"), 7),
    (OSError(errno.ENOSPC, "No space left on device", "/full/file"), 7),
    (RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:1: Connection reset by peer"), 5),
    (DistBackendError("anything"), 5), (OutOfMemoryError("CUDA out of memory. Tried\nmore"), 5), (MemoryError(), 5),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), 5),
    (UsageError("x"), 2), (KeyboardInterrupt(), 130), (ZeroDivisionError("a bug"), 5), (SystemExit("usage"), 2),
    (SystemExit(3), 3)]


def test_every_failure_is_one_line_and_its_code_and_success_is_zero_and_silent(capfd):
    for error, code in CODES:
        assert exit_codes.run(failing(error), debug=False) == code
        lines = capfd.readouterr().err.splitlines()
        assert len(lines) == (0 if isinstance(error.args[0] if error.args else "", int) and code == 3 else 1)
        assert all(line.startswith("error: ") for line in lines)
    assert [exit_codes.run(main) for main in (lambda: None, lambda: 0, failing(SystemExit()))] == [0, 0, 0]
    assert capfd.readouterr().err == ""


PRINTED: list[tuple[BaseException, bool, str]] = [
    (KeyboardInterrupt(), False, "interrupted\n"),
    (KeyboardInterrupt(), True, "interrupted before training could save; start the same command to resume\n"),
    (ConfigError("error: first\n   second\n\nthird"), False, "first second third\n"),
    (ConfigError("f:\n 2 errors:\n  (1) one\n of them\n\n  (2) two\n"), False,
     "f: 2 errors:\n  (1) one of them\n  (2) two\n")]


def test_a_message_is_folded_and_marked_once_and_errors_that_are_listed_have_a_line_each(capfd):
    for error, is_job, printed in PRINTED:
        exit_codes.run(failing(error), debug=False, is_job=is_job)
        assert capfd.readouterr().err == f"error: {printed}"


def test_a_traceback_appears_only_for_debug_and_never_for_a_lost_peer(capfd):
    for error, is_shown in ((ConfigError("x"), True), (PeerError("x"), False)):
        exit_codes.run(failing(error), debug=True)
        assert ("Traceback" in capfd.readouterr().err) == is_shown


def test_under_the_launcher_an_own_failure_is_told_from_a_lost_peer():
    reasons = [exit_codes.exit_reason_of(error, {"MEGATRON_LAUNCHER": "1", "RANK": "3"})
               for error in (ZeroDivisionError("x"), MemoryError(), DistBackendError("x"))]
    assert [reason.code for reason in reasons] == [1, 1, 5] and all("rank 3" in reason.text for reason in reasons)


def test_a_failing_rank_leaves_without_destructors_and_says_all_it_has_to_say():
    program = ("import atexit, os, sys; from megatron.distributed import exit_codes;"
               "atexit.register(lambda: print('destructor'));"
               "os.environ.update(RANK='0', WORLD_SIZE='2'); print('flushed', end='');"
               "sys.exit(exit_codes.run(lambda: 6))")
    result = python("-c", program)
    assert (result.returncode, result.stdout) == (6, "flushed")


UNCAUGHT = """
import atexit, sys
from megatron.errors import ConfigError, NumericsError, PeerError
from megatron.distributed import exit_codes
atexit.register(lambda: print("left properly"))
exit_codes.install_excepthook()
def half():
    try:
        {0}
    except ZeroDivisionError as error:
        raise NumericsError("first\\nsecond") from error
half()
"""


def uncaught(statement: str, *arguments: str, flags: tuple[str, ...] = (), **environ: str) -> CompletedProcess[str]:
    return python(*flags, "-c", UNCAUGHT.format(statement), *arguments, **environ)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_script_that_does_not_catch_an_error_of_ours_ends_with_its_code_and_line(ranks):
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"} if ranks == 2 else {}
    result = uncaught("1 / 0", **place)
    assert (result.returncode, result.stderr) == (6, "error: first second (<string>, line 11)\n")
    assert result.stdout == ("left properly\n" if ranks == 1 else "")
    lost = uncaught("raise RuntimeError('[gloo/x.cc:1] Connection closed by peer. This is typically GLHF')", **place)
    assert lost.returncode == 5 and lost.stderr.startswith("error: rank ") and "GLHF" not in lost.stderr


def test_the_traceback_of_an_uncaught_error_is_shown_when_asked_for():
    for result in (uncaught("1 / 0", "--debug", MEGATRON_DEBUG="0"), uncaught("1 / 0", MEGATRON_DEBUG="1")):
        assert result.returncode == 6 and "ZeroDivisionError" in result.stderr
        assert result.stderr.splitlines()[-1].startswith("error: first second")


def test_an_error_of_the_script_and_one_that_somebody_typed_are_left_to_python():
    result = uncaught("raise ValueError('mine')", RANK="0", WORLD_SIZE="2")
    assert result.returncode == 1 and result.stderr.startswith("Traceback") and "error: " not in result.stderr
    assert "Traceback" in uncaught("1 / 0", flags=("-i",)).stderr


def test_every_entry_to_the_engine_answers_for_its_errors(monkeypatch):
    for entry in (zero.initialize, zero.init_distributed, zero.Init):
        monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
        monkeypatch.setenv("RANK", "1")  # without a world: an error
        with suppress(ConfigError):
            entry()
        assert sys.excepthook is not sys.__excepthook__
        hook = sys.excepthook
        exit_codes.install_excepthook()
        assert sys.excepthook is hook


ENVIRONMENTS = [
    ({}, Environment()),
    ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, Environment(5, 1, 8, 4)),
    ({"RANK": "1", "WORLD_SIZE": "2"}, Environment(1, 1, 2, 2)),
    ({"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"},
     Environment(5, 1, 8, 4)),
    ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0"}, Environment()),
    ({"SLURM_NTASKS": "8"}, Environment()),
    ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
      "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, Environment(3, 1, 4, 2)),
    ({"RANK": "0", "WORLD_SIZE": "1", "SLURM_PROCID": "3", "SLURM_NTASKS": "8"}, Environment())]
BROKEN = [
    ({"RANK": "1"}, "RANK is set but WORLD_SIZE is not"),
    ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set but RANK is not"),
    ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2 but WORLD_SIZE is 2"),
    ({"RANK": "one", "WORLD_SIZE": "2"}, "'one'"),
    ({"RANK": "-1", "WORLD_SIZE": "2"}, "'-1'")]


def test_the_place_of_a_rank_is_read_from_every_launcher():
    for environ, expected in ENVIRONMENTS:
        assert read_environment(environ) == expected
    for environ, words in BROKEN:
        with pytest.raises(ConfigError, match=words):
            read_environment(environ)


def test_one_rank_needs_no_process_group_and_wrong_settings_are_named(monkeypatch):
    init_process_group(Environment())
    with pytest.raises(ConfigError, match="expected one of nccl, gloo"):
        init_process_group(Environment(), "mpi")
    with pytest.raises(ConfigError, match="timeout"):
        init_process_group(Environment(), "gloo", 0.0)
    for name in ("MEGATRON_STORE_FILE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="cannot meet without MASTER_ADDR and MASTER_PORT"):
        init_process_group(Environment(0, 0, 2, 2), "gloo")


# ---- of ranks that end with the same error one says it, where no launcher of ours picks the line ---------------------

RANK = """
import os, sys, time
from megatron.errors import ConfigError
from megatron.distributed import exit_codes
from megatron.distributed import exit_codes
exit_codes.LINGER_SECONDS *= float(os.environ["PATIENT"])
def main():
    open(os.environ["MASTER_PORT"] + "-" + os.environ["RANK"], "w").close()
    while len(os.listdir()) < int(os.environ["COMPANY"]):
        time.sleep(0.01)
    time.sleep(float(os.environ["RANK"]) / 10)
    raise ConfigError({text})
sys.exit(exit_codes.run(main, is_job=True))
"""
"""All ranks of all jobs meet in a folder: once one has spoken, nobody has Python's start before him. (A job leaves
signals alone, so that SIGTERM is caught from when the speaker waits for others.)"""
SAME, OWN, NAMED = '"no such flag"', '"no such file: " + "x" * int(os.environ["RANK"])', '"rank " + os.environ["RANK"]'


def speak(folder: Path, port: int, text: str, rank: int, **more: str) -> subprocess.Popen[str]:
    """The address is of these tests alone: others on this machine may run them at the same time."""
    environ = {name: value for name, value in os.environ.items() if name != "MEGATRON_LAUNCHER"}
    environ |= {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": f"here {os.getpid()}", "MASTER_PORT": str(port),
                "PYTHONPATH": str(ROOT), "COMPANY": "18", "PATIENT": "1", **more}
    return begin([sys.executable, "-c", RANK.format(text=text)], cwd=folder, env=environ, text=True,
                 stderr=subprocess.PIPE)


def test_an_error_of_all_ranks_is_said_once_a_job_and_other_errors_by_everyone(tmp_path: Path) -> None:
    jobs = {(1, SAME): 1, (2, SAME): 1, (3, OWN): 3, (4, NAMED): 1}
    ranks = {job: [speak(tmp_path, *job, rank) for rank in range(3)] for job in jobs}
    ranks |= {(5, SAME): [speak(tmp_path, 5, SAME, rank, MEGATRON_LAUNCHER="1") for rank in range(3)],
              (6, SAME): [speak(tmp_path, 6, SAME, rank, LOCAL_WORLD_SIZE="1") for rank in range(3)]}
    told = {job: "".join(rank.communicate(timeout=2 * PATIENCE)[1] for rank in of_it).splitlines()
            for job, of_it in ranks.items()}
    assert all(rank.returncode == 2 for of_it in ranks.values() for rank in of_it)
    assert all(line.startswith("error: ") for lines in told.values() for line in lines)
    assert {job: len(lines) for job, lines in told.items()} == {**jobs, (5, SAME): 3, (6, SAME): 3}
