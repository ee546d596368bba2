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
from megatron.zero.homes.ferry import Mark
from megatron.zero.homes.host import HostShelf
from megatron.zero.homes.passing import Passing
from megatron.zero.homes.shelf import WEIGHT, Homes, Kept


@dataclass(frozen=True)
class Tile:
    """What is updated at a time of one bucket: a part of its shard, with what is kept of it."""

    bucket: FlatBucket
    part: slice
    kept: Kept
    grads: Tensor
    narrow: Tensor | None
    """Where the new weights are wanted as they are at work, on the side of the update."""


class Renewal:
    def __init__(self, homes: Homes, buckets: Sequence[FlatBucket]) -> None:
        self._ferry = homes.ferry
        across = [bucket for bucket in buckets if self.crosses(bucket)]
        self._passing = {on_host: self._from([bucket for bucket in across if bucket.home.walks_on_host == on_host],
                                             homes.pins) for on_host in {one.home.walks_on_host for one in across}}
        self._last: Mark | None = None

    def _from(self, buckets: Sequence[FlatBucket], pinned: bool) -> Passing:
        size, first = max(part.stop - part.start for bucket in buckets for part in bucket.kept.parts), buckets[0]
        return Passing(size, first.work.dtype, None if first.home.walks_on_host else first.device, pinned=pinned)

    def tile(self, bucket: FlatBucket, part: slice, kept: Kept, grads: Tensor) -> Tile:
        return Tile(bucket, part, kept, grads, self._narrow(bucket, part))

    def _narrow(self, bucket: FlatBucket, part: slice) -> Tensor | None:
        if not bucket.keeps_masters:
            return None
        if self.crosses(bucket):
            return self._passing[bucket.home.walks_on_host].take(part.stop - part.start)
        weights = bucket.work.in_memory(WEIGHT)
        return None if weights is None else weights[part]

    def crosses(self, bucket: FlatBucket) -> bool:
        """The weights at work are in memory, on the other side."""
        return self._ferry is not None and bucket.is_at_hand == bucket.home.walks_on_host \
            and not bucket.work.is_on_drive

    def __call__(self, tiles: Sequence[Tile], *, written: bool) -> None:
        """With `written` the rule has filled `narrow`."""
        to_fill = [(tile.narrow, tile.kept[WEIGHT]) for tile in tiles if tile.narrow is not None and not written]
        if to_fill:
            narrow, masters = zip(*to_fill)
            torch._foreach_copy_(narrow, masters)
        for tile in tiles:
            bucket = tile.bucket
            if tile.narrow is None and bucket.keeps_masters:
                bucket.work.write(WEIGHT, tile.part.start, tile.kept[WEIGHT].to(bucket.work.dtype))
            elif tile.narrow is not None and self.crosses(bucket):
                self._send(bucket, tile.part, tile.narrow)

    def _send(self, bucket: FlatBucket, part: slice, narrow: Tensor) -> None:
        assert self._ferry is not None
        if isinstance(bucket.work, HostShelf):
            mark = bucket.work.copy_in({WEIGHT: narrow}, part, self._ferry.down)
        else:
            mark = self._last = self._ferry.up.copy(bucket.shard[part], narrow)
        self._passing[bucket.home.walks_on_host].sent(mark)

    def bring(self, bucket: FlatBucket, weights: Tensor) -> Mark | None:
        """All of a bucket's, from the host, where nobody writes to them until the mark."""
        if self._ferry is not None and bucket.is_at_hand:
            self._last = self._ferry.up.copy(bucket.shard, weights)
            return self._last
        bucket.work.write(WEIGHT, 0, weights)
        return None

    def settle(self) -> None:
        """What went up so far is there, for what the device is asked from now on."""
        if self._last is not None:
            self._last.join()
            self._last = None
