"""Update: the rule over the tiles of all shards, and new weights published.

    Update           the weights are new when the call returns
    DelayedOptimizerUpdate    the host updates beside the next forward and backward, which use the weights of before; those the
                     call made are published when the one after it begins (or when something has to be whole). Inexact:
                     a step's gradients are of weights that lack the step before
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.optim.rule import ParamGroup, SlotRange, StepScalars, UpdateRule, UpdateSegment
from megatron.zero.bucket import FlatBucket
from megatron.zero.homes.ferry import CopyEvent
from megatron.zero.homes.host import HostShard
from megatron.zero.homes.memory import page_aligned_zeros
from megatron.zero.homes.shelf import HOST, WEIGHT, ChunkIterator, EngineStorage, StorageBackend
from megatron.zero.renewal import MasterToParamCopier, UpdateTile
from megatron.zero.state import EngineState
from megatron.zero.wholes import gather_full_params
from mpu.collectives import all_reduce
from mpu.device import on_accelerator
from mpu.groups import Groups
from mpu.wire.interface import Op

GroupHyperparams = Sequence[Mapping[str, Any]]
"""The hyper-parameters of each group, as they are at this step."""


ScalarsForDevice = Callable[[torch.device], StepScalars]
"""The numbers of a step, for one side."""


@dataclass(frozen=True)
class _StorageUpdate:
    """Of a step through one home."""

    storage: StorageBackend
    device: torch.device
    """Where its arithmetic is."""
    is_batched: bool
    tiles: Sequence[Sequence[tuple[FlatBucket, slice]]]
    """What is updated at a time: everything where launches count, one part where it stays in the cache."""

    def iter_tiles(self) -> ChunkIterator:
        return self.storage.iter_chunks([(bucket.master_state, part) for bucket, part in tiles] for tiles in self.tiles)


class OptimizerUpdate:
    def __init__(self, state: EngineState, engine_storage: EngineStorage, groups: Groups, rule: UpdateRule,
                 param_groups: Sequence[ParamGroup]) -> None:
        self._state, self._groups, self._rule, self._param_groups = state, groups, rule, param_groups
        self._copier = MasterToParamCopier(engine_storage, state.buckets)
        self._storage_updates = [
            self._make_storage_update(home, [bucket for bucket in state.buckets if bucket.storage is home])
            for home in sorted({bucket.storage
                                for bucket in state.buckets}, key=lambda it: it.is_offloaded)
        ]
        """What is on the device comes first: it works at that beside the host."""
        self.is_batched = all(each.is_batched for each in self._storage_updates)
        self._is_tp_sharded = {bucket: torch.tensor([slot.partition is not None for slot in bucket.layout.slots],
                                                    device=bucket.device) for bucket in state.buckets}

    def _make_storage_update(self, storage: StorageBackend, buckets: Sequence[FlatBucket]) -> _StorageUpdate:
        is_batched = on_accelerator(buckets[0].device) and not storage.is_offloaded and \
            not any(map(self._copier.crosses_devices, buckets))
        chunks = [(bucket, part) for bucket in buckets for part in bucket.master_state.chunks]
        return _StorageUpdate(storage, buckets[0].update_device, is_batched,
                              [chunks] if is_batched else [[part] for part in chunks])

    def __call__(self, scalars: ScalarsForDevice, grad_multiplier: float | None = None) -> None:
        """`factor` is 1 / divisor, where the host knows it: a rule that waits needs it."""
        self._state.unfinished_change = "step"
        for bucket in self._state.buckets:
            bucket.wait_for_param_gather()  # of a step before, in blocks that no forward has used since
        hypers, taken = self._current_hyperparams(), self._state.counters.optimizer_steps
        for storage_update in self._storage_updates:
            at = scalars(storage_update.device)
            with closing(storage_update.iter_tiles()) as chunk_iterator:
                for tiles, chunk_states in zip(storage_update.tiles, chunk_iterator, strict=True):
                    new = [self._copier.make_tile(bucket, part, numbers, bucket.grads.shard[part])
                           for (bucket, part), numbers in zip(tiles, chunk_states, strict=True)]
                    self._copier(new, lp_is_written=self._apply_rule(new, hypers, at, grad_multiplier, taken))
                    self._start_allgathers(
                        [tile.bucket for tile in new if tile.chunk.stop == tile.bucket.layout.shard_numel])
        self._state.unfinished_change = None

    def _start_allgathers(self, updated: Sequence[FlatBucket]) -> None:
        if updated:
            self._copier.join_copies()
        for bucket in updated:
            bucket.start_allgather_after_step()

    @property
    def is_running(self) -> bool:
        return False

    def finish(self) -> None:
        """It has."""

    def _current_hyperparams(self) -> GroupHyperparams:
        return [{name: value for name, value in group.items() if name != "params"} for group in self._param_groups]

    def _apply_rule(self, tiles: Sequence[UpdateTile], hypers: GroupHyperparams, at: StepScalars, factor: float | None,
                    taken: int) -> bool:
        """True: the new weights are where the tiles want them, too."""
        written = not self._rule.needs_host_scalars
        for number, hyper in enumerate(hypers):
            spans = [span for tile in tiles for span in self._spans(tile, number)]
            if not self._rule.needs_host_scalars:
                written &= not spans or self._rule.step_many(spans, hyper, at)
                continue
            assert factor is not None, "the step of a rule that waits is not deferred"
            for span in spans:
                self._rule.step(span, hyper, factor=factor, steps_taken=taken)
        return written

    def _spans(self, tile: UpdateTile, group: int) -> Iterator[UpdateSegment]:
        """The work of a rule on a tile for one hyper-parameter group: a span, or none."""
        start, stop = tile.bucket.layout.group_range(tile.bucket.shard_group.rank, group)
        start, stop = max(start, tile.chunk.start), min(stop, tile.chunk.stop)
        if start < stop:
            yield self._span(tile, group, slice(start, stop))
        elif not self._rule.elementwise:
            yield self._span(tile, group, slice(tile.chunk.start, tile.chunk.start))

    def _span(self, tile: UpdateTile, group: int, span: slice) -> UpdateSegment:
        bucket = tile.bucket
        parts = [] if self._rule.elementwise else [
            SlotRange(index, start - span.start, stop - span.start)
            for index, start, stop in bucket.layout.slot_ranges(bucket.shard_group.rank)
            if span.start <= start < span.stop]
        names = () if self._rule.elementwise else tuple(slot.name for slot in bucket.layout.slots)
        here = slice(span.start - tile.chunk.start, span.stop - tile.chunk.start)
        states = {kind: values[here] for kind, values in tile.master_state.items() if kind != WEIGHT}
        narrow = None if tile.lp_out is None else tile.lp_out[here]
        return UpdateSegment(group, tile.master_state[WEIGHT][here], tile.grads[here], states, parts,
                             len(bucket.layout.slots), partial(self._reduce_slot_values, bucket, "sum"), narrow,
                             partial(self._reduce_slot_values, bucket, "max"), names,
                             partial(gather_full_params, bucket, self._groups.tp, group))

    def _reduce_slot_values(self, bucket: FlatBucket, op: Op, values: Tensor) -> Tensor:
        """Sums or maxima over this rank's part of each parameter -> over the whole parameter."""
        if bucket.shard_group.is_solo and self._groups.tp.is_solo:
            return values
        here = all_reduce(values.to(bucket.device), bucket.shard_group, op)
        return torch.where(self._is_tp_sharded[bucket], all_reduce(here, self._groups.tp, op), here).to(values.device)


