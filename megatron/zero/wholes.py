"""Wholes: the numbers of whole parameters, for a rule that looks at more of one than sums (optim/rule.py).

Every rank that has a part of a bucket gives the numbers of its span, and all are sent to all at once. Parameters that
tensor parallelism cuts are joined in their logical order, and what pads them is left out. A rank makes only those
parameters whole that it has a part of, so that what is done with each is shared out among the ranks, where there are
many.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron.optim.rule import FullParam
from megatron.zero.bucket import FlatBucket
from megatron.zero.layout import FlatLayout, Segment, Slot, align
from mpu.collectives import all_gather_into
from mpu.groups import Group
from mpu.partition import join_local_slices, local_slice


def gather_full_params(bucket: FlatBucket, tp: Group, group: int, values: Tensor) -> Iterator[FullParam]:
    """Of the parameters of a hyper-parameter group, from the numbers of this rank's span of it. Collective."""
    layout, shard_group = bucket.layout, bucket.shard_group
    members = [slot for slot in layout.slots if slot.group == group and slot.numel]
    if not members:
        return iter(())
    end = layout.numel if members[-1] is layout.slots[-1] else align(members[-1].end)
    longest = min(layout.shard_numel, end - members[0].offset)  # no rank's span is longer
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
    layout, rank = bucket.layout, bucket.shard_group.rank
    first, last = layout.group_range(rank, group)
    for segment in layout.segments(rank, slice(first, last)):
        slices = torch.cat([*_slot_segments(layout, segment.slot, gathered)], 1).unflatten(1, segment.slot.shape)
        start = segment.shard_offset - first
        yield _make_full_param(segment.slot, segment, slice(start, start + segment.count), slices, tp, device)


def _slot_segments(layout: FlatLayout, slot: Slot, gathered: Tensor) -> Iterator[Tensor]:
    """Of a slot, from each rank that has a part of it: [tp or 1, n]."""
    size = layout.shard_numel
    for rank in range(slot.offset // size, -(-slot.end // size)):
        start, stop = (place - rank * size for place in (slot.offset, slot.end))
        first, last = layout.group_range(rank, slot.group)
        yield gathered[:, rank, max(start, first) - first : min(stop, last) - first]


def _make_full_param(slot: Slot, segment: Segment, part: slice, slices: Tensor, tp: Group,
                     device: torch.device) -> FullParam:
    partition = slot.partition
    if partition is None:
        return FullParam(slot.name, part, slices[0], 1, 0, partial(_take_segment, slices[0], segment, device))
    joined = join_local_slices(list(slices.unbind()), partition)
    values = joined if partition.size is None else joined.narrow(partition.dim, 0, partition.size)

    def own_segment() -> Tensor:
        return _take_segment(local_slice(joined, partition, tp.rank, tp.size), segment, device)

    return FullParam(slot.name, part, values, partition.stride, partition.dim, own_segment)


def _take_segment(values: Tensor, segment: Segment, device: torch.device) -> Tensor:
    return values.flatten()[segment.slot_offset : segment.slot_offset + segment.count].to(device)
