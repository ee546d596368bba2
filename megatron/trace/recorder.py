"""What the engine says of itself during a trace, with the time at which it does: where it is, what travels, when it
waits. Writing one thing down takes about a microsecond."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

from megatron.trace.stretches import Stretch
from megatron.whereabouts import ACTIVITY, PHASE, STATUS, STEP, UNIT, ObservedCounters
from megatron.zero.exchanges import CollectiveLog
from mpu.wire import waits

Clock = Callable[[], float]


def microseconds() -> float:
    """Since 1970, as torch's profiler counts."""
    return time.time_ns() / 1e3


@dataclass
class Journey:
    """One exchange."""

    what: str
    start: float
    awaited: float | None = None
    stop: float | None = None


@dataclass
class Line:
    """Of which of several things is going on, one after the other."""

    changes: list[tuple[float, str]] = field(default_factory=list)

    def stretches(self, end: float) -> list[Stretch]:
        """Those that have a name; what was said twice is one."""
        found: list[Stretch] = []
        for (start, name), (stop, _) in zip(self.changes, [*self.changes[1:], (end, "")]):
            if found and found[-1].name == name and found[-1].stop == start:
                found[-1] = Stretch(found[-1].start, stop, name)
            elif name:
                found.append(Stretch(start, stop, name))
        return found


class Recorder:
    def __init__(self, clock: Clock = microseconds) -> None:
        self._clock = clock
        self.lines = {place: Line() for place in (STEP, ACTIVITY, PHASE, UNIT)}
        self.exchanging = Line()
        """Whether the host is in an exchange with others: it sends, or waits."""
        self.journeys: dict[tuple[str, int], Journey] = {}
        self._words: dict[int, str] = {}

    @contextmanager
    def listening(self, log: CollectiveLog) -> Iterator[None]:
        with ExitStack() as after:
            after.enter_context(STATUS.observed_by(self._heard))
            numbers = waits.current_counters()
            waits.write_counters_to(ObservedCounters(numbers, self._exchanges))
            after.callback(waits.write_counters_to, numbers)
            log.observer = self
            after.callback(partial(setattr, log, "follower", None))
            yield

    def _heard(self, place: int, number: int) -> None:
        if (line := self.lines.get(place)) is not None:
            line.changes.append((self._clock(), f"step {number}" if place == STEP else self._word(number)))

    def _word(self, number: int) -> str:
        if number not in self._words:
            self._words[number] = STATUS.text_of(number)
        return self._words[number]

    def _exchanges(self, place: int, mark: int) -> None:
        if place == 0:
            self.exchanging.changes.append((self._clock(), "exchange" if mark else ""))

    @property
    def size(self) -> int:
        """How often the engine went on to something else; operations are some tens of times as many."""
        return sum(len(line.changes) for line in self.lines.values())

    # ---- what travels (zero/exchanges.py) ---------------------------------------------------------------------------

    def collective_started(self, kind: str, number: int, what: str) -> None:
        self.journeys[kind, number] = Journey(what, self._clock())

    def collective_awaited(self, kind: str, number: int) -> None:
        if (journey := self.journeys.get((kind, number))) is not None:
            journey.awaited = self._clock()

    def collective_finished(self, kind: str, number: int) -> None:
        if (journey := self.journeys.get((kind, number))) is not None:
            journey.stop = self._clock()

    # ---- what came of it --------------------------------------------------------------------------------------------

    def count_from(self, base: float) -> None:
        """All times are since then."""
        for line in (*self.lines.values(), self.exchanging):
            line.changes = [(moment - base, name) for moment, name in line.changes]
        for journey in self.journeys.values():
            journey.start -= base
            journey.awaited = None if journey.awaited is None else journey.awaited - base
            journey.stop = None if journey.stop is None else journey.stop - base

    def at_exchanges(self, end: float) -> list[Stretch]:
        """When the host was at exchanges, and what it waited for where that is known."""
        awaited = [Stretch(one.awaited, end if one.stop is None else one.stop, one.what)
                   for one in self.journeys.values() if one.awaited is not None]
        return sorted([*awaited, *self.exchanging.stretches(end)])
