"""Records the engine's rank status, collectives and waits with timestamps during a trace, as intervals of time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from megatron.distributed.collective_log import CollectiveLog
from megatron.distributed.rank_status import ACTIVITY, PHASE, STATUS, STEP, UNIT, ObservedCounters
from mpu import collective_tracker


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


ClockFn = Callable[[], float]


def microseconds() -> float:
    """Since 1970, as torch's profiler counts."""
    return time.time_ns() / 1e3


@dataclass
class CollectiveSpan:
    """One exchange."""

    what: str
    start: float
    awaited: float | None = None
    stop: float | None = None


@dataclass
class StateTimeline:
    """Of which of several things is going on, one after the other."""

    changes: list[tuple[float, str]] = field(default_factory=list)

    def intervals(self, end: float) -> list[Interval]:
        """Those that have a name; what was said twice is one."""
        found: list[Interval] = []
        for (start, name), (stop, _) in zip(self.changes, [*self.changes[1:], (end, "")]):
            if found and found[-1].name == name and found[-1].stop == start:
                found[-1] = Interval(found[-1].start, stop, name)
            elif name:
                found.append(Interval(start, stop, name))
        return found


class TraceRecorder:
    def __init__(self, clock: ClockFn = microseconds) -> None:
        self._clock = clock
        self.timelines = {place: StateTimeline() for place in (STEP, ACTIVITY, PHASE, UNIT)}
        self.exchange_timeline = StateTimeline()
        """Whether the host is in an exchange with others: it sends, or waits."""
        self.collectives: dict[tuple[str, int], CollectiveSpan] = {}
        self._names: dict[int, str] = {}

    @contextmanager
    def attached(self, log: CollectiveLog) -> Iterator[None]:
        with ExitStack() as after:
            after.enter_context(STATUS.observed_by(self._on_status))
            numbers = collective_tracker.current_counters()
            collective_tracker.write_counters_to(ObservedCounters(numbers, self._on_exchange))
            after.callback(collective_tracker.write_counters_to, numbers)
            log.observer = self
            after.callback(partial(setattr, log, "observer", None))
            yield

    def _on_status(self, place: int, number: int) -> None:
        if (line := self.timelines.get(place)) is not None:
            line.changes.append((self._clock(), f"step {number}" if place == STEP else self._name(number)))

    def _name(self, number: int) -> str:
        if number not in self._names:
            self._names[number] = STATUS.text_of(number)
        return self._names[number]

    def _on_exchange(self, place: int, mark: int) -> None:
        if place == 0:
            self.exchange_timeline.changes.append((self._clock(), "exchange" if mark else ""))

    @property
    def num_changes(self) -> int:
        """How often the engine went on to something else; operations are some tens of times as many."""
        return sum(len(line.changes) for line in self.timelines.values())

    # ---- collectives (distributed/collective_log.py) ----------------------------------------------------------------

    def collective_started(self, kind: str, number: int, what: str) -> None:
        self.collectives[kind, number] = CollectiveSpan(what, self._clock())

    def collective_awaited(self, kind: str, number: int) -> None:
        if (journey := self.collectives.get((kind, number))) is not None:
            journey.awaited = self._clock()

    def collective_finished(self, kind: str, number: int) -> None:
        if (journey := self.collectives.get((kind, number))) is not None:
            journey.stop = self._clock()

    # ---- what came of it --------------------------------------------------------------------------------------------

    def rebase(self, base: float) -> None:
        """All times are since then."""
        for line in (*self.timelines.values(), self.exchange_timeline):
            line.changes = [(moment - base, name) for moment, name in line.changes]
        for journey in self.collectives.values():
            journey.start -= base
            journey.awaited = None if journey.awaited is None else journey.awaited - base
            journey.stop = None if journey.stop is None else journey.stop - base

    def exchange_intervals(self, end: float) -> list[Interval]:
        """When the host was at exchanges, and what it waited for where that is known."""
        awaited = [Interval(one.awaited, end if one.stop is None else one.stop, one.what)
                   for one in self.collectives.values() if one.awaited is not None]
        return sorted([*awaited, *self.exchange_timeline.intervals(end)])
