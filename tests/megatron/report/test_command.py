"""`python -m megatron.report` on what training really leaves: runs that were killed and resumed, and broken files. Its
page is one file that loads nothing, says what the runs did, and stays small however long they were."""

from __future__ import annotations

import json
import math
import os
import random
import shlex
from collections.abc import Callable, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from data.storage import DataError
from megatron.config.cli import parse_args
from megatron.config.tree import TrainConfig, flag_name
from megatron.distributed import exit_codes
from megatron.metrics.sinks import MetricsFileReader
from megatron.report.run_report import (HEADLINES, MOST_POINTS, RunHistory, chart_data, find_metrics_file, main,
                                        report_page)
from megatron.train.run_log import RunLog
from tests.megatron.helpers import TINY, steps, train
from tests.megatron.launch.processes import python
from tests.megatron.report.written import CONFIG, evaluation, save, start, step, write


class Parsed(HTMLParser):
    """Rows of text, the data, and every attribute of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.open: list[str] = []
        self.data, self.code, self.headings, self.notes = "", "", list[str](), list[str]()
        self.feed(text)
        assert not self.open, "every element is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        if tag not in ("meta", "input"):
            self.open.append(f"{tag} {dict(attrs).get('class') or dict(attrs).get('id') or ''}".strip())
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().partition(" ")[0] == tag

    def handle_data(self, data: str) -> None:
        inside = self.open[-1] if self.open else ""
        if inside in ("td", "th"):
            self.rows[-1][-1] += data
        elif self.open[-2:] == ["code", "span"]:
            self.code += f"{data} "
        elif inside == "script data":
            self.data += data
        elif inside == "h2":
            self.headings.append(data)
        elif inside == "p note":
            self.notes.append(data)

    def row(self, name: str) -> list[str]:
        (found,) = (row for row in self.rows if row[0] == name)
        return found[1:]


def history(*records: dict[str, Any], name: str = "run") -> RunHistory:
    return RunHistory(name, records)


def test_a_page_loads_nothing() -> None:
    text = report_page([history(CONFIG, step(1))], [])
    found = Parsed(text)
    assert not {name for name, _ in found.attributes} & {"src", "href", "action", "srcset", "data"}
    assert "default-src 'none'" in text
    for word in ("http:", "https:", "import(", "fetch(", "@import", "url("):
        assert word not in text.replace("http://www.w3.org/2000/svg", ""), word


def test_the_summary_says_what_came_of_each_run() -> None:
    one = history(start(0), *(step(n, lm_loss=9 - n, skipped=n == 2) for n in range(1, 6)), evaluation(2, 1.25),
                  evaluation(5, 1.5), evaluation(5, 2.0, "test"), save(5), start(3), step(4, lm_loss=None), save(4),
                  name="one")
    whole = history(start(0), *map(step, range(1, 101)), name="whole")
    found = Parsed(report_page([one, whole, history(name="new")], []))
    assert found.row("state") == ["at step 4 of 100", "complete", "no step yet"]
    assert found.row("tokens") == ["128", "3,200", "–"] and found.row("training time") == ["2.0 s", "50.0 s", "–"]
    assert found.row("validation loss") == ["1.25 (perplexity 3.49)", "–", "–"]
    assert found.row("skipped steps") == ["1", "0", "–"] and found.row("steps given up") == ["2", "–", "–"]
    assert found.row("steps without a finite loss") == ["1", "–", "–"]
    assert found.row("saves") == ["1, the last at step 4", "0", "–"] and found.row("ranks") == ["2", "2", "–"]
    assert not [row for row in found.rows if row[0] == "test loss"], "it was taken back"


def test_the_headline_figures_are_averages_over_the_last_steps(tmp_path: Path) -> None:
    values = [*range(1, 981), *([1.0, 3.0] * 10)]
    steps = [step(n, lm_loss=value, tokens_per_s=value) for n, value in enumerate(values, 1)]
    found = Parsed(report_page([history(*steps[:3]), history(*steps[900:]), history(*steps)], []))
    assert found.row("loss") == ["2 (mean of the last 3 steps)", "2 (mean of the last 10 steps)",
                                 f"{(sum(range(901, 981)) + 40) / 100:.4g} (mean of the last 100 steps)"]
    assert found.row("tokens a second")[:2] == ["2 (median of the last 3 steps)", "2 (median of the last 10 steps)"]
    assert [row[0] for row in found.rows[1:5]] == [*HEADLINES], "before everything else"


def test_the_flags_of_the_page_start_the_same_run_and_are_marked_among_all_settings(tmp_path: Path) -> None:
    flags = [*TINY, "--mock-data", "--train-iters", "7", "--no-overlap-comm", "--lr", "3e-4", "--metrics-file",
             f"{tmp_path}/it's <here> $HOME.jsonl"]
    config = parse_args(flags)
    found = Parsed(report_page([history({"config": True, "start": 0, "values": config.as_dict(), "device": "CPU"},
                                        step(1))], []))
    assert parse_args(shlex.split(found.code)) == config
    marked = {row[0]: row[2] for row in found.rows if len(row) == 3 and row[2] and row[0] != "setting"}
    assert marked["train.train_iters"] == f"{TrainConfig().train_iters:,}" and marked["zero.overlap_comm"] == "yes"
    assert {flag_name(name.split(".")[1]) for name in marked} == {
        word.replace("--no-", "--") for word in shlex.split(found.code) if word.startswith("--")}


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """100,000 steps; the norm of one of them is a spike, the loss of another is not finite."""
    records = (step(n, lm_loss=None if n == 70_007 else 3 + 1 / n, grad_norm=1e4 if n == 33_333 else 1.0)
               for n in range(1, 100_001))
    return write(tmp_path_factory.mktemp("long") / "m", CONFIG, *records)


def test_the_points_of_a_long_run_are_few_and_no_spike_is_lost(long_run: Path) -> None:
    found = RunHistory("long", MetricsFileReader(long_run))
    run = chart_data([found])["runs"][0]
    for curve in run["curves"].values():
        for part in curve.values():
            assert len(part) == MOST_POINTS == len(run["step"]) == len(run["tokens"]) == len(run["seconds"])
    norms, losses = run["curves"]["grad_norm"], run["curves"]["lm_loss"]
    peak = norms["high"].index(max(norms["high"]))
    assert norms["high"][peak] == 1e4 and run["step"][peak - 1] < 33_333 <= run["step"][peak]
    assert max(losses["high"]) == 4.0 and None not in losses["mean"] and run["step"][-1] == 100_000
    assert len(report_page([found], [])) < 400_000


@pytest.mark.parametrize("count", [1, 7, MOST_POINTS - 1, MOST_POINTS + 1, 4_321])
def test_every_bucket_has_the_mean_and_the_peaks_of_its_steps(count: int) -> None:
    draw = random.Random(count)
    values = [draw.choice([math.nan, math.inf]) if draw.random() < 0.01 else draw.gauss(0, 1) for _ in range(count)]
    values[count // 2] = 1e6
    run = chart_data([history(*(step(number, grad_norm=value) for number, value in enumerate(values, 1)))])["runs"][0]
    curve, ends = run["curves"]["grad_norm"], run["step"]
    assert len(ends) == min(count, MOST_POINTS) and ends[-1] == count and ("low" in curve) == (count > MOST_POINTS)
    for begin, end, mean, *peaks in zip([0, *ends], ends, curve["mean"], curve.get("low", ends),
                                        curve.get("high", ends), strict=False):
        part = [value for value in values[begin:end] if math.isfinite(value)]
        if count > MOST_POINTS and part:
            assert peaks == pytest.approx([min(part), max(part)], rel=1e-5)
        assert mean == (pytest.approx(math.fsum(part) / len(part), rel=1e-5, abs=1e-9) if part else None)
    assert max(value for value in curve.get("high", curve["mean"]) if value is not None) == 1e6


# ---- the command ---------------------------------------------------------------------------------------------------

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


def test_a_run_that_was_killed_and_resumed_twice_is_one_line(tmp_path, monkeypatch, cli):
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
def test_what_cannot_be_done_is_one_line_and_writes_nothing(argv, code, words, tmp_path, monkeypatch, cli):
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
