"""The predicted time of a step in words, and beside what a run has measured. Not here: the arithmetic (time.py)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from megatron.plan.footprint import Run
from megatron.plan.rates import Rates, Where
from megatron.plan.report import settings_of
from megatron.plan.table import CARDS_HEAD, aligned, label
from megatron.plan.time import StepTime, step_time
from megatron.report.history import History
from megatron.report.read import MetricsLines

PARTS = ("products", "attention", "rest", "optimizer", "exchange", "hidden", "total")
WARM_UP = 3
"""Steps of a run that its median leaves out, where it has more than twice as many."""
DECISIVE = ("model.", "precision.", "parallel.", "zero.", "recompute.", "offload.", "layer_drop.", "optim.optimizer",
            "optim.clip_grad", "train.batch_size", "train.global_batch_size", "train.compile", "train.cuda_graphs")
"""Settings that a time belongs to, and sections of them."""
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


def measured(path: str, asked: Run, rates: Rates) -> Measured | None:
    """Of a metrics file, beside a prediction by these rates; None while it has no step."""
    history = History(path).read(MetricsLines(Path(path)))
    taken = list(history.finite("step_ms"))
    if not taken:
        return None
    if len(taken) > 2 * WARM_UP:
        taken = taken[WARM_UP:]
    return Measured(path, median(taken) / 1e3, len(taken), tuple(_differences(history.settings, asked, rates.where)))


def _differences(settings: dict[str, Any], asked: Run, where: Where) -> Iterator[str]:
    if settings.get("world_size", asked.ranks) != asked.ranks:
        yield f"{settings['world_size']} ranks"
    device, torch = settings.get("device"), settings.get("torch", where.torch)
    if device is not None and not _is_of(device, where):
        yield f"device {device}"
    if torch != where.torch:
        yield f"torch {torch}"
    here = {f"{section}.{name}": value for section, fields in settings_of(asked).items()
            for name, value in fields.items()}
    for name, value in settings.items():
        if name in here and name.startswith(DECISIVE) and value != here[name]:
            yield f"{name} {value}"


def _is_of(device: str, where: Where) -> bool:
    """Runs name the model of a GPU, and rates that of a machine, in which it is."""
    return device == "CPU" if where.device == "cpu" else device in where.machine


def forecast(asked: Run, rates: Rates, rows: Sequence[dict[str, Any]], beside: Measured | None) -> Iterator[str]:
    """`rows`: those of report.py."""
    yield from ("", f"predicted ms of a step, by the rates of {rates.where}")
    tokens = asked.config.global_batch_size(asked.dp) * asked.config.seq_length
    head = [*CARDS_HEAD, *PARTS, "tokens/s"]
    cells = [[*label(row), *(f"{1e3 * row['step'][part]:.4g}" for part in PARTS),
              f"{tokens / row['step']['total']:,.0f}"] for row in rows]
    yield from aligned([head, *cells], left=(0, 1))
    yield from (f"note: {sentence}" for sentence in _reservations(asked, rates.where))
    if beside is not None:
        yield from ("", _beside(step_time(asked, rates), beside))
        if beside.differs:
            more = f" and {len(beside.differs) - SHOWN} more" if len(beside.differs) > SHOWN else ""
            yield f"note: that run had other settings: {', '.join(beside.differs[:SHOWN])}{more}"


def _reservations(asked: Run, where: Where) -> Iterator[str]:
    if where.device == "cuda":
        yield ("not calibrated on GPUs yet: no prediction has stood beside a measured step of one; and these are of a "
               "model that is not compiled")
    if asked.ranks > where.ranks:
        yield (f"{asked.ranks} ranks exchange as fast as the {where.ranks} that were measured on one machine: a slower "
               "network between nodes is not predicted")


def _beside(predicted: StepTime, found: Measured) -> str:
    return (f"measured {1e3 * found.seconds:.4g} ms (median of {found.steps} steps of {found.name}), predicted "
            f"{1e3 * predicted.total:.4g} ms: {predicted.total / found.seconds - 1:+.1%}")
