"""`python -m megatron.report RUN...`: one HTML page of curves and tables of runs, by their metrics files.

A *start* is a time at which the trainer began to write; after step 0 it is a resume. Steps recorded beyond a resume
are discarded, so each step counts once. A step back without a start means that two runs wrote to the file.

The page is one file that loads nothing; the script in charts.html draws the curves. A curve has at most MOST_POINTS
points, each with the mean, minimum and maximum of its steps.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import sys
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from data.cli import StrictArgumentParser, format_count
from data.html_page import escape_html, html_document, html_section
from data.storage import (DataError, check_is_rereadable, check_outputs_are_not_inputs, escape_to_one_line,
                          prefix_storage_errors, staged_file)
from megatron.checkpoint.tags import latest_tag, read_tag_manifest
from megatron.config.cli_help import command_parser
from megatron.config.tree import FIELDS, config_to_flags, require
from megatron.errors import CheckpointError, ConfigError
from megatron.metrics.sinks import MetricsFileReader, Record, looks_like_metrics

USUAL_NAME = "metrics.jsonl"

EXAMPLES = """examples:
  python -m megatron.report runs/gpt2
  python -m megatron.report runs/small runs/large/metrics.jsonl --output compared.html

docs/report.md says what the page shows."""


def build_parser() -> StrictArgumentParser:
    parser = command_parser("python -m megatron.report", "One page of curves from what training runs have written.",
                            EXAMPLES)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a metrics file, or the folder of a run that holds it")
    parser.add_argument("--output", default="report.html", metavar="FILE", help="the page to write (report.html)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    runs = [(name, find_metrics_file(Path(name))) for name in args.runs]
    for index, (name, path) in enumerate(runs):
        twin = next((other for other, other_path in runs[:index] if other_path.resolve() == path.resolve()), None)
        require(twin is None, f"{name} is given twice" + (f", the other time as {twin}" if twin != name else ""))
    with prefix_storage_errors("--output"):
        check_outputs_are_not_inputs((path for _, path in runs), (args.output,), "give --output another name")
    _check_overwrites_only_reports(Path(args.output))
    histories, notes = list[RunHistory](), list[str]()
    for name, path in runs:
        lines = MetricsFileReader(path)
        histories.append(RunHistory(escape_to_one_line(name), lines))
        notes += history_notes(histories[-1], lines)
    text = report_page(histories, notes).encode(errors="backslashreplace")  # a setting need not be text
    with prefix_storage_errors("--output"), staged_file(args.output) as file:
        file.write(text)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    steps = format_count(sum(len(history.steps) for history in histories), "step")
    print(f"{escape_to_one_line(args.output)}: {format_count(len(histories), 'run')}, {steps}, {len(text):,} bytes")
    return 0


def _check_overwrites_only_reports(output: Path) -> None:
    begin = b""
    try:
        if output.is_file():
            with open(output, "rb") as file:
                begin = file.read(1 << 16)  # a page's header is shorter
    except OSError as error:
        raise ConfigError(f"--output {output}: there is such a file, which cannot be read ({error.strerror}); give "
                          "--output another name") from error
    require(not begin or begin.startswith(b"<!DOCTYPE html>") and b'<form id="axes" ' in begin,
            f"--output {output}: there is such a file, which is no page of this command and would be lost; give "
            "--output another name, or remove it")


def find_metrics_file(path: Path) -> Path:
    """The metrics file of a RUN argument."""
    check_is_rereadable(path)
    if path.is_file():
        return path
    if not path.is_dir():
        raise DataError(f"{path}: there is no such run; name a metrics file, or the folder that holds one")
    if (path / USUAL_NAME).is_file():
        return path / USUAL_NAME
    candidates = sorted(file for file in path.glob("*.jsonl") if file.is_file() and looks_like_metrics(file))
    if len(candidates) > 1:
        raise DataError(f"{path} holds {len(candidates)} metrics files: "
                        f"{', '.join(file.name for file in candidates)}; name the ones that are meant")
    if candidates:
        return candidates[0]
    with suppress(CheckpointError, OSError, KeyError, TypeError):
        # the newest checkpoint names the file, relative to the folder that the run was started in
        tag = latest_tag(path)
        named = read_tag_manifest(path, tag).config["log"]["metrics_file"] if tag is not None else None
        if isinstance(named, str) and Path(named).is_file():
            return Path(named)
    raise DataError(f"{path} holds no metrics file: name the one that --metrics-file gave, or train with "
                    f"--metrics-file {path / USUAL_NAME}")


# ---- the history of a run --------------------------------------------------------------------------------------------

# values of a step, by their names in the file; nan if missing or not finite
COLUMNS = ("lm_loss", "learning_rate", "grad_norm", "loss_scale", "tokens_per_s", "tflops", "mfu", "max_memory_bytes",
           "step_ms", "consumed_samples", "skipped", "drive_wait_ms", "pld_theta")


@dataclass
class RunStart:
    step: int  # the last step before it
    record: Record = field(default_factory=dict)  # with the configuration under "values"; empty if the file has none
    discarded_steps: int = 0  # earlier recorded steps beyond `step`
    last_step: int = 0  # the last step that it recorded

    @property
    def settings(self) -> dict[str, Any]:
        """The configuration by dotted name, and the other fields of the record."""
        fields = {name: value for name, value in self.record.items()
                  if name not in ("config", "start", "began", "values")}
        return fields | {f"{section}.{name}": value for section, values in self.record.get("values", {}).items()
                         for name, value in values.items()}


class EvaluationEvent(NamedTuple):
    step: int
    split: str
    loss: float
    bits_per_byte: float


class RunHistory:
    """One sequence of steps across kills and resumes: each step occurs once, in order."""

    def __init__(self, name: str, records: Iterable[Record] = ()) -> None:
        self.name, self.steps = name, array("q")
        self.columns = {column: array("d") for column in COLUMNS}
        self.starts: list[RunStart] = []
        self.saves: list[int] = []  # their steps
        self.evaluations: list[EvaluationEvent] = []
        self.num_out_of_order = 0  # steps after a later one without a start between them: another run writes
        for record in records:
            step = _as_step(record.get("iteration"))
            if record.get("config") is True:
                self._add_start(RunStart(_as_step(record.get("start")) or 0, record))
            elif record.get("save") is True and (saved := _as_step(record.get("step"))) is not None:
                self.saves.append(saved)
            elif step is not None and record.get("eval") is True:
                self.evaluations.append(EvaluationEvent(
                    step, str(record.get("split", "validation")), _as_float(record.get("lm_loss")),
                    _as_float(record.get("bits_per_byte"))))
            elif step:
                self._add_step(step, record)
        # of a repeated evaluation the last one counts
        self.evaluations = sorted({(one.step, one.split): one for one in self.evaluations}.values())
        # The starts after step 0 that no later start has discarded.
        self.resumes = [start for index, start in enumerate(self.starts) if 0 < start.step < min(
            (later.step for later in self.starts[index + 1:]), default=math.inf)]
        self.settings = self.starts[-1].settings if self.starts else {}
        # Cumulative at each step, as are the tokens.
        self.seconds = array("d", accumulate(value / 1e3 if math.isfinite(value) else 0.0
                                             for value in self.columns["step_ms"]))
        length = _as_float(self.settings.get("data.seq_length") or self.settings.get("model.max_position_embeddings"))
        self.tokens = array("d", (samples * length for samples in self.columns["consumed_samples"]))

    def _add_start(self, start: RunStart) -> None:
        start.discarded_steps, start.last_step = self._rewind(start.step), start.step
        self.starts.append(start)

    def _rewind(self, step: int) -> int:
        """Discard everything after `step`; returns the number of discarded steps."""
        kept = bisect_right(self.steps, step)
        discarded = len(self.steps) - kept
        del self.steps[kept:]
        for column in self.columns.values():
            del column[kept:]
        self.saves = [save for save in self.saves if save <= step]
        self.evaluations = [one for one in self.evaluations if one.step <= step]
        return discarded

    def _add_step(self, step: int, record: Record) -> None:
        is_behind = bool(self.steps) and step <= self.steps[-1]
        if is_behind and self.starts[-1].record:
            self._rewind(step - 1)
            self.num_out_of_order += 1
        elif is_behind or not self.starts:  # the file has no record of this start
            self._add_start(RunStart(step - 1))
        self.starts[-1].last_step = max(step, self.starts[-1].last_step)
        self.steps.append(step)
        for name, column in self.columns.items():
            value = record.get(name)
            column.append(value if type(value) is float else _as_float(value))  # the common case without a call

    def position(self, step: int) -> dict[str, float | None]:
        """A step on every axis of the charts, as of the last recorded step up to it; None if unknown."""
        index = bisect_right(self.steps, step) - 1
        return {"step": step, "tokens": _rounded(self.tokens[index]) if index >= 0 else 0.0,
                "seconds": _rounded(self.seconds[index]) if index >= 0 else 0.0}

    def finite_values(self, column: str) -> list[float]:
        return [value for value in self.columns[column] if math.isfinite(value)]


def _as_float(value: object) -> float:
    """nan if it is not a number."""
    with suppress(OverflowError):
        return float(value) if isinstance(value, float | int) else math.nan
    return math.nan


def _as_step(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < 2**63 else None


def history_notes(history: RunHistory, lines: MetricsFileReader) -> list[str]:
    """What a reader should know about the file."""
    restart = next((start for start in reversed(history.starts) if start.discarded_steps and not start.step), None)
    missing = history.steps[-1] - history.steps[0] + 1 - len(history.steps) if history.steps else 0
    notes = {
        "its metrics file holds no record yet": not lines.num_records,
        "the last line of its metrics file is not whole: it is being written, or a kill has cut it":
            lines.last_line_is_incomplete,
        f"its metrics file has {format_count(lines.num_damaged_lines, 'damaged line')}": lines.num_damaged_lines,
        f"{format_count(history.num_out_of_order, 'step')} stand behind later ones, without a start between them: two "
        "runs wrote into its metrics file at the same time; the curves mix both": history.num_out_of_order,
        "it was started again from step 0, and its curves leave out "
        f"{format_count(restart.discarded_steps if restart else 0, 'step')} before that":
            restart and not history.num_out_of_order,
        f"{format_count(missing, 'step')} between the first and the last have no record": missing,
        "its file does not say how many tokens it has seen": history.steps and math.isnan(history.tokens[-1])}
    return [f"{history.name}: {note}" for note, is_so in notes.items() if is_so]


# ---- curves ----------------------------------------------------------------------------------------------------------

GIB = 2**30
MOST_POINTS = 1000  # points of a curve: about the width of a screen
UNKNOWN = "–"


class MetricChart(NamedTuple):
    column: str
    title: str
    healthy: str  # what a good curve looks like
    unit: str = ""
    scale: float = 1.0  # factor from the column to the unit
    noisy: bool = False  # the page smooths it, and keeps extreme values from stretching its axis
    logarithmic: bool = False  # the page offers a logarithmic axis
    default_value: float | None = None  # the chart is omitted if no run has another value


CHARTS = (
    MetricChart("lm_loss", "Loss", "falls, first steeply, then ever more slowly, and validation stays near it. "
                "Validation that rises while training falls is overfitting; a lasting rise of both is divergence.",
                "nats a token", noisy=True, logarithmic=True),
    MetricChart("learning_rate", "Learning rate", "rises during the warm-up, then falls as planned."),
    MetricChart("grad_norm", "Gradient norm", "falls during the warm-up and stays level. Single spikes are clipped and "
                "do no harm; a lasting rise often precedes divergence.", noisy=True, logarithmic=True),
    MetricChart("tokens_per_s", "Tokens a second", "level after the first steps. A decline or regular dips mean "
                "waiting: for data, for other programs, or for a hot device.", noisy=True),
    MetricChart("max_memory_bytes", "Peak memory", "level after the first evaluation and save. Constant growth ends in "
                "an out-of-memory error.", "GiB", 1 / GIB),
    MetricChart("skipped", "Skipped steps", "a few at the start, while the loss scale is found, then hardly any.",
                "so far", default_value=0.0),
    MetricChart("loss_scale", "Loss scale", "doubles now and then, and halves after a skipped step. Near 1, gradients "
                "overflow all the time.", logarithmic=True, default_value=1.0),
    MetricChart("drive_wait_ms", "Waiting for drives", "a small part of the time of a step.", "ms a step", noisy=True),
    MetricChart("pld_theta", "Layer dropping", "falls from 1 to the value of --pld-theta.", "theta"))


def chart_data(histories: Sequence[RunHistory]) -> dict[str, Any]:
    """The input of the page's script."""
    charts = [chart for chart in CHARTS if any(value != chart.default_value for history in histories
                                               for value in history.finite_values(chart.column))]
    return {"charts": [chart._asdict() for chart in charts],
            "runs": [_run_data(history, charts) for history in histories]}


