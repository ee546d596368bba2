"""Passes: what happens to the units in a forward and a backward pass of the model.

hooks.py reports the events; here they become calls: residency.py gathers parameters and releases them, reductions.py
sends the gradients of a bucket to their owners as soon as all of them have been made. Nothing here knows of loss
scales, micro-batches or the optimizer.

At stage 3 the order of what travels may not depend on which parameters a rank has used: on an accelerator sums are in
one queue with parameters, everywhere what is gathered next depends on what has been released. So a unit is closed, sent
and released, when the backward of another one begins: all it will get has arrived by then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from megatron.errors import ConfigError
from megatron.whereabouts import BACKWARD, FORWARD, HERE
from megatron.zero.bucket import FlatBucket
from megatron.zero.forwards import ForwardCheck
from megatron.zero.gradients import UNSEEN
from megatron.zero.exchanges import INTERRUPTED, ExchangeLog
from megatron.zero.hooks import Call, Unit
from megatron.zero.reductions import ReductionOrder
from megatron.zero.residency import TRACES, Phase, Resident
from megatron.zero.saved_weights import CHANGED


class Passes:
    """Receives the events of hooks.py, and runs a backward pass from its loss to the last reduction."""

    _under_way: Passes | None = None
    """Of all engines, the one whose backward runs."""

    def __init__(self, units: Sequence[Unit], residency: Resident, reductions: ReductionOrder, log: ExchangeLog,
                 check_forward: ForwardCheck, *, allows_unused: bool, splits_parameters: bool,
                 step_under_way: Callable[[], int]) -> None:
        self._residency, self._reductions, self._allows_unused = residency, reductions, allows_unused
        self._log, self._splits_parameters, self.check_forward = log, splits_parameters, check_forward
        self._step_under_way = step_under_way
        self._buckets = [bucket for unit in units for bucket in unit.buckets if bucket.trainable]
        self.in_backward = False
        self.weights = 0
        self._is_alone = all(bucket.shard_group.is_solo and bucket.replicas.is_solo for bucket in self._buckets)
        self._is_broken = False
        self._reduces = False
        self._complaint: str | None = None
        self._abandoned = 0
        self._entered, self._inputs_done = Counter[Unit](), Counter[Unit]()
        """Calls whose backward has begun, and those that have the gradients of their inputs."""
        self._calls, self._calls_of = Counter[Unit](), 0
        """Forwards that a backward may still be of, by unit; and the weights they used."""
        self._seen: set[Call] = set()
        """Calls whose backward has begun."""
        self._begun: dict[Unit, set[Call]] = {}
        """The same, of units not all of whose gradients have arrived."""
        self._trace_before = 0  # of the forward under way
        self.before_evaluation: Callable[[], None] | None = None
        self._root, self._unit_of = units[0], {unit.module: unit for unit in units}
        self._ran, self._left_out, self._ran_with = set[Unit](), set[Unit](), 0
        """Units that ran with these weights; those that a forward of theirs has said it leaves out."""
        self._running: list[Unit] = []
        self._around: dict[Unit, set[Unit]] = {}
        """Units whose forward has called this one's."""

    def backward(self, loss: Tensor, *, retain_graph: bool, reduces: bool, ends_step: bool) -> None:
        """Make the gradients of `loss`. With `reduces` they are summed over data parallel when this returns; with
        `ends_step` no other backward adds to them."""
        try:
            self.begin(reduces=reduces)
            loss.backward(retain_graph=retain_graph)
            self.complete(ends_step=ends_step)
        except BaseException as error:
            self.fail(error)
            if CHANGED in str(error) and self._splits_parameters:
                raise ConfigError("a backward came to a parameter while it was split over the ranks, or to a tensor "
                                  f"that was changed in place after the forward: {UNSEEN}. torch says: {error}"
                                  ) from error
            raise
        self.end(retain_graph=retain_graph)

    def begin(self, *, reduces: bool) -> None:
        """A backward begins; `complete` and `end`, or `fail`, are to follow."""
        self.in_backward, self._reduces, Passes._under_way = True, reduces, self
        HERE.enter(BACKWARD)
        for bucket in self._buckets:
            bucket.grads.heed()
        for bucket in self._buckets:
            bucket.grads.begin_backward()
        for unit in self._left_out - self._ran if reduces else ():
            for bucket in unit.buckets:
                if bucket.trainable:
                    self._reductions.ready(bucket)  # with no gradient: what comes after it need not wait

    def complete(self, *, ends_step: bool) -> None:
        """Autograd is through: send what has not been sent, and wait for the sums."""
        if ends_step:
            self._complaint = self._complain_of_unused()
        if self._reduces:
            self._reductions.flush()
        for bucket in self._buckets:
            bucket.grads.end_backward(ends_step)

    def fail(self, error: BaseException) -> None:
        try:
            self.note_interruption(error)
            self._log.explain(error)
            if not self._is_broken:
                self._abandon()
        finally:
            self._leave_backward()

    def end(self, *, retain_graph: bool) -> None:
        self._leave_backward()
        if not retain_graph and max(self._calls.values(), default=0) <= 1:
            self._calls.clear()  # otherwise it is not known which forwards are left
        self._residency.done_with_all()
        HERE.enter("")

    def _leave_backward(self) -> None:
        self.in_backward, Passes._under_way = False, None
        self._entered.clear()
        self._inputs_done.clear()
        self._begun.clear()
        self._seen.clear()

    def _abandon(self) -> None:
        """A backward failed half way: what has been accumulated is incomplete, and is discarded."""
        self._abandoned += 1
        for bucket in self._buckets:
            bucket.grads.settle_reduce()
        self._reductions.reset()
        self._residency.done_with_all()
        for bucket in self._buckets:
            bucket.grads.discard()

    def note_interruption(self, error: BaseException) -> None:
        """A backward or a step was left by `error`. Where that is Ctrl-C the peers may be anywhere, and nothing waits
        for them."""
        if not isinstance(error, Exception) and not self._is_alone:
            self._is_broken = True
            self._log.note(INTERRUPTED)

    def check_whole(self) -> None:
        if self._is_broken:
            raise ConfigError("an earlier backward or step was interrupted half way, and the ranks no longer exchange "
                              "the same gradients: end this run, and resume it from the last checkpoint")

    def _complain_of_unused(self) -> str | None:
        """Other ranks may have used what this one has not: alone it raises, among others it objects to the step."""
        unused = [] if self._allows_unused else [name for bucket in self._buckets for name in bucket.grads.unused()]
        if not unused:
            return None
        complaint = (f"{len(unused)} parameters got no gradient, {unused[0]} first: the loss does not depend on them; "
                     "change the model, or set ignore_unused_parameters")
        if self._is_alone:
            raise ConfigError(complaint)
        return complaint

    def announce(self, modules: Iterable[nn.Module]) -> None:
        """The forward under way calls these modules, in this order, and no other units."""
        units = [self._unit_of[part] for module in modules for part in module.modules() if part in self._unit_of]
        self._left_out.update(set(self._unit_of.values()).difference(units, [self._root]))
        self._residency.expect(units)

    def objection(self) -> str | None:
        """What this rank has against the step that its last backward ended: until another one does."""
        return self._complaint

    def take_trace(self) -> int:
        """A digest of what this rank did since the last call: what was gathered in which order, and how often a
        backward failed. A rank whose backward failed goes on while its peers wait for it, with other gradients."""
        return (self._residency.take_trace() * 31 + self._abandoned) % TRACES

    # ---- events (hooks.py) --------------------------------------------------------------------------------------

    def before_forward(self, unit: Unit) -> None:
        HERE.enter(BACKWARD if self.in_backward else FORWARD, unit.shown)
        for bucket in unit.buckets:
            if bucket.is_set_aside:
                bucket.check_here("a forward")
        if unit.is_root and not self.in_backward:
            if self.before_evaluation is not None and not (torch.is_grad_enabled() and unit.module.training):
                self.before_evaluation()
            if torch.is_grad_enabled():
                HERE.at_step(self._step_under_way())
            self._residency.start()
            self._trace_before = self._residency.trace
            self._running.clear()  # of a forward that failed
            if self._ran_with != self.weights:
                self._ran.clear()
                self._left_out.clear()
                self._ran_with = self.weights
        self._ran.add(unit)
        if self._splits_parameters:
            self._note_call(unit)
        try:
            self._residency.enter(unit, Phase.REPLAY if self.in_backward else Phase.FORWARD)
        except RuntimeError as error:
            self._log.explain(error)
            raise

    def after_forward(self, unit: Unit) -> None:
        HERE.enter(BACKWARD if self.in_backward else "" if unit.is_root else FORWARD)
        while self._running and self._running.pop() is not unit:
            pass
        learns = torch.is_grad_enabled()
        if self.in_backward:
            self._residency.pause(unit)
            return
        if not (unit.is_root and learns):  # the backward of everything else uses the root again
            self._residency.leave(unit, backward_follows=learns)
        if unit.is_root and not learns and self._residency.trace != self._trace_before:
            self.check_forward(self._residency.trace)

    def before_backward(self, unit: Unit, weights: int, call: Call) -> None:
        if weights != self.weights:
            raise ConfigError("backward of a forward that ran before the weights changed (a step, a loaded checkpoint, "
                              "or a delayed update that somebody waited for): its gradients would mix old and new; run "
                              "the forward again after it")
        HERE.enter(BACKWARD, unit.shown)
        if call in self._seen:  # by another output; and one that the unit was given, and returns, belongs to others
            return
        if self.in_backward:
            self._seen.add(call)
            self._entered[unit] += 1
        self._running.clear()  # a recomputation ends before its forward does
        if self._splits_parameters and self.in_backward:
            self._close_others(unit, replays=False, call=call)
            if not unit.is_root:
                self._begun.setdefault(unit, set()).add(call)
        self._residency.enter(unit, Phase.BACKWARD)

    def _note_call(self, unit: Unit) -> None:
        self._around.setdefault(unit, set()).update(self._running)
        self._running.append(unit)
        if self.in_backward:
            self._close_others(unit, replays=True)
        elif torch.is_grad_enabled():
            if self._calls_of != self.weights:
                self._calls.clear()
                self._calls_of = self.weights
            self._calls[unit] += 1

    def _close_others(self, unit: Unit, *, replays: bool, call: Call | None = None) -> None:
        """The backward of `unit` begins. Autograd goes back in the order of the forward, so that of a unit whose calls
        have all begun theirs is over, unless it has `unit` inside, or the two returned one tensor. A unit that torch
        checkpoints with use_reentrant=True has no counted call, and is over when another one is recomputed."""
        for other in sorted(self._begun.keys() - {unit}, key=lambda one: -one.index):
            calls = self._calls[other]
            begun = self._begun[other]
            is_over = not calls if replays else (len(begun) >= calls and unit not in self._around[other])
            if call is not None and any(call.begins_with(one) for one in begun):
                continue
            if is_over and other not in self._around[unit]:
                del self._begun[other]
                self._residency.done(other)
                for bucket in other.buckets if self._reduces else ():
                    if bucket.trainable:
                        self._reductions.ready(bucket)

    def inputs_done(self, unit: Unit) -> None:
        self._inputs_done[unit] += 1
        self._finish(unit)

    def gradient_ready(self, unit: Unit, bucket: FlatBucket, index: int) -> None:
        if not self.in_backward:
            bucket.parameters[index].grad = None
            if Passes._under_way is None:
                raise ConfigError("gradients outside of engine.backward: call engine.backward(loss), not "
                                  "loss.backward()")
            raise ConfigError(
                f"{bucket.layout.slots[index].name} got a gradient in the backward of another engine, which does not "
                "sum it: where only the other model is trained (a GAN: docs/engine.md), call requires_grad_(False) on "
                "this one before the forward, and True after the step; to train both, make one nn.Module of them")
        if bucket.grads.accept(index):
            self._finish(unit)
            if self._reduces:
                self._reductions.ready(bucket)

    def _finish(self, unit: Unit) -> None:
        """Release the parameters of a unit as soon as nothing in this backward can need them: all their gradients have
        been computed, and where some parameters have none, those of the inputs."""
        made = all(bucket.grads.complete for bucket in unit.buckets if bucket.trainable)
        if made:
            self._begun.pop(unit, None)
        if made and not unit.is_root and (
                not unit.has_frozen or self._inputs_done[unit] >= self._entered[unit]):
            self._residency.done(unit)
