"""Applies the optimizer rule to all shards, and copies the new masters into the 16-bit parameters.

    OptimizerUpdate          the weights are new when the call returns
    DelayedOptimizerUpdate   the host updates during the next forward and backward, which use the old weights;
                             gradients are one step old

Where the new parameters go: on the device of the update, the rule writes them (`lp_out`) or one copy does; across
devices they go through a staging buffer while the next tile is updated; to NVMe through its storage.
`gather_full_params` gathers full parameters for a rule that needs them (Muon): each rank gets those it has a part of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron.optim.rule import FullParam, ParamGroup, SlotRange, StepScalars, UpdateRule, UpdateSegment
from megatron.zero.bucket import FlatBucket
from megatron.zero.layout import Segment, align
from megatron.zero.offload.copy_streams import CopyEvent, StagingDoubleBuffer
from megatron.zero.offload.direct_io import page_aligned_zeros
from megatron.zero.offload.storage import (HOST, WEIGHT, EngineStorage, HostShard, Location, StateTensors,
                                           StorageBackend)
from megatron.zero.state import EngineState
from mpu.collectives import Op, all_gather_into, all_reduce
from mpu.device import on_accelerator
from mpu.groups import Group, Groups
from mpu.partition import join_local_slices, local_slice


def gather_full_params(bucket: FlatBucket, tp: Group, group: int, values: Tensor) -> Iterator[FullParam]:
    """Yield the full parameters of a param group that this rank has a part of. Collective.

    `values` is this rank's part of the group: a 1-dimensional tensor, in the order of the shard."""
    layout, shard_group = bucket.layout, bucket.shard_group
    members = [slot for slot in layout.slots if slot.group == group and slot.numel]
    if not members:
        return iter(())
    end = layout.numel if members[-1] is layout.slots[-1] else align(members[-1].end)
    longest = min(layout.shard_numel, end - members[0].offset)  # no rank has more of the group: all-gather this length
    is_tp_sharded = any(slot.partition is not None for slot in members)
    padded = pad(values.to(bucket.device), (0, longest - len(values)))
    gathered = _all_gather(_all_gather(padded, shard_group),
                           tp if is_tp_sharded else None)  # [tp or 1, shards, longest]
    return _iter_full_params(bucket, tp, group, gathered.view(-1, layout.shards, longest), values.device)


def _all_gather(own: Tensor, group: Group | None) -> Tensor:
    """[n] -> [size * n], in rank order."""
    if group is None or group.is_solo:
        return own
    everything = own.new_empty(group.size * len(own))
    all_gather_into(everything, own, group).wait()
    return everything


