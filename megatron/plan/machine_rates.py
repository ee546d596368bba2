"""Measured rates of a machine, stored as JSON: curves of seconds by size and surfaces of FLOP/s, interpolated log-log.
Pure.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from itertools import pairwise
from typing import Any

Point = tuple[float, float]


@dataclass(frozen=True)
class Curve:
    """Seconds by size."""

    points: tuple[Point, ...]
    """(size, seconds), in order of size, all above 0."""

    def __call__(self, size: float) -> float:
        """Nothing takes no time. Less than the smallest takes as long as that; more than the largest, in proportion."""
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
    """A rate by two sizes, measured at every pair of `rows` and `widths`; beyond them as at the border."""

    rows: tuple[float, ...]
    widths: tuple[float, ...]
    rates: tuple[tuple[float, ...], ...]
    """A line for each of `rows`."""

    def __call__(self, rows: float, width: float) -> float:
        across = [math.log(x) for x in self.widths]
        along = [_interpolate(across, [math.log(rate) for rate in line], math.log(width)) for line in self.rates]
        return math.exp(_interpolate([math.log(x) for x in self.rows], along, math.log(rows)))


def _interpolate(places: Sequence[float], values: Sequence[float], at: float) -> float:
    """The broken line through these points; level beyond them."""
    index = bisect_right(places, at)
    if index == 0 or index == len(places):
        return values[max(index - 1, 0)]
    share = (at - places[index - 1]) / (places[index] - places[index - 1])
    return values[index - 1] + share * (values[index] - values[index - 1])


@dataclass(frozen=True)
class Where:
    """What rates belong to: other ones hold anywhere else."""

    machine: str
    torch: str
    device: str
    precision: str
    ranks: int
    """Of this machine, all at work at the same time."""
    threads: int
    """Of a rank."""

    def __str__(self) -> str:
        return (f"{self.ranks} rank{'s' * (self.ranks > 1)} in {self.precision} on {self.machine} ({self.device}, "
                f"{self.threads} thread{'s' * (self.threads > 1)} each, torch {self.torch})")


@dataclass(frozen=True)
class MachineRates:
    """Of one rank, while the others work as well."""

    where: Where
    seconds: float
    """What the probe took."""
    forward: Surface
    """FLOP/s of [rows, width] x [width, width]."""
    backward: Surface
    """Of the two products that give its gradients."""
    attention_forward: Curve
    """Of one head, 64 wide, of one sample, by the length of the sequence."""
    attention_backward: Curve
    dropping_forward: Curve
    """The same with dropout, which on a CPU is written out in products."""
    dropping_backward: Curve
    block_forward: Curve
    """What a block does beside products and attention, by the elements of its input; the work of the host included."""
    block_backward: Curve
    replay: float
    """Seconds that a recomputed block takes besides its forward, whatever its size."""
    dropout_forward: Curve
    """By elements."""
    dropout_backward: Curve
    loss: Curve
    """Forward and backward beside products, by the number of logits."""
    update: Curve
    """Norm, optimizer and new weights, by the parameters that a rank updates."""
    a_pass: float
    """Seconds of a micro-batch, whatever its size."""
    a_step: float
    """Seconds of a step of training besides: batches, and numbers to report."""
    split_unit: float
    """Seconds that a unit of split parameters takes in a pass, beside its exchange."""
    meetings: tuple[float, ...]
    """By ZeRO stage, and last at stage 3 where all parameters stay whole: seconds that ranks take for a collective,
    beside the wire itself."""
    inner_sum: float
    """The same, of tensor parallel ranks inside of layers."""
    all_reduce: Curve
    """By bytes of the whole tensor, as it travels."""
    reduce_scatter: Curve
    all_gather: Curve
    hides: float
    """Share of an exchange that costs the computation beside it nothing."""
    link: float
    """Bytes a second between host and device, one way at a time; 0: they are one."""
    host_update: Curve
    """`update`, by the host; where host and device are one, the same."""
    spread: float = 1.0
    """How far its sweeps are apart: more than a little where the machine was busy."""
    taken: str = ""
    """The day of the probe; "": a file of before it was kept."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(record: Mapping[str, Any]) -> MachineRates:
        """From `as_dict`, by way of JSON; KeyError, TypeError or ValueError where it is something else, or what no
        probe finds."""
        made: dict[str, Any] = {item.name: _MAKERS[str(item.type)](record[item.name])
                                for item in fields(MachineRates) if item.name in record or item.default is MISSING}
        rates = MachineRates(**made)
        empty = {name for name, value in made.items() if isinstance(value, Curve) and not value.points}
        _check(not empty or rates.where.ranks == 1 and empty <= EXCHANGES, "a curve has no points")
        _check(len(rates.meetings) == NUM_COLLECTIVE_COSTS and rates.hides <= 1, "a number is out of range")
        return rates


EXCHANGES = {"all_reduce", "reduce_scatter", "all_gather"}
"""Curves that one rank has no points of."""
NUM_COLLECTIVE_COSTS = 5
QUIET_SPREAD = 1.2
"""Spread of a probe that nobody disturbed, at most."""


def _check(holds: bool, why: str) -> None:
    if not holds:
        raise ValueError(why)


def _number(value: Any) -> float:
    number = float(value)
    _check(math.isfinite(number) and number >= 0, f"{value} is no amount")
    return number


def _numbers(values: Any, *, rise: bool = False) -> tuple[float, ...]:
    """`rise`: every one above 0, and above the one before it."""
    numbers = tuple(map(_number, values))
    _check(not rise or all(one < other for one, other in pairwise((0.0, *numbers))), "sizes do not rise")
    return numbers


def _curve(record: Mapping[str, Any]) -> Curve:
    points = tuple((_number(size), _number(seconds)) for size, seconds in record["points"])
    _numbers([size for size, _ in points], rise=True)
    _check(all(seconds > 0 for _, seconds in points), "something took no time")
    return Curve(points)


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
    "Curve": _curve, "Surface": _surface, "tuple[float, ...]": _numbers, "float": _number, "str": str, "Where": _where}
