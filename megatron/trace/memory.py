"""Memory over time, from the allocations that torch's profiler has noted: those of one device.

On an accelerator a level is what its allocator has given out. On a CPU nobody has counted before the trace began, and
a level is what came since.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from megatron.trace.events import Event
from megatron.trace.recorder import Recorder
from megatron.trace.stretches import Stretch
from megatron.whereabouts import PHASE, UNIT

CPU, CUDA = 0, 1
"""As torch numbers kinds of devices."""


class Level(NamedTuple):
    time: float
    total: int
    """Bytes."""
    is_since: bool = False
    """Since the trace began."""


def levels(events: Iterable[Event]) -> list[Level]:
    """In order. Of the accelerator where there is one, else of the host."""
    by_kind: dict[int, list[Level]] = {}
    for event in events:
        if event.get("name") == "[memory]":
            given = event["args"]
            by_kind.setdefault(given["Device Type"], []).append(Level(
                event["ts"], given["Total Allocated"], given["Device Type"] == CPU))
    return sorted(by_kind.get(CUDA) or by_kind.get(CPU) or [])


def peak(found: Sequence[Level], recorded: Recorder) -> tuple[Level, str] | None:
    """The highest, and where the engine was."""
    if not found:
        return None
    highest = max(found, key=lambda level: level.total)
    where = [_at(recorded.lines[place].stretches(found[-1].time), highest.time) for place in (PHASE, UNIT)]
    return highest, ", ".join(word for word in where if word)


def _at(stretches: Sequence[Stretch], moment: float) -> str:
    return next((one.name for one in stretches if one.start <= moment < one.stop), "")


def thinned(found: Sequence[Level], count: int) -> list[Level]:
    """Lowest and highest of each of so many pieces of the time."""
    if len(found) <= 2 * count:
        return list(found)
    start, width = found[0].time, (found[-1].time - found[0].time) / count or 1.0
    pieces: dict[int, list[Level]] = {}
    for level in found:
        pieces.setdefault(int((level.time - start) / width), []).append(level)
    kept = {extreme for piece in pieces.values() for extreme in (min(piece, key=_total), max(piece, key=_total))}
    return sorted(kept)


def _total(level: Level) -> int:
    return level.total
