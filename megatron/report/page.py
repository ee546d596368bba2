"""The HTML report of runs: curves of at most 1,000 points (drawn by page.js), tables of results, settings and starts.

The page is one file that loads nothing. Each point has the mean, minimum and maximum of its steps.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

from data.cli import format_count
from data.storage import escape_to_one_line
from megatron.report.history import EvaluationEvent, MetricsFileReader, RunHistory, as_float

GIB = 2**30
DIGITS = 6
MOST_POINTS = 1000
"""Points of a curve: about the width of a screen."""


@dataclass(frozen=True)
class MetricChart:
    column: str
    title: str
    unit: str = ""
    scale: float = 1.0
    """Factor from the column to the unit."""
    logarithmic: bool = False
    """Whether the page offers a logarithmic axis."""
    default_value: float | None = None
    """The chart is omitted if no run has another value."""


CHARTS = (
    MetricChart("lm_loss", "Loss", "nats a token", logarithmic=True),
    MetricChart("learning_rate", "Learning rate"),
    MetricChart("grad_norm", "Gradient norm", logarithmic=True),
    MetricChart("tokens_per_s", "Tokens a second"),
    MetricChart("max_memory_bytes", "Peak memory", "GiB", 1 / GIB),
    MetricChart("skipped", "Skipped steps", "so far", default_value=0.0),
    MetricChart("loss_scale", "Loss scale", logarithmic=True, default_value=1.0),
    MetricChart("drive_wait_ms", "Waiting for drives", "ms a step"),
    MetricChart("pld_theta", "Layer dropping", "theta"))


def chart_data(histories: Sequence[RunHistory]) -> dict[str, Any]:
    """The input of page.js."""
    charts = [chart for chart in CHARTS if any(value != chart.default_value for history in histories
                                               for value in history.finite_values(chart.column))]
    return {"charts": [{"column": chart.column, "title": chart.title, "unit": chart.unit,
                        "logarithmic": chart.logarithmic} for chart in charts],
            "runs": [_run_data(history, charts) for history in histories]}


def _run_data(history: RunHistory, charts: Sequence[MetricChart]) -> dict[str, Any]:
    ends = bucket_ends(len(history.steps))

    def event(step: int, **more: Any) -> dict[str, Any]:
        return {axis: rounded(value) if axis != "step" else value
                for axis, value in history.position(step).items()} | more

    return {
        "name": history.name,
        "first": history.steps[0] if history.steps else 0,
        # a point is drawn at the end of its bucket
        "step": [history.steps[end - 1] for end in ends],
        "tokens": [rounded(history.tokens[end - 1]) for end in ends],
        "seconds": [rounded(history.seconds[end - 1]) for end in ends],
        "curves": {chart.column: _curve_data(history, chart, ends) for chart in charts},
        "evaluations": [event(one.step, split=one.split, loss=rounded(one.loss)) for one in history.evaluations],
        "saves": [event(step) for step in history.saves],
        "resumes": [event(start.step, given_up=start.discarded_steps) for start in history.resumes]}


def _curve_data(history: RunHistory, chart: MetricChart, ends: Sequence[int]) -> dict[str, list[float | None]]:
    """Without `low` and `high` if each point is one step."""
    values = history.columns[chart.column]
    if chart.column == "skipped":
        values = array("d", accumulate(value if math.isfinite(value) else 0.0 for value in values))
    curve = downsample(values, ends)
    parts = ("mean",) if len(ends) == len(values) else ("mean", "low", "high")
    return {part: [rounded(value * chart.scale) for value in curve[part]] for part in parts}


def bucket_ends(count: int, most: int = MOST_POINTS) -> list[int]:
    """The exclusive ends of nearly equal buckets of range(count)."""
    buckets = min(count, most)
    return [count * number // buckets for number in range(1, buckets + 1)]


def downsample(values: Sequence[float], ends: Sequence[int]) -> dict[str, list[float]]:
    """Mean, minimum and maximum of the finite values of each bucket; nan if it has none."""
    buckets = [[value for value in values[begin:end] if math.isfinite(value)] or [math.nan]
               for begin, end in zip([0, *ends], ends, strict=False)]
    return {"mean": [sum(bucket) / len(bucket) for bucket in buckets], "low": [*map(min, buckets)],
            "high": [*map(max, buckets)]}


def rounded(value: float) -> float | None:
    """To what a chart can show; None (null in JSON) for nan and inf."""
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None


UNKNOWN = "–"


# ---- summary of a run --------------------------------------------------------------------------------------------


def _summary_values(history: RunHistory) -> dict[str, str]:
    goal = as_float(history.settings.get("train.train_iters"))  # nan if unknown
    state = f"at step {history.last_step:,}" if math.isnan(goal) else \
        "complete" if history.last_step >= goal else f"at step {history.last_step:,} of {goal:,.0f}"
    cells = {"state": state if history.steps else "no step yet", "steps": f"{history.last_step:,}"}
    if not history.steps:
        return cells
    cells |= {"tokens": format_amount(history.tokens[-1]), "training time": format_duration(history.seconds[-1]),
              "loss of the last step": format_float(history.columns["lm_loss"][-1])}
    for split in dict.fromkeys(evaluation.split for evaluation in history.evaluations):
        cells |= _evaluation_values(split, [one for one in history.evaluations if one.split == split])
    for column, name, scale in (("tokens_per_s", "tokens a second", 1.0), ("tflops", "TFLOP/s of a device", 1.0),
                                ("mfu", "MFU", 100.0)):
        if values := list(history.finite_values(column)):
            middle = scale * median(values)
            cells[name] = f"{format_float(middle)} %" if column == "mfu" else format_amount(middle)
    if memory := max(history.finite_values("max_memory_bytes"), default=0.0):
        cells["peak memory"] = f"{memory / GIB:.2f} GiB"
    cells["skipped steps"] = f"{sum(history.finite_values('skipped')):,.0f}"
    if lost := sum(map(math.isnan, history.columns["lm_loss"])):
        cells["steps without a finite loss"] = f"{lost:,}"
    last = f", the last at step {history.saves[-1]:,}" if history.saves else ""
    cells["saves"] = f"{len(history.saves):,}{last}"
    if history.resumes:
        cells["resumes"] = f"{len(history.resumes):,}"
    if given_up := sum(start.discarded_steps for start in history.starts):
        cells["steps given up"] = f"{given_up:,}"
    settings = history.settings
    cells |= {name: format_value(settings[key]) for key, name in (
        ("parameters", "parameters"), ("world_size", "ranks"), ("device", "device"), ("torch", "torch"))
        if key in settings}
    return cells


def _evaluation_values(split: str, evaluations: Sequence[EvaluationEvent]) -> dict[str, str]:
    """The last evaluation, and the lowest of several."""
    last = evaluations[-1]
    bits = "" if math.isnan(last.bits_per_byte) else f", {format_float(last.bits_per_byte)} bits a byte"
    perplexity = format_float(math.exp(min(last.loss, 20.0)))
    values = {f"{split} loss": f"{format_float(last.loss)} (perplexity {perplexity}{bits})"}
    finite = [one for one in evaluations if math.isfinite(one.loss)]
    if len(evaluations) > 1 and finite:
        best = min(finite, key=lambda one: one.loss)
        values[f"lowest {split} loss"] = f"{format_float(best.loss)} at step {best.step:,}"
    return values


def _differing_settings(settings: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """(name, value in each) of the settings that are not equal in all."""
    names = dict.fromkeys(name for values in settings for name in values)
    rows = ((name, [values.get(name) for values in settings]) for name in names)
    return [(name, *map(format_value, values))
            for name, values in rows if any(value != values[0] for value in values[1:])]


# ---- notes -------------------------------------------------------------------------------------------------------


def history_notes(history: RunHistory, lines: MetricsFileReader) -> list[str]:
    """What a reader should know about the file."""
    notes = []
    if not lines.num_records:
        notes.append("its metrics file holds no record yet")
    if lines.last_line_is_incomplete:
        notes.append("the last line of its metrics file is not whole: it is being written, or a kill has cut it")
    if lines.num_damaged_lines:
        notes.append(f"its metrics file has {format_count(lines.num_damaged_lines, 'damaged line')}")
    restart = next((start for start in reversed(history.starts) if start.discarded_steps and not start.step), None)
    if history.num_out_of_order:
        notes.append(f"{format_count(history.num_out_of_order, 'step')} stand behind later ones, without a start "
                     "between them: two runs wrote into its metrics file at the same time; the curves mix both")
    elif restart is not None:
        notes.append("it was started again from step 0, and its curves leave out "
                     f"{format_count(restart.discarded_steps, 'step')} before that")
    if history.num_missing:
        notes.append(f"{format_count(history.num_missing, 'step')} between the first and the last have no record")
    if history.steps and math.isnan(history.tokens[-1]):
        notes.append("its file does not say how many tokens it has seen")
    return [f"{history.name}: {note}" for note in notes]


# ---- words -------------------------------------------------------------------------------------------------------


def format_value(value: object) -> str:
    if value is None:
        return UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:g}"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def format_float(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else UNKNOWN


def format_amount(value: float) -> str:
    """A count, with at most 4 digits and a unit from a million on."""
    if not math.isfinite(value):
        return UNKNOWN
    for size, letter in ((1e12, " T"), (1e9, " G"), (1e6, " M")):
        if value >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def format_duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours:,} h {minutes:02d} min" if hours else f"{minutes} min"


HEADER_BYTES = 1 << 16
"""Upper bound on a page's size up to the end of its header."""
AXES = """<form id="axes" aria-label="Horizontal axis">
<label><input type="radio" name="axis" value="step" checked> steps</label>
<label><input type="radio" name="axis" value="tokens"> tokens</label>
<label><input type="radio" name="axis" value="seconds"> training time</label>
</form>
"""
CHART_AREA = """<noscript><p class="note">A script draws the curves, and this browser runs none.</p></noscript>
<div id="legend"></div>
<div id="charts"></div>
"""


