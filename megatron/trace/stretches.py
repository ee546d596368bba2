"""Stretches of time in microseconds, and which of several kinds each moment belongs to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple


class Interval(NamedTuple):
    start: float
    stop: float
    name: str = ""

    @property
    def length(self) -> float:
        return self.stop - self.start


TimeSpan = tuple[float, float]


def merge_spans(intervals: Iterable[tuple[float, ...] | Interval], within: TimeSpan) -> list[TimeSpan]:
    """In order, and apart."""
    found: list[TimeSpan] = []
    for start, stop in sorted((max(each[0], within[0]), min(each[1], within[1])) for each in intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        elif start < stop:
            found.append((start, stop))
    return found


def total_length(spans: Sequence[TimeSpan]) -> float:
    return sum(stop - start for start, stop in spans)


def time_by_kind(kinds: Mapping[str, Iterable[Interval]], within: TimeSpan) -> dict[str, float]:
    """How long each kind is, where a moment belongs to the first that has it; "" is what none has."""
    found, taken = {}, list[TimeSpan]()
    for kind, stretches in kinds.items():
        more = merge_spans([*taken, *stretches], within)
        found[kind] = total_length(more) - total_length(taken)
        taken = more
    found[""] = within[1] - within[0] - total_length(taken)
    return found
