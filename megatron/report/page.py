"""The HTML report of runs: curves downsampled to 1,000 points (drawn by page.js), tables of results, settings and
starts.

The page is one file that loads nothing. Each point has the mean, minimum and maximum of its steps.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from html import escape
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

from data.storage import escape_to_one_line
from megatron.report.history import EvaluationEvent, MetricsFileReader, RunHistory, as_float

GIB = 2**30
DIGITS = 6
MOST_POINTS = 1000
"""Of a curve: about as many as a screen has columns for it."""


@dataclass(frozen=True)
class MetricChart:
    column: str
    title: str
    unit: str = ""
    scale: float = 1.0
    """Of the column, for the unit."""
    logarithmic: bool = False
    """Offered as well."""
    default_value: float | None = None
    """A chart in which all runs have this value and no other is left out."""


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
    """For page.js."""
    charts = [chart for chart in CHARTS if any(_has_data(chart, history) for history in histories)]
    return {"charts": [{"column": chart.column, "title": chart.title, "unit": chart.unit,
                        "logarithmic": chart.logarithmic} for chart in charts],
            "runs": [_run_data(history, charts) for history in histories]}


def _has_data(chart: MetricChart, history: RunHistory) -> bool:
    return any(value != chart.default_value for value in history.finite_values(chart.column))


def _run_data(history: RunHistory, charts: Sequence[MetricChart]) -> dict[str, Any]:
    cuts = bucket_ends(len(history.steps))
    last = [end - 1 for end in cuts]  # a point stands where its bucket ends
    return {
        "name": history.name,
        "first": history.steps[0] if history.steps else 0,
        "step": [history.steps[index] for index in last],
        "tokens": rounded_values(history.tokens[index] for index in last),
        "seconds": rounded_values(history.seconds[index] for index in last),
        "curves": {chart.column: _curve_data(history, chart, cuts) for chart in charts},
        "evaluations": [{**_position_data(history, found.step), "split": found.split, "loss": rounded_value(found.loss)}
                        for found in history.evaluations],
        "saves": [_position_data(history, save.step) for save in history.saves],
        "resumes": [{**_position_data(history, start.step), "given_up": start.discarded_steps}
                    for start in history.resumes]}


def _curve_data(history: RunHistory, chart: MetricChart, cuts: Sequence[int]) -> dict[str, list[float | None]]:
    """Without `low` and `high` where each point is one step."""
    values = history.columns[chart.column]
    if chart.column == "skipped":
        values = array("d", accumulate(value if math.isfinite(value) else 0.0 for value in values))
    curve = downsample(values, cuts)
    parts = {"mean": curve.mean, "low": curve.low, "high": curve.high}
    if len(cuts) == len(values):
        parts = {"mean": curve.mean}
    return {name: rounded_values(value * chart.scale for value in part) for name, part in parts.items()}


@dataclass(frozen=True)
class DownsampledCurve:
    """A value per bucket; nan where no step of it has one."""

    mean: array[float]
    low: array[float]
    high: array[float]


def bucket_ends(count: int, most: int = MOST_POINTS) -> list[int]:
    """Where buckets end, as equal as they can be: the first begins at 0, each at the end of the one before."""
    buckets = min(count, most)
    return [count * number // buckets for number in range(1, buckets + 1)]


def downsample(values: Sequence[float], cuts: Sequence[int]) -> DownsampledCurve:
    curve, begin = DownsampledCurve(array("d"), array("d"), array("d")), 0
    for end in cuts:
        part: Sequence[float] = values[begin:end]
        total, begin = sum(part), end
        if not math.isfinite(total):  # a value is not
            part = [value for value in part if math.isfinite(value)] or [math.nan]
            total = sum(part)
        curve.mean.append(total / len(part))
        curve.low.append(min(part))
        curve.high.append(max(part))
    return curve


def _position_data(history: RunHistory, step: int) -> dict[str, float | None]:
    return {axis: rounded_value(value) if axis != "step" else value
            for axis, value in asdict(history.position(step)).items()}


def rounded_values(values: Iterable[float]) -> list[float | None]:
    return [rounded_value(value) for value in values]


def rounded_value(value: float) -> float | None:
    """To what a chart can show; null for what is no number in JSON."""
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None


@dataclass(frozen=True)
class ReportTable:
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


UNKNOWN = "–"


def make_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> ReportTable:
    return ReportTable(tuple(head), tuple(tuple(row) for row in rows))


# ---- what came of a run ------------------------------------------------------------------------------------------


def summary_table(histories: Sequence[RunHistory]) -> ReportTable:
    """A column a run; a row that no run has anything for is left out."""
    columns = [_summary_values(history) for history in histories]
    names = dict.fromkeys(name for column in columns for name in column)
    return make_table(("", *(history.name for history in histories)),
                      ((name, *(column.get(name, UNKNOWN) for column in columns)) for name in names))


def _summary_values(history: RunHistory) -> dict[str, str]:
    found = {"state": _progress(history), "steps": f"{history.last_step:,}"}
    if not history.steps:
        return found
    found |= {"tokens": format_amount(history.tokens[-1]), "training time": format_duration(history.seconds[-1]),
              "loss of the last step": format_float(history.columns["lm_loss"][-1])}
    for split in dict.fromkeys(evaluation.split for evaluation in history.evaluations):
        found |= _evaluation_values(split, [one for one in history.evaluations if one.split == split])
    for column, name, scale in (("tokens_per_s", "tokens a second", 1.0), ("tflops", "TFLOP/s of a device", 1.0),
                                ("mfu", "MFU", 100.0)):
        if values := list(history.finite_values(column)):
            middle = scale * median(values)
            found[name] = f"{format_float(middle)} %" if column == "mfu" else format_amount(middle)
    if memory := max(history.finite_values("max_memory_bytes"), default=0.0):
        found["peak memory"] = f"{memory / GIB:.2f} GiB"
    found["skipped steps"] = f"{sum(history.finite_values('skipped')):,.0f}"
    if lost := sum(map(math.isnan, history.columns["lm_loss"])):
        found["steps without a finite loss"] = f"{lost:,}"
    last = f", the last at step {history.saves[-1].step:,}" if history.saves else ""
    found["saves"] = f"{len(history.saves):,}{last}"
    if history.resumes:
        found["resumes"] = f"{len(history.resumes):,}"
    if given_up := sum(start.discarded_steps for start in history.starts):
        found["steps given up"] = f"{given_up:,}"
    settings = history.settings
    found |= {name: format_value(settings[key]) for key, name in (
        ("parameters", "parameters"), ("world_size", "ranks"), ("device", "device"), ("torch", "torch"))
        if key in settings}
    return found


def _progress(history: RunHistory) -> str:
    if not history.steps:
        return "no step yet"
    goal = as_float(history.settings.get("train.train_iters"))
    if math.isnan(goal):
        return f"at step {history.last_step:,}"
    return "complete" if history.last_step >= goal else f"at step {history.last_step:,} of {goal:,.0f}"


def _evaluation_values(split: str, evaluations: Sequence[EvaluationEvent]) -> dict[str, str]:
    """The last one; of several also the lowest."""
    last = evaluations[-1]
    bits = "" if math.isnan(last.bits_per_byte) else f", {format_float(last.bits_per_byte)} bits a byte"
    perplexity = format_float(math.exp(min(last.loss, 20.0)))
    found = {f"{split} loss": f"{format_float(last.loss)} (perplexity {perplexity}{bits})"}
    finite = [one for one in evaluations if math.isfinite(one.loss)]
    if len(evaluations) > 1 and finite:
        best = min(finite, key=lambda one: one.loss)
        found[f"lowest {split} loss"] = f"{format_float(best.loss)} at step {best.step:,}"
    return found


# ---- settings ----------------------------------------------------------------------------------------------------


def differences_table(histories: Sequence[RunHistory]) -> ReportTable:
    """The settings in which runs differ, with the value in each."""
    settings = [history.settings for history in histories]
    return make_table(("", *(history.name for history in histories)), _differing_settings(settings))


def settings_table(history: RunHistory) -> ReportTable:
    return make_table(("setting", "value"), ((name, format_value(value)) for name, value in history.settings.items()))


def _differing_settings(settings: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    names = dict.fromkeys(name for values in settings for name in values)
    rows = ((name, [values.get(name) for values in settings]) for name in names)
    return [(name, *map(format_value, values))
            for name, values in rows if any(value != values[0] for value in values[1:])]


# ---- starts ------------------------------------------------------------------------------------------------------


def starts_table(history: RunHistory) -> ReportTable:
    """A row for each time it was started; what was then another setting than before."""
    rows, before = list[Sequence[str]](), history.starts[0].settings if history.starts else {}
    for start in history.starts:
        changes, before = _differing_settings([before, start.settings]), start.settings
        rows.append((format_value(start.config.get("began")), f"{start.step:,}", f"{start.last_step:,}",
                     f"{start.discarded_steps:,}", "; ".join(f"{name} {was} → {now}" for name, was, now in changes)))
    return make_table(("began", "after step", "reached", "given up", "other settings than before"), rows)


# ---- notes -------------------------------------------------------------------------------------------------------


def history_notes(history: RunHistory, lines: MetricsFileReader) -> list[str]:
    """What a reader should know about the file."""
    found = []
    if not lines.num_records:
        found.append("its metrics file holds no record yet")
    if lines.last_line_is_incomplete:
        found.append("the last line of its metrics file is not whole: it is being written, or a kill has cut it")
    if lines.num_damaged_lines:
        found.append(f"{lines.num_damaged_lines:,} line{'s' * (lines.num_damaged_lines > 1)} of its metrics file "
                     f"{'are' if lines.num_damaged_lines > 1 else 'is'} damaged")
    restart = next((start for start in reversed(history.starts) if start.discarded_steps and not start.step), None)
    if history.num_out_of_order:
        found.append(
            f"{history.num_out_of_order:,} of its steps stand behind later ones, without a start between them: "
            "two runs wrote into its metrics file at the same time, and the curves are a mixture of both")
    elif restart is not None:
        found.append(
            f"it was begun anew from step 0: {restart.discarded_steps:,} step{'s' * (restart.discarded_steps > 1)} "
            f"before that {'are' if restart.discarded_steps > 1 else 'is'} left out")
    if history.num_missing:
        found.append(f"{history.num_missing:,} step{'s' * (history.num_missing > 1)} between the first and the last "
                     f"{'are' if history.num_missing > 1 else 'is'} not recorded")
    if history.steps and math.isnan(history.tokens[-1]):
        found.append("its file does not say how many tokens it has seen")
    return [f"{history.name}: {note}" for note in found]


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
    """A count, as long as its digits are of use."""
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


CONTENT_SECURITY_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
"""What the browser holds the page to: nothing is fetched, from nowhere."""


NO_SCRIPT = '<noscript><p class="note">A script draws the curves, and this browser runs none.</p></noscript>'
HEADER_BYTES = 1 << 16
"""Bytes of a page that hold its head, its style and what stands beside its title."""
AXES = """<form id="axes" aria-label="Horizontal axis">
<label><input type="radio" name="axis" value="step" checked> steps</label>
<label><input type="radio" name="axis" value="tokens"> tokens</label>
<label><input type="radio" name="axis" value="seconds"> training time</label>
</form>
"""


def report_page(histories: Sequence[RunHistory], notes: Iterable[str]) -> str:
    main = f"""{html_notes(notes)}{NO_SCRIPT}
