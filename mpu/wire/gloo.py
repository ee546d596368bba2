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
from mpu.wire.interface import CollectiveWork, Op
from mpu.wire.native import REDUCE_OPS, accumulation_dtype
from mpu.wire.waits import track_async_collective

SUM_BLOCK = 1 << 17
"""Elements summed at a time: the fp32 accumulator stays in the cache."""


class GlooBackend:
    @track_async_collective
    def all_gather(self, full: Tensor, shard: Tensor, group: Group, max_in_flight: int | None) -> CollectiveWork:
        parts = full.view(group.size, -1)
        if parts[group.rank].data_ptr() != shard.data_ptr():
            parts[group.rank].copy_(shard.view(-1))
        return CollectiveWork([self.broadcast(piece, rank, group) for rank, part in enumerate(parts)
                               for piece in _segments(part, max_in_flight)])

    @track_async_collective
    def reduce_scatter(self, shard: Tensor, full: Tensor, group: Group, reduce_dtype: torch.dtype | None,
                       max_in_flight: int | None) -> CollectiveWork:
        own, mine = full.view(group.size, -1), shard.view(-1)
        width = len(mine) if max_in_flight is None else max(1, max_in_flight // group.size)
        starts = range(0, len(mine), max(1, width))

        def reduce_remaining() -> None:
            for start in starts[1:]:
                _reduce_scatter_by_sends(mine[start:start + width], own[:, start:start + width], group).wait()

        return CollectiveWork([_reduce_scatter_by_sends(mine[:width], own[:, :width], group)], reduce_remaining)

    @track_async_collective
    def all_reduce(self, flat: Tensor, group: Group, op: Op, reduce_dtype: torch.dtype | None,
                   max_in_flight: int | None) -> CollectiveWork:
        return CollectiveWork([dist.all_reduce(piece, REDUCE_OPS[op], group=group.control_process_group, async_op=True)
                               for piece in _segments(flat, max_in_flight)])

    @track_async_collective
    def broadcast(self, x: Tensor, src: int, group: Group) -> CollectiveWork:
        return CollectiveWork([dist.broadcast(x, group.ranks[src], group=group.control_process_group, async_op=True)])

    @track_async_collective
    def all_to_all(self, received: Tensor, sent: Tensor, group: Group) -> CollectiveWork:
        received[group.rank].copy_(sent[group.rank])
        return _send_and_receive(list(received), list(sent), group)


def _segments(flat: Tensor, max_in_flight: int | None) -> Sequence[Tensor]:
    return flat.split(max_in_flight) if max_in_flight is not None and flat.numel() > max_in_flight else [flat]


def _reduce_scatter_by_sends(mine: Tensor, own: Tensor, group: Group) -> CollectiveWork:
    """mine [n] <- the sum over the ranks of row `group.rank` of their `own` [size, n]."""
    peers = _peers(group)
    is_free = mine.dtype == own.dtype and mine.data_ptr() != own[group.rank].data_ptr()
    buffers = [mine] if is_free else []  # the place of the sum can take what one of the others has for this rank
    received = buffers + [torch.empty_like(own[0]) for _ in peers[len(buffers):]]
    parts = [*received[:group.rank], own[group.rank], *received[group.rank:]]  # in rank order
    return _send_and_receive(parts, list(own), group, lambda: _sum_in_rank_order(parts, mine))


def _peers(group: Group) -> list[int]:
    return [rank for rank in range(group.size) if rank != group.rank]


def _send_and_receive(received: Sequence[Tensor], sent: Sequence[Tensor], group: Group,
                      on_complete: Callable[[], None] | None = None) -> CollectiveWork:
    """received[k] <- what the other rank k sends here; this rank's own place is left alone."""
    handle = group.control_process_group
    operations = [dist.P2POp(dist.irecv, received[peer], group.ranks[peer], handle) for peer in _peers(group)]
    operations += [dist.P2POp(dist.isend, sent[peer], group.ranks[peer], handle) for peer in _peers(group)]
    return CollectiveWork(dist.batch_isend_irecv(operations), on_complete, _timeout_of(handle))


def _timeout_of(process_group: dist.ProcessGroup | None) -> timedelta | None:
    """How long to wait for a peer. Sends and receives of gloo's keep to what it was when the group was made."""
    assert process_group is not None, "a group of one sends nothing"
    options = getattr(process_group._get_backend(torch.device("cpu")), "options", None)
    return getattr(options, "_timeout", None)


def _sum_in_rank_order(parts: Sequence[Tensor], out: Tensor) -> None:
    """out[i] <- parts[0][i] + parts[1][i] + ..., 16-bit values in fp32; `out` may be one of the parts."""
    step = max(1, min(len(out), SUM_BLOCK))
    first = parts[0]
    total = first.new_empty(step, dtype=accumulation_dtype(first.dtype))
    for start in range(0, len(out), step):
        blocks = [part[start:start + step] for part in parts]
        sums = total[:len(blocks[0])].copy_(blocks[0])
        for block in blocks[1:]:
            sums += block
        out[start:start + step].copy_(sums)
