"""What one sweep of the probe saw (probe.py): seconds only, each of the slowest rank, in the order of `Sizes`.

Sweeps are alike, so of several the `least` holds, number by number: what else a machine does makes things longer only,
and seldom the same ones twice. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from statistics import median
from typing import Any, NamedTuple


class PassTimings(NamedTuple):
    forward: float
    backward: float


class StepTimings(NamedTuple):
    """By a step, in its three calls."""

    forward: float
    backward: float
    step: float


class CollectiveTimings(NamedTuple):
    all_reduce: float
    reduce_scatter: float
    all_gather: float


class OverlapTimings(NamedTuple):
    """Products and an exchange that take about as long."""

    products: float
    exchange: float
    both: float


class VariantTimings(NamedTuple):
    """Of the first shape."""

    whole: StepTimings
    split: StepTimings
    """Under stage 3."""
    recomputed: StepTimings


class ProbeResult(NamedTuple):
    products: tuple[tuple[PassTimings, ...], ...]
    """[rows, width] x [width, width], and the two that give its gradients: a line for each of the rows."""
    attention: tuple[PassTimings, ...]
    """Of all heads, by the length of the sequence."""
    dropping: tuple[PassTimings, ...]
    """The same with dropout."""
    dropout: tuple[PassTimings, ...]
    loss: tuple[float, ...]
    """With its products; those of its gradients are made on the way forward."""
    exchanges: tuple[CollectiveTimings, ...]
    """() of one rank."""
    beside: tuple[OverlapTimings, ...]
    """() of one rank."""
    link: float
    """From the device to the host, and back; 0 where they are one."""
    blocks: tuple[tuple[StepTimings, StepTimings], ...]
    """Of each shape, with few blocks and with more."""
    largest: StepTimings
    variants: VariantTimings
    together: tuple[StepTimings, ...]
    """The first shape with more blocks, data parallel over all ranks: `ProbeModelShape.together`; () of one rank."""
    cut: tuple[StepTimings, ...]
    """`Sizes.cut`; () where there is none."""
    training: float
    """The first shape with more blocks, in the loop of training, data parallel over all ranks at stage 0."""
    host: tuple[float, ...]
    """Steps of the optimizer by the host; () where host and device are one."""


def elementwise_min(*sightings: ProbeResult) -> ProbeResult:
    return reduce(_least, sightings)


def spread(*sightings: ProbeResult) -> float:
    """How many times the least the next one is, usually: about 1 where nobody disturbs."""
    columns = (sorted(column) for column in zip(*map(_numbers, sightings), strict=True))
    return float(median(second / first for first, second, *_ in columns if first > 0))


def _least(one: Any, other: Any) -> Any:
    if not isinstance(one, tuple):
        return min(one, other)
    parts = [_least(*pair) for pair in zip(one, other, strict=True)]
    return tuple(parts) if type(one) is tuple else type(one)(*parts)


def _numbers(part: Any) -> Iterator[float]:
    if not isinstance(part, tuple):
        yield part
        return
    for inner in part:
        yield from _numbers(inner)
