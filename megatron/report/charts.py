"""Histories -> what the page draws, as plain data: axes, charts and, of each run, its curves and its marks.

A curve has at most MOST_POINTS points: of each bucket of neighbouring steps the mean, the lowest and the highest value.
A number that is not known is null. Not here: how it looks (page.js, page.css).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

from megatron.report.history import RunHistory

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
    MetricChart("pld_theta", "Layer dropping", "theta"),
)


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
        "name": history.name, "first": history.steps[0] if history.steps else 0,
        "step": [history.steps[index] for index in last], "tokens": rounded_values(history.tokens[index]
                                                                                   for index in last),
        "seconds": rounded_values(history.seconds[index] for index in last),
        "curves": {chart.column: _curve_data(history, chart, cuts)
                   for chart in charts}, "evaluations": [
                       {**_position_data(history, found.step), "split": found.split, "loss": rounded_value(found.loss)}
                       for found in history.evaluations
                   ], "saves": [_position_data(history, save.step) for save in history.saves],
        "resumes": [{**_position_data(history, start.step), "given_up": start.discarded_steps}
                    for start in history.resumes]
    }


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
