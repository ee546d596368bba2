"""Stretches of time in microseconds, and which of several kinds each moment belongs to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple


class Stretch(NamedTuple):
    start: float
    stop: float
    name: str = ""

    @property
    def length(self) -> float:
        return self.stop - self.start


Span = tuple[float, float]


def union(stretches: Iterable[tuple[float, ...] | Stretch], within: Span) -> list[Span]:
    """In order, and apart."""
    found: list[Span] = []
    for start, stop in sorted((max(each[0], within[0]), min(each[1], within[1])) for each in stretches):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        elif start < stop:
            found.append((start, stop))
    return found


def length(spans: Sequence[Span]) -> float:
    return sum(stop - start for start, stop in spans)


def divided(kinds: Mapping[str, Iterable[Stretch]], within: Span) -> dict[str, float]:
    """How long each kind is, where a moment belongs to the first that has it; "" is what none has."""
    found, taken = {}, list[Span]()
    for kind, stretches in kinds.items():
        more = union([*taken, *stretches], within)
        found[kind] = length(more) - length(taken)
        taken = more
    found[""] = within[1] - within[0] - length(taken)
    return found
