"""Renewal: new weights at work, from the masters that a step has just updated, a tile at a time.

    updated on    weights at work are on     they get there
    one side      the same side              the rule writes them, or one copy makes them
    the host      the device                 through a buffer on the host, while the next tile is updated
    the device    the host                   through a buffer on the device
    either        a drive                    by their shelf

The *sides* are the device and the host; a device that is its own host has one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.zero.bucket import FlatBucket
from megatron.zero.homes.ferry import CopyEvent
from megatron.zero.homes.host import HostShard
from megatron.zero.homes.passing import StagingDoubleBuffer
from megatron.zero.homes.shelf import WEIGHT, EngineStorage, StateTensors


@dataclass(frozen=True)
class UpdateTile:
    """What is updated at a time of one bucket: a part of its shard, with what is kept of it."""

    bucket: FlatBucket
    chunk: slice
    master_state: StateTensors
    grads: Tensor
    lp_out: Tensor | None
    """Where the new weights are wanted as they are at work, on the side of the update."""


class MasterToParamCopier:
    def __init__(self, engine_storage: EngineStorage, buckets: Sequence[FlatBucket]) -> None:
        self._copy_streams = engine_storage.copy_streams
        across = [bucket for bucket in buckets if self.crosses_devices(bucket)]
        self._staging = {
            on_host: self._make_staging([bucket for bucket in across if bucket.storage.updates_on_host == on_host],
                                        engine_storage.pin_memory)
            for on_host in {one.storage.updates_on_host
                            for one in across}
        }
        self._last_copy: CopyEvent | None = None

    def _make_staging(self, buckets: Sequence[FlatBucket], pinned: bool) -> StagingDoubleBuffer:
        size, first = max(part.stop - part.start for bucket in buckets
                          for part in bucket.master_state.chunks), buckets[0]
        return StagingDoubleBuffer(size,
                                   first.param_shard.dtype,
                                   None if first.storage.updates_on_host else first.device,
                                   pinned=pinned)

    def make_tile(self, bucket: FlatBucket, chunk: slice, master_state: StateTensors, grads: Tensor) -> UpdateTile:
        return UpdateTile(bucket, chunk, master_state, grads, self._lp_out_for(bucket, chunk))

    def _lp_out_for(self, bucket: FlatBucket, chunk: slice) -> Tensor | None:
        if not bucket.has_separate_masters:
            return None
        if self.crosses_devices(bucket):
            return self._staging[bucket.storage.updates_on_host].acquire(chunk.stop - chunk.start)
        weights = bucket.param_shard.memory_view(WEIGHT)
        return None if weights is None else weights[chunk]

    def crosses_devices(self, bucket: FlatBucket) -> bool:
        """The weights at work are in memory, on the other side."""
        return self._copy_streams is not None and bucket.is_on_device == bucket.storage.updates_on_host \
            and not bucket.param_shard.is_on_nvme

    def __call__(self, tiles: Sequence[UpdateTile], *, lp_is_written: bool) -> None:
        """With `written` the rule has filled `narrow`."""
        to_fill = [(tile.lp_out, tile.master_state[WEIGHT]) for tile in tiles
                   if tile.lp_out is not None and not lp_is_written]
        if to_fill:
            narrow, masters = zip(*to_fill)
            torch._foreach_copy_(narrow, masters)
        for tile in tiles:
            bucket = tile.bucket
            if tile.lp_out is None and bucket.has_separate_masters:
                bucket.param_shard.write(WEIGHT, tile.chunk.start,
                                         tile.master_state[WEIGHT].to(bucket.param_shard.dtype))
            elif tile.lp_out is not None and self.crosses_devices(bucket):
                self._copy_across(bucket, tile.chunk, tile.lp_out)

    def _copy_across(self, bucket: FlatBucket, chunk: slice, lp_out: Tensor) -> None:
        assert self._copy_streams is not None
        if isinstance(bucket.param_shard, HostShard):
            mark = bucket.param_shard.copy_chunk_from_device({WEIGHT: lp_out}, chunk, self._copy_streams.to_host)
        else:
            mark = self._last_copy = self._copy_streams.to_device.copy(bucket.device_param_shard[chunk], lp_out)
        self._staging[bucket.storage.updates_on_host].mark_sent(mark)

    def copy_all_params(self, bucket: FlatBucket, weights: Tensor) -> CopyEvent | None:
        """All of a bucket's, from the host, where nobody writes to them until the mark."""
        if self._copy_streams is not None and bucket.is_on_device:
            self._last_copy = self._copy_streams.to_device.copy(bucket.device_param_shard, weights)
            return self._last_copy
        bucket.param_shard.write(WEIGHT, 0, weights)
        return None

    def join_copies(self) -> None:
        """What went up so far is there, for what the device is asked from now on."""
        if self._last_copy is not None:
            self._last_copy.wait_on_device()
            self._last_copy = None
