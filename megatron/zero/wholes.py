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

from megatron.optim.rule import Whole
from megatron.zero.bucket import FlatBucket
from megatron.zero.layout import Segment, Slot
from mpu.collectives import all_gather_into
from mpu.groups import Group
from mpu.partition import join_slices, local_slice


def wholes(bucket: FlatBucket, tp: Group, group: int, values: Tensor) -> Iterator[Whole]:
    """Of the parameters of a hyper-parameter group, from the numbers of this rank's span of it. Collective."""
    layout, owners = bucket.layout, bucket.shard_group
    spans = [layout.group_span(rank, group) for rank in range(layout.shards)]
    longest = max(stop - start for start, stop in spans)
    if not longest:
        return iter(())
    is_cut = any(slot.partition is not None for slot in layout.slots if slot.group == group)
    padded = pad(values.to(bucket.device), (0, longest - len(values)))
    gathered = _gathered(_gathered(padded, owners), tp if is_cut else None)  # [tp or 1, shards, longest]
    return _each(bucket, tp, group, spans, gathered.view(-1, layout.shards, longest), values.device)


def _gathered(own: Tensor, group: Group | None) -> Tensor:
    """[n] -> [size * n], in rank order."""
    if group is None or group.is_solo:
        return own
    everything = own.new_empty(group.size * len(own))
    all_gather_into(everything, own, group).wait()
    return everything


def _each(bucket: FlatBucket, tp: Group, group: int, spans: list[tuple[int, int]], gathered: Tensor,
          device: torch.device) -> Iterator[Whole]:
    layout, rank = bucket.layout, bucket.shard_group.rank
    for segment in layout.segments(rank, slice(*spans[rank])):
        slot = segment.slot
        if slot.group != group:
            continue  # padding of the group before it
        pieces = [gathered[:, other, piece.shard_offset - start : piece.shard_offset - start + piece.count]
                  for other, (start, stop) in enumerate(spans)
                  for piece in layout.segments(other, slice(start, stop)) if piece.slot is slot]
        slices = torch.cat(pieces, 1).unflatten(1, slot.shape)  # [tp or 1, *shape]
        start = segment.shard_offset - spans[rank][0]
        yield _whole(slot, segment, slice(start, start + segment.count), slices, tp, device)


def _whole(slot: Slot, segment: Segment, part: slice, slices: Tensor, tp: Group, device: torch.device) -> Whole:
    partition = slot.partition
    if partition is None:
        return Whole(slot.name, part, slices[0], 1, 0, partial(_run, slices[0], segment, device))
    joined = join_slices(list(slices.unbind()), partition)
    values = joined if partition.size is None else joined.narrow(partition.dim, 0, partition.size)

    def own() -> Tensor:
        return _run(local_slice(joined, partition, tp.rank, tp.size), segment, device)

    return Whole(slot.name, part, values, partition.stride, partition.dim, own)


def _run(values: Tensor, segment: Segment, device: torch.device) -> Tensor:
    return values.flatten()[segment.slot_offset : segment.slot_offset + segment.count].to(device)