def _run_data(history: RunHistory, charts: Sequence[MetricChart]) -> dict[str, Any]:
    num_points = min(len(history.steps), MOST_POINTS)
    ends = [len(history.steps) * number // num_points for number in range(1, num_points + 1)]
    points = [history.position(history.steps[end - 1]) for end in ends]  # a point is drawn at the end of its bucket

    def event(mark: str, step: int, text: str, **more: Any) -> dict[str, Any]:
        return {"mark": mark, "text": text, **history.position(step), **more}

    return {
        "name": history.name, "first": history.steps[0] if history.steps else 0,
        **{axis: [point[axis] for point in points] for axis in ("step", "tokens", "seconds")},
        "curves": {chart.column: _curve_data(history, chart, ends) for chart in charts},
        "events": [
            *(event("test" if one.split == "test" else "validation", one.step, value=_rounded(one.loss),
                    text=f"{one.split} {format_float(one.loss)} at step {one.step:,}") for one in history.evaluations),
            *(event("resumed", one.step, f"resumed after step {one.step:,}"
                    + (f", {format_count(one.discarded_steps, 'step')} given up" if one.discarded_steps else ""))
              for one in history.resumes),
            *(event("saved", step, f"saved at step {step:,}") for step in history.saves)]}


def _curve_data(history: RunHistory, chart: MetricChart, ends: Sequence[int]) -> dict[str, list[float | None]]:
    """Mean, minimum and maximum of the finite values of each bucket; the mean alone where each is one step."""
    values: Sequence[float] = history.columns[chart.column]
    if chart.column == "skipped":
        values = [*accumulate(value if math.isfinite(value) else 0.0 for value in values)]
    buckets = [[value * chart.scale for value in values[begin:end] if math.isfinite(value)] or [math.nan]
               for begin, end in pairwise([0, *ends])]
    curve = {"mean": [sum(bucket) / len(bucket) for bucket in buckets]}
    if len(ends) < len(values):
        curve |= {"low": [*map(min, buckets)], "high": [*map(max, buckets)]}
    return {part: [*map(_rounded, points)] for part, points in curve.items()}


def _rounded(value: float) -> float | None:
    """To what a chart can show; None (null in JSON) for nan and inf."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


# ---- tables ----------------------------------------------------------------------------------------------------------


def _summary_values(history: RunHistory) -> dict[str, str]:
    if not history.steps:
        return {"state": "no step yet", "steps": "0"}
    last, settings = history.steps[-1], history.settings
    goal = _as_float(settings.get("train.train_iters"))  # nan if unknown
    cells = {"state": "complete" if last >= goal else f"at step {last:,}" + (f" of {goal:,.0f}" if goal > last else ""),
             "steps": f"{last:,}", "tokens": format_amount(history.tokens[-1]),
             "training time": format_duration(history.seconds[-1])}
    for split in dict.fromkeys(one.split for one in history.evaluations):
        of_split = [one for one in history.evaluations if one.split == split]
        loss, bits = of_split[-1].loss, of_split[-1].bits_per_byte
        cells[f"{split} loss"] = (f"{format_float(loss)} (perplexity {format_float(math.exp(min(loss, 20.0)))}"
                                  + ("" if math.isnan(bits) else f", {format_float(bits)} bits a byte") + ")")
        finite = [one for one in of_split if math.isfinite(one.loss)]
        if len(of_split) > 1 and finite:
            best = min(finite, key=lambda one: one.loss)
            cells[f"lowest {split} loss"] = f"{format_float(best.loss)} at step {best.step:,}"
    for column, name, average, format_one in RECENT_FIGURES:
        recent = history.columns[column][-min(MOST_RECENT, max(LEAST_RECENT, len(history.steps) // 10)):]
        if values := [value for value in recent if math.isfinite(value)]:
            text = f"{average.__name__} of the last {format_count(len(recent), 'step')}"
            cells[name] = f"{format_one(average(values))} ({text})"
    if memory := max(history.finite_values("max_memory_bytes"), default=0.0):
        cells["peak memory"] = f"{memory / GIB:.2f} GiB"
    cells["skipped steps"] = f"{sum(history.finite_values('skipped')):,.0f}"
    if lost := sum(map(math.isnan, history.columns["lm_loss"])):
        cells["steps without a finite loss"] = f"{lost:,}"
    cells["saves"] = f"{len(history.saves):,}" + (f", the last at step {history.saves[-1]:,}" if history.saves else "")
    if history.resumes:
        cells["resumes"] = f"{len(history.resumes):,}"
    if given_up := sum(start.discarded_steps for start in history.starts):
        cells["steps given up"] = f"{given_up:,}"
    return cells | {name: format_value(settings[key]) for key, name in (
        ("parameters", "parameters"), ("world_size", "ranks"), ("device", "device"), ("torch", "torch"))
        if key in settings}


def _differing_settings(settings: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """(name, value in each) of the settings that are not equal in all."""
    names = dict.fromkeys(name for values in settings for name in values)
    rows = ((name, [values.get(name) for values in settings]) for name in names)
    return [(name, *map(format_value, values))
            for name, values in rows if any(value != values[0] for value in values[1:])]


def format_value(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: UNKNOWN, True: "yes", False: "no"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:g}"
    return (" ".join(map(str, value)) or UNKNOWN) if isinstance(value, list | tuple) else str(value)


def format_float(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else UNKNOWN


def format_amount(value: float) -> str:
    """A count, with at most 4 digits and a unit from a million on."""
    for size, letter in ((1e12, " T"), (1e9, " G"), (1e6, " M")):
        if size <= value < math.inf:
            return f"{value / size:.4g}{letter}"
    return f"{value:,.0f}" if 1000 <= value < math.inf else format_float(value)


def format_duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours:,} h {minutes:02d} min" if hours else f"{minutes} min"


LEAST_RECENT, MOST_RECENT = 10, 100  # a figure is an average over the last tenth of the steps, within these bounds
RECENT_FIGURES: tuple[tuple[str, str, Callable[[list[float]], float], Callable[[float], str]], ...] = (
    ("lm_loss", "loss", mean, format_float), ("tokens_per_s", "tokens a second", median, format_amount),
    ("tflops", "TFLOP/s of a device", median, format_amount),
    ("mfu", "MFU", median, lambda share: f"{format_float(100 * share)} %"))
HEADLINES = ("state", "loss", "validation loss", "tokens a second")  # above the charts


# ---- the page --------------------------------------------------------------------------------------------------------


def report_page(histories: Sequence[RunHistory], notes: Iterable[str]) -> str:
    names, settings = [history.name for history in histories], [history.settings for history in histories]
    columns = [_summary_values(history) for history in histories]
    headlines, rows = [[(name, *(column.get(name, UNKNOWN) for column in columns)) for name in found] for found in (
        HEADLINES, [name for name in dict.fromkeys(chain(*columns)) if name not in HEADLINES])]
    data = json.dumps(chart_data(histories), allow_nan=False, separators=(",", ":"))
    charts = Path(__file__).with_name("charts.html").read_text(encoding="utf-8")
    parts = [html_section("Summary", ["", *names], headlines),
             charts.replace("{{data}}", data.replace("<", "\\u003c")),  # "<" would end the element
             html_section("More figures", ["", *names], rows)]
    if len(histories) > 1:
        parts.append(html_section("Settings that differ", ["", *names], _differing_settings(settings)))
    for history in histories:
        if len(history.starts) > 1:
            parts.append(html_section(f"Starts of {history.name}", (
                "began", "after step", "reached", "given up", "other settings than before"), [
                (format_value(start.record.get("began")), f"{start.step:,}", f"{start.last_step:,}",
                 f"{start.discarded_steps:,}", "; ".join(f"{name} {was} → {now}" for name, was, now in
                                                         _differing_settings([before.settings, start.settings])))
                for before, start in pairwise([history.starts[0], *history.starts])]))
    for history in histories:
        if history.settings:
            fields = {name: name.rpartition(".")[2] for name in history.settings}
            shown = {name: format_value(value) for name, value in history.settings.items()}
            defaults = {name: format_value(FIELDS[field].default) for name, field in fields.items() if field in FIELDS}
            parts.append(_flags_section(history))
            parts.append(html_section(
                f"All settings of {history.name}", ("setting", "value", "default, where it differs"),
                [(name, value, default if (default := defaults.get(name, value)) != value else "")
                 for name, value in shown.items()], is_folded=True))
    return html_document(", ".join(names), notes, parts)


def _flags_section(history: RunHistory) -> str:
    """The flags that are not default, to be copied; a line is broken between flags only."""
    flags = shlex.join(config_to_flags({name.rpartition(".")[2]: value for name, value in history.settings.items()}))
    shown = " ".join(f"<span>{escape_html(flag)}</span>" for flag in re.split(r" (?=--)", flags))
    return (f"<section><h2>Flags of {escape_html(history.name)}</h2>\n<div class=\"flags\"><code>{shown}</code>"
            "<button type=\"button\">copy</button></div></section>\n")
