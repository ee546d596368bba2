"""Standard output that cannot be written: a reader that has left ends a command quietly, a full disk does not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.megatron.helpers import ROOT
from tests.megatron.launch.processes import environment

LINES = """
import sys
from megatron.distributed.exit_codes import run
def main():
    for number in range(int(sys.argv[1])):
        print("line", number)
sys.exit(run(main))
"""
FEW, MANY = 3, 100_000
"""Lines that stay in the buffer until the end of a program, and lines that do not."""


def command(*argv: str) -> list[str]:
    return [sys.executable, "-P", *argv]


def ended(argv: list[str], stdout: int) -> tuple[int, str]:
    """(exit code, standard error) of a command that writes to `stdout`."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}
    found = subprocess.run(argv, stdout=stdout, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environ, timeout=120)
    return found.returncode, found.stderr


def without_reader(argv: list[str]) -> tuple[int, str]:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        return ended(argv, writer)
    finally:
        os.close(writer)


@pytest.mark.parametrize("argv", [
    *(["-c", LINES, str(count)] for count in (FEW, MANY)), ["-m", "megatron.plan", "--preset", "tiny"],
    ["-m", "data.verify", "--help"], ["pretrain_gpt2.py", "--help_all"],
    ["-c", "import sys; from megatron.commands import train; sys.exit(train())", "--version"],
], ids=lambda argv: " ".join(argv[1:])[-30:].strip())
def test_a_reader_that_leaves_ends_a_command_quietly(argv: list[str]) -> None:
    assert without_reader(command(*argv)) == (141, "")


@pytest.mark.parametrize("argv", [
    ["-c", LINES, str(FEW)], ["-c", LINES, str(MANY)]], ids=["few", "many"])
def test_a_full_disk_under_standard_output_is_a_storage_error(argv: list[str]) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        code, error = ended(command(*argv), full)
    finally:
        os.close(full)
    assert (code, error.count("\n")) == (7, 1)
    assert error.startswith("error: cannot write standard output or a file: No space left on device; free space")


TRAINING = ["pretrain_gpt2.py", "--preset", "tiny", "--mock-data", "--train-iters", "2", "--eval-interval", "0"]
COMMANDS = {
    "train": (TRAINING, 0), "train wrong": (["pretrain_gpt2.py", "--no-such-flag"], 2),
    "two ranks": (["-m", "megatron.launch", "--nproc-per-node", "2", *TRAINING], 0),
    "launch wrong": (["-m", "megatron.launch", "no-such-script.py"], 2),
    "plan": (["-m", "megatron.plan", "--preset", "tiny"], 0), "plan wrong": (["-m", "megatron.plan", "--nothing"], 2),
    "checkpoint": (["-m", "megatron.checkpoint", "--help"], 0),
    "checkpoint wrong": (["-m", "megatron.checkpoint", "list", "no-such-folder"], 4),
    "version": (["-c", "import sys; from megatron.commands import plan; sys.exit(plan())", "--version"], 0),
    "verify": (["-m", "data.verify", "--help"], 0), "verify wrong": (["-m", "data.verify", "no-such-data"], 3),
    "webtext wrong": (["-m", "data.webtext", "nothing"], 2),
}


@pytest.mark.parametrize(("name", "closed"), [
    ("train", ">&-"), ("plan wrong", "2>&-"), ("train wrong", ">&-"),
    *(pytest.param(name, "<&- >&- 2>&-", marks=[] if name == "verify wrong" else pytest.mark.slow)
      for name in COMMANDS)])
def test_closed_streams_change_no_exit_code(name: str, closed: str) -> None:
    argv, code = COMMANDS[name]
    line = ["bash", "-c", f'exec "$@" {closed}', "bash", *command(*argv)]
    ended = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, timeout=120,
                           env=environment())
    assert ended.returncode == code, ended.stderr
    if "2>&-" not in closed:
        assert ended.stderr.count("error:") == (code != 0) and "Traceback" not in ended.stderr, ended.stderr


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_reader_that_leaves_costs_no_training(ranks: int, tmp_path: Path) -> None:
    argv = command("-m", "megatron.launch", "--nproc-per-node", str(ranks), "pretrain_gpt2.py", "--preset", "tiny",
                   "--mock-data", "--train-iters", "100000", "--eval-interval", "0", "--log-interval", "1",
                   "--save", str(tmp_path / "s"))
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
                          env=environment()) as job:
        assert job.stdout is not None and job.stderr is not None
        for line in job.stdout:
            if " iteration " in line:
                break
        job.stdout.close()
        error, code = job.stderr.read(), job.wait(120)
    [line] = [line for line in error.splitlines() if line.startswith("error:")]
    tags = [path.name for path in (tmp_path / "s").iterdir() if path.is_dir()]
    assert code == 7 and line.startswith("error: cannot write standard output: Broken pipe; saved step "), error
    assert len(tags) == 1 and int("".join(filter(str.isdigit, tags[0]))) == int(line.split("step ")[1].split()[0])
