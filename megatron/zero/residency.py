"""Which units' parameters are whole: those in use, and around them a small cache of those used next.

    in use     from `enter` to `leave` (a forward), or from `enter` for a backward to `done`
    idle       whole, but not in use: gathered ahead of its use, or kept from a forward for its backward
    away       split; entering it means gathering it

While one unit is used, the one that followed it the last time is on its way, unless this backward is through with it:
a rank may learn that later than another (passes.py), and all of them must gather the same. At most `max_live` elements
are whole at a time: idle units are released for one that is needed, first the one whose use is furthest away. In
forward as in backward that is the one with the smallest index: backward runs from the end.

`Residency` does this in constant time per event. Where nothing comes and goes there is nothing to do: `Resident`.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from enum import Enum
from typing import TypeGuard

from megatron.errors import ConfigError
from megatron.zero.exchanges import ExchangeLog
from megatron.zero.hooks import Unit


TRACES = 2**12
"""Digests are below this, so that sums of their squares over 20,000 ranks are exact in fp64."""


class Phase(Enum):
    """What a unit is used for."""

    FORWARD = "forward"
    REPLAY = "a forward inside backward: recomputation"
    BACKWARD = "backward"


class Resident:
    """Of units that are always whole; at most their new values are still to arrive."""

    trace = 0
    """A digest of what was gathered in which order: ranks must agree on it."""

    def take_trace(self) -> int:
        """The digest since the last call."""
        trace, self.trace = self.trace, 0
        return trace

    def start(self) -> None:
        """A forward of the whole model begins. What a failed one left in use is released."""

    def expect(self, units: Sequence[Unit]) -> None:
        """The forward that has begun goes through these units, in this order, and so does its backward, back."""

    def enter(self, unit: Unit, phase: Phase) -> None:
        """The unit is about to be used."""
        for bucket in unit.buckets:
            bucket.await_parameters()

    def leave(self, unit: Unit, *, backward_follows: bool) -> None:
        """The forward of a unit is over; with `backward_follows` it stays if that comes soon."""

    def pause(self, unit: Unit) -> None:
        """A recomputed forward is over: its backward is next, so the unit stays unless the room is needed."""

    def done(self, unit: Unit) -> None:
        """This pass no longer needs the unit."""

    def done_with_all(self) -> None:
        """Nothing is in use any more."""


def reused_within(distance: int, units: Sequence[Unit]) -> Set[Unit]:
    """Units whose backward follows their forward with at most so many other elements in between."""
    behind, found = 0, set[Unit]()
    for unit in reversed(units):  # the others' forward and backward come in between
        if 2 * behind <= distance:
            found.add(unit)
        behind += unit.numel
    return found


class Residency(Resident):
    """Of units that come and go."""

    def __init__(self, units: Sequence[Unit], *, max_live: int, stays: Set[Unit], prefetches: bool,
                 log: ExchangeLog) -> None:
        """What `stays` is kept from a forward for its backward, where there is room."""
        self._max_live, self._prefetches, self._log = max_live, prefetches, log
        self._in_use: set[Unit] = set()
        self._in_backward: set[Unit] = set()
        self._over: set[Unit] = set()
        """Units that this backward has used up."""
        self._whole: set[Unit] = set()
        self.live = 0
        """Elements that are whole now."""
        self._stays, self._root, self._all = stays, units[0], frozenset(units)
        self._left_out: Set[Unit] = frozenset()
        """Units that the last forward has said it does not use."""
        self._turn: Unit | None = None
        """The unit that it has said is its last: the backward begins there."""
        pairs = list(zip(units[1:], units[2:]))
        self._followers = {(Phase.FORWARD, unit): after for unit, after in pairs}
        self._followers |= {(Phase.BACKWARD, after): unit for unit, after in pairs}
        self._followers |= {(Phase.FORWARD, units[0]): unit for unit in units[1:2]}
        self._last: tuple[Phase, Unit] | None = None

    def start(self) -> None:
        for unit in [*self._in_use]:
            self._rest(unit)
        self._last = self._turn = None
        self._left_out = frozenset()

    def expect(self, units: Sequence[Unit]) -> None:
        way = [self._root, *units, self._root]
        self._left_out, self._turn = self._all.difference(way), way[-2]
        for one, after in zip(way, way[1:]):
            self._followers[Phase.FORWARD, one] = after
            self._followers[Phase.BACKWARD, after] = one

    def enter(self, unit: Unit, phase: Phase) -> None:
        self._log.purpose = phase.value
        if unit not in self._whole:
            self._make_room_for(unit)
        self._in_use.add(unit)
        if phase is Phase.BACKWARD:
            self._in_backward.add(unit)
        self._bring(unit)
        for bucket in unit.buckets:
            bucket.gather()
        if self._last is not None:
            self._followers[self._last] = unit
        self._last = phase, unit
        follower = self._followers.get(self._last)
        self._prefetch(follower)
        if follower is not None:
            self._expect(self._followers.get((phase, follower)))

    def _prefetch(self, unit: Unit | None) -> None:
        """Begin to gather the unit that is next, if there is room for it."""
        if self._is_wanted(unit) and self.live + unit.numel <= self._max_live:
            self._bring(unit)
            for bucket in unit.buckets:
                bucket.prefetch()

    def _expect(self, unit: Unit | None) -> None:
        """Begin to fetch this rank's part of the unit after the next one, where that is elsewhere."""
        if self._is_wanted(unit):
            for bucket in unit.buckets:
                bucket.work.expect()

    def _is_wanted(self, unit: Unit | None) -> TypeGuard[Unit]:
        """It is away, and this pass will come to it, as far as is known."""
        return self._prefetches and unit is not None and unit not in self._whole and unit not in self._over and \
            unit not in self._left_out

    def leave(self, unit: Unit, *, backward_follows: bool) -> None:
        if unit not in self._in_backward:
            self._rest(unit)
            if not backward_follows or not (unit in self._stays or unit is self._turn):
                self._away(unit, soon_back=backward_follows)

    def pause(self, unit: Unit) -> None:
        if unit not in self._in_backward:
            self._rest(unit)

    def done(self, unit: Unit) -> None:
        self._over.add(unit)
        self._rest(unit)
        self._away(unit)

    def done_with_all(self) -> None:
        self._over.clear()
        self._in_use.clear()
        self._in_backward.clear()
        for unit in [*self._whole]:
            self._away(unit)
        self._last = None

    def _bring(self, unit: Unit) -> None:
        if unit not in self._whole:
            self._whole.add(unit)
            self.live += unit.numel
        if unit.numel and not unit.is_here:
            self.trace = (self.trace * 31 + unit.index + 1) % TRACES

    def _rest(self, unit: Unit) -> None:
        self._in_use.discard(unit)
        self._in_backward.discard(unit)

    def _away(self, unit: Unit, *, soon_back: bool = False) -> None:
        for bucket in unit.buckets:
            bucket.leave(soon_back=soon_back)
        if unit in self._whole and not unit.is_here:  # what is lent stays
            self._whole.remove(unit)
            self.live -= unit.numel

    def _make_room_for(self, unit: Unit) -> None:
        if self.live + unit.numel <= self._max_live:
            return
        for idle in sorted(self._whole - self._in_use, key=lambda other: other.index):
            self._away(idle)
            if self.live + unit.numel <= self._max_live:
                return
        needed = self.live + unit.numel
        raise ConfigError(
            f"{needed} parameters have to be whole at once for {unit.name}, and --stage3-max-live-parameters is "
            f"{self._max_live}: raise it to {needed}, or cut the model finer (blocks in a ModuleList, TiledLinear)")
