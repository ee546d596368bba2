"""Decides which units are gathered at stage 3: those in use, and a cache of those that are used next (`UnitState`).

While a unit is used, the unit that followed it last time is prefetched. At most `stage3_max_live_parameters` elements
are gathered at a time: idle units are resharded to make space, in forward order (a backward uses the first one last).
All ranks must gather the same units in the same order; `gather_digest` checks it. At stages 0 to 2 units are always
gathered: they have no elements that count here, and `acquire` waits for the all-gather after the last step.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from enum import Enum
from typing import TypeGuard

from megatron.distributed.collective_log import CollectiveLog
from megatron.errors import ConfigError
from megatron.zero.hooks import Unit

DIGEST_LIMIT = 2**12
"""Digests are below this, so that sums of their squares over 20,000 ranks are exact in fp64."""


class UnitPhase(Enum):
    FORWARD = "forward"
    RECOMPUTE = "a forward inside backward: recomputation"
    BACKWARD = "backward"


class UnitState(Enum):
    """What this pass does with a unit. Where parameters are not sharded its buckets have nothing to gather."""

    SHARDED = "no pass uses it: `acquire` gathers it"
    IDLE = "gathered but not in use: prefetched, or kept from a forward for its backward"
    IN_FORWARD = "from `acquire` to `after_forward`"
    IN_BACKWARD = "from `acquire` to `release`"


def units_reused_within(distance: int, units: Sequence[Unit]) -> Set[Unit]:
    """Units whose backward follows their forward with at most `distance` elements of other units in between."""
    behind, reused = 0, set[Unit]()
    for unit in reversed(units):
        if 2 * behind <= distance:  # each later unit is used twice in between: in its forward and in its backward
            reused.add(unit)
        behind += unit.numel
    return reused


class ParamCoordinator:
    def __init__(self, units: Sequence[Unit], *, max_live: int, kept_for_backward: Set[Unit], prefetches: bool,
                 log: CollectiveLog) -> None:
        """`max_live`: elements gathered at a time. `kept_for_backward`: units to keep gathered after their forward."""
        self._max_live, self._prefetches, self._log = max_live, prefetches, log
        self._states = dict.fromkeys(units, UnitState.SHARDED)
        self._finished_in_backward: set[Unit] = set()  # units that this backward does not use again
        self.gathered_numel = self.gather_digest = 0
        """`gather_digest`: of the gathered units and their order, below DIGEST_LIMIT. Ranks must agree on it."""
        self._kept_for_backward, self._root = kept_for_backward, units[0]
        self._skipped_units: Set[Unit] = frozenset()  # units that the last `set_forward_order` left out
        self._last_forward_unit: Unit | None = None
        """The last unit of the last `set_forward_order`: the backward begins there."""
        pairs = list(zip(units[1:], units[2:]))
        self._next_unit = {(UnitPhase.FORWARD, unit): after for unit, after in pairs}
        self._next_unit |= {(UnitPhase.BACKWARD, after): unit for unit, after in pairs}
        self._next_unit |= {(UnitPhase.FORWARD, units[0]): unit for unit in units[1:2]}
        self._last_use: tuple[UnitPhase, Unit] | None = None

    def begin_forward(self) -> None:
        """A forward of the whole model begins. Units that a failed forward left in use become idle."""
        for unit, state in self._states.items():
            if state is not UnitState.SHARDED:
                self._states[unit] = UnitState.IDLE
        self._last_use = self._last_forward_unit = None
        self._skipped_units = frozenset()

    def set_forward_order(self, units: Sequence[Unit]) -> None:
        """The running forward uses these units in this order, and its backward in the reverse order."""
        order = [self._root, *units, self._root]
        self._skipped_units, self._last_forward_unit = self._states.keys() - order, order[-2]
        for one, after in zip(order, order[1:]):
            self._next_unit[UnitPhase.FORWARD, one] = after
            self._next_unit[UnitPhase.BACKWARD, after] = one

    def acquire(self, unit: Unit, phase: UnitPhase) -> None:
        """Make the parameters of the unit ready for use."""
        self._log.purpose = phase.value
        if self._states[unit] is UnitState.SHARDED:
            self._evict_idle_units(unit)
        self._mark_gathered(unit)
        if phase is UnitPhase.BACKWARD:
            self._states[unit] = UnitState.IN_BACKWARD
        elif self._states[unit] is not UnitState.IN_BACKWARD:
            self._states[unit] = UnitState.IN_FORWARD
        for bucket in unit.buckets:
            bucket.gather()
        if self._last_use is not None:
            self._next_unit[self._last_use] = unit
        self._last_use = phase, unit
        follower = self._next_unit.get(self._last_use)
        if self._should_prefetch(follower) and self.gathered_numel + follower.numel <= self._max_live:
            self._mark_gathered(follower)
            for bucket in follower.buckets:
                bucket.start_gather()
        second = None if follower is None else self._next_unit.get((phase, follower))
        if self._should_prefetch(second):  # fetch this rank's shard from its offload storage
            for bucket in second.buckets:
                bucket.param_shard.prefetch()

    def _should_prefetch(self, unit: Unit | None) -> TypeGuard[Unit]:
        """The unit is sharded, and this pass is expected to use it."""
        return (self._prefetches and unit is not None and self._states[unit] is UnitState.SHARDED
                and unit not in self._finished_in_backward and unit not in self._skipped_units)

    def after_forward(self, unit: Unit, phase: UnitPhase, *, backward_follows: bool) -> None:
        """The forward of a unit is over. It stays gathered if its backward comes soon: always after a recomputation."""
        if self._states[unit] is UnitState.IN_FORWARD:
            self._states[unit] = UnitState.IDLE
        stays = backward_follows and (phase is UnitPhase.RECOMPUTE or unit in self._kept_for_backward
                                      or unit is self._last_forward_unit)
        if self._states[unit] is not UnitState.IN_BACKWARD and not stays:
            self._reshard(unit, keep_secondary_shard=backward_follows)

    def release(self, unit: Unit) -> None:
        """This pass no longer needs the unit: reshard it."""
        self._finished_in_backward.add(unit)
        self._reshard(unit)

    def release_all(self) -> None:
        """The pass is over: reshard all units."""
        self._finished_in_backward.clear()
        for unit, state in self._states.items():
            if state is not UnitState.SHARDED:
                self._reshard(unit)
        self._last_use = None

    def _mark_gathered(self, unit: Unit) -> None:
        if self._states[unit] is UnitState.SHARDED:
            self._states[unit] = UnitState.IDLE
            self.gathered_numel += unit.numel
        if unit.numel and not unit.is_unsharded:
            self.gather_digest = (self.gather_digest * 31 + unit.index + 1) % DIGEST_LIMIT

    def _reshard(self, unit: Unit, *, keep_secondary_shard: bool = False) -> None:
        for bucket in unit.buckets:
            bucket.reshard(keep_secondary_shard=keep_secondary_shard)
        if self._states[unit] is not UnitState.SHARDED:
            self._states[unit] = UnitState.IDLE  # inside zero.GatheredParameters the unit stays gathered
            if not unit.is_unsharded:
                self._states[unit] = UnitState.SHARDED
                self.gathered_numel -= unit.numel

    def _evict_idle_units(self, unit: Unit) -> None:
        needed = self.gathered_numel + unit.numel
        for idle in [] if needed <= self._max_live else [
                other for other, state in self._states.items() if state is UnitState.IDLE]:
            self._reshard(idle)
            needed = self.gathered_numel + unit.numel
            if needed <= self._max_live:
                break
        if needed > self._max_live:
            raise ConfigError(
                f"{needed} parameters have to be gathered at once for {unit.name}, and --stage3-max-live-parameters is "
                f"{self._max_live}: raise it to {needed}, or cut the model finer (blocks in a ModuleList, TiledLinear)")
