"""Histories -> the tables of the page, as rows of text: what came of each run, in which settings they differ, and where
each was started. Not here: HTML (page.py)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from megatron.report.charts import GIB
from megatron.report.history import EvaluationEvent, RunHistory, as_float
from megatron.report.read import MetricsFileReader


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
    return [(name, *map(format_value, values)) for name, values in rows
            if any(value != values[0] for value in values[1:])]


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
            f"it was begun anew from step 0: {restart.discarded_steps:,} step{'s' * (restart.discarded_steps > 1)} before that "
            f"{'are' if restart.discarded_steps > 1 else 'is'} left out")
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
