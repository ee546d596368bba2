"""What checkpoints hold of an engine: masters, optimizer states, frozen weights, counters, module buffers.

An interrupted change of them is remembered: steps and saves are refused until a load.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from megatron.errors import ConfigError
from megatron.optim.loss_scale import LossScaleState
from megatron.optim.rule import UpdateRule
from megatron.zero.bucket import publish_masters
from megatron.zero.layout import Slot
from megatron.zero.moq import MoQState
from megatron.zero.offload.storage import WEIGHT
from megatron.zero.units import Unit
from mpu.collectives import all_gather_json, broadcast_into
from mpu.groups import Group


def snapshot_module_buffers(module: nn.Module) -> Callable[[], None]:
    """A function that restores the buffers and their values: a forward may write to a buffer or replace it."""
    snapshot = [(part, name, buffer, None if buffer is None else buffer.detach().clone())
                for part in module.modules() for name, buffer in part._buffers.items()]

    @torch.no_grad()
    def restore() -> None:
        for part, name, buffer, values in snapshot:
            part._buffers[name] = buffer
            if buffer is not None and values is not None:
                buffer.copy_(values)

    return restore


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that a state dict of the module holds, by the first of their names."""
    kept = {id(buffer) for part in module.modules() for name, buffer in part._buffers.items()
            if name not in part._non_persistent_buffers_set}
    return {name: buffer for name, buffer in module.named_buffers() if id(buffer) in kept}


def broadcast_buffers(buffers: Iterable[Tensor], dp: Group) -> None:
    """Broadcast the buffers from the first data parallel rank. (FlatBucket does the same for parameters.)"""
    for buffer in buffers if not dp.is_solo else ():
        values = buffer.contiguous()
        broadcast_into(values.view(-1).view(torch.uint8), 0, dp).wait()  # bytes: not every dtype can be sent
        buffer.copy_(values)


@dataclass
class StepCounters:
    scaler: LossScaleState
    global_steps: int = 0  # optimizer steps, skipped ones included
    skipped_steps: int = 0
    micro_steps: int = 0
    optimizer_steps: int = 0  # steps since the optimizer states were reset: the bias corrections use this count
    recent_norms: tuple[float, ...] = ()  # finite gradient norms of the last steps, for --skip-step-on-spike

    @property
    def applied_steps(self) -> int:
        """Optimizer steps that changed the weights; learning rate schedules count these."""
        return self.global_steps - self.skipped_steps


class EngineState:
    """The tensors of all buckets and the counters."""

    def __init__(self, units: Sequence[Unit], rule: UpdateRule, scaler: LossScaleState, world: Group, *,
                 loads_masters: bool) -> None:
        in_forward_order = [bucket for unit in units for bucket in unit.buckets]
        self.device = in_forward_order[0].device
        self.buckets = [bucket for bucket in in_forward_order if bucket.trainable]
        self.frozen_buckets = [bucket for bucket in in_forward_order if not bucket.trainable]
        self.all_buckets = [*self.buckets, *self.frozen_buckets]
        for bucket in self.buckets:
            bucket.master_state.add_kinds(rule.states)
        self.counters = StepCounters(scaler)
        self.moq: MoQState | None = None  # quantization in training, if configured
        # The operation that is writing to the tensors. If it stays set, it was interrupted (Ctrl-C, damaged file).
        self.unfinished_change: str | None = None
        self._rule, self._world, self._loads_masters = rule, world, loads_masters

    def check_no_unfinished_change(self) -> None:
        if self.unfinished_change is not None:
            raise ConfigError(
                f"an earlier {self.unfinished_change} ended half way, and some weights are new, others old: load "
                "a checkpoint with engine.load_checkpoint(), or end this run and resume the last one")

    @contextmanager
    def guard_state_change(self, what: str) -> Iterator[None]:
        """If the block raises, the state stays marked as incomplete: steps and saves are refused until a load. An
        earlier mark stays too."""
        before, self.unfinished_change = self.unfinished_change, self.unfinished_change or what
        yield
        self.unfinished_change = before

    # ---- tensors ------------------------------------------------------------------------------------------------

    def load_segments(self, names: Mapping[str, Collection[str]],
                      read: Callable[[str, Slot, int, Tensor], None]) -> None:
        """Call `read(kind, slot, offset, out)` for each segment of `names` (kind -> parameter names) on this rank.

        No parameter may be in use. The caller clears `unfinished_change` at the end of the load. A chunk that
        is overwritten completely is not read first: after an NVMe failure it may be unreadable."""
        self.unfinished_change = "load"
        for bucket in self.all_buckets:
            shard = bucket.master_state
            for chunk, kind in product(shard.chunks, [kind for kind in names if kind in shard.kinds]):
                segments = list(bucket.layout.segments(bucket.shard_group.rank, chunk))
                reads = not all(segment.slot.name in names[kind] for segment in segments)
                with shard.open(chunk, [kind], reads=reads, writes=True) as opened:
                    values, end = opened[kind], 0
                    for segment in segments:
                        start = segment.shard_offset - chunk.start
                        values[end:start] = 0  # padding
                        end = start + segment.count
                        if segment.slot.name in names[kind]:
                            read(kind, segment.slot, segment.slot_offset, values[start:end])
                    values[end:] = 0
                    if kind == WEIGHT and not self._loads_masters:
                        values.copy_(values.to(bucket.param_shard.dtype))

    # ---- counters -----------------------------------------------------------------------------------------------

    def scalar_state(self) -> dict[str, Any]:
        """Everything that a resumed run needs besides tensors, as JSON values. Collective."""
        rule_scalars: dict[str, Any] = {}
        for scalars in all_gather_json(self._rule.scalars(), self._world):  # a rank has those of its own segments
            rule_scalars |= scalars
        counters = self.counters
        optional: dict[str, Any] = {} if self.moq is None else {"quantisation": self.moq.state_dict()}
        if counters.recent_norms:
            optional["recent_norms"] = [*counters.recent_norms]
        return {"global_steps": counters.global_steps, "skipped_steps": counters.skipped_steps,
                "micro_steps": counters.micro_steps, "optimizer_steps": counters.optimizer_steps, "rule": rule_scalars,
                "loss_scale": counters.scaler.scale, "clean_steps": counters.scaler.clean_steps,
                "hysteresis_left": counters.scaler.hysteresis_left, **optional}

    def restore_scalar_state(self, saved: dict[str, Any], *, loss_scale: bool = True) -> None:
        """Restore the result of `scalar_state`, perhaps without its loss scale. Collective with MoQ, because the
        weights are rounded again."""
        scaler = LossScaleState(saved["loss_scale"], saved["clean_steps"], saved["hysteresis_left"]) if loss_scale \
            else self.counters.scaler
        self.counters = StepCounters(scaler, saved["global_steps"], saved["skipped_steps"], saved["micro_steps"],
                                     saved["optimizer_steps"], tuple(saved.get("recent_norms", ())))
        self._rule.restore(saved["rule"])
        if self.moq is not None:
            self.moq.load_state_dict(saved.get("quantisation"), self.counters.applied_steps)
            publish_masters(self.buckets)

    def reset_optimizer_state(self) -> None:
        """Set the optimizer states to zero, and restart the bias corrections."""
        with self.guard_state_change("load"):
            for bucket in self.buckets:
                states = [kind for kind in bucket.master_state.kinds if kind != WEIGHT]
                for chunk in bucket.master_state.chunks if states else ():
                    with bucket.master_state.open(chunk, states, reads=False, writes=True) as opened:
                        for kind in states:
                            opened[kind].zero_()
        self.counters.optimizer_steps = 0
        self._rule.restore({})
