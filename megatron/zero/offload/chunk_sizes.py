"""Chunk sizes and buffer counts of offloaded state, and which buckets are offloaded (`OffloadRatio`).

Imports no torch, as the planner uses it.
"""

from __future__ import annotations

from collections.abc import Sequence

# Chunks are multiples of this many elements, which fill whole pages in any dtype of 16 bits and more.
CHUNK_ALIGNMENT = 2048

# Elements of a chunk of host state: large enough to saturate the bus, small enough for the device buffers.
HOST_CHUNK_NUMEL = 2**22

STEP_BUFFER_SETS = 3  # buffer sets of a step: one chunk is read, one updated, one written


class OffloadRatio:
    """Decides bucket by bucket which are offloaded: their share of all elements stays as close to `ratio` as whole
    buckets allow, and both kinds interleave, so that device and host are busy at all times."""

    def __init__(self, ratio: float = 1.0) -> None:
        self._ratio, self._total_numel, self._offloaded_numel = ratio, 0, 0

    def offloads_next(self, numel: int) -> bool:
        """Whether the next bucket, of `numel` elements, is offloaded."""
        self._total_numel += numel
        offloads = self._offloaded_numel + numel / 2 <= self._ratio * self._total_numel
        self._offloaded_numel += numel * offloads
        return offloads

    @property
    def achieved(self) -> float:
        """The offloaded share of all elements so far."""
        return self._offloaded_numel / max(1, self._total_numel)


def chunk_numel(numel: int) -> int:
    """The largest aligned chunk that fits `numel` elements."""
    return max(CHUNK_ALIGNMENT, numel // CHUNK_ALIGNMENT * CHUNK_ALIGNMENT)


def step_chunk_numel(place: str, tile: int, buffers: int, kinds: int) -> int | None:
    """Elements of optimizer state (`kinds` tensors a weight) at `place` that a step updates at a time; None: the whole
    shard, which is on the device. On a drive, `buffers` buffers of `tile` elements hold STEP_BUFFER_SETS sets."""
    if place == "none":
        return None
    return min(HOST_CHUNK_NUMEL, tile) if place == "cpu" else chunk_numel(tile * buffers // (STEP_BUFFER_SETS * kinds))


def param_chunks(buffer_size: int, buffers: int, step_chunk: int | None) -> tuple[int, int]:
    """Elements of a chunk of parameters on a drive (at most what a step writes at a time), and the number of buffers:
    at least two, one in use and one being read."""
    chunk = chunk_numel(buffer_size) if step_chunk is None else min(chunk_numel(buffer_size), step_chunk)
    return chunk, max(2, buffer_size * buffers // chunk)


def split_into_chunks(numel: int, chunk: int, outer_chunk: int | None = None) -> Sequence[slice]:
    """Equal slices of at most `chunk` elements, the last one shorter. With `outer_chunk`, no slice crosses a boundary
    of the slices of that size, so that writing one of those writes whole chunks."""
    if outer_chunk is not None:
        return [slice(outer.start + inner.start, outer.start + inner.stop) for outer in split_into_chunks(
            numel, outer_chunk) for inner in split_into_chunks(outer.stop - outer.start, chunk)]
    count = max(1, -(-numel // chunk))
    size = -(-numel // count // CHUNK_ALIGNMENT) * CHUNK_ALIGNMENT
    return [slice(start, min(start + size, numel)) for start in range(0, numel, size)]


def largest_chunk(chunks: Sequence[slice]) -> int:
    """Elements of the largest chunk, or 0."""
    return max((part.stop - part.start for part in chunks), default=0)
