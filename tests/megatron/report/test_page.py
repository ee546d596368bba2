"""The page is one file that loads nothing, says what the runs did, and stays small however long they were."""

from __future__ import annotations

import math
import random
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from megatron.metrics.metrics_file import MetricsFileReader
from megatron.report.run_report import MOST_POINTS, RunHistory, chart_data, report_page
from tests.megatron.report.written import CONFIG, evaluation, save, start, step, write


class Parsed(HTMLParser):
    """Rows of text, the data, and every attribute of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.open: list[str] = []
        self.data, self.headings, self.notes = "", list[str](), list[str]()
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
