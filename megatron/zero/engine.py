"""ZeroEngine: the data-parallel engine a training loop talks to. `zero.initialize` builds one.

    loss = engine(batch...);  engine.backward(loss);  engine.step()

It is called once per micro-batch; `step` does something only at the accumulation boundary. Gradients are sums over
data parallel and carry the loss scale; both are divided out by one factor inside the optimizer, together with
clipping.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron.config.tree import PrecisionConfig, ZeroConfig
from megatron.errors import ConfigError, NumericsError
from megatron.optim.loss_scale import LossScaleRule, LossScaleState
from megatron.optim.rule import Part, Rule, Span
from megatron.zero.bucket import FlatBucket
from megatron.zero.gradients import Dtypes
from megatron.zero.hooks import Unit, attach
from megatron.zero.layout import FlatLayout, Slot
from megatron.zero.norm import clip_factor, global_norm, square_sum
from megatron.zero.policy import Policy, policy, wire
from megatron.zero.reductions import ReductionOrder
from megatron.zero.residency import Residency
from megatron.zero.units import Cut, build_units, connect_sinks, disconnect_sinks
from mpu.collectives import all_gather_json, all_reduce, broadcast_into
from mpu.groups import Groups

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

OVERFLOWS_IN_A_ROW = 20
"""So many steps may be skipped at a loss scale that cannot shrink before the run ends: it would never train again."""

ParamGroup = dict[str, Any]
"""As torch's optimizers have them: "params", and the hyper-parameters these share ("lr" is one of them)."""


@dataclass(frozen=True)
class StepReport:
    """What one optimizer step did."""

    applied: bool
    grad_norm: float
    """Before clipping; not finite when the step was skipped."""
    loss_scale: float
    """The scale this step's gradients carried."""


