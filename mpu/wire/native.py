"""The wire of accelerators: one operation of the backend for each operation, whatever its size.

Nothing is cut here: a collective runs beside the computation only as a whole, and its time at small sizes is all
latency. Sums are taken by the backend, around a ring or up a tree, each partial sum rounded to the type that travels:
of many 16-bit numbers the last ones would be lost (256 + 1 is 256 in bf16). So 16-bit numbers are widened before a
reduce-scatter, travel in fp32, and each rank rounds its part of the sum once; `sum_in` asks for something else.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from mpu.groups import Group
from mpu.wire.interface import CollectiveWork, Op
from mpu.wire.waits import track_async_collective

REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class NativeBackend:
    @track_async_collective
    def all_gather(self, full: Tensor, shard: Tensor, group: Group, max_in_flight: int | None) -> CollectiveWork:
        return CollectiveWork([start_all_gather(full, shard, group.process_group_or_none)])

    @track_async_collective
    def reduce_scatter(self, shard: Tensor, full: Tensor, group: Group, reduce_dtype: torch.dtype | None,
                       max_in_flight: int | None) -> CollectiveWork:
        wide = full.to(reduce_dtype or accumulation_dtype(full.dtype))
        mine = shard if shard.dtype == wide.dtype else torch.empty_like(shard, dtype=wide.dtype)
        work = start_reduce_scatter(mine, wide, group.process_group_or_none)
        return CollectiveWork([work], None if mine is shard else lambda: _copy_into(shard, mine))

    @track_async_collective
    def all_reduce(self, flat: Tensor, group: Group, op: Op, reduce_dtype: torch.dtype | None,
                   max_in_flight: int | None) -> CollectiveWork:
        wide = flat.to(reduce_dtype or flat.dtype)
        work = dist.all_reduce(wide, REDUCE_OPS[op], group=group.process_group_or_none, async_op=True)
        return CollectiveWork([work], None if wide is flat else lambda: _copy_into(flat, wide))

    @track_async_collective
    def broadcast(self, x: Tensor, src: int, group: Group) -> CollectiveWork:
        return CollectiveWork([dist.broadcast(x, group.ranks[src], group=group.process_group_or_none, async_op=True)])

    @track_async_collective
    def all_to_all(self, received: Tensor, sent: Tensor, group: Group) -> CollectiveWork:
        return CollectiveWork(
            [dist.all_to_all_single(received, sent, group=group.process_group_or_none, async_op=True)])


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision in which numbers of this one are added up."""
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype


# torch 2.13 renames the next two, and warns at the old names. They are looked up at each call.

def start_all_gather(full: Tensor, shard: Tensor, process_group: dist.ProcessGroup | None) -> dist.Work:
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return cast(dist.Work, gather(full, shard, group=process_group, async_op=True))


def start_reduce_scatter(shard: Tensor, full: Tensor, process_group: dist.ProcessGroup | None) -> dist.Work:
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return cast(dist.Work, scatter(shard, full, group=process_group, async_op=True))


def _copy_into(target: Tensor, source: Tensor) -> None:
    target.copy_(source)
