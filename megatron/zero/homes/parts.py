"""Which shelves leave the device, how large the parts are in which they go and come back, and how many are on the host
at a time: pure arithmetic, for the engine and for the planner.
"""

from __future__ import annotations

from collections.abc import Sequence

GRAIN = 2048
"""Parts are multiples of this many numbers, which fill pages in any precision of 16 bits and more."""

PART_ON_HOST = 2**22
"""Of state on the host: a part travels long enough to fill the bus, and the parts on the device are small."""

STEP_SETS = 3
"""Parts on the host during a step: one is read, one used, one written."""


class Share:
    """Of shelves, as they come: together those that leave are as near to `ratio` of all numbers as whole shelves can
    be, and the two kinds take turns, so that device and host have something to do at all times."""

    def __init__(self, ratio: float = 1.0) -> None:
        self._ratio, self._numbers, self._left = ratio, 0, 0

    def leaves(self, numel: int) -> bool:
        """Whether the next shelf does, of so many numbers."""
        self._numbers += numel
        leaves = self._left + numel / 2 <= self._ratio * self._numbers
        self._left += numel * leaves
        return leaves

    @property
    def reached(self) -> float:
        """What it has come to."""
        return self._left / max(1, self._numbers)


def part_of(numbers: int) -> int:
    """The largest part that so many numbers have room for."""
    return max(GRAIN, numbers // GRAIN * GRAIN)


def part_of_step(tile: int, buffers: int, kinds: int) -> int:
    """Of the optimizer's state: so many buffers of a tile each are room for the sets of all kinds."""
    return part_of(tile * buffers // (STEP_SETS * kinds))


def part_of_weights(buffer_size: int, of_step: int | None) -> int:
    """Of weights at work: what a step writes at a time, if that is a part of its own state."""
    part = part_of(buffer_size)
    return part if of_step is None else min(part, of_step)


def sets_of_weights(buffer_size: int, buffers: int, part: int) -> int:
    """At least one in use, and one on its way."""
    return max(2, buffer_size * buffers // part)


def cut(numel: int, part: int, within: int | None = None) -> Sequence[slice]:
    """A shelf in equal parts, but for the last one. `within`: each of the parts of that size by itself, so that whoever
    writes one of those writes whole parts."""
    if within is not None:
        return [slice(outer.start + inner.start, outer.start + inner.stop)
                for outer in cut(numel, within) for inner in cut(outer.stop - outer.start, part)]
    count = max(1, -(-numel // part))
    size = -(-numel // count // GRAIN) * GRAIN
    return [slice(start, min(start + size, numel)) for start in range(0, numel, size)]


def largest(parts: Sequence[slice]) -> int:
    """Numbers that there must be room for."""
    return max((part.stop - part.start for part in parts), default=0)
