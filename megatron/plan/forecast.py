"""The predicted time of a step in words, and beside what a run has measured. Not here: the arithmetic (time.py)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from megatron.plan.footprint import Run
from megatron.plan.rates import Rates
from megatron.plan.table import CARDS_HEAD, aligned, label
from megatron.plan.time import StepTime, step_time
from megatron.report.history import History
from megatron.report.read import MetricsLines

PARTS = ("products", "attention", "rest", "optimizer", "exchange", "hidden", "total")
WARM_UP = 3
"""Steps of a run that its median leaves out, where it has more than twice as many."""
DECISIVE = ("model", "precision", "parallel", "zero", "recompute", "train.batch_size", "train.global_batch_size")
"""Settings that a time belongs to."""
SHOWN = 3


@dataclass(frozen=True)
class Measured:
    """What a run says of its steps."""

    name: str
    seconds: float
    """Median of its steps."""
    steps: int
    differs: tuple[str, ...] = ()
    """Settings that are others there."""


def measured(path: str, asked: Run) -> Measured | None:
    """Of a metrics file; None while it has no step."""
    history = History(path).read(MetricsLines(Path(path)))
    taken = list(history.finite("step_ms"))
    if not taken:
        return None
    if len(taken) > 2 * WARM_UP:
        taken = taken[WARM_UP:]
    return Measured(path, median(taken) / 1e3, len(taken), tuple(_differences(history.settings, asked)))


def _differences(settings: dict[str, Any], asked: Run) -> Iterator[str]:
    here = {f"{section}.{name}": value for section, fields in asked.config.as_dict().items()
            for name, value in fields.items()}
    if settings.get("world_size", asked.ranks) != asked.ranks:
        yield f"{settings['world_size']} ranks"
    for name, value in settings.items():
        if name in here and name.startswith(DECISIVE) and value != here[name]:
            yield f"{name} {value}"


def forecast(asked: Run, rates: Rates, rows: Sequence[dict[str, Any]], beside: Measured | None) -> Iterator[str]:
    """`rows`: those of report.py."""
    yield from ("", f"predicted ms of a step, by the rates of {rates.where}")
    tokens = asked.config.global_batch_size(asked.dp) * asked.config.seq_length
    head = [*CARDS_HEAD, *PARTS, "tokens/s"]
    cells = [[*label(row), *(f"{1e3 * row['step'][part]:.4g}" for part in PARTS),
              f"{tokens / row['step']['total']:,.0f}"] for row in rows]
    yield from aligned([head, *cells], left=(0, 1))
    if beside is not None:
        yield from ("", _beside(step_time(asked, rates), beside))
        if beside.differs:
            more = f" and {len(beside.differs) - SHOWN} more" if len(beside.differs) > SHOWN else ""
            yield f"note: that run had other settings: {', '.join(beside.differs[:SHOWN])}{more}"


def _beside(predicted: StepTime, found: Measured) -> str:
    return (f"measured {1e3 * found.seconds:.4g} ms (median of {found.steps} steps of {found.name}), predicted "
            f"{1e3 * predicted.total:.4g} ms: {predicted.total / found.seconds - 1:+.1%}")
