"""State: what lasts from step to step, and the runs of it that a checkpoint holds.

    tensors    the masters of all buckets, the states that the optimizer's rule keeps beside them, frozen weights
    counters   steps of each kind, the loss scale, and the numbers of the rule

A *run* is a contiguous part of one parameter's state that this rank holds. Where the tensors are is the shelves'
affair (homes/shelf.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron.errors import ConfigError
from megatron.optim.loss_scale import LossScaleState
from megatron.optim.rule import UpdateRule
from megatron.zero.bucket import FlatBucket, publish_masters
from megatron.zero.homes.shelf import WEIGHT, StateSegment
from megatron.zero.hooks import Unit
from megatron.zero.layout import FlatLayout, Slot
from megatron.zero.quantise import MoQState
from mpu.collectives import all_gather_json
from mpu.groups import Group


@dataclass
class StepCounters:
    """How far the run has come."""

    scaler: LossScaleState
    global_steps: int = 0
    """Optimizer steps, skipped ones included."""
    skipped_steps: int = 0
    micro_steps: int = 0
    optimizer_steps: int = 0
    """Steps behind the states of the optimizer: its bias corrections count these."""

    @property
    def applied_steps(self) -> int:
        """Optimizer steps that changed the weights: what a learning rate schedule counts."""
        return self.global_steps - self.skipped_steps


class EngineState:
    """The tensors of all buckets and the counters."""

    def __init__(self, units: Sequence[Unit], rule: UpdateRule, scaler: LossScaleState, world: Group, *,
                 loads_masters: bool) -> None:
        in_forward_order = [bucket for unit in units for bucket in unit.buckets]
        self.device = in_forward_order[0].device
        self.buckets = [bucket for bucket in in_forward_order if bucket.trainable]
        self.frozen_buckets = [bucket for bucket in in_forward_order if not bucket.trainable]
        for bucket in self.buckets:
            bucket.master_state.add_kinds(rule.states)
        self.counters = StepCounters(scaler)
        self.moq: MoQState | None = None
        """What rounds the weights at work."""
        self.unfinished_change: str | None = None
        """What writes to the tensors now. Found later, it ended half way (Ctrl-C, a damaged file)."""
        self._rule, self._world, self._loads_masters = rule, world, loads_masters

    def check_no_unfinished_change(self) -> None:
        if self.unfinished_change is not None:
            raise ConfigError(
                f"an earlier {self.unfinished_change} ended half way, and some weights are new, others old: load "
                "a checkpoint with engine.load_checkpoint(), or end this run and resume the last one")

    @contextmanager
    def guard_state_change(self, what: str) -> Iterator[None]:
        """Weights are written to inside. What another one left half way stays so."""
        before, self.unfinished_change = self.unfinished_change, self.unfinished_change or what
        yield
        self.unfinished_change = before

    # ---- tensors ------------------------------------------------------------------------------------------------

    def segments_to_save(self, kinds: tuple[str, ...], frozen: bool = True) -> Iterator[tuple[Slot, int, StateSegment]]:
        """(slot, offset in the slot, run) for everything this rank is to write; together the ranks write every element
        once. A shard that has replicas is cut among them."""
        for bucket in self._buckets_with_state(frozen):
            for kind in kinds:
                if kind in bucket.master_state.kinds:
                    yield from _owned_segments(bucket, kind)

    def load_segments(self, names: Mapping[str, Collection[str]], read: Callable[[str, Slot, int, Tensor],
                                                                                 None]) -> None:
        """`read(kind, slot, offset, out)` for every run this rank holds of these kinds and slots, by name; `publish` is
        to follow. No parameter may be in use. What is filled wholly is not read before: a drive may have lost it."""
        self.unfinished_change = "load"
        for bucket in self._buckets_with_state():
            for chunk in bucket.master_state.chunks:
                for kind in (kind for kind in names if kind in bucket.master_state.kinds):
                    self._load_chunk(bucket, kind, chunk, names[kind], read)

    def _load_chunk(self, bucket: FlatBucket, kind: str, chunk: slice, names: Collection[str],
                    read: Callable[[str, Slot, int, Tensor], None]) -> None:
        segments = list(bucket.layout.segments(bucket.shard_group.rank, chunk))
        wanted = [segment for segment in segments if segment.slot.name in names]
        with bucket.master_state.open(chunk, [kind], reads=len(wanted) < len(segments), writes=True) as kept:
            end = chunk.start
            for segment in segments:
                kept[kind][end - chunk.start : segment.shard_offset - chunk.start] = 0  # padding
                end = segment.shard_offset + segment.count
            kept[kind][end - chunk.start :] = 0
            for segment in wanted:
                start = segment.shard_offset - chunk.start
                read(kind, segment.slot, segment.slot_offset, kept[kind][start : start + segment.count])
            if kind == WEIGHT and not self._loads_masters:
                kept[WEIGHT].copy_(kept[WEIGHT].to(bucket.param_shard.dtype))

    def publish_loaded(self) -> None:
        """Bring what was filled to every rank that holds a working copy. Collective."""
        publish_masters([*self.buckets, *self.frozen_buckets])
        self.unfinished_change = None

    def _buckets_with_state(self, frozen: bool = True) -> list[FlatBucket]:
        return [*self.buckets, *self.frozen_buckets] if frozen else self.buckets

    # ---- counters -----------------------------------------------------------------------------------------------

    def scalar_state(self) -> dict[str, Any]:
        """Everything that a resumed run must know besides tensors, as JSON values. Collective."""
        of_rule: dict[str, Any] = {}
        for part in all_gather_json(self._rule.scalars(), self._world):  # a rank knows those of its own spans
            of_rule |= part
        counters = self.counters
        rounding = {} if self.moq is None else {"quantisation": self.moq.state_dict()}
        return {"global_steps": counters.global_steps, "skipped_steps": counters.skipped_steps,
                "micro_steps": counters.micro_steps, "optimizer_steps": counters.optimizer_steps, "rule": of_rule,
                "loss_scale": counters.scaler.scale, "clean_steps": counters.scaler.clean_steps,
                "hysteresis_left": counters.scaler.hysteresis_left, **rounding}

    def restore_scalar_state(self, saved: dict[str, Any]) -> None:
        """Go on from what `numbers` returned. Collective where weights are rounded, which they are anew."""
        scaler = LossScaleState(saved["loss_scale"], saved["clean_steps"], saved["hysteresis_left"])
        self.counters = StepCounters(scaler, saved["global_steps"], saved["skipped_steps"], saved["micro_steps"],
                                     saved["optimizer_steps"])
        self._rule.restore(saved["rule"])
        if self.moq is not None:
            self.moq.load_state_dict(saved.get("quantisation"), self.counters.applied_steps)
            publish_masters(self.buckets)

    def reset_optimizer_state(self) -> None:
        """The optimizer starts anew: its states are zeros, and its bias corrections start from their first step."""
        with self.guard_state_change("load"):
            for bucket in self.buckets:
                states = [kind for kind in bucket.master_state.kinds if kind != WEIGHT]
                for chunk in bucket.master_state.chunks if states else ():
                    with bucket.master_state.open(chunk, states, reads=False, writes=True) as kept:
                        for kind in states:
                            kept[kind].zero_()
        self.counters.optimizer_steps = 0
        self._rule.restore({})


def _owned_segments(bucket: FlatBucket, kind: str) -> Iterator[tuple[Slot, int, StateSegment]]:
    if bucket.replica_group.size > 1:
        layout, rank = FlatLayout(bucket.layout.slots, bucket.replica_group.size), bucket.replica_group.rank
        shift = rank * layout.shard_numel
    else:
        layout, rank, shift = bucket.layout, bucket.shard_group.rank, 0
    for segment in layout.segments(rank):
        yield segment.slot, segment.slot_offset, StateSegment(bucket.master_state, kind, shift + segment.shard_offset,
                                                              segment.count)
