"""Commands in environments that they are not used to: each makes what it makes in the environment of the tests, or
says in one line what is missing. A reader of its output that has left ends a command quietly, a full disk does not."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import pytest

from data import cli
from data.storage import DataError
from megatron.distributed import exit_codes
from megatron.inference.prompts import prompts_from_args, prompts_from_file
from tests.megatron.helpers import ROOT, TINY, lines, total_digest, train, write_corpus
from tests.megatron.launch.processes import environment

TEXT = "Grüße, 你好, 😀 and a \u2028 line"
NAME = "größe"
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
ENVIRONMENTS: dict[str, tuple[str, dict[str, str]]] = {
    "ASCII": ("", ASCII), "umask 077": ("umask 077", {}), "python -OO": ("", {"PYTHONOPTIMIZE": "2"}),
    "HOME absent": ("", {"HOME": "/nonexistent"}), "TMPDIR absent": ("", {"TMPDIR": "/nonexistent"}),
    "64 files": ("ulimit -n 64", {}), "tiny /dev/shm": ("mount -t tmpfs -o size=64k none /dev/shm", {})}
"""What bash does before the command, and variables."""


def run(command: Sequence[object], folder: Path, environment: str = "") -> str:
    """The standard output of a command; without a name in the environment of the tests."""
    before, variables = ENVIRONMENTS.get(environment, ("", {}))
    argv = ["bash", "-c", f'{before or "true"} && exec "$@"', "bash", sys.executable, *map(str, command)]
    if "mount" in before:
        argv = ["unshare", "-m", *argv]
    usual = {name: value for name, value in os.environ.items() if name not in ("PYTHONUTF8", "PYTHONIOENCODING")}
    done = subprocess.run(argv, cwd=folder, env=usual | {"PYTHONPATH": str(ROOT), "LANG": "C.UTF-8"} | variables,
                          stdin=subprocess.DEVNULL, capture_output=True, timeout=240)
    said = (done.stdout + done.stderr).decode(errors="replace")
    assert done.returncode == 0 and not re.search("Traceback|Exception ignored|^error:", said, re.MULTILINE), said
    return done.stdout.decode(errors="replace")


def flags_of(corpus: str) -> list[object]:
    return [*TINY, "--train-data", corpus, "--train-iters", 2, "--lr", 1e-3, "--batch-size", 1, "--log-interval", 1,
            "--sample-tokens", 4, "--sample-prompt", "é"]


def test_text_comes_out_whole_of_a_terminal_that_knows_ascii_alone(tmp_path: Path) -> None:
    train([*flags_of(write_corpus(tmp_path / "corpus")), "--save", tmp_path / "tags"])
    command = ["-m", "megatron.generate", "--load", tmp_path / "tags", "--greedy", "--jsonl", "--max-new-tokens", 3,
               TEXT[:9]]
    usual, ascii_only = (json.loads(run(command, tmp_path, environment)) for environment in ("", "ASCII"))
    assert ascii_only == usual and usual["prompt"] == TEXT[:9]


@pytest.mark.slow
@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_a_command_does_the_same_in_another_environment(environment: str, tmp_path: Path) -> None:
    if "mount" in ENVIRONMENTS[environment][0] and subprocess.run(["unshare", "-m", "true"]).returncode:
        pytest.skip("no mount namespaces here")
    (tmp_path / f"{NAME}.jsonl").write_text(json.dumps({"text": TEXT}) + "\n", "utf-8")
    corpus, found = write_corpus(tmp_path / "corpus"), []
    for name in ("", environment):
        folder = tmp_path / f"in {name}"
        folder.mkdir()
        run(["-m", "data.preprocess", "--input", tmp_path / f"{NAME}.jsonl", "--output-prefix", folder / NAME,
             "--tokenizer-type", "ByteLevelTokenizer", "--workers", 2], tmp_path, name)
        run(["-m", "megatron.launch", "--nproc-per-node", 2, ROOT / "pretrain_gpt2.py", *flags_of(corpus),
             "--model-parallel-size", 2, "--num-workers", 2, "--save", folder / "save", "--metrics-file",
             folder / "m"], tmp_path, name)
        found.append((total_digest(folder / "save"), lines(folder / "m"), (folder / f"{NAME}.bin").read_bytes()))
    assert found[0] == found[1]


@pytest.mark.parametrize("raw", [b"\xff", "half a pair \ud800".encode("utf-8", "surrogatepass")])
def test_a_prompt_or_stop_that_is_no_text_is_refused_and_not_answered(raw: bytes, tmp_path: Path) -> None:
    """A tokenizer would read `?` in its place."""
    with pytest.raises(DataError, match="prompt 2 of the command line: not UTF-8 text"):
        prompts_from_args(["good", os.fsdecode(raw)])
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "half a pair \ud800"}))
    with pytest.raises(DataError, match="line 1: key 'prompt': lone surrogate"):
        list(prompts_from_file(str(tmp_path / "p.jsonl"), print))


@pytest.mark.parametrize("error", [
    OSError(errno.EMFILE, "too many"), BlockingIOError(errno.EAGAIN, "none"), RuntimeError("can't start new thread")])
def test_a_limit_of_the_system_is_one_line_of_every_command(error, capsys):
    def fail() -> None:
        raise error

    failure = exit_codes.exit_reason_of(error, {})
    assert failure.code == 5 and not failure.is_peer_loss and "raise it (ulimit -n, ulimit -u)" in failure.text
    with pytest.raises(SystemExit) as caught, patch("data.cli._interrupt_on_stop_signals"):
        cli.run_command(fail)
    err = capsys.readouterr().err
    assert caught.value.code == 5 and err.count("\n") == 1 and "raise it (ulimit -n, ulimit -u)" in err


# ---- standard output that cannot be written ------------------------------------------------------------------------

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
