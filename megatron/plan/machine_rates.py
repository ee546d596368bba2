"""Measured rates of a machine, as JSON: curves of seconds by size and surfaces of FLOP/s, interpolated log-log."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from itertools import pairwise
from typing import Any

Point = tuple[float, float]


@dataclass(frozen=True)
class RateCurve:
    """Seconds by size."""

    points: tuple[Point, ...]
    """(size, seconds), in order of size, all above 0."""

    def __call__(self, size: float) -> float:
        """Constant below the smallest point (0 at size 0), proportional above the largest."""
        if size <= 0 or not self.points:
            return 0.0
        (first, least), (last, most) = self.points[0], self.points[-1]
        if size <= first:
            return least
        if size >= last:
            return most * size / last
        return math.exp(_interpolate([math.log(x) for x, _ in self.points], [math.log(y) for _, y in self.points],
                                     math.log(size)))


@dataclass(frozen=True)
class Surface:
    """A rate by two sizes, measured at every pair of `rows` and `widths`; constant beyond them."""

    rows: tuple[float, ...]
    widths: tuple[float, ...]
    rates: tuple[tuple[float, ...], ...]
    """[rows][widths]"""

    def __call__(self, rows: float, width: float) -> float:
        across = [math.log(x) for x in self.widths]
        along = [_interpolate(across, [math.log(rate) for rate in line], math.log(width)) for line in self.rates]
        return math.exp(_interpolate([math.log(x) for x in self.rows], along, math.log(rows)))


def _interpolate(places: Sequence[float], values: Sequence[float], at: float) -> float:
    """Piecewise linear; constant beyond the first and last point."""
    index = bisect_right(places, at)
    if index == 0 or index == len(places):
        return values[max(index - 1, 0)]
    share = (at - places[index - 1]) / (places[index] - places[index - 1])
    return values[index - 1] + share * (values[index] - values[index - 1])


@dataclass(frozen=True)
class Where:
    """The circumstances that rates are valid for."""

    machine: str
    torch: str
    device: str
    precision: str
    ranks: int
    """Ranks of this machine, measured at the same time."""
    threads: int
    """Threads per rank."""

    def __str__(self) -> str:
        return (f"{self.ranks} rank{'s' * (self.ranks > 1)} in {self.precision} on {self.machine} ({self.device}, "
                f"{self.threads} thread{'s' * (self.threads > 1)} each, torch {self.torch})")


@dataclass(frozen=True)
class MachineRates:
    """Rates of one rank, while the others work as well."""

    where: Where
    seconds: float
    """Duration of the probe."""
    forward: Surface
    """FLOP/s of [rows, width] x [width, width]."""
    backward: Surface
    """FLOP/s of the two products of its gradients."""
    attention_forward: RateCurve
    """One head of width 64, one sample, by sequence length."""
    attention_backward: RateCurve
    dropping_forward: RateCurve
    """The same with dropout, which is unfused on a CPU."""
    dropping_backward: RateCurve
    block_forward: RateCurve
    """A block without products and attention, but with the host's work, by the elements of its input."""
    block_backward: RateCurve
    replay: float
    """Fixed seconds of recomputing a block, beside its forward."""
    dropout_forward: RateCurve
    """By elements."""
    dropout_backward: RateCurve
    loss: RateCurve
    """Forward and backward without products, by the number of logits."""
    update: RateCurve
    """Norm, optimizer and new weights, by the parameters that a rank updates."""
    a_pass: float
    """Fixed seconds of a micro-batch."""
    a_step: float
    """Fixed seconds of a training step: batches, and metrics."""
    split_unit: float
    """Seconds that a sharded unit takes in a pass, beside its collectives."""
    meetings: tuple[float, ...]
    """Fixed seconds of a data parallel collective, by ZeRO stage; the last is for stage 3 with unsharded parameters."""
    inner_sum: float
    """Fixed seconds of a tensor parallel collective."""
    all_reduce: RateCurve
    """By bytes of the full tensor on the wire."""
    reduce_scatter: RateCurve
    all_gather: RateCurve
    hides: float
    """Share of a collective that does not slow down the computation beside it."""
    link: float
    """Bytes per second between host and device, one way at a time; 0 on a CPU."""
    host_update: RateCurve
    """`update` on the host; on a CPU the same."""
    spread: float = 1.0
    """Ratio of its sweeps' times: large if the machine was busy."""
    taken: str = ""
    """Date of the probe; "" in old files."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(record: Mapping[str, Any]) -> MachineRates:
        """From the JSON of `as_dict`; raises KeyError, TypeError or ValueError for anything that no probe writes."""
        made: dict[str, Any] = {item.name: _MAKERS[str(item.type)](record[item.name])
                                for item in fields(MachineRates) if item.name in record or item.default is MISSING}
        rates = MachineRates(**made)
        empty = {name for name, value in made.items() if isinstance(value, RateCurve) and not value.points}
        _check(not empty or rates.where.ranks == 1 and empty <= EXCHANGES, "a curve has no points")
        _check(len(rates.meetings) == NUM_COLLECTIVE_COSTS and rates.hides <= 1, "a number is out of range")
        return rates


EXCHANGES = {"all_reduce", "reduce_scatter", "all_gather"}
"""Curves that are empty on a single rank."""
NUM_COLLECTIVE_COSTS = 5
QUIET_SPREAD = 1.2
"""Maximum spread of a probe on an idle machine."""


def _check(holds: bool, why: str) -> None:
    if not holds:
        raise ValueError(why)


def _number(value: Any) -> float:
    number = float(value)
    _check(math.isfinite(number) and number >= 0, f"{value} is no amount")
    return number


def _numbers(values: Any, *, rise: bool = False) -> tuple[float, ...]:
    """`rise`: require positive, increasing values."""
    numbers = tuple(map(_number, values))
    _check(not rise or all(one < other for one, other in pairwise((0.0, *numbers))), "sizes do not rise")
    return numbers


def _curve(record: Mapping[str, Any]) -> RateCurve:
    points = tuple((_number(size), _number(seconds)) for size, seconds in record["points"])
    _numbers([size for size, _ in points], rise=True)
    _check(all(seconds > 0 for _, seconds in points), "something took no time")
    return RateCurve(points)


def _surface(record: Mapping[str, Any]) -> Surface:
    rows, widths = (_numbers(record[name], rise=True) for name in ("rows", "widths"))
    rates = tuple(map(_numbers, record["rates"]))
    _check(bool(rows and widths) and [len(line) for line in rates] == [len(widths)] * len(rows), "not all pairs")
    _check(min(map(min, rates)) > 0, "a rate is 0")
    return Surface(rows, widths, rates)


def _where(record: Mapping[str, Any]) -> Where:
    where = Where(**record)
    _check(isinstance(where.ranks, int) and where.ranks >= 1, "it is of no rank")
    return where


_MAKERS: dict[str, Callable[[Any], Any]] = {
    "RateCurve": _curve, "Surface": _surface, "tuple[float, ...]": _numbers, "float": _number, "str": str,
    "Where": _where}
