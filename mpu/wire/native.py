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
from mpu.wire.interface import Op, Pending
from mpu.wire.waits import sending

OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class NativeWire:
    @sending
    def all_gather(self, full: Tensor, shard: Tensor, group: Group, at_a_time: int | None) -> Pending:
        return Pending([all_gather_of(full, shard, group.handle)])

    @sending
    def reduce_scatter(self, shard: Tensor, full: Tensor, group: Group, sum_in: torch.dtype | None,
                       at_a_time: int | None) -> Pending:
        wide = full.to(sum_in or widened(full.dtype))
        mine = shard if shard.dtype == wide.dtype else torch.empty_like(shard, dtype=wide.dtype)
        work = reduce_scatter_of(mine, wide, group.handle)
        return Pending([work], None if mine is shard else lambda: _fill(shard, mine))

    @sending
    def all_reduce(self, flat: Tensor, group: Group, op: Op, sum_in: torch.dtype | None,
                   at_a_time: int | None) -> Pending:
        wide = flat.to(sum_in or flat.dtype)
        work = dist.all_reduce(wide, OPS[op], group=group.handle, async_op=True)
        return Pending([work], None if wide is flat else lambda: _fill(flat, wide))

    @sending
    def broadcast(self, x: Tensor, src: int, group: Group) -> Pending:
        return Pending([dist.broadcast(x, group.ranks[src], group=group.handle, async_op=True)])

    @sending
    def all_to_all(self, received: Tensor, sent: Tensor, group: Group) -> Pending:
        return Pending([dist.all_to_all_single(received, sent, group=group.handle, async_op=True)])


def widened(dtype: torch.dtype) -> torch.dtype:
    """The precision in which numbers of this one are added up."""
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype


# torch 2.13 renames the next two, and warns at the old names. They are looked up at each call.

def all_gather_of(full: Tensor, shard: Tensor, handle: dist.ProcessGroup | None) -> dist.Work:
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return cast(dist.Work, gather(full, shard, group=handle, async_op=True))


def reduce_scatter_of(shard: Tensor, full: Tensor, handle: dist.ProcessGroup | None) -> dist.Work:
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return cast(dist.Work, scatter(shard, full, group=handle, async_op=True))


def _fill(target: Tensor, source: Tensor) -> None:
    target.copy_(source)
