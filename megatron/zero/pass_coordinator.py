"""Forward and backward passes: turns the events of hooks.py into gathers, reshards and gradient reductions.

Gather: a unit is gathered when it is used, and the unit that followed it last time is prefetched. At most
`stage3_max_live_parameters` elements are gathered at a time: idle units are resharded to make space, in forward order
(a backward uses the first one last). At stages 0 to 2 units are always gathered: they have no elements that count here,
and `_gather_unit` waits for the all-gather after the last step.

Reduce: in one fixed order, from the last unit to the first and the root at the end, whatever order gradients arrive in.
`max_in_flight` limits how many reductions run at a time.

Reshard: after the forward, unless the backward comes soon; in a backward when the unit is *finished*. The order of
collectives must not depend on which parameters a rank used, so a unit is finished at the latest when the backward of
another unit begins. Ranks compare `gather_digest`. No loss scale, micro-batch or optimizer here.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum
from weakref import WeakSet

import torch
from torch import Tensor, nn

from megatron.distributed.collective_log import BACKWARD_END, INTERRUPTED, CollectiveLog
from megatron.distributed.rank_status import BACKWARD, FORWARD, STATUS
from megatron.distributed.step_consistency import NoGradForwardChecker
from megatron.errors import ConfigError
from megatron.zero.bucket import FlatBucket, ShardState
from megatron.zero.gradients import STAGE3_OUTPUT_RULE
from megatron.zero.hooks import INPLACE_CHANGE_TEXT
from megatron.zero.units import Unit, UnitCall

# Digests are below this, so that sums of their squares over 20,000 ranks are exact in fp64.
DIGEST_LIMIT = 2**12


class UnitPhase(Enum):
    FORWARD = "forward"
    RECOMPUTE = "a forward inside backward: recomputation"
    BACKWARD = "backward"


class UnitState(Enum):
    """What this pass does with a unit. Whether its buckets are sharded is their `shard_state`."""

    UNUSED = "no pass uses it: the next use gathers it, where parameters are sharded"
    IDLE = "gathered but not in use: prefetched, or it stays gathered between its forward and its backward"
    IN_FORWARD = "from `before_forward` to `after_forward`"
    IN_BACKWARD = "from `before_backward` until it is finished"


def units_reused_within(distance: int, units: Sequence[Unit]) -> set[Unit]:
    """Units whose backward follows their forward with at most `distance` elements of other units in between."""
    behind, reused = 0, set[Unit]()
    for unit in reversed(units):
        if 2 * behind <= distance:  # each later unit is used twice in between: in its forward and in its backward
            reused.add(unit)
        behind += unit.numel
    return reused


@dataclass
class RunningBackward:
    """What has happened in one backward, from `begin_backward` on."""

    reduces: bool
    # Calls whose backward has begun.
    begun_calls: defaultdict[Unit, set[UnitCall]] = field(default_factory=lambda: defaultdict(set))
    # The same without those of units whose gradients have all arrived.
    unfinished_calls: dict[Unit, set[UnitCall]] = field(default_factory=dict)
    # Calls whose input gradients are computed.
    input_grads_counts: Counter[Unit] = field(default_factory=Counter)
    # Units that this backward does not use again.
    finished_units: set[Unit] = field(default_factory=set)
    # Buckets whose gradients have all arrived, or cannot arrive any more.
    ready_buckets: set[FlatBucket] = field(default_factory=set)
    started_reductions: int = 0  # reductions started so far, in the fixed order


class PassCoordinator:
    """Receives the events of hooks.py, and runs a backward pass from its loss to the last reduction. FSDP has a
    subclass, whose backward the user starts."""

    _in_backward_now: PassCoordinator | None = None  # of the engine whose backward runs; at most one in a process

    def __init__(self, units: Sequence[Unit], log: CollectiveLog, forward_checker: NoGradForwardChecker, *,
                 params_are_sharded: bool, max_live: int, kept_for_backward: set[Unit], prefetches: bool,
                 max_in_flight: int | None, allows_unused: bool, current_step: Callable[[], int]) -> None:
        """`max_live`: elements gathered at a time. `kept_for_backward`: units to keep gathered after their forward.
        `max_in_flight`: reductions that are left running (None: no limit)."""
        self._log, self.forward_checker, self._current_step = log, forward_checker, current_step
        self._params_are_sharded, self._max_live, self._prefetches = params_are_sharded, max_live, prefetches
        self.kept_for_backward, self._max_in_flight, self._allows_unused = (
            kept_for_backward, max_in_flight, allows_unused)
        self.before_evaluation: Callable[[], None] | None = None
        self._root, self._unit_of = units[0], {unit.module: unit for unit in units}
        self._buckets = [bucket for unit in units for bucket in unit.buckets if bucket.trainable]
        self._reduction_order = [bucket for unit in (*reversed(units[1:]), units[0])
                                 for bucket in unit.buckets if bucket.trainable]
        self._is_single_rank = all(bucket.shard_group.is_solo and bucket.replica_group.is_solo
                                   for bucket in self._buckets)
        self._backward: RunningBackward | None = None
        self.weight_version = 0  # a backward of a forward with an older version is refused
        # Why this rank refuses the step that its last backward ended.
        self.unused_param_error: str | None = None
        self.is_interrupted, self._failed_backward_count = False, 0
        # gathers
        self._states = dict.fromkeys(units, UnitState.UNUSED)
        self.gathered_numel = self._gather_digest = 0
        self._digest_before = 0  # `_gather_digest` at the start of the running forward
        pairs = list(zip(units[1:], units[2:]))
        self._next_unit = {(UnitPhase.FORWARD, unit): after for unit, after in pairs}
        self._next_unit |= {(UnitPhase.BACKWARD, after): unit for unit, after in pairs}
        self._next_unit |= {(UnitPhase.FORWARD, units[0]): unit for unit in units[1:2]}
        self._last_use: tuple[UnitPhase, Unit] | None = None
        self._left_out_units: Set[Unit] = frozenset()  # of the running forward, by `set_forward_modules`
        # The last unit of the last `set_forward_modules`: the backward begins there.
        self._last_forward_unit: Unit | None = None
        # forwards since the weights changed
        self._forwards_version = 0  # their weight version
        # Forward calls whose backward may still come: their graphs are alive (stage 3).
        self._live_calls = defaultdict[Unit, WeakSet[UnitCall]](WeakSet)
        # Units that ran, and units that `set_forward_modules` left out.
        self._ran_units, self._skipped_units = set[Unit](), set[Unit]()
        # Units whose forward runs, outermost first (stage 3).
        self.running_units: list[Unit] = []
        self._enclosing_units: dict[Unit, set[Unit]] = {}  # unit -> the units whose forward called it

    @property
    def in_backward(self) -> bool:
        return self._backward is not None

    # ---- one backward -------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, *, retain_graph: bool, reduces: bool, ends_step: bool) -> None:
        """Compute the gradients of `loss`. With `reduces` they are summed over data parallel when this returns; with
        `ends_step` this is the last backward of the step. If it raises, the caller must call `fail_backward`."""
        self.begin_backward(reduces=reduces)
        try:
            loss.backward(retain_graph=retain_graph)
        except RuntimeError as error:
            if INPLACE_CHANGE_TEXT in str(error) and self._params_are_sharded:
                raise ConfigError(
                    "a backward came to a parameter while it was split over the ranks, or to a tensor that was "
                    f"changed in place after the forward: {STAGE3_OUTPUT_RULE}. torch says: {error}") from error
            raise
        self.complete_backward(ends_step=ends_step)
        self.end_backward(retain_graph=retain_graph)

    def begin_backward(self, *, reduces: bool) -> None:
        """Prepare a backward. `complete_backward` and `end_backward`, or `fail_backward`, must follow."""
        backward = self._backward = RunningBackward(reduces)
        PassCoordinator._in_backward_now = self
        STATUS.set_phase(BACKWARD)
        for bucket in self._buckets:
            bucket.grads.begin_backward()
        for unit in self._skipped_units - self._ran_units:  # no gradient will come: do not delay later buckets
            self._start_reductions(backward, unit.buckets)

    def complete_backward(self, *, ends_step: bool) -> None:
        """Autograd is done: launch the remaining reductions and wait for all."""
        if ends_step:
            unused = [] if self._allows_unused else [
                slot.name for bucket in self._buckets for index, slot in enumerate(bucket.layout.slots)
                if index not in bucket.grads.params_with_grad]
            message = None if not unused else (
                f"{len(unused)} parameters got no gradient, {unused[0]} first: the loss does not depend on them; "
                "change the model, or set ignore_unused_parameters")
            if message is not None and self._is_single_rank:
                raise ConfigError(message)
            self.unused_param_error = message  # a veto for the step: other ranks may have used the parameters
        assert self._backward is not None
        if self._backward.reduces:  # also buckets with parameters that this backward did not reach
            self._start_reductions(self._backward, self._reduction_order)
            self._log.record_barrier(BACKWARD_END)
        for bucket in self._buckets:
            bucket.grads.end_backward(ends_step)

    def fail_backward(self, error: BaseException) -> None:
        try:
            self.record_interruption(error)
            self._log.raise_root_cause(error)
            if not self.is_interrupted:  # discard all gradients of the step, which are incomplete
                self._failed_backward_count += 1
                self._live_calls.clear()  # their graph is half used, though it may be alive
                self.reshard_all()
                for bucket in self._buckets:
                    bucket.grads.discard()
        finally:
            self._backward = PassCoordinator._in_backward_now = None
            self.running_units.clear()

    def end_backward(self, *, retain_graph: bool) -> None:
        assert self._backward is not None
        if not retain_graph:
            for unit, calls in self._backward.begun_calls.items():
                self._live_calls[unit].difference_update(calls)
        self._backward = PassCoordinator._in_backward_now = None
        self.running_units.clear()
        self.reshard_all()
        STATUS.set_phase("")

    def record_interruption(self, error: BaseException) -> None:
        """`error` ended a backward or a step. After Ctrl-C the other ranks may be anywhere: do not wait for them, and
        refuse later calls."""
        if not isinstance(error, Exception) and not self._is_single_rank:
            self.is_interrupted = True
            self._log.record_collective(INTERRUPTED)

    def check_not_interrupted(self) -> None:
        if self.is_interrupted:
            raise ConfigError("an earlier backward or step was interrupted half way, and the ranks no longer exchange "
                              "the same gradients: end this run, and resume it from the last checkpoint")

    def set_forward_modules(self, modules: Iterable[nn.Module]) -> None:
        """The running forward calls these modules in this order, and no other units; its backward in reverse."""
        units = [self._unit_of[part] for module in modules for part in module.modules() if part in self._unit_of]
        order = [self._root, *units, self._root]
        self._left_out_units, self._last_forward_unit = self._states.keys() - order, order[-2]
        self._skipped_units |= self._left_out_units
        for one, after in zip(order, order[1:]):
            self._next_unit[UnitPhase.FORWARD, one] = after
            self._next_unit[UnitPhase.BACKWARD, after] = one

    def take_run_digest(self) -> int:
        """A digest of the gathers since the last call, their order, and the number of failed backwards.

        Ranks compare it at each step: after a failed backward a rank goes on with other gradients than its peers."""
        digest, self._gather_digest = self._gather_digest, 0
        return (digest * 31 + self._failed_backward_count) % DIGEST_LIMIT

    # ---- events (hooks.py) --------------------------------------------------------------------------------------

    def before_forward(self, unit: Unit) -> None:
        backward = self._backward
        STATUS.set_phase(FORWARD if backward is None else BACKWARD, unit.display_name)
        for bucket in unit.buckets:
            if bucket.is_offloaded:
                bucket.check_not_offloaded("a forward")
        if unit.is_root and backward is None:
            self._begin_model_forward(unit)
        if backward is None and self._forwards_version != self.weight_version:
            for forwards in (self._live_calls, self._ran_units, self._skipped_units):
                forwards.clear()
            self._forwards_version = self.weight_version
        self._ran_units.add(unit)
        if self._params_are_sharded:
            self._enclosing_units.setdefault(unit, set()).update(self.running_units)
            self.running_units.append(unit)
            if backward is not None:
                self._finish_earlier_units(backward, unit, call=None)
        try:
            self._gather_unit(unit, UnitPhase.FORWARD if backward is None else UnitPhase.RECOMPUTE)
        except RuntimeError as error:
            self._log.raise_root_cause(error)
            raise

    def _begin_model_forward(self, root: Unit) -> None:
        if self.before_evaluation is not None and not (torch.is_grad_enabled() and root.module.training):
            self.before_evaluation()
        if torch.is_grad_enabled():
            STATUS.set_step(self._current_step())
        for unit, state in self._states.items():
            if state is not UnitState.UNUSED:  # a failed forward may have left it in use
                self._states[unit] = UnitState.IDLE
        self.running_units.clear()
        self._last_use = self._last_forward_unit = None
        self._left_out_units = frozenset()
        self._digest_before = self._gather_digest

    def after_forward(self, unit: Unit, call: UnitCall) -> None:
        """The forward of a unit is over. It stays gathered if its backward comes soon: always after a recomputation."""
        call.weight_version = self.weight_version
        is_recompute, is_training = self._backward is not None, torch.is_grad_enabled()
        STATUS.set_phase(BACKWARD if is_recompute else "" if unit.is_root else FORWARD)
        while self.running_units and self.running_units.pop() is not unit:
            pass  # also those inside it whose forward has raised
        if self._params_are_sharded and is_training and not is_recompute:
            self._live_calls[unit].add(call)
        if unit.is_root and is_training and not is_recompute:
            return  # the root stays gathered and in use: the backward begins with it
        if self._states[unit] is UnitState.IN_FORWARD:
            self._states[unit] = UnitState.IDLE
        stays_gathered = is_recompute or is_training and (
            unit in self.kept_for_backward or unit is self._last_forward_unit)
        if self._states[unit] is not UnitState.IN_BACKWARD and not stays_gathered:
            self._reshard_unit(unit, keep_secondary_shard=is_training)
        if unit.is_root and not is_recompute and self._gather_digest != self._digest_before:
            self.forward_checker(self._gather_digest)

    def before_backward(self, unit: Unit, call: UnitCall) -> None:
        """The backward of `call` begins; called for each of its outputs."""
        if call.weight_version != self.weight_version:
            raise ConfigError("backward of a forward that ran before the weights changed (a step, a loaded checkpoint, "
                              "or a delayed update that was waited for): its gradients would mix old and new; run "
                              "the forward again after it")
        STATUS.set_phase(BACKWARD, unit.display_name)
        # Its first output has begun it. An output that is a returned input gets its gradient while other units run.
        backward = self._backward
        if backward is not None and call in backward.begun_calls[unit]:
            return
        self.running_units.clear()  # a recomputation ends before its forward does
        if backward is not None:
            backward.begun_calls[unit].add(call)
            # Only stage 3 needs the memory of finished units. At stages 0 to 2 a bucket with an unused parameter
            # holds its reduction, and those after it in the order, back until the end of the backward.
            if self._params_are_sharded:
                self._finish_earlier_units(backward, unit, call)
                if not unit.is_root:
                    backward.unfinished_calls.setdefault(unit, set()).add(call)
        self._gather_unit(unit, UnitPhase.BACKWARD)

    def input_grads_ready(self, unit: Unit) -> None:
        """The gradients of all inputs of the unit have been computed; only for units with frozen parameters."""
        if self._backward is not None:
            self._backward.input_grads_counts[unit] += 1
        self._finish_if_complete(unit)

    def param_grad_ready(self, unit: Unit, bucket: FlatBucket, index: int) -> None:
        if self._backward is None:
            bucket.parameters[index].grad = None
            if PassCoordinator._in_backward_now is None:
                raise ConfigError("gradients outside of engine.backward: call engine.backward(loss), not "
                                  "loss.backward()")
            raise ConfigError(
                f"{bucket.layout.slots[index].name} got a gradient in the backward of another engine, which does not "
                "sum it: where only the other model is trained (a GAN: docs/engine.md), call requires_grad_(False) on "
                "this one before the forward, and True after the step; to train both, make one nn.Module of them")
        if bucket.grads.accept_grad(index):
            self._finish_if_complete(unit)
            self._start_reductions(self._backward, [bucket])

    # ---- when a unit is finished, and its gradients are reduced ---------------------------------------------------
    # A unit is finished by whichever comes first: its last gradient (`_finish_if_complete`), the backward of a unit
    # that ran before it (`_finish_earlier_units`), the end of the backward (`end_backward`).

    def _finish_if_complete(self, unit: Unit) -> None:
        """Finish the unit if this backward cannot need it: the gradients of all its trainable parameters have been
        computed and, if it has frozen parameters, those of its inputs. The root stays to the end."""
        if not all(bucket.grads.is_complete for bucket in unit.buckets if bucket.trainable):
            return
        backward = self._backward
        if backward is not None:
            backward.unfinished_calls.pop(unit, None)
        if not unit.is_root and (not unit.has_frozen or backward is None or
                                 backward.input_grads_counts[unit] >= len(backward.begun_calls[unit])):
            if backward is not None:
                backward.finished_units.add(unit)
            self._reshard_unit(unit)

    def _finish_earlier_units(self, backward: RunningBackward, unit: Unit, call: UnitCall | None) -> None:
        """Finish the units whose backward is over when that of a `call` of `unit` begins, or its recomputation (None).

        Autograd runs in the reverse order of the forward. So the backward of another unit is over once all its calls
        have begun theirs, unless it encloses `unit` or both returned the same tensor. Calls inside
        torch.utils.checkpoint(use_reentrant=True) are not counted; their backward is over when another unit is
        recomputed."""
        for other in sorted(backward.unfinished_calls.keys() - {unit}, key=lambda one: -one.index):
            live, begun = self._live_calls[other], backward.unfinished_calls[other]
            if call is None:
                is_over = not live
            else:
                is_over = live <= begun and unit not in self._enclosing_units[other] and not any(
                    call.output_ids & one.output_ids for one in begun)
            if is_over and other not in self._enclosing_units[unit]:
                del backward.unfinished_calls[other]
                backward.finished_units.add(other)
                self._reshard_unit(other)
                self._start_reductions(backward, other.buckets)

    def _start_reductions(self, backward: RunningBackward, ready: Iterable[FlatBucket]) -> None:
        """The buckets `ready` get no more gradients: start the reductions whose turn in the fixed order has come."""
        backward.ready_buckets.update(ready)
        order = self._reduction_order[backward.started_reductions :] if backward.reduces else []
        for bucket in order:
            if bucket not in backward.ready_buckets:
                break
            bucket.grads.start_reduction()
            number, limit = backward.started_reductions, self._max_in_flight
            if limit is not None:
                # One more may be summed between replicas, on other links. The newer one first: its all-reduce then runs
                # while the older one is waited for.
                for earlier in reversed(self._reduction_order[max(0, number - limit - 1) : number - limit + 1]):
                    earlier.grads.wait_for_reduction(between_replicas=False)
            backward.started_reductions += 1

    # ---- gathers and reshards -----------------------------------------------------------------------------------

    def _gather_unit(self, unit: Unit, phase: UnitPhase) -> None:
        """Make the parameters of the unit ready for use, and prefetch the unit that is used next."""
        self._log.purpose = phase.value
        if self._states[unit] is UnitState.UNUSED:
            self._evict_idle_units(unit)
        self._count_gather(unit)
        if phase is UnitPhase.BACKWARD:
            self._states[unit] = UnitState.IN_BACKWARD
        elif self._states[unit] is not UnitState.IN_BACKWARD:
            self._states[unit] = UnitState.IN_FORWARD
        for bucket in unit.buckets:
            bucket.start_gather()
            bucket.wait_for_param_gather()
        if self._last_use is not None:
            self._next_unit[self._last_use] = unit
        self._last_use = phase, unit
        if not self._prefetches:
            return
        follower = self._next_unit.get((phase, unit))
        second = None if follower is None else self._next_unit.get((phase, follower))
        unusable = self._left_out_units if self._backward is None \
            else self._left_out_units | self._backward.finished_units
        if follower is not None and self._states[follower] is UnitState.UNUSED and follower not in unusable \
                and self.gathered_numel + follower.numel <= self._max_live:
            self._count_gather(follower)
            for bucket in follower.buckets:
                bucket.start_gather()
        if second is not None and self._states[second] is UnitState.UNUSED and second not in unusable:
            for bucket in second.buckets:  # fetch this rank's shard from its offload storage
                bucket.param_shard.prefetch()

    def _count_gather(self, unit: Unit) -> None:
        if self._states[unit] is UnitState.UNUSED:
            self._states[unit] = UnitState.IDLE
            self.gathered_numel += unit.numel
        if unit.numel and all(bucket.shard_state is ShardState.SHARDED for bucket in unit.sharded_buckets):
            self._gather_digest = (self._gather_digest * 31 + unit.index + 1) % DIGEST_LIMIT

    def _evict_idle_units(self, unit: Unit) -> None:
        """Reshard idle units until `unit` fits."""
        for idle in [other for other, state in self._states.items() if state is UnitState.IDLE]:
            if self.gathered_numel + unit.numel <= self._max_live:
                break
            self._reshard_unit(idle)
        needed = self.gathered_numel + unit.numel
        if needed > self._max_live:
            raise ConfigError(
                f"{needed} parameters have to be gathered at once for {unit.name}, and --stage3-max-live-parameters is "
                f"{self._max_live}: raise it to {needed}, or cut the model finer (blocks in a ModuleList, TiledLinear)")

    def _reshard_unit(self, unit: Unit, *, keep_secondary_shard: bool = False) -> None:
        for bucket in unit.buckets:
            bucket.reshard(keep_secondary_shard=keep_secondary_shard)
        if self._states[unit] is not UnitState.UNUSED:
            self._states[unit] = UnitState.IDLE  # inside zero.GatheredParameters the unit stays gathered
            if all(bucket.shard_state is ShardState.SHARDED for bucket in unit.sharded_buckets):
                self._states[unit] = UnitState.UNUSED
                self.gathered_numel -= unit.numel

    def reshard_all(self) -> None:
        """The pass is over: reshard all units."""
        for unit, state in self._states.items():
            if state is not UnitState.UNUSED:
                self._reshard_unit(unit)
        self._last_use = None
