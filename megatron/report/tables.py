"""Histories -> the tables of the page, as rows of text: what came of each run, in which settings they differ, and where
each was started. Not here: HTML (page.py)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from megatron.report.charts import GIB
from megatron.report.history import Evaluation, History, number
from megatron.report.read import MetricsLines


@dataclass(frozen=True)
class Table:
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


UNKNOWN = "–"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    return Table(tuple(head), tuple(tuple(row) for row in rows))


# ---- what came of a run ------------------------------------------------------------------------------------------


def summary(histories: Sequence[History]) -> Table:
    """A column a run; a row that no run has anything for is left out."""
    columns = [_figures(history) for history in histories]
    names = dict.fromkeys(name for column in columns for name in column)
    return table(("", *(history.name for history in histories)),
                 ((name, *(column.get(name, UNKNOWN) for column in columns)) for name in names))


def _figures(history: History) -> dict[str, str]:
    found = {"state": _state(history), "steps": f"{history.last_step:,}"}
    if not history.steps:
        return found
    found |= {"tokens": amount(history.tokens[-1]), "training time": duration(history.seconds[-1]),
              "loss of the last step": figure(history.columns["lm_loss"][-1])}
    for split in dict.fromkeys(evaluation.split for evaluation in history.evaluations):
        found |= _scores(split, [one for one in history.evaluations if one.split == split])
    for column, name, scale in (("tokens_per_s", "tokens a second", 1.0), ("tflops", "TFLOP/s of a device", 1.0),
                                ("mfu", "MFU", 100.0)):
        if values := list(history.finite(column)):
            middle = scale * median(values)
            found[name] = f"{figure(middle)} %" if column == "mfu" else amount(middle)
    if memory := max(history.finite("max_memory_bytes"), default=0.0):
        found["peak memory"] = f"{memory / GIB:.2f} GiB"
    found["skipped steps"] = f"{sum(history.finite('skipped')):,.0f}"
    if lost := sum(map(math.isnan, history.columns["lm_loss"])):
        found["steps without a finite loss"] = f"{lost:,}"
    last = f", the last at step {history.saves[-1].step:,}" if history.saves else ""
    found["saves"] = f"{len(history.saves):,}{last}"
    if history.resumes:
        found["resumes"] = f"{len(history.resumes):,}"
    if given_up := sum(start.given_up for start in history.starts):
        found["steps given up"] = f"{given_up:,}"
    settings = history.settings
    found |= {name: shown(settings[key]) for key, name in (
        ("parameters", "parameters"), ("world_size", "ranks"), ("device", "device"), ("torch", "torch"))
        if key in settings}
    return found


def _state(history: History) -> str:
    if not history.steps:
        return "no step yet"
    goal = number(history.settings.get("train.train_iters"))
    if math.isnan(goal):
        return f"at step {history.last_step:,}"
    return "complete" if history.last_step >= goal else f"at step {history.last_step:,} of {goal:,.0f}"


def _scores(split: str, evaluations: Sequence[Evaluation]) -> dict[str, str]:
    """The last one; of several also the lowest."""
    last = evaluations[-1]
    bits = "" if math.isnan(last.bits_per_byte) else f", {figure(last.bits_per_byte)} bits a byte"
    perplexity = figure(math.exp(min(last.loss, 20.0)))
    found = {f"{split} loss": f"{figure(last.loss)} (perplexity {perplexity}{bits})"}
    finite = [one for one in evaluations if math.isfinite(one.loss)]
    if len(evaluations) > 1 and finite:
        best = min(finite, key=lambda one: one.loss)
        found[f"lowest {split} loss"] = f"{figure(best.loss)} at step {best.step:,}"
    return found


# ---- settings ----------------------------------------------------------------------------------------------------


def differences(histories: Sequence[History]) -> Table:
    """The settings in which runs differ, with the value in each."""
    settings = [history.settings for history in histories]
    return table(("", *(history.name for history in histories)), _differing(settings))


def configuration(history: History) -> Table:
    return table(("setting", "value"), ((name, shown(value)) for name, value in history.settings.items()))


def _differing(settings: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    names = dict.fromkeys(name for values in settings for name in values)
    rows = ((name, [values.get(name) for values in settings]) for name in names)
    return [(name, *map(shown, values)) for name, values in rows if any(value != values[0] for value in values[1:])]


# ---- starts ------------------------------------------------------------------------------------------------------


def starts(history: History) -> Table:
    """A row for each time it was started; what was then another setting than before."""
    rows, before = list[Sequence[str]](), history.starts[0].settings if history.starts else {}
    for start in history.starts:
        changes, before = _differing([before, start.settings]), start.settings
        rows.append((shown(start.config.get("began")), f"{start.step:,}", f"{start.reached:,}",
                     f"{start.given_up:,}", "; ".join(f"{name} {was} → {now}" for name, was, now in changes)))
    return table(("began", "after step", "reached", "given up", "other settings than before"), rows)


# ---- notes -------------------------------------------------------------------------------------------------------


def notes(history: History, lines: MetricsLines) -> list[str]:
    """What a reader should know about the file."""
    found = []
    if not lines.records:
        found.append("its metrics file holds no record yet")
    if lines.is_cut:
        found.append("the last line of its metrics file is not whole: it is being written, or a kill has cut it")
    if lines.damaged:
        found.append(f"{lines.damaged:,} line{'s' * (lines.damaged > 1)} of its metrics file "
                     f"{'are' if lines.damaged > 1 else 'is'} damaged")
    anew = next((start for start in reversed(history.starts) if start.given_up and not start.step), None)
    if history.out_of_order:
        found.append(f"{history.out_of_order:,} of its steps stand behind later ones, without a start between them: "
                     "two runs wrote into its metrics file at the same time, and the curves are a mixture of both")
    elif anew is not None:
        found.append(f"it was begun anew from step 0: {anew.given_up:,} step{'s' * (anew.given_up > 1)} before that "
                     f"{'are' if anew.given_up > 1 else 'is'} left out")
    if history.missing:
        found.append(f"{history.missing:,} step{'s' * (history.missing > 1)} between the first and the last "
                     f"{'are' if history.missing > 1 else 'is'} not recorded")
    if history.steps and math.isnan(history.tokens[-1]):
        found.append("its file does not say how many tokens it has seen")
    return [f"{history.name}: {note}" for note in found]


# ---- words -------------------------------------------------------------------------------------------------------


def shown(value: object) -> str:
    if value is None:
        return UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:g}"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def figure(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else UNKNOWN


def amount(value: float) -> str:
    """A count, as long as its digits are of use."""
    if not math.isfinite(value):
        return UNKNOWN
    for size, letter in ((1e12, " T"), (1e9, " G"), (1e6, " M")):
        if value >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours:,} h {minutes:02d} min" if hours else f"{minutes} min"
