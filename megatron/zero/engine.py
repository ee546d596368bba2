"""ZeroEngine: the data-parallel engine a training loop talks to.

    loss = engine(batch...);  engine.backward(loss);  report = engine.step(lr)

It is called once per micro-batch; `step` does something only at the accumulation boundary. Gradients are sums over
data parallel and carry the loss scale; both are divided out by one factor inside the optimizer, together with
clipping.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron.config import OptimConfig, PrecisionConfig, ZeroConfig
from megatron.errors import ConfigError, NumericsError
from megatron.optim.adam import LARGEST_TILE, AdamW
from megatron.optim.loss_scale import LossScaleRule, LossScaleState
from megatron.optim.norm import clip_factor, global_norm, square_sum
from megatron.zero.bucket import Dtypes, FlatBucket
from megatron.zero.hooks import Unit, attach
from megatron.zero.layout import ALIGNMENT, FlatLayout, Slot
from megatron.zero.policy import Policy, policy
from megatron.zero.units import build_units, connect_sinks
from mpu.collectives import all_gather_json
from mpu.groups import Groups

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

OVERFLOWS_IN_A_ROW = 20
"""So many steps may be skipped at a loss scale that cannot shrink before the run ends: it would never train again."""


@dataclass(frozen=True)
class StepReport:
    """What one optimizer step did."""

    applied: bool
    grad_norm: float
    """Before clipping; not finite when the step was skipped."""
    loss_scale: float
    """The scale this step's gradients carried."""


class ZeroEngine:
    def __init__(self, module: nn.Module, groups: Groups, *, zero: ZeroConfig, optim: OptimConfig,
                 precision: PrecisionConfig, accumulation: int = 1) -> None:
        self.module, self.groups, self.accumulation = module, groups, accumulation
        self._policy = policy(zero.zero_stage)
        self._optim = optim
        self._rule = AdamW(optim.adam_beta1, optim.adam_beta2, optim.adam_eps, tile=_tile(zero.sub_group_size))
        self._allows_unused = zero.ignore_unused_parameters
        self._prefetch_limit = zero.stage3_prefetch_bucket_size
        self._weight_decay = {0: optim.weight_decay, 1: 0.0}
        self._scale_rule = scale_rule(precision)
        self.scaler = self._scale_rule.start()
        self.global_steps = self.skipped_steps = self.micro_steps = self.adam_steps = 0
        self._overflows_in_a_row = 0
        self._units = build_units(module, policy=self._policy, dp=groups.dp,
                                  dtypes=_dtypes(self._policy, precision, accumulation))
        connect_sinks(self._units)
        self.buckets = [unit.bucket for unit in self._units]
        self._states = [
            {name: torch.zeros_like(bucket.master) for name in self._rule.states} for bucket in self.buckets
        ]
        backward_order = [unit.bucket for unit in (*reversed(self._units[1:]), self._units[0])]
        self._reductions = _ReductionOrder(backward_order, in_flight=1 if self._policy.split_grads else None)
        self._in_backward = False
        self._handles = attach(self._units, self)

    # ---- the training loop's view -------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @property
    def at_boundary(self) -> bool:
        """The current micro-batch is the last one of its optimizer step."""
        return (self.micro_steps + 1) % self.accumulation == 0

    @property
    def backward_scale(self) -> float:
        """What `backward` multiplies the loss by."""
        return self.scaler.scale / self.accumulation

    @property
    def applied_steps(self) -> int:
        """Optimizer steps that changed the weights: what a learning rate schedule counts."""
        return self.global_steps - self.skipped_steps

    def backward(self, loss: Tensor) -> None:
        self._in_backward = True
        try:
            (loss * self.backward_scale).backward()
        finally:
            self._in_backward = False
        if self._reduces_now:
            self._check_unused()
            self._reductions.flush()
        for bucket in self.buckets:
            bucket.end_backward()

    def _check_unused(self) -> None:
        unused = [] if self._allows_unused else [name for bucket in self.buckets for name in bucket.unused()]
        if unused:
            raise ConfigError(f"{len(unused)} parameters got no gradient, {unused[0]} first: the loss does not depend "
                              "on them; mend the model, or set ignore_unused_parameters")

    def step(self, lr: float) -> StepReport | None:
        """At the accumulation boundary: clip, update, publish; None in between."""
        boundary = self.at_boundary
        self.micro_steps += 1
        if not boundary:
            return None
        scale = self.scaler.scale
        per_unit = 1.0 / (scale * self.groups.dp.size)
        norm = self._grad_norm() * per_unit
        applied = math.isfinite(norm)
        if applied:
            self._update(lr, per_unit * clip_factor(norm, self._optim.clip_grad))
        else:
            self._skip(norm)
        for bucket in self.buckets:
            bucket.discard_grads()
        self.scaler = self._scale_rule.after(self.scaler, overflow=not applied)
        self.global_steps += 1
        return StepReport(applied, norm, scale)

    def settle(self) -> None:
        """Wait for what is still on its way between ranks, so that this one may leave."""
        for bucket in self.buckets:
            bucket.await_parameters()

    def train(self, mode: bool = True) -> None:
        self.module.train(mode)

    # ---- events (hooks.py) --------------------------------------------------------------------------------------

    def before_forward(self, unit: Unit) -> None:
        unit.bucket.gather()
        self._prefetch(unit.index + (-1 if self._in_backward else 1))

    def after_forward(self, unit: Unit) -> None:
        # A recomputed forward is followed by its backward; the root is used again by the backward of everything else.
        if not self._in_backward and (unit.index > 0 or not torch.is_grad_enabled()):
            unit.bucket.release()

    def before_backward(self, unit: Unit) -> None:
        unit.bucket.gather()
        self._prefetch(unit.index - 1)

    def gradient_ready(self, unit: Unit, index: int) -> None:
        if unit.bucket.accept(index) and self._reduces_now:
            self._reductions.ready(unit.bucket)

    def _prefetch(self, index: int) -> None:
        if 0 < index < len(self._units):
            bucket = self._units[index].bucket
            if bucket.layout.numel <= self._prefetch_limit:
                bucket.prefetch()

    @property
    def _reduces_now(self) -> bool:
        return self._policy.split_grads or self.at_boundary

    # ---- the step -----------------------------------------------------------------------------------------------

    def _grad_norm(self) -> float:
        total = sum((square_sum(bucket.grad_parts(), self.groups.tp) for bucket in self.buckets[1:]),
                    square_sum(self.buckets[0].grad_parts(), self.groups.tp))
        return global_norm(total, self.buckets[0].shard_group, self.groups.tp)

    def _update(self, lr: float, factor: float) -> None:
        for bucket, states in zip(self.buckets, self._states, strict=True):
            for group, start, stop in bucket.layout.group_spans(bucket.shard_group.rank):
                span = slice(start, stop)
                self._rule.step(bucket.master[span], bucket.grad_shard[span],
                                {name: state[span] for name, state in states.items()}, factor=factor,
                                steps_taken=self.adam_steps, lr=lr, weight_decay=self._weight_decay[group])
            bucket.publish()
        self.adam_steps += 1
        self._overflows_in_a_row = 0

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
            for segment, grad in bucket.grad_parts()
            if not grad.isfinite().all()
        ]
        for rank, name in enumerate(all_gather_json(found[0] if found else None, self.groups.world)):
            if name is not None:
                return f"first in {name} on rank {rank}"
        return "the sum of finite gradients overflowed"

    # ---- what a checkpoint holds --------------------------------------------------------------------------------

    def state_runs(self, kinds: tuple[str, ...]) -> Iterator[tuple[str, Slot, int, Tensor]]:
        """(kind, slot, offset in the slot, run of the state) for everything this rank is to write; together the ranks
        write every element once. A shard that has replicas is cut among them."""
        for bucket, states in zip(self.buckets, self._states, strict=True):
            for kind in kinds:
                flat = bucket.master if kind == "weight" else states[kind]
                yield from ((kind, slot, offset, run) for slot, offset, run in self._owned_runs(bucket, flat))

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
        for bucket, states in zip(self.buckets, self._states, strict=True):
            for kind in kinds:
                flat = bucket.master if kind == "weight" else states[kind]
                for segment in bucket.layout.segments(bucket.shard_group.rank):
                    run = flat[segment.shard_offset : segment.shard_offset + segment.count]
                    read(kind, segment.slot, segment.slot_offset, run)
            bucket.publish()

    @property
    def state_kinds(self) -> tuple[str, ...]:
        """Kinds of optimizer state beside the weight."""
        return self._rule.states

    def counters(self) -> dict[str, Any]:
        """Everything of the engine that a resumed run must know besides tensors."""
        return {"global_steps": self.global_steps, "skipped_steps": self.skipped_steps,
                "adam_steps": self.adam_steps, "loss_scale": self.scaler.scale, "clean_steps": self.scaler.clean_steps,
                "hysteresis_left": self.scaler.hysteresis_left}

    def restore_counters(self, saved: dict[str, Any]) -> None:
        self.global_steps, self.skipped_steps = saved["global_steps"], saved["skipped_steps"]
        self.adam_steps = saved["adam_steps"]
        self.scaler = LossScaleState(saved["loss_scale"], saved["clean_steps"], saved["hysteresis_left"])


