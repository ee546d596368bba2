"""A curve of any length -> at most so many points, with every peak: of each bucket of neighbouring steps the mean, the
lowest and the highest value. All curves of a run share the buckets, and so the axes."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

MOST_POINTS = 1000
"""Of a curve: about as many as a screen has columns for it."""


@dataclass(frozen=True)
class Curve:
    """A value per bucket; nan where no step of it has one."""

    mean: array[float]
    low: array[float]
    high: array[float]


def ends(count: int, most: int = MOST_POINTS) -> list[int]:
    """Where buckets end, as equal as they can be: the first begins at 0, each at the end of the one before."""
    buckets = min(count, most)
    return [count * number // buckets for number in range(1, buckets + 1)]


def thinned(values: Sequence[float], cuts: Sequence[int]) -> Curve:
    curve, begin = Curve(array("d"), array("d"), array("d")), 0
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
