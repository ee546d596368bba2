"""Step: the optimizer step. Norm and overflow, clipping, the rule over spans of the shards, and new weights published.

Gradients arrive as sums over data parallel that carry the loss scale; both are divided out by one factor, together
with clipping, so that they are read once. (What was divided before the sum is not divided again.) Nothing here knows
of modules, passes or micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatron.errors import ConfigError, NumericsError
from megatron.optim.loss_scale import LossScaleRule
from megatron.optim.rule import ParamGroup, Part, Rule, Span
from megatron.zero.bucket import FlatBucket
from megatron.zero.norm import clip_factor, global_norm, square_sum
from megatron.zero.state import State
from mpu.collectives import all_gather_json, all_reduce
from mpu.groups import Groups

OVERFLOWS_IN_A_ROW = 20
"""How many steps in a row may be skipped at a loss scale that cannot shrink; after that the run ends, since it would
never train again."""


@dataclass(frozen=True)
class StepReport:
    """What one optimizer step did."""

    applied: bool
    grad_norm: float
    """Before clipping; not finite when the step was skipped."""
    loss_scale: float
    """The scale this step's gradients carried."""


class Step:
    """Takes optimizer steps: call it when the gradients of all buckets have been reduced."""

    def __init__(self, state: State, groups: Groups, rule: Rule, param_groups: Sequence[ParamGroup],
                 scale_rule: LossScaleRule, *, clip_grad: float, divisor: float) -> None:
        self._state, self._groups, self._rule, self._param_groups = state, groups, rule, param_groups
        self._scale_rule, self._clip_grad = scale_rule, clip_grad
        self._divisor = divisor  # what turns the sums over ranks into means
        self._overflows_in_a_row = 0

    def __call__(self, trace: int, objection: str | None = None) -> StepReport:
        """Update the weights, or skip the step where a gradient is not finite; the gradients are spent. `trace` is a
        digest of what this rank ran, which all ranks must agree on; an `objection` of one rank is an error of all."""
        counters = self._state.counters
        scale = counters.scaler.scale
        per_unit = 1.0 / (scale * self._divisor)
        norm = self._norm(trace, objection) * per_unit
        applied = math.isfinite(norm)
        if applied:
            self._update(per_unit * clip_factor(norm, self._clip_grad))
        else:
            self._skip(norm)
        for bucket in self._state.buckets:
            bucket.grads.discard()
        counters.scaler = self._scale_rule.after(counters.scaler, overflow=not applied)
        counters.global_steps += 1
        return StepReport(applied, norm, scale)

    def _norm(self, trace: int, objection: str | None) -> float:
        """Of the sum of all gradients of this step, times the loss scale."""
        buckets = self._state.buckets
        total = torch.zeros((), dtype=torch.float64, device=buckets[0].shard.device)
        for bucket in buckets:
            total = total + square_sum(bucket.grads.parts(), self._groups.tp)
        found = global_norm(total, buckets[0].shard_group, buckets[0].replicas, self._groups.tp, trace,
                            objection is not None)
        if found.objections:
            raise ConfigError(next(text for text in all_gather_json(objection, self._groups.world) if text is not None))
        if not found.alike:
            raise ConfigError(
                "the ranks ran different blocks of the model, or in another order, and have received each other's "
                "parameters: at ZeRO stage 3 what is random in the forward (layer drop) must be drawn alike on every "
                "data parallel rank; draw it alike, or use stage 2")
        return found.norm

    # ---- update -------------------------------------------------------------------------------------------------

    def _update(self, factor: float) -> None:
        counters = self._state.counters
        self._state.changing = "step"
        for bucket, states in zip(self._state.buckets, self._state.of_rule, strict=True):
            for group, span in self._spans(bucket, states):
                hyper = {name: value for name, value in group.items() if name != "params"}
                self._rule.step(span, hyper, factor=factor, steps_taken=counters.optimizer_steps)
            bucket.publish()
        counters.optimizer_steps += 1
        self._state.changing = None
        self._overflows_in_a_row = 0

    def _spans(self, bucket: FlatBucket, states: Mapping[str, Tensor]) -> Iterator[tuple[ParamGroup, Span]]:
        """The work of a rule on this rank's shard of a bucket, one piece for each hyper-parameter group."""
        for number, group in enumerate(self._param_groups):
            start, stop = bucket.layout.group_span(bucket.shard_group.rank, number)
            if start < stop or not self._rule.elementwise:
                yield group, self._span(bucket, states, number, slice(start, stop))

    def _span(self, bucket: FlatBucket, states: Mapping[str, Tensor], group: int, span: slice) -> Span:
        parts = [] if self._rule.elementwise else [
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
        return torch.where(split, all_reduce(here, self._groups.tp), here)

    # ---- overflow -----------------------------------------------------------------------------------------------

    def _skip(self, norm: float) -> None:
        """Leave everything as it was; end the run where skipping cannot help."""
        counters = self._state.counters
        counters.skipped_steps += 1
        self._overflows_in_a_row += self._scale_rule.exhausted(counters.scaler)
        if not self._scale_rule.scales:
            raise NumericsError(
                f"gradient norm is {norm} at step {counters.global_steps + 1}: {self._first_bad_parameter()}; weights "
                "are unchanged; resume from the last checkpoint with a lower --lr or other data")
        if self._overflows_in_a_row > OVERFLOWS_IN_A_ROW:
            raise NumericsError(
                f"{self._overflows_in_a_row} overflows in a row at loss scale {counters.scaler.scale:g}, which "
                f"cannot shrink, last at step {counters.global_steps + 1}: {self._first_bad_parameter()}; resume from "
                "the last checkpoint with --bf16 or a lower --lr")

    def _first_bad_parameter(self) -> str:
        """Agreed by all ranks, so that every one of them ends with the same message."""
        found = next((segment.slot.name for bucket in self._state.buckets for segment, grad in bucket.grads.parts()
                      if not grad.isfinite().all()), None)
        for rank, name in enumerate(all_gather_json(found, self._groups.world)):
            if name is not None:
                return f"first in {name} on rank {rank}"
        return "the sum of finite gradients overflowed"