class ZeroEngine:
    def __init__(self, module: nn.Module, groups: Groups, *, zero: ZeroConfig, precision: PrecisionConfig, rule: Rule,
                 param_groups: list[ParamGroup], device: torch.device, clip_grad: float = 0.0,
                 accumulation: int = 1) -> None:
        self.module, self.groups, self.param_groups, self.accumulation = module, groups, param_groups, accumulation
        self._policy = policy(zero.zero_stage)
        self.rule, self._clip_grad, self._loads_masters = rule, clip_grad, zero.load_from_fp32_weights
        self._allows_unused = zero.ignore_unused_parameters
        self._scale_rule = scale_rule(precision)
        self.scaler = self._scale_rule.start()
        self.global_steps = self.skipped_steps = self.micro_steps = self.optimizer_steps = 0
        self._micro_batches = self._overflows_in_a_row = 0  # of this optimizer step; skipped ones at the end
        self._boundary: bool | None = None
        self.last_report: StepReport | None = None
        _copy_buffers_from_first(module, groups)
        group_of = {parameter: number for number, group in enumerate(param_groups) for parameter in group["params"]}
        self._units = build_units(module, Cut(
            self._policy, wire(zero), _dtypes(self._policy, precision, accumulation), groups.dp, device,
            zero.stage3_param_persistence_threshold, group_of.__getitem__))
        connect_sinks(self._units)
        in_forward_order = [bucket for unit in self._units for bucket in unit.buckets]
        self.buckets = [bucket for bucket in in_forward_order if bucket.trainable]
        self.frozen = [bucket for bucket in in_forward_order if not bucket.trainable]
        self._states = [{name: torch.zeros_like(bucket.master) for name in rule.states} for bucket in self.buckets]
        self._reductions = ReductionOrder(self._units, in_flight=1 if self._policy.split_optim else None)
        self.residency = Residency(self._units, max_live=zero.stage3_max_live_parameters,
                                   reuse_distance=zero.stage3_max_reuse_distance,
                                   prefetch_limit=zero.stage3_prefetch_bucket_size if zero.overlap_comm else 0)
        self._in_backward = False
        self._inputs_done: set[Unit] = set()
        self._handles = attach(self._units, self)

    # ---- the training loop's view -------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @property
    def at_boundary(self) -> bool:
        """The current micro-batch is the last one of its optimizer step."""
        return self._micro_batches + 1 >= self.accumulation if self._boundary is None else self._boundary

    @property
    def backward_scale(self) -> float:
        """What `backward` multiplies the loss by."""
        return self.scaler.scale / self.accumulation

    @property
    def applied_steps(self) -> int:
        """Optimizer steps that changed the weights: what a learning rate schedule counts."""
        return self.global_steps - self.skipped_steps

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Gradients of `loss` divided by the number of micro-batches (unless `scale_wrt_gas` is off); returns that
        quotient."""
        divisor = self.accumulation if scale_wrt_gas else 1
        self._in_backward = True
        try:
            (loss * (self.scaler.scale / divisor)).backward(retain_graph=retain_graph)
            if self._reduces_now:
                self._check_unused()
                self._reductions.flush()
            for bucket in self.buckets:
                bucket.grads.end_backward()
        except Exception:  # not for Ctrl-C: this waits for peers
            self._abandon_step()
            raise
        finally:
            self._in_backward = False
            self._inputs_done.clear()
        self.residency.done_with_all()
        return loss / divisor

    def _abandon_step(self) -> None:
        """A backward failed half way: what has been accumulated is not whole, and goes."""
        for bucket in self.buckets:
            bucket.grads.settle_reduce()
        self._reductions.reset()
        self.residency.done_with_all()
        self.zero_grad()
        self._micro_batches = 0

    def _check_unused(self) -> None:
        unused = [] if self._allows_unused else [name for bucket in self.buckets for name in bucket.grads.unused()]
        if unused:
            raise ConfigError(f"{len(unused)} parameters got no gradient, {unused[0]} first: the loss does not depend "
                              "on them; mend the model, or set ignore_unused_parameters")

    def step(self, lr: float | None = None) -> StepReport | None:
        """At the accumulation boundary: clip, update, publish; None in between. `lr` sets that of all groups."""
        boundary = self.at_boundary
        self.micro_steps += 1
        self._micro_batches = 0 if boundary else self._micro_batches + 1
        if not boundary:
            return None
        for group in self.param_groups if lr is not None else ():
            group["lr"] = lr
        scale = self.scaler.scale
        per_unit = 1.0 / (scale * self.groups.dp.size)
        norm = self._grad_norm() * per_unit
        applied = math.isfinite(norm)
        if applied:
            self._update(per_unit * clip_factor(norm, self._clip_grad))
        else:
            self._skip(norm)
        self.zero_grad()
        self.scaler = self._scale_rule.after(self.scaler, overflow=not applied)
        self.global_steps += 1
        self.last_report = StepReport(applied, norm, scale)
        return self.last_report

    def zero_grad(self) -> None:
        """Forget what has been accumulated."""
        for bucket in self.buckets:
            bucket.grads.discard()

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Say oneself whether the next backward and step end an optimizer step; None: count micro-batches again."""
        self._boundary = is_boundary

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward inside leaves gradients on the rank, to be summed over ranks by the first backward outside."""
        if self._policy.split_grads:
            raise ConfigError("no_sync needs stage 0 or 1: gradients that are split are summed after every backward")
        before, self._boundary = self._boundary, False
        try:
            yield
        finally:
            self._boundary = before

    def settle(self) -> None:
        """Wait for what is still on its way between ranks, so that this one may leave."""
        for bucket in (*self.buckets, *self.frozen):
            bucket.await_parameters()

    def detach(self) -> None:
        """Leave the module to itself: no hooks, and whole parameters."""
        for handle in self._handles:
            handle.remove()
        disconnect_sinks(self._units)
        for bucket in (*self.buckets, *self.frozen):
            bucket.give_back()

    # ---- events (hooks.py) --------------------------------------------------------------------------------------

    def before_forward(self, unit: Unit) -> None:
        if unit.is_root and not self._in_backward:
            self.residency.start()
        self.residency.enter(unit)
        self.residency.prefetch(unit.index + (-1 if self._in_backward else 1))

    def after_forward(self, unit: Unit) -> None:
        learns = torch.is_grad_enabled()
        if self._in_backward:
            self.residency.pause(unit)
        elif not (unit.is_root and learns):  # the backward of everything else uses the root again
            self.residency.leave(unit, backward_follows=learns)

    def before_backward(self, unit: Unit) -> None:
        self.residency.begin_backward(unit)
        self.residency.prefetch(unit.index - 1)

    def inputs_done(self, unit: Unit) -> None:
        self._inputs_done.add(unit)
        self._finish(unit)

    def gradient_ready(self, unit: Unit, bucket: FlatBucket, index: int) -> None:
        if not self._in_backward:
            raise ConfigError("gradients outside of engine.backward: call engine.backward(loss), not loss.backward()")
        if bucket.grads.accept(index):
            self._finish(unit)
            if self._reduces_now:
                self._reductions.ready(bucket)

    def _finish(self, unit: Unit) -> None:
        """Let the parameters of a unit go as soon as nothing in this backward can need them: all gradients have been
        made, and where some parameters have none, those of the inputs."""
        made = all(bucket.grads.complete for bucket in unit.buckets if bucket.trainable)
        if made and not unit.is_root and (not unit.has_frozen or unit in self._inputs_done):
            self.residency.done(unit)

    @property
    def _reduces_now(self) -> bool:
        return self._policy.split_grads or self.at_boundary

    # ---- the step -----------------------------------------------------------------------------------------------

    def _grad_norm(self) -> float:
        """Of the sum of all gradients of this step, times the loss scale."""
        total = torch.zeros((), dtype=torch.float64, device=self.buckets[0].shard.device)
        for bucket in self.buckets:
            total = total + square_sum(bucket.grads.parts(), self.groups.tp)
        norm, alike = global_norm(total, self.buckets[0].shard_group, self.groups.tp, self.residency.take_trace())
        if not alike:
            raise ConfigError(
                "the ranks ran different blocks of the model, or in another order, and have received each other's "
                "parameters: at ZeRO stage 3 what is random in the forward (layer drop) must be drawn alike on every "
                "data parallel rank; draw it alike, or use stage 2")
        return norm

    def _update(self, factor: float) -> None:
        for bucket, states in zip(self.buckets, self._states, strict=True):
            for number, group in enumerate(self.param_groups):
                start, stop = bucket.layout.group_span(bucket.shard_group.rank, number)
                if start < stop or not self.rule.elementwise:
                    hyper = {name: value for name, value in group.items() if name != "params"}
                    self.rule.step(self._span(bucket, states, number, slice(start, stop)), hyper, factor=factor,
                                   steps_taken=self.optimizer_steps)
            bucket.publish()
        self.optimizer_steps += 1
        self._overflows_in_a_row = 0

    def _span(self, bucket: FlatBucket, states: Mapping[str, Tensor], group: int, span: slice) -> Span:
        parts = [] if self.rule.elementwise else [
            Part(index, start - span.start, stop - span.start)
            for index, start, stop in bucket.layout.slot_spans(bucket.shard_group.rank)
            if span.start <= start < span.stop]
        return Span(group, bucket.master[span], bucket.grads.shard[span],
                    {name: state[span] for name, state in states.items()}, parts, len(bucket.layout.slots),
                    partial(self._slot_totals, bucket))

    def _slot_totals(self, bucket: FlatBucket, sums: Tensor) -> Tensor:
        """Sums over this rank's part of each parameter -> over the whole parameter."""
        here = all_reduce(sums, bucket.shard_group)
        split = torch.tensor([slot.partition is not None for slot in bucket.layout.slots], device=sums.device)
        return torch.where(split, all_reduce(here, self.groups.tp), here)

    def _skip(self, norm: float) -> None:
        """Leave everything as it was; end the run where skipping cannot help."""
        self.skipped_steps += 1
        self._overflows_in_a_row += self._scale_rule.exhausted(self.scaler)
        if not self._scale_rule.scales:
            raise NumericsError(
                f"gradient norm is {norm} at step {self.global_steps + 1}: {self._first_bad_parameter()}; weights are "
                "unchanged; resume from the last checkpoint with a lower --lr or other data"
            )
        if self._overflows_in_a_row > OVERFLOWS_IN_A_ROW:
            raise NumericsError(
                f"{self._overflows_in_a_row} overflows in a row at loss scale {self.scaler.scale:g}, which "
                f"cannot shrink, last at step {self.global_steps + 1}: {self._first_bad_parameter()}; resume from the "
                "last checkpoint with --bf16 or a lower --lr"
            )

    def _first_bad_parameter(self) -> str:
        """Agreed by all ranks, so that every one of them ends with the same message."""
        found = [
            segment.slot.name
            for bucket in self.buckets
            for segment, grad in bucket.grads.parts()
            if not grad.isfinite().all()
        ]
        for rank, name in enumerate(all_gather_json(found[0] if found else None, self.groups.world)):
            if name is not None:
                return f"first in {name} on rank {rank}"
        return "the sum of finite gradients overflowed"

    # ---- what a checkpoint holds --------------------------------------------------------------------------------

    def state_runs(self, kinds: tuple[str, ...], frozen: bool = True) -> Iterator[tuple[str, Slot, int, Tensor]]:
        """(kind, slot, offset in the slot, run of the state) for everything this rank is to write; together the ranks
        write every element once. A shard that has replicas is cut among them."""
        for bucket, states in self._holdings(frozen):
            for kind in kinds:
                if kind in states:
                    yield from ((kind, *run) for run in self._owned_runs(bucket, states[kind]))

    def _holdings(self, frozen: bool = True) -> Iterator[tuple[FlatBucket, dict[str, Tensor]]]:
        """Every bucket with what lasts of it: kind -> shard."""
        for bucket, states in zip(self.buckets, self._states, strict=True):
            yield bucket, {"weight": bucket.master, **states}
        for bucket in self.frozen if frozen else ():
            yield bucket, {"weight": bucket.shard}

    def _owned_runs(self, bucket: FlatBucket, flat: Tensor) -> Iterator[tuple[Slot, int, Tensor]]:
        if bucket.replicas.size > 1:
            layout, rank = FlatLayout(bucket.layout.slots, bucket.replicas.size), bucket.replicas.rank
            shift = rank * layout.shard_numel
        else:
            layout, rank, shift = bucket.layout, bucket.shard_group.rank, 0
        for segment in layout.segments(rank):
            start = shift + segment.shard_offset
            yield segment.slot, segment.slot_offset, flat[start : start + segment.count]

    def load_runs(self, kinds: tuple[str, ...], read: Callable[[str, Slot, int, Tensor], None]) -> None:
        """Fill everything this rank holds: `read(kind, slot, offset, out)` for every run, then publish the weights."""
        self.residency.done_with_all()
        for bucket, states in self._holdings():
            for kind in kinds:
                for segment in bucket.layout.segments(bucket.shard_group.rank) if kind in states else ():
                    run = states[kind][segment.shard_offset : segment.shard_offset + segment.count]
                    read(kind, segment.slot, segment.slot_offset, run)
            if not self._loads_masters:
                bucket.master.copy_(bucket.master.to(bucket.shard.dtype))
            bucket.publish()

    @property
    def state_kinds(self) -> tuple[str, ...]:
        """Kinds of optimizer state beside the weight."""
        return self.rule.states

    def counters(self) -> dict[str, Any]:
        """Everything of the engine that a resumed run must know besides tensors."""
        numbers: dict[str, Any] = {}
        for part in all_gather_json(self.rule.scalars(), self.groups.world):  # a rank knows those of its own spans
            numbers |= part
        return {"global_steps": self.global_steps, "skipped_steps": self.skipped_steps,
                "micro_steps": self.micro_steps, "optimizer_steps": self.optimizer_steps, "rule": numbers,
                "loss_scale": self.scaler.scale, "clean_steps": self.scaler.clean_steps,
                "hysteresis_left": self.scaler.hysteresis_left}

    def forget_optimizer_steps(self) -> None:
        """The optimizer's states are new: its bias corrections start from their first step."""
        self.optimizer_steps = 0
        self.rule.restore({})

    def restore_counters(self, saved: dict[str, Any]) -> None:
        self.global_steps, self.skipped_steps = saved["global_steps"], saved["skipped_steps"]
        self.micro_steps, self.optimizer_steps = saved["micro_steps"], saved["optimizer_steps"]
        self.rule.restore(saved["rule"])
        self.scaler = LossScaleState(saved["loss_scale"], saved["clean_steps"], saved["hysteresis_left"])