<div id="legend"></div>
<div id="charts"></div>
{_sections(histories)}"""
    scripts = f"""<script type="application/json" id="data">{_embedded_json(chart_data(histories))}</script>
<script>
{_read_asset("page.js")}</script>
"""
    return html_document(", ".join(history.name for history in histories), main, beside_title=AXES, scripts=scripts)


def is_report_page(path: Path) -> bool:
    """One that `page` has made."""
    with open(path, "rb") as file:
        begin = file.read(HEADER_BYTES)
    return (begin.startswith(b"<!DOCTYPE html>") and CONTENT_SECURITY_POLICY.encode() in begin
            and AXES.splitlines()[0].encode() in begin)


def html_document(title: str, main: str, *, beside_title: str = "", scripts: str = "") -> str:
    """A page of this style; all but the title is HTML."""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{CONTENT_SECURITY_POLICY}">
<meta name="color-scheme" content="light dark">
<title>{_escaped(title)}</title>
<style>
{_read_asset("page.css")}</style>
</head>
<body>
<header>
<h1>{_escaped(title)}</h1>
{beside_title}</header>
<main>
{main}</main>
{scripts}</body>
</html>
"""


def _sections(histories: Sequence[RunHistory]) -> str:
    parts = [_section("What came of it", summary_table(histories))]
    if len(histories) > 1:
        parts.append(_section("Settings that differ", differences_table(histories), "None."))
    parts += [_section(f"Starts of {history.name}", starts_table(history))
              for history in histories if len(history.starts) > 1]
    parts += [f"<details><summary>All settings of {_escaped(history.name)}</summary>\n"
              f"{html_table(settings_table(history))}</details>\n" for history in histories if history.settings]
    return "".join(parts)


def _section(title: str, table: ReportTable, empty: str = "") -> str:
    shown = html_table(table) if table.rows else f"<p>{_escaped(empty)}</p>\n"
    return f"<section><h2>{_escaped(title)}</h2>\n{shown}</section>\n"


def html_table(table: ReportTable) -> str:
    head = "".join(f"<th scope=\"col\">{_escaped(cell)}</th>" for cell in table.head)
    rows = "".join(f"<tr><th scope=\"row\">{_escaped(first)}</th>"
                   + "".join(f"<td>{_escaped(cell)}</td>" for cell in rest) + "</tr>\n" for first, *rest in table.rows)
    return f"<div class=\"wide\"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}</tbody>\n</table></div>\n"


def html_notes(notes: Iterable[str]) -> str:
    return "".join(f"<p class=\"note\">{_escaped(note)}</p>\n" for note in notes)


def _escaped(text: str) -> str:
    return escape(escape_to_one_line(text))


def _embedded_json(value: dict[str, Any]) -> str:
    """JSON in which nothing ends the element that holds it."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _read_asset(name: str) -> str:
    """A file that the page contains."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")
