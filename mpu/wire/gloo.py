"""The wire of the CPU, over gloo.

gloo's own all-gather and reduce-scatter are slower (at 2 ranks) than the same exchange by broadcasts, and by sends and
a sum taken here. That sum is in rank order, 16-bit numbers in fp32 and rounded once; with 2 ranks its fp32 result is
bit for bit that of an all-reduce, as a + b is b + a. An all-reduce adds in the order and precision of gloo.

Where the group's tensors travel by another backend, those on the CPU take its control group.

What peers send needs a place until it is summed: `at_a_time` bounds it, and `wait` sends the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from mpu.groups import Group
from mpu.wire.interface import Op, Pending
from mpu.wire.native import OPS, widened
from mpu.wire.waits import sending

SUM_BLOCK = 1 << 17
"""Elements summed at a time: the fp32 accumulator stays in the cache."""


class GlooWire:
    @sending
    def all_gather(self, full: Tensor, shard: Tensor, group: Group, at_a_time: int | None) -> Pending:
        parts = full.view(group.size, -1)
        if parts[group.rank].data_ptr() != shard.data_ptr():
            parts[group.rank].copy_(shard.view(-1))
        return Pending([self.broadcast(piece, rank, group) for rank, part in enumerate(parts)
                        for piece in _pieces(part, at_a_time)])

    @sending
    def reduce_scatter(self, shard: Tensor, full: Tensor, group: Group, sum_in: torch.dtype | None,
                       at_a_time: int | None) -> Pending:
        own, mine = full.view(group.size, -1), shard.view(-1)
        width = len(mine) if at_a_time is None else max(1, at_a_time // group.size)
        starts = range(0, len(mine), max(1, width))

        def one_by_one() -> None:
            for start in starts[1:]:
                _exchange(mine[start:start + width], own[:, start:start + width], group).wait()

        return Pending([_exchange(mine[:width], own[:, :width], group)], one_by_one)

    @sending
    def all_reduce(self, flat: Tensor, group: Group, op: Op, sum_in: torch.dtype | None,
                   at_a_time: int | None) -> Pending:
        return Pending([dist.all_reduce(piece, OPS[op], group=group.control_handle, async_op=True)
                        for piece in _pieces(flat, at_a_time)])

    @sending
    def broadcast(self, x: Tensor, src: int, group: Group) -> Pending:
        return Pending([dist.broadcast(x, group.ranks[src], group=group.control_handle, async_op=True)])

    @sending
    def all_to_all(self, received: Tensor, sent: Tensor, group: Group) -> Pending:
        received[group.rank].copy_(sent[group.rank])
        return _swap(list(received), list(sent), group)


def _pieces(flat: Tensor, at_a_time: int | None) -> Sequence[Tensor]:
    return flat.split(at_a_time) if at_a_time is not None and flat.numel() > at_a_time else [flat]


def _exchange(mine: Tensor, own: Tensor, group: Group) -> Pending:
    """mine [n] <- the sum over the ranks of row `group.rank` of their `own` [size, n]."""
    peers = _peers(group)
    is_free = mine.dtype == own.dtype and mine.data_ptr() != own[group.rank].data_ptr()
    places = [mine] if is_free else []  # the place of the sum can take what one of the others has for this rank
    received = places + [torch.empty_like(own[0]) for _ in peers[len(places):]]
    parts = [*received[:group.rank], own[group.rank], *received[group.rank:]]  # in rank order
    return _swap(parts, list(own), group, lambda: _sum_in_rank_order(parts, mine))


def _peers(group: Group) -> list[int]:
    return [rank for rank in range(group.size) if rank != group.rank]


def _swap(received: Sequence[Tensor], sent: Sequence[Tensor], group: Group,
          finish: Callable[[], None] | None = None) -> Pending:
    """received[k] <- what the other rank k sends here; this rank's own place is left alone."""
    handle = group.control_handle
    exchange = [dist.P2POp(dist.irecv, received[peer], group.ranks[peer], handle) for peer in _peers(group)]
    exchange += [dist.P2POp(dist.isend, sent[peer], group.ranks[peer], handle) for peer in _peers(group)]
    return Pending(dist.batch_isend_irecv(exchange), finish, _limit_of(handle))


def _limit_of(handle: dist.ProcessGroup | None) -> timedelta | None:
    """How long to wait for a peer. Sends and receives of gloo's keep to what it was when the group was made."""
    assert handle is not None, "a group of one sends nothing"
    options = getattr(handle._get_backend(torch.device("cpu")), "options", None)
    return getattr(options, "_timeout", None)


def _sum_in_rank_order(parts: Sequence[Tensor], out: Tensor) -> None:
    """out[i] <- parts[0][i] + parts[1][i] + ..., 16-bit values in fp32; `out` may be one of the parts."""
    step = max(1, min(len(out), SUM_BLOCK))
    first = parts[0]
    total = first.new_empty(step, dtype=widened(first.dtype))
    for start in range(0, len(out), step):
        blocks = [part[start:start + step] for part in parts]
        sums = total[:len(blocks[0])].copy_(blocks[0])
        for block in blocks[1:]:
            sums += block
        out[start:start + step].copy_(sums)
