"""What the engine says of itself during a trace, with the time at which it does: where it is, what travels, when it
waits. Writing one thing down takes about a microsecond."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

from megatron.trace.stretches import Interval
from megatron.whereabouts import ACTIVITY, PHASE, STATUS, STEP, UNIT, ObservedCounters
from megatron.zero.exchanges import CollectiveLog
from mpu.wire import waits

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
            numbers = waits.current_counters()
            waits.write_counters_to(ObservedCounters(numbers, self._on_exchange))
            after.callback(waits.write_counters_to, numbers)
            log.observer = self
            after.callback(partial(setattr, log, "follower", None))
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

    # ---- what travels (zero/exchanges.py) ---------------------------------------------------------------------------

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
