"""Records the engine's rank status, collectives and waits with timestamps during a trace, as intervals of time."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron.distributed.collective_log import CollectiveLog
from megatron.distributed.rank_status import ACTIVITY, PHASE, STATUS, STEP, UNIT, ObservedCounters
from mpu import collective_tracker


class Interval(NamedTuple):
    start: float
    stop: float
    name: str = ""


TimeRange = tuple[float, float]


def merge_intervals(intervals: Iterable[tuple[float, ...] | Interval], within: TimeRange) -> list[TimeRange]:
    """The union of the intervals as disjoint ranges, in order."""
    merged = list[TimeRange]()
    for start, stop in sorted((max(each[0], within[0]), min(each[1], within[1])) for each in intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        elif start < stop:
            merged.append((start, stop))
    return merged


def time_by_kind(kinds: Mapping[str, Iterable[Interval]], within: TimeRange) -> dict[str, float]:
    """The time of each kind; a moment counts for the first kind that has it, or for ""."""
    times, covered, before = dict[str, float](), list[TimeRange](), 0.0
    for kind, intervals in kinds.items():
        covered = merge_intervals([*covered, *intervals], within)
        total = sum(stop - start for start, stop in covered)
        times[kind], before = total - before, total
    return times | {"": within[1] - within[0] - before}


def microseconds() -> float:
    """Since 1970, as torch's profiler counts."""
    return time.time_ns() / 1e3


@dataclass
class CollectiveRecord:
    what: str
    start: float
    awaited: float | None = None
    stop: float | None = None


@dataclass
class StateTimeline:
    """Times and names of successive states; "" is no state."""

    changes: list[tuple[float, str]] = field(default_factory=list)

    def intervals(self, end: float) -> list[Interval]:
        """The intervals of named states; equal successive states are one."""
        states = list[Interval]()
        for (start, name), (stop, _) in zip(self.changes, [*self.changes[1:], (end, "")]):
            if states and states[-1].name == name and states[-1].stop == start:
                states[-1] = Interval(states[-1].start, stop, name)
            elif name:
                states.append(Interval(start, stop, name))
        return states


class TraceRecorder:
    def __init__(self) -> None:
        self.timelines = {place: StateTimeline() for place in (STEP, ACTIVITY, PHASE, UNIT)}
        self.exchange_timeline = StateTimeline()
        """Whether the host sends to other ranks, or waits for them."""
        self.collectives: dict[tuple[str, int], CollectiveRecord] = {}
        self._names: dict[int, str] = {}

    @contextmanager
    def attached(self, log: CollectiveLog) -> Iterator[None]:
        counters = collective_tracker.current_counters()
        with STATUS.observed_by(self._on_status):
            collective_tracker.write_counters_to(ObservedCounters(counters, self._on_exchange))
            log.observer = self
            try:
                yield
            finally:
                log.observer = None
                collective_tracker.write_counters_to(counters)

    def _on_status(self, place: int, number: int) -> None:
        if (line := self.timelines.get(place)) is not None:
            if place != STEP and number not in self._names:
                self._names[number] = STATUS.text_of(number)
            line.changes.append((microseconds(), f"step {number}" if place == STEP else self._names[number]))

    def _on_exchange(self, place: int, mark: int) -> None:
        if place == 0:
            self.exchange_timeline.changes.append((microseconds(), "exchange" if mark else ""))

    @property
    def num_changes(self) -> int:
        """State changes of the engine; there are some tens of operations for each."""
        return sum(len(line.changes) for line in self.timelines.values())

    # ---- collectives (distributed/collective_log.py) ----------------------------------------------------------------

    def collective_started(self, kind: str, number: int, what: str) -> None:
        self.collectives[kind, number] = CollectiveRecord(what, microseconds())

    def collective_awaited(self, kind: str, number: int) -> None:
        if (collective := self.collectives.get((kind, number))) is not None:
            collective.awaited = microseconds()

    def collective_finished(self, kind: str, number: int) -> None:
        if (collective := self.collectives.get((kind, number))) is not None:
            collective.stop = microseconds()

    # ---- results ----------------------------------------------------------------------------------------------------

    def rebase(self, base: float) -> None:
        """Make all times relative to `base`."""
        for line in (*self.timelines.values(), self.exchange_timeline):
            line.changes = [(moment - base, name) for moment, name in line.changes]
        for collective in self.collectives.values():
            collective.start -= base
            collective.awaited = None if collective.awaited is None else collective.awaited - base
            collective.stop = None if collective.stop is None else collective.stop - base

    def exchange_intervals(self, end: float) -> list[Interval]:
        """When the host sent or waited, with the awaited collective if known."""
        awaited = [Interval(one.awaited, end if one.stop is None else one.stop, one.what)
                   for one in self.collectives.values() if one.awaited is not None]
        return sorted([*awaited, *self.exchange_timeline.intervals(end)])
