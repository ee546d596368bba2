"""Forward and backward passes: turns the events of hooks.py into gathers, reshards and gradient reductions.

Gradients are reduced in one fixed order, from the last unit to the first and the root at the end, whatever order
they arrive in: ranks must agree on it. `max_in_flight` limits how many reductions run at a time.

At stage 3 the order of collectives must not depend on which parameters a rank used. So a unit is finished (reduced
and resharded) at the latest when the backward of another unit begins. No loss scale, micro-batch or optimizer here.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megatron.distributed.collective_log import BACKWARD_END, INTERRUPTED, CollectiveLog
from megatron.distributed.rank_status import BACKWARD, FORWARD, STATUS
from megatron.errors import ConfigError
from megatron.zero.bucket import FlatBucket
from megatron.zero.gradients import STAGE3_OUTPUT_RULE
from megatron.zero.hooks import INPLACE_CHANGE_TEXT, Unit, UnitCall
from megatron.zero.param_coordinator import DIGEST_LIMIT, ParamCoordinator, UnitPhase
from megatron.zero.step_result import NoGradForwardChecker


@dataclass
class RunningBackward:
    """What has happened in one backward, from `begin_backward` on."""

    reduces: bool
    begun_calls: defaultdict[Unit, set[UnitCall]] = field(default_factory=lambda: defaultdict(set))
    """Calls whose backward has begun."""
    unfinished_calls: dict[Unit, set[UnitCall]] = field(default_factory=dict)
    """The same without those of units whose gradients have all arrived."""
    input_grads_counts: Counter[Unit] = field(default_factory=Counter)
    """Calls whose input gradients are computed."""
    ready_buckets: set[FlatBucket] = field(default_factory=set)
    """Buckets whose gradients have all arrived, or cannot arrive any more."""
    started_reductions: int = 0  # reductions started so far, in the fixed order


class PassCoordinator:
    """Receives the events of hooks.py, and runs a backward pass from its loss to the last reduction."""

    _in_backward_now: PassCoordinator | None = None  # of the engine whose backward runs; at most one in a process

    def __init__(self, units: Sequence[Unit], param_coordinator: ParamCoordinator, log: CollectiveLog,
                 forward_checker: NoGradForwardChecker, *, max_in_flight: int | None, allows_unused: bool,
                 params_are_sharded: bool, current_step: Callable[[], int]) -> None:
        """`max_in_flight`: reductions that run at a time (None: no limit)."""
        self._param_coordinator, self._allows_unused, self._max_in_flight = (
            param_coordinator, allows_unused, max_in_flight)
        self._log, self._params_are_sharded, self.forward_checker = log, params_are_sharded, forward_checker
        self._current_step = current_step
        self._buckets = [bucket for unit in units for bucket in unit.buckets if bucket.trainable]
        self._reduction_order = [bucket for unit in (*reversed(units[1:]), units[0])
                                 for bucket in unit.buckets if bucket.trainable]
        self._backward: RunningBackward | None = None
        self.weight_version = 0  # a backward of a forward with an older version is refused
        self._is_single_rank = all(bucket.shard_group.is_solo and bucket.replica_group.is_solo
                                   for bucket in self._buckets)
        self._is_interrupted = False
        self.unused_param_error: str | None = None
        """Why this rank refuses the step that its last backward ended."""
        self._failed_backwards = 0
        self._call_counts = Counter[Unit]()  # per unit: forward calls whose backward may still come
        self._digest_before = 0  # the gather digest at the start of the running forward
        self.before_evaluation: Callable[[], None] | None = None
        self._root, self._unit_of = units[0], {unit.module: unit for unit in units}
        self._ran_units, self._skipped_units = set[Unit](), set[Unit]()
        """Units that ran, and units that `set_forward_modules` left out."""
        self._forwards_version = 0  # the weight version of the forwards that the two sets and the counts are of
        self._running_units: list[Unit] = []
        self._enclosing_units: dict[Unit, set[Unit]] = {}  # unit -> the units whose forward called it

    @property
    def in_backward(self) -> bool:
        return self._backward is not None

    def backward(self, loss: Tensor, *, retain_graph: bool, reduces: bool, ends_step: bool) -> None:
        """Compute the gradients of `loss`. With `reduces` they are summed over data parallel when this returns; with
        `ends_step` this is the last backward of the step."""
        try:
            self.begin_backward(reduces=reduces)
            loss.backward(retain_graph=retain_graph)
            self.complete_backward(ends_step=ends_step)
        except BaseException as error:
            self.fail_backward(error)
            if INPLACE_CHANGE_TEXT in str(error) and self._params_are_sharded:
                raise ConfigError(
                    "a backward came to a parameter while it was split over the ranks, or to a tensor that was "
                    f"changed in place after the forward: {STAGE3_OUTPUT_RULE}. torch says: {error}") from error
            raise
        self.end_backward(retain_graph=retain_graph)

    def begin_backward(self, *, reduces: bool) -> None:
        """Prepare a backward. `complete_backward` and `end_backward`, or `fail_backward`, must follow."""
        backward = self._backward = RunningBackward(reduces)
        PassCoordinator._in_backward_now = self
        STATUS.set_phase(BACKWARD)
        for bucket in self._buckets:
            bucket.grads.check_user_modified_grads()
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
            if not self._is_interrupted:  # discard all gradients of the step, which are incomplete
                self._failed_backwards += 1
                for bucket in self._buckets:
                    bucket.grads.cancel_reduction()
                self._param_coordinator.release_all()
                for bucket in self._buckets:
                    bucket.grads.discard()
        finally:
            self._backward = PassCoordinator._in_backward_now = None

    def end_backward(self, *, retain_graph: bool) -> None:
        self._backward = PassCoordinator._in_backward_now = None
        if not retain_graph and max(self._call_counts.values(), default=0) <= 1:
            self._call_counts.clear()  # otherwise it is unknown which of the calls still have a backward to come
        self._param_coordinator.release_all()
        STATUS.set_phase("")

    def record_interruption(self, error: BaseException) -> None:
        """`error` ended a backward or a step. After Ctrl-C the other ranks may be anywhere: do not wait for them, and
        refuse later calls."""
        if not isinstance(error, Exception) and not self._is_single_rank:
            self._is_interrupted = True
            self._log.record_collective(INTERRUPTED)

    def check_not_interrupted(self) -> None:
        if self._is_interrupted:
            raise ConfigError("an earlier backward or step was interrupted half way, and the ranks no longer exchange "
                              "the same gradients: end this run, and resume it from the last checkpoint")

    def set_forward_modules(self, modules: Iterable[nn.Module]) -> None:
        """The running forward calls these modules in this order, and no other units."""
        units = [self._unit_of[part] for module in modules for part in module.modules() if part in self._unit_of]
        self._skipped_units.update(set(self._unit_of.values()).difference(units, [self._root]))
        self._param_coordinator.set_forward_order(units)

    def take_run_digest(self) -> int:
        """A digest of the gathers since the last call, their order, and the number of failed backwards.

        Ranks compare it at each step: after a failed backward a rank goes on with other gradients than its peers."""
        digest, self._param_coordinator.gather_digest = self._param_coordinator.gather_digest, 0
        return (digest * 31 + self._failed_backwards) % DIGEST_LIMIT

    # ---- events (hooks.py) --------------------------------------------------------------------------------------

    def before_forward(self, unit: Unit) -> None:
        STATUS.set_phase(BACKWARD if self.in_backward else FORWARD, unit.display_name)
        for bucket in unit.buckets:
            if bucket.is_offloaded:
                bucket.check_not_offloaded("a forward")
        if unit.is_root and not self.in_backward:
            if self.before_evaluation is not None and not (torch.is_grad_enabled() and unit.module.training):
                self.before_evaluation()
            if torch.is_grad_enabled():
                STATUS.set_step(self._current_step())
            self._param_coordinator.begin_forward()
            self._digest_before = self._param_coordinator.gather_digest
            self._running_units.clear()  # left over from a failed forward
        if not self.in_backward and self._forwards_version != self.weight_version:
            for forwards in (self._call_counts, self._ran_units, self._skipped_units):
                forwards.clear()
            self._forwards_version = self.weight_version
        self._ran_units.add(unit)
        if self._params_are_sharded:
            self._enclosing_units.setdefault(unit, set()).update(self._running_units)
            self._running_units.append(unit)
            if self._backward is not None:
                self._release_earlier_units(self._backward, unit, is_recompute=True)
            elif torch.is_grad_enabled():
                self._call_counts[unit] += 1
        try:
            self._param_coordinator.acquire(unit, UnitPhase.RECOMPUTE if self.in_backward else UnitPhase.FORWARD)
        except RuntimeError as error:
            self._log.raise_root_cause(error)
            raise

    def after_forward(self, unit: Unit, call: UnitCall) -> None:
        call.weight_version = self.weight_version
        STATUS.set_phase(BACKWARD if self.in_backward else "" if unit.is_root else FORWARD)
        while self._running_units and self._running_units.pop() is not unit:
            pass
        is_training = torch.is_grad_enabled()
        if self.in_backward:
            self._param_coordinator.after_forward(unit, UnitPhase.RECOMPUTE, backward_follows=True)
            return
        if not (unit.is_root and is_training):  # the root stays gathered: the backward begins with it
            self._param_coordinator.after_forward(unit, UnitPhase.FORWARD, backward_follows=is_training)
        if unit.is_root and not is_training and self._param_coordinator.gather_digest != self._digest_before:
            self.forward_checker(self._param_coordinator.gather_digest)

    def before_backward(self, unit: Unit, call: UnitCall) -> None:
        if call.weight_version != self.weight_version:
            raise ConfigError("backward of a forward that ran before the weights changed (a step, a loaded checkpoint, "
                              "or a delayed update that was waited for): its gradients would mix old and new; run "
                              "the forward again after it")
        STATUS.set_phase(BACKWARD, unit.display_name)
        # Its first output has begun it. An output that is a returned input gets its gradient while other units run.
        backward = self._backward
        if backward is not None and call in backward.begun_calls[unit]:
            return
        self._running_units.clear()  # a recomputation ends before its forward does
        if backward is not None:
            backward.begun_calls[unit].add(call)
            if self._params_are_sharded:
                self._release_earlier_units(backward, unit, is_recompute=False, call=call)
                if not unit.is_root:
                    backward.unfinished_calls.setdefault(unit, set()).add(call)
        self._param_coordinator.acquire(unit, UnitPhase.BACKWARD)

    def input_grads_ready(self, unit: Unit) -> None:
        if self._backward is not None:
            self._backward.input_grads_counts[unit] += 1
        self._release_if_complete(unit)

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
            self._release_if_complete(unit)
            self._start_reductions(self._backward, [bucket])

    # ---- when a unit is released, and its gradients are reduced ---------------------------------------------------
    # A unit is released by whichever comes first: its last gradient (`_release_if_complete`), the backward of a unit
    # that ran before it (`_release_earlier_units`), the end of the backward (`end_backward`).

    def _release_if_complete(self, unit: Unit) -> None:
        """Release the unit if this backward cannot need it: the gradients of all its trainable parameters have been
        computed and, if it has frozen parameters, those of its inputs. The root stays to the end."""
        if not all(bucket.grads.is_complete for bucket in unit.buckets if bucket.trainable):
            return
        backward = self._backward
        if backward is not None:
            backward.unfinished_calls.pop(unit, None)
        if not unit.is_root and (not unit.has_frozen or backward is None or
                                 backward.input_grads_counts[unit] >= len(backward.begun_calls[unit])):
            self._param_coordinator.release(unit)

    def _release_earlier_units(self, backward: RunningBackward, unit: Unit, *, is_recompute: bool,
                               call: UnitCall | None = None) -> None:
        """Release the units whose backward is over when the backward of `unit` begins.

        Autograd runs in the reverse order of the forward. So the backward of another unit is over once all its calls
        have begun theirs, unless it encloses `unit` or both returned the same tensor. Calls inside
        torch.utils.checkpoint(use_reentrant=True) are not counted; their backward is over when another unit is
        recomputed."""
        for other in sorted(backward.unfinished_calls.keys() - {unit}, key=lambda one: -one.index):
            calls = self._call_counts[other]
            begun = backward.unfinished_calls[other]
            is_over = not calls if is_recompute else (len(begun) >= calls and unit not in self._enclosing_units[other])
            if call is not None and any(call.shares_output_with(one) for one in begun):
                continue
            if is_over and other not in self._enclosing_units[unit]:
                del backward.unfinished_calls[other]
                self._param_coordinator.release(other)
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
            if limit is not None and number >= limit:
                self._reduction_order[number - limit].grads.wait_for_reduction()
            backward.started_reductions += 1