def _dtypes(policy: Policy, precision: PrecisionConfig, accumulation: int) -> Dtypes:
    """A sum over several 16-bit micro-batches, or over ranks where asked for, is taken in fp32."""
    work = DTYPES[precision.name]
    wide = precision.fp32_allreduce or accumulation > 1
    sums = torch.float32 if wide else work
    in_place = precision.fp32_allreduce or not policy.split_grads  # the sum over micro-batches is taken in `grads`
    return Dtypes(work, sums if in_place else work, sums)


def _tile(sub_group_size: int) -> int:
    """Tiles are cut where rows are, so that their size changes no bits."""
    return min(LARGEST_TILE, -(-sub_group_size // ALIGNMENT) * ALIGNMENT)


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


class _ReductionOrder:
    """Launches reductions in one fixed order, whatever order gradients arrive in: ranks must agree on it.

    At most `in_flight` are under way where gradients are split, so that few whole gradients exist at a time.
    """

    def __init__(self, order: list[FlatBucket], in_flight: int | None) -> None:
        self._order, self._in_flight = order, in_flight
        self._next = 0
        self._ready: set[int] = set()

    def ready(self, bucket: FlatBucket) -> None:
        self._ready.add(id(bucket))
        while self._next < len(self._order) and id(self._order[self._next]) in self._ready:
            self._launch()

    def flush(self) -> None:
        """Launch what is left: buckets with parameters that this backward did not reach."""
        while self._next < len(self._order):
            self._launch()
        self._next = 0
        self._ready.clear()

    def _launch(self) -> None:
        bucket = self._order[self._next]
        bucket.gather()  # one this pass never touched is still at rest
        bucket.reduce()
        bucket.release()
        if self._in_flight is not None and self._next >= self._in_flight:
            self._order[self._next - self._in_flight].finish_reduce()
        self._next += 1