def _dtypes(policy: Policy, precision: PrecisionConfig, accumulation: int) -> Dtypes:
    """A sum over several 16-bit micro-batches, or over ranks where asked for, is taken in fp32."""
    work = DTYPES[precision.name]
    wide = precision.fp32_allreduce or accumulation > 1
    sums = torch.float32 if wide else work
    in_place = precision.fp32_allreduce or not policy.split_grads  # the sum over micro-batches is taken in `grads`
    return Dtypes(work, sums if in_place else work, sums)


def scale_rule(precision: PrecisionConfig) -> LossScaleRule:
    if not precision.fp16:
        return LossScaleRule()
    return LossScaleRule(
        precision.loss_scale or precision.initial_loss_scale,
        precision.loss_scale_window,
        precision.hysteresis,
        precision.min_scale,
        dynamic=precision.loss_scale is None,
        scales=True,
    )


def _copy_buffers_from_first(module: nn.Module, groups: Groups) -> None:
    """Every data parallel rank starts from those of the first. (Parameters do the same as buckets take them over.)"""
    for buffer in module.buffers() if not groups.dp.is_solo else ():
        values = buffer.contiguous()
        broadcast_into(values.view(-1).view(torch.uint8), 0, groups.dp).wait()  # as bytes: not every type can travel
        buffer.copy_(values)