def report_page(histories: Sequence[RunHistory], notes: Iterable[str]) -> str:
    # "<" would end the element
    data = json.dumps(chart_data(histories), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    scripts = (f'<script type="application/json" id="data">{data}</script>\n'
               f"<script>\n{_read_asset('page.js')}</script>\n")
    return html_document(", ".join(history.name for history in histories),
                         html_notes(notes) + CHART_AREA + _sections(histories), beside_title=AXES, scripts=scripts)


def is_report_page(path: Path) -> bool:
    """Whether `report_page` wrote the file."""
    with open(path, "rb") as file:
        begin = file.read(HEADER_BYTES)
    return begin.startswith(b"<!DOCTYPE html>") and AXES.splitlines()[0].encode() in begin


def html_document(title: str, main: str, *, beside_title: str = "", scripts: str = "") -> str:
    """A page of the style of page.html, which loads nothing; all but the title is HTML."""
    parts = {"title": _escaped(title), "beside_title": beside_title, "main": main, "scripts": scripts}
    return re.sub(r"{{(\w+)}}", lambda found: parts[found[1]], _read_asset("page.html"))


def _sections(histories: Sequence[RunHistory]) -> str:
    head = ("", *(history.name for history in histories))
    columns = [_summary_values(history) for history in histories]
    names = dict.fromkeys(name for column in columns for name in column)
    parts = [_section("What came of it", head, [(name, *(column.get(name, UNKNOWN) for column in columns))
                                                for name in names])]
    if len(histories) > 1:
        parts.append(_section("Settings that differ", head,
                              _differing_settings([history.settings for history in histories])))
    for history in histories:
        if len(history.starts) > 1:
            rows, before = list[Sequence[str]](), history.starts[0].settings
            for start in history.starts:
                changes, before = _differing_settings([before, start.settings]), start.settings
                rows.append((format_value(start.config.get("began")), f"{start.step:,}", f"{start.last_step:,}",
                             f"{start.discarded_steps:,}",
                             "; ".join(f"{name} {was} → {now}" for name, was, now in changes)))
            parts.append(_section(f"Starts of {history.name}", (
                "began", "after step", "reached", "given up", "other settings than before"), rows))
    for history in histories:
        if history.settings:
            table = html_table(("setting", "value"), [(name, format_value(value))
                                                      for name, value in history.settings.items()])
            parts.append(f"<details><summary>All settings of {_escaped(history.name)}</summary>\n{table}</details>\n")
    return "".join(parts)


def _section(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    shown = html_table(head, rows) if rows else "<p>None.</p>\n"
    return f"<section><h2>{_escaped(title)}</h2>\n{shown}</section>\n"


def html_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The first cell of a row is its header."""
    columns = "".join(f"<th scope=\"col\">{_escaped(cell)}</th>" for cell in head)
    body = "".join(f"<tr><th scope=\"row\">{_escaped(first)}</th>"
                   + "".join(f"<td>{_escaped(cell)}</td>" for cell in rest) + "</tr>\n" for first, *rest in rows)
    return f"<div class=\"wide\"><table>\n<thead><tr>{columns}</tr></thead>\n<tbody>\n{body}</tbody>\n</table></div>\n"


def html_notes(notes: Iterable[str]) -> str:
    return "".join(f"<p class=\"note\">{_escaped(note)}</p>\n" for note in notes)


def _escaped(text: str) -> str:
    return escape(escape_to_one_line(text))


def _read_asset(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")
