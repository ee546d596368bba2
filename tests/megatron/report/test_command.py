"""`python -m megatron.report` on what training really leaves: runs that were killed and resumed, and broken files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from data.storage import DataError
from megatron.distributed import exit_codes
from megatron.report.run_report import find_metrics_file, main
from megatron.train.run_log import RunLog
from tests.megatron.helpers import TINY, steps, train
from tests.megatron.launch.processes import python
from tests.megatron.report.test_page import Parsed
from tests.megatron.report.written import CONFIG, step, write

Cli = Callable[..., tuple[int, str]]


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str]) -> Cli:
    """(exit code, standard error)"""
    def call(*argv: object) -> tuple[int, str]:
        code = exit_codes.run(lambda: main(list(map(str, argv))))
        return code, capfd.readouterr().err
    return call


def data_of(page: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Parsed(page.read_text()).data)
    return found


class Killed(BaseException):
    """Nothing catches it."""


def killed_at(iteration: int, argv: Sequence[object], monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is gone when it has written this step."""
    real = RunLog.step

    def step(log: RunLog, metrics: Any) -> None:
        real(log, metrics)
        if metrics.iteration == iteration:
            raise Killed
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(RunLog, "step", step)
        train(argv)


def test_a_run_that_was_killed_and_resumed_twice_is_one_line(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    """The same, at that, as of a run that nothing happened to: resuming is exact."""
    def run(folder: Path) -> list[object]:
        return [*TINY, "--mock-data", "--train-iters", 30, "--eval-interval", 10, "--eval-iters", 1, "--save", folder,
                "--load", folder, "--save-interval", 10, "--metrics-file", folder / "metrics.jsonl"]

    for name in ("killed", "whole"):
        (tmp_path / name).mkdir()
    killed_at(17, run(tmp_path / "killed"), monkeypatch)
    killed_at(25, run(tmp_path / "killed"), monkeypatch)
    train(run(tmp_path / "killed"))
    train(run(tmp_path / "whole"))
    assert len(steps(tmp_path / "killed" / "metrics.jsonl")) == 30 + 7 + 5, "lines of repeated steps are there twice"
    assert cli(tmp_path / "killed", tmp_path / "whole", "--output", tmp_path / "r.html") == (0, "")
    killed, whole = data_of(tmp_path / "r.html")["runs"]
    assert killed["step"] == list(range(1, 31)) == whole["step"] and killed["tokens"] == whole["tokens"]
    assert killed["seconds"] == sorted(killed["seconds"])
    for curve in ("lm_loss", "grad_norm", "learning_rate"):
        assert killed["curves"][curve] == whole["curves"][curve] and None not in killed["curves"][curve]["mean"]
    resumes = [event for event in killed["events"] if event["mark"] == "resumed"]
    assert [event["text"] for event in resumes] == [
        "resumed after step 10, 7 steps given up", "resumed after step 20, 5 steps given up"]
    others = [[(event["mark"], event["text"]) for event in run["events"] if event not in resumes]
              for run in (killed, whole)]
    assert others[0] == others[1]
    assert [text for mark, text in others[0] if mark == "saved"] == [f"saved at step {n}" for n in (10, 20, 30)]


def test_a_file_without_a_line_and_one_that_is_being_written_make_a_page(tmp_path: Path, cli: Cli) -> None:
    write(tmp_path / "empty")
    write(tmp_path / "cut", CONFIG, step(1), end='{"iteration": 2, "lm_l')
    code, told = cli(tmp_path / "empty", tmp_path / "cut", "--output", tmp_path / "r.html")
    assert code == 0 and told.splitlines() == [
        f"note: {tmp_path / 'empty'}: its metrics file holds no record yet",
        f"note: {tmp_path / 'cut'}: the last line of its metrics file is not whole: it is being written, or a kill has "
        "cut it"]
    assert [run["step"] for run in data_of(tmp_path / "r.html")["runs"]] == [[], [1]]


def test_a_folder_is_a_run_by_its_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    with pytest.raises(DataError, match="run holds no metrics file: .* train with --metrics-file .*run/metrics.jsonl"):
        find_metrics_file(tmp_path / "run")
    (tmp_path / "run" / "text.jsonl").write_text('{"text": "of a corpus"}\n')
    log = write(tmp_path / "run" / "log.jsonl", CONFIG)
    assert find_metrics_file(tmp_path / "run") == log
    write(tmp_path / "run" / "other.jsonl", step(1))
    with pytest.raises(DataError, match="run holds 2 metrics files: log.jsonl, other.jsonl; name"):
        find_metrics_file(tmp_path / "run")
    usual = write(tmp_path / "run" / "metrics.jsonl")
    assert find_metrics_file(tmp_path / "run") == usual


@pytest.mark.parametrize(("argv", "code", "words"), [
    ([], 2, "RUN"), (["m", "--no-such-flag"], 2, "--no-such-flag"), (["none"], 3, "none: there is no such run"),
    (["m", "m"], 2, "m is given twice"), (["m", "./m"], 2, "./m is given twice, the other time as m"),
    (["text"], 3, "text is no metrics file"), (["pipe"], 3, "pipe"), (["m", "--output", "m"], 2, "--output"),
    (["m", "--output", "no/r.html"], 7, "--output: "), (["m", "--output", "folder"], 7, "--output: ")])
def test_what_cannot_be_done_is_one_line_and_writes_nothing(
        argv: list[str], code: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("m"), CONFIG, step(1))
    Path("text").write_text("no metrics\n")
    Path("folder").mkdir()
    os.mkfifo("pipe")
    before = sorted(os.listdir())
    found, told = cli(*argv)
    assert found == code and told.startswith("error: ") and told.count("\n") == 1 and words in told, told
    assert sorted(os.listdir()) == before


def test_the_command_imports_neither_torch_nor_numpy(tmp_path: Path) -> None:
    write(tmp_path / "m", CONFIG, step(1))
    program = ("import sys; from megatron.report.run_report import main; code = main(); "
               "print(code, {'torch', 'numpy'} & set(sys.modules))")
    done = python("-c", program, "m", cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "0 set()", done.stderr
    assert (tmp_path / "report.html").stat().st_size > 10_000