def _iter_full_params(bucket: FlatBucket, tp: Group, group: int, gathered: Tensor,
                      device: torch.device) -> Iterator[FullParam]:
    layout, rank, size = bucket.layout, bucket.shard_group.rank, bucket.layout.shard_numel
    first, last = layout.group_range(rank, group)
    for segment in layout.segments(rank, slice(first, last)):
        slot, partition, parts = segment.slot, segment.slot.partition, []
        for shard in range(slot.offset // size, -(-slot.end // size)):
            low, high = layout.group_range(shard, group)
            start, stop = max(slot.offset - shard * size, low), min(slot.end - shard * size, high)
            parts.append(gathered[:, shard, start - low : stop - low])
        slices = torch.cat(parts, 1).unflatten(1, slot.shape)  # [tp or 1, *shape]
        joined = slices[0] if partition is None else join_local_slices(list(slices.unbind()), partition)
        unpadded = joined
        if partition is not None and partition.size is not None:
            unpadded = joined.narrow(partition.dim, 0, partition.size)
        start = segment.shard_offset - first
        yield FullParam(slot.name, slice(start, start + segment.count), unpadded,
                        1 if partition is None else partition.stride, 0 if partition is None else partition.dim,
                        partial(_local_values, joined, segment, tp, device))


def _local_values(joined: Tensor, segment: Segment, tp: Group, device: torch.device) -> Tensor:
    """This rank's segment of the values, as they are at the time of the call."""
    partition = segment.slot.partition
    local = joined if partition is None else local_slice(joined, partition, tp.rank, tp.size)
    return local.flatten()[segment.slot_offset : segment.slot_offset + segment.count].to(device)


@dataclass(frozen=True)
class UpdateTile:
    """One chunk of a bucket's shard, with the tensors that the update reads and writes."""

    bucket: FlatBucket
    chunk: slice
    master_state: StateTensors
    grads: Tensor
    # Output for the new parameters in working precision, on the device of the update. None if there are no separate
    # masters, or if the copier writes through the storage (NVMe).
    lp_out: Tensor | None


class MasterToParamCopier:
    """Copies updated masters into the parameter shards, across devices too."""

    def __init__(self, engine_storage: EngineStorage, buckets: Sequence[FlatBucket]) -> None:
        self._copy_streams = engine_storage.copy_streams
        self._last_copy: CopyEvent | None = None
        # Buckets whose parameter shard is in the memory of another device than the one that updates.
        self.crossing_buckets = {
            bucket for bucket in buckets if self._copy_streams is not None and bucket.param_shard.is_in_memory
            and bucket.param_shard.location is not bucket.storage.update_location}
        self._staging: dict[Location, StagingDoubleBuffer] = {}
        for location in (Location.DEVICE, Location.HOST):
            across = [bucket for bucket in buckets
                      if bucket.storage.update_location is location and bucket in self.crossing_buckets]
            if across:
                size = max(chunk.stop - chunk.start for bucket in across for chunk in bucket.master_state.chunks)
                self._staging[location] = StagingDoubleBuffer(
                    size, across[0].param_shard.dtype, None if location is Location.HOST else across[0].device,
                    pinned=engine_storage.pin_memory)

    def lp_out_for(self, bucket: FlatBucket, chunk: slice) -> Tensor | None:
        if not bucket.has_separate_masters:
            return None
        if bucket in self.crossing_buckets:
            return self._staging[bucket.storage.update_location].acquire(chunk.stop - chunk.start)
        return bucket.param_shard.view(WEIGHT)[chunk] if bucket.param_shard.is_in_memory else None

    def __call__(self, tiles: Sequence[UpdateTile], *, lp_is_written: bool) -> None:
        """Copy the new parameters to their shards. Unless `lp_is_written`, first cast the masters into `lp_out`."""
        to_fill = [(tile.lp_out, tile.master_state[WEIGHT]) for tile in tiles
                   if tile.lp_out is not None and not lp_is_written]
        if to_fill:
            outputs, masters = zip(*to_fill)
            torch._foreach_copy_(outputs, masters)
        for tile in tiles:
            bucket = tile.bucket
            if tile.lp_out is None and bucket.has_separate_masters:
                bucket.param_shard.write(WEIGHT, tile.chunk.start,
                                         tile.master_state[WEIGHT].to(bucket.param_shard.dtype))
            elif tile.lp_out is not None and bucket in self.crossing_buckets:
                self._copy_across(bucket, tile.chunk, tile.lp_out)

    def _copy_across(self, bucket: FlatBucket, chunk: slice, lp_out: Tensor) -> None:
        assert self._copy_streams is not None
        if isinstance(bucket.param_shard, HostShard):
            event = bucket.param_shard.copy_chunk_from_device({WEIGHT: lp_out}, chunk, self._copy_streams.to_host)
        else:
            event = self._last_copy = self._copy_streams.to_device.copy(bucket.device_param_shard[chunk], lp_out)
        self._staging[bucket.storage.update_location].mark_sent(event)

    def copy_all_params(self, bucket: FlatBucket, weights: Tensor) -> CopyEvent | None:
        """Copy a bucket's parameter shard from the host. `weights` must not change before the returned event."""
        if self._copy_streams is not None and bucket.param_shard.is_on_device:
            self._last_copy = self._copy_streams.to_device.copy(bucket.device_param_shard, weights)
            return self._last_copy
        bucket.param_shard.write(WEIGHT, 0, weights)
        return None

    def join_copies(self) -> None:
        """Make the current stream wait for the copies to the device so far."""
        if self._last_copy is not None:
            self._last_copy.wait_on_device()
            self._last_copy = None


class OptimizerUpdate:
    """Applies the update rule to all shards."""

    running: Future[None] | None = None  # a delayed update that is running; set or None on all ranks alike

    def __init__(self, state: EngineState, engine_storage: EngineStorage, groups: Groups, rule: UpdateRule,
                 param_groups: Sequence[ParamGroup]) -> None:
        self._state, self._groups, self._rule, self._param_groups = state, groups, rule, param_groups
        self._copier = MasterToParamCopier(engine_storage, state.buckets)
        # Device storage first: the device then computes while the host updates its part.
        storages = sorted({bucket.storage for bucket in state.buckets},
                          key=lambda storage: storage.location is not Location.DEVICE)
        self._tiles_by_storage: dict[StorageBackend, list[list[tuple[FlatBucket, slice]]]] = {}
        self.is_batched = True  # the device updates all shards with a few launches, and the host never waits
        for storage in storages:
            buckets = [bucket for bucket in state.buckets if bucket.storage is storage]
            chunks = [(bucket, chunk) for bucket in buckets for chunk in bucket.master_state.chunks]
            # An accelerator updates all chunks at once, which saves launches. The host takes one chunk at a time, so
            # that it stays in the cache.
            is_batched = on_accelerator(state.device) and storage.location is Location.DEVICE and \
                self._copier.crossing_buckets.isdisjoint(buckets)
            self._tiles_by_storage[storage] = [chunks] if is_batched else [[chunk] for chunk in chunks]
            self.is_batched &= is_batched
        self._is_tp_sharded = {bucket: torch.tensor([slot.partition is not None for slot in bucket.layout.slots],
                                                    device=bucket.device) for bucket in state.buckets}

    def __call__(self, scalars_on: Callable[[torch.device], StepScalars]) -> None:
        """Update all shards and start the all-gathers. `scalars_on` returns the scalars of the step on the device of an
        update."""
        for bucket in self._state.buckets:
            bucket.wait_for_param_gather()  # from an earlier step, if no forward has used the bucket since
        for storage, all_tiles in self._tiles_by_storage.items():
            first_bucket, _ = all_tiles[0][0]
            scalars = scalars_on(first_bucket.update_device)
            with closing(storage.iter_chunks([(bucket.master_state, part) for bucket, part in tiles]
                                             for tiles in all_tiles)) as chunk_iterator:
                for tiles, chunk_states in zip(all_tiles, chunk_iterator, strict=True):
                    new = [UpdateTile(bucket, chunk, states, bucket.grads.shard[chunk],
                                      self._copier.lp_out_for(bucket, chunk))
                           for (bucket, chunk), states in zip(tiles, chunk_states, strict=True)]
                    self._copier(new, lp_is_written=self._apply_rule(new, self._param_groups, scalars))
                    updated = [tile.bucket for tile in new if tile.chunk.stop == tile.bucket.layout.shard_numel]
                    if updated:  # on the host their all-gathers overlap the update of the next tiles
                        self._copier.join_copies()
                    for bucket in updated:
                        bucket.start_allgather_after_step()  # [shard_numel] on each rank -> [numel]

    def finish(self) -> None:
        """Wait for a delayed update and copy its masters to the parameters. Collective."""

    def _apply_rule(self, tiles: Sequence[UpdateTile], hypers: Sequence[ParamGroup], scalars: StepScalars) -> bool:
        """Run the rule on the tiles, one group of hyper-parameters at a time. True if it has also written every
        `lp_out`."""
        written, elementwise = True, self._rule.elementwise
        for group, hyper in enumerate(hypers):
            segments = []
            for tile in tiles:  # the part of each tile that belongs to the group: one contiguous range
                bucket, chunk, layout, rank = tile.bucket, tile.chunk, tile.bucket.layout, tile.bucket.shard_group.rank
                start, stop = layout.group_range(rank, group)
                start, stop = max(start, chunk.start), min(stop, chunk.stop)
                if start >= stop:
                    if elementwise:
                        continue
                    start = stop = chunk.start  # an empty segment: the rule's reductions are collective
                parts = [] if elementwise else [SlotRange(index, first - start, last - start) for index, first, last
                                                in layout.slot_ranges(rank) if start <= first < stop]
                names = () if elementwise else tuple(slot.name for slot in layout.slots)
                here = slice(start - chunk.start, stop - chunk.start)
                segments.append(UpdateSegment(
                    group, master=tile.master_state[WEIGHT][here], grad=tile.grads[here],
                    states={kind: values[here] for kind, values in tile.master_state.items() if kind != WEIGHT},
                    slot_ranges=parts, num_slots=len(layout.slots), param_names=names,
                    sum_over_shards=partial(self._reduce_slot_values, bucket, "sum"),
                    max_over_shards=partial(self._reduce_slot_values, bucket, "max"),
                    lp_out=None if tile.lp_out is None else tile.lp_out[here],
                    gather_full_params=partial(gather_full_params, bucket, self._groups.tp, group)))
            if segments:
                written &= self._rule.step(segments, hyper, scalars)
        return written

    def _reduce_slot_values(self, bucket: FlatBucket, op: Op, values: Tensor) -> Tensor:
        """[parameters of the bucket]: sums or maxima over this rank's part of each parameter -> over all of it."""
        if bucket.shard_group.is_solo and self._groups.tp.is_solo:
            return values
        here = all_reduce(values.to(bucket.device), bucket.shard_group, op)
        return torch.where(self._is_tp_sharded[bucket], all_reduce(here, self._groups.tp, op), here).to(values.device)


class DelayedOptimizerUpdate(OptimizerUpdate):
    """Updates masters on the host in a background thread. For elementwise rules only."""

    def __init__(self, state: EngineState, engine_storage: EngineStorage, groups: Groups, rule: UpdateRule,
                 param_groups: Sequence[ParamGroup]) -> None:
        super().__init__(state, engine_storage, groups, rule, param_groups)
        self._worker = ThreadPoolExecutor(1, "update")
        # New parameters on the host, [shard_numel], until the old ones are no longer used.
        self._new_params = {bucket: page_aligned_zeros(bucket.master_state.numel, bucket.param_shard.dtype,
                                                       pinned=engine_storage.pin_memory) for bucket in state.buckets}
        self._pending_copies: list[CopyEvent] = []  # running copies of `_new_params` to the device

    def __call__(self, scalars_on: Callable[[torch.device], StepScalars]) -> None:
        assert self.running is None, "an update is under way"
        shards = [bucket.master_state for bucket in self._state.buckets if isinstance(bucket.master_state, HostShard)]
        for event in self._pending_copies:
            event.wait_on_host()
        tiles = []
        for bucket, shard in zip(self._state.buckets, shards, strict=True):
            assert bucket.grads.offloader is not None, "the device updates"
            grads = bucket.grads.offloader.detach_sums()
            tiles += [UpdateTile(bucket, part, {kind: shard.view(kind)[part] for kind in shard.kinds}, grads[part],
                                 self._new_params[bucket][part])
                      for part in shard.chunks]
        # Copies for the background thread: a learning rate may be a tensor that schedulers change in place.
        hypers = [{name: value.clone() if isinstance(value, Tensor) else value for name, value in hyper.items()}
                  for hyper in self._param_groups]
        self.running = self._worker.submit(self._update_tiles, tiles, hypers, scalars_on(HOST))
        for shard in shards:
            shard.pending_update = self.running

    def _update_tiles(self, tiles: Sequence[UpdateTile], hypers: Sequence[ParamGroup], scalars: StepScalars) -> None:
        for tile in tiles:
            if not self._apply_rule([tile], hypers, scalars):
                assert tile.lp_out is not None
                tile.lp_out.copy_(tile.master_state[WEIGHT])

    def finish(self) -> None:
        if self.running is None:
            return
        under_way, self.running = self.running, None
        under_way.result()
        events = []
        for bucket in self._state.buckets:
            bucket.wait_for_param_gather()  # from the last update, if no forward has come since
            events.append(self._copier.copy_all_params(bucket, self._new_params[bucket]))
            self._copier.join_copies()
            bucket.start_allgather_after_step()
        self._pending_copies = [event for event in events if event is not None]