class DelayedOptimizerUpdate(OptimizerUpdate):
    """Of state on the host beside the device, by a rule that looks at one weight at a time."""

    def __init__(self, state: EngineState, engine_storage: EngineStorage, groups: Groups, rule: UpdateRule,
                 param_groups: Sequence[ParamGroup]) -> None:
        super().__init__(state, engine_storage, groups, rule, param_groups)
        self._worker = ThreadPoolExecutor(1, "update")
        self._running: Future[None] | None = None
        self._new_params = {
            bucket: page_aligned_zeros(bucket.master_state.numel,
                                       bucket.param_shard.dtype,
                                       pinned=engine_storage.pin_memory)
            for bucket in state.buckets
        }
        """New weights, until nobody uses the ones before."""
        self._pending_copies: list[CopyEvent] = []
        """On their way to the device."""

    def __call__(self, scalars: ScalarsForDevice, grad_multiplier: float | None = None) -> None:
        assert self._running is None, "an update is under way"
        shelves = [bucket.master_state for bucket in self._state.buckets if isinstance(bucket.master_state, HostShard)]
        for mark in self._pending_copies:
            mark.wait_on_host()
        tiles = []
        for bucket, shelf in zip(self._state.buckets, shelves, strict=True):
            grads = bucket.grads.detach_host_grads()
            tiles += [UpdateTile(bucket, part, shelf.lend_chunk(part), grads[part], self._new_params[bucket][part])
                      for part in shelf.chunks]
        self._running = self._worker.submit(self._update_tiles, tiles, _copy_hyperparams(self._current_hyperparams()),
                                            scalars(HOST), grad_multiplier, self._state.counters.optimizer_steps)
        for shelf in shelves:
            shelf.set_pending_update(self._running)

    def _update_tiles(self, tiles: Sequence[UpdateTile], hypers: GroupHyperparams, at: StepScalars,
                      factor: float | None, taken: int) -> None:
        for tile in tiles:
            if not self._apply_rule([tile], hypers, at, factor, taken):
                assert tile.lp_out is not None
                tile.lp_out.copy_(tile.master_state[WEIGHT])

    @property
    def is_running(self) -> bool:
        return self._running is not None

    def finish(self) -> None:
        if self._running is None:
            return
        self._state.unfinished_change = "step"
        under_way, self._running = self._running, None
        under_way.result()
        marks = []
        for bucket in self._state.buckets:
            bucket.wait_for_param_gather()  # of the update before, if no forward came between
            marks.append(self._copier.copy_all_params(bucket, self._new_params[bucket]))
            self._start_allgathers([bucket])
        self._pending_copies = [mark for mark in marks if mark is not None]
        self._state.unfinished_change = None


def _copy_hyperparams(hypers: GroupHyperparams) -> GroupHyperparams:
    """As they are now: a learning rate may be a tensor, which schedulers change in place."""
    return [{name: value.clone() if isinstance(value, Tensor) else value for name, value in hyper.items()}
            for hyper in hypers]
