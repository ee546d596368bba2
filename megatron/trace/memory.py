"""Memory over time, from the allocations that torch's profiler has noted: those of one device.

On an accelerator a level is what its allocator has given out. On a CPU nobody has counted before the trace began, and
a level is what came since.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from megatron.trace.events import TraceEvent
from megatron.trace.recorder import TraceRecorder
from megatron.trace.stretches import Interval
from megatron.whereabouts import PHASE, UNIT

CPU, CUDA = 0, 1
"""As torch numbers kinds of devices."""


class MemoryLevel(NamedTuple):
    time: float
    total: int
    """Bytes."""
    is_relative: bool = False
    """Since the trace began."""


def memory_levels(events: Iterable[TraceEvent]) -> list[MemoryLevel]:
    """In order. Of the accelerator where there is one, else of the host."""
    by_kind: dict[int, list[MemoryLevel]] = {}
    for event in events:
        if event.get("name") == "[memory]":
            given = event["args"]
            by_kind.setdefault(given["Device Type"], []).append(MemoryLevel(
                event["ts"], given["Total Allocated"], given["Device Type"] == CPU))
    return sorted(by_kind.get(CUDA) or by_kind.get(CPU) or [])


def peak_level(found: Sequence[MemoryLevel], recorder: TraceRecorder) -> tuple[MemoryLevel, str] | None:
    """The highest, and where the engine was."""
    if not found:
        return None
    highest = max(found, key=lambda level: level.total)
    where = [_interval_at(recorder.timelines[place].intervals(found[-1].time), highest.time) for place in (PHASE, UNIT)]
    return highest, ", ".join(word for word in where if word)


def _interval_at(intervals: Sequence[Interval], moment: float) -> str:
    return next((one.name for one in intervals if one.start <= moment < one.stop), "")


def downsample_levels(found: Sequence[MemoryLevel], count: int) -> list[MemoryLevel]:
    """Lowest and highest of each of so many pieces of the time."""
    if len(found) <= 2 * count:
        return list(found)
    start, width = found[0].time, (found[-1].time - found[0].time) / count or 1.0
    pieces: dict[int, list[MemoryLevel]] = {}
    for level in found:
        pieces.setdefault(int((level.time - start) / width), []).append(level)
    kept = {extreme for piece in pieces.values() for extreme in (min(piece, key=_total), max(piece, key=_total))}
    return sorted(kept)


def _total(level: MemoryLevel) -> int:
    return level.total
