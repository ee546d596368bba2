"""Chunk sizes and buffer counts of offloaded state, and which buckets are offloaded (`OffloadRatio`). No torch: the planner uses it."""

from __future__ import annotations

from collections.abc import Sequence

CHUNK_ALIGNMENT = 2048
"""Parts are multiples of this many numbers, which fill pages in any precision of 16 bits and more."""

HOST_CHUNK_NUMEL = 2**22
"""Of state on the host: a part travels long enough to fill the bus, and the parts on the device are small."""

STEP_BUFFER_SETS = 3
"""Parts on the host during a step: one is read, one used, one written."""


class OffloadRatio:
    """Of shelves, as they come: together those that leave are as near to `ratio` of all numbers as whole shelves can
    be, and the two kinds take turns, so that device and host have something to do at all times."""

    def __init__(self, ratio: float = 1.0) -> None:
        self._ratio, self._total_numel, self._offloaded_numel = ratio, 0, 0

    def offloads_next(self, numel: int) -> bool:
        """Whether the next shelf does, of so many numbers."""
        self._total_numel += numel
        offloads = self._offloaded_numel + numel / 2 <= self._ratio * self._total_numel
        self._offloaded_numel += numel * offloads
        return offloads

    @property
    def achieved(self) -> float:
        """What it has come to."""
        return self._offloaded_numel / max(1, self._total_numel)


def chunk_numel(numel: int) -> int:
    """The largest part that so many numbers have room for."""
    return max(CHUNK_ALIGNMENT, numel // CHUNK_ALIGNMENT * CHUNK_ALIGNMENT)


def step_chunk_numel(tile: int, buffers: int, kinds: int) -> int:
    """Of the optimizer's state: so many buffers of a tile each are room for the sets of all kinds."""
    return chunk_numel(tile * buffers // (STEP_BUFFER_SETS * kinds))


def param_chunk_numel(buffer_size: int, step_chunk: int | None) -> int:
    """Of weights at work: what a step writes at a time, if that is a part of its own state."""
    part = chunk_numel(buffer_size)
    return part if step_chunk is None else min(part, step_chunk)


def param_buffer_sets(buffer_size: int, buffers: int, chunk: int) -> int:
    """At least one in use, and one on its way."""
    return max(2, buffer_size * buffers // chunk)


def split_into_chunks(numel: int, chunk: int, outer_chunk: int | None = None) -> Sequence[slice]:
    """A shelf in equal parts, but for the last one. `within`: each of the parts of that size by itself, so that whoever
    writes one of those writes whole parts."""
    if outer_chunk is not None:
        return [
            slice(outer.start + inner.start, outer.start + inner.stop)
            for outer in split_into_chunks(numel, outer_chunk)
            for inner in split_into_chunks(outer.stop - outer.start, chunk)
        ]
    count = max(1, -(-numel // chunk))
    size = -(-numel // count // CHUNK_ALIGNMENT) * CHUNK_ALIGNMENT
    return [slice(start, min(start + size, numel)) for start in range(0, numel, size)]


def largest_chunk(chunks: Sequence[slice]) -> int:
    """Numbers that there must be room for."""
    return max((part.stop - part.start for part in chunks), default=0)
