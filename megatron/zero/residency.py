"""Which units' parameters are whole: those in use, and around them a small cache of those used next.

    in use     from `enter` to `leave` (a forward), or from `begin_backward` to `done`
    idle       whole, but not in use: gathered ahead of its use, or kept from a forward for its backward
    away       split; entering it means gathering it

At most `max_live` elements are whole at a time: idle units are released for one that is needed, first the one whose
use is furthest away. In forward as in backward that is the one with the smallest index: backward runs from the end.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron.errors import ConfigError
from megatron.zero.hooks import Unit


TRACES = 2**12
"""Digests are below this, so that sums of their squares over 20,000 ranks are exact in fp64."""


class Residency:
    def __init__(self, units: Sequence[Unit], *, max_live: int, reuse_distance: int, prefetch_limit: int) -> None:
        self._units = units
        self._max_live, self._reuse_distance, self._prefetch_limit = max_live, reuse_distance, prefetch_limit
        self._in_use: set[Unit] = set()
        self._in_backward: set[Unit] = set()
        behind = [sum(unit.numel for unit in units[index + 1 :]) for index in range(len(units))]
        self._distances = [2 * elements for elements in behind]  # the others' forward and backward come in between
        self.trace = 0
        """A digest of what was gathered in which order: ranks must agree on it."""

    @property
    def live(self) -> int:
        """Elements that are whole now."""
        return sum(unit.numel for unit in self._units if unit.is_here)

    def take_trace(self) -> int:
        """The digest since the last call."""
        trace, self.trace = self.trace, 0
        return trace

    def start(self) -> None:
        """A forward of the whole model begins. What a failed one left in use is released."""
        for unit in [*self._in_use]:
            self._rest(unit)

    def enter(self, unit: Unit) -> None:
        self._make_room_for(unit)
        self._in_use.add(unit)
        self._note(unit)
        for bucket in unit.buckets:
            bucket.gather()

    def leave(self, unit: Unit, *, backward_follows: bool) -> None:
        """The forward of a unit is over; with `backward_follows` it stays if that comes soon."""
        if unit not in self._in_backward:
            self._rest(unit)
            if not backward_follows or self._distances[unit.index] > self._reuse_distance:
                self._away(unit)

    def pause(self, unit: Unit) -> None:
        """A recomputed forward is over: its backward is next, so the unit stays unless the room is needed."""
        if unit not in self._in_backward:
            self._rest(unit)

    def begin_backward(self, unit: Unit) -> None:
        self._in_backward.add(unit)
        self.enter(unit)

    def done(self, unit: Unit) -> None:
        """This pass no longer needs the unit."""
        self._rest(unit)
        self._away(unit)

    def done_with_all(self) -> None:
        for unit in self._units:
            self.done(unit)

    def prefetch(self, index: int) -> None:
        """Begin to gather the unit at `index`, if there is one and room for it."""
        if 0 < index < len(self._units):
            unit = self._units[index]
            needed = 0 if unit.is_here else unit.numel
            if needed <= self._prefetch_limit and self.live + needed <= self._max_live:
                self._note(unit)
                for bucket in unit.buckets:
                    bucket.prefetch()

    def _note(self, unit: Unit) -> None:
        if unit.numel and not unit.is_here:
            self.trace = (self.trace * 31 + unit.index + 1) % TRACES

    def _rest(self, unit: Unit) -> None:
        self._in_use.discard(unit)
        self._in_backward.discard(unit)

    def _away(self, unit: Unit) -> None:
        for bucket in unit.buckets:
            bucket.leave()

    def _make_room_for(self, unit: Unit) -> None:
        needed = self.live + (0 if unit.is_here else unit.numel)
        for other in self._units:
            if needed <= self._max_live:
                return
            if other.is_here and other not in self._in_use and other is not unit:
                needed -= other.numel
                self._away(other)
        if needed > self._max_live:
            raise ConfigError(
                f"{needed} parameters have to be whole at once for {unit.name}, and --stage3-max-live-parameters is "
                f"{self._max_live}: raise it to {needed}, or cut the model finer (blocks in a ModuleList, TiledLinear)")
