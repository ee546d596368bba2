"""Backends of the collectives: torch's own operations for accelerators, broadcasts and sends over gloo for the CPU.

`mpu/collectives.py` chooses one by where the tensors are. An operation returns a `CollectiveWork`; until its `wait()`
no buffer may be written and no destination read. Several may be in flight: every rank starts them, and waits for
them, in the same order. Sums of 16-bit values are taken in fp32 and rounded once. `functional_*` are torch's
functional collectives, for autograd and torch.compile. Groups of one never come here.
`delay_gloo_terminate` delays the std::terminate that gloo triggers, so that our error is printed first.
"""

from __future__ import annotations

import atexit
import ctypes
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache, wraps
from threading import Event
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives
from torch import Tensor
from torch.distributed import Work

from mpu import collective_tracker
from mpu.collective_tracker import track_async_collective
from mpu.groups import Group

Op = Literal["sum", "max", "min"]


class CollectiveWork:
    """A collective in flight, like torch's Work. On an accelerator `wait` blocks the current stream, never the host."""

    def __init__(self, works: Sequence[Work | CollectiveWork | None] = (),
                 on_complete: Callable[[], object] | None = None, timeout: timedelta | None = None) -> None:
        """`timeout` is passed to works that have none of their own."""
        self._works, self._on_complete, self._timeout = works, on_complete, timeout

    def wait(self) -> None:
        """Complete the operation, then run `on_complete` (a local sum, a dtype conversion) once. Idempotent."""
        works, on_complete = self._works, self._on_complete
        self._works, self._on_complete = (), None
        for work in works:
            if isinstance(work, CollectiveWork):
                work.wait()
            elif work is not None:
                collective_tracker.mark_waiting()
                work.wait() if self._timeout is None else work.wait(self._timeout)
                collective_tracker.mark_idle()
        if on_complete is not None:
            on_complete()


REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class CollectiveBackend:
    """The collectives as torch's own operations, for accelerators; groups have several ranks, and sizes are checked
    before.

    `reduce_dtype` is the dtype in which the communication library sums; `GlooBackend.reduce_scatter`, which sums by
    itself, always uses at least fp32. `bucket_size` limits the elements in flight where received copies are buffered,
    as in `GlooBackend`."""

    @track_async_collective
    def all_gather(self, full: Tensor, shard: Tensor, group: Group, bucket_size: int | None) -> CollectiveWork:
        """full <- the shards of all ranks in rank order; `shard` may be this rank's slice of `full`."""
        return CollectiveWork([start_all_gather(full, shard, group.process_group_or_none)])

    @track_async_collective
    def reduce_scatter(self, shard: Tensor, full: Tensor, group: Group, reduce_dtype: torch.dtype | None,
                       bucket_size: int | None) -> CollectiveWork:
        """shard <- this rank's slice of the sum of every rank's `full`; see collectives.reduce_scatter_into."""
        wide = full.to(reduce_dtype or accumulation_dtype(full.dtype))  # [size * n]; `full` itself in its own dtype
        mine = shard if shard.dtype == wide.dtype else torch.empty_like(shard, dtype=wide.dtype)
        # torch 2.13 renames it, and warns about the old name
        start = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        work = start(mine, wide, group=group.process_group_or_none, async_op=True)
        return CollectiveWork([work], None if mine is shard else lambda: shard.copy_(mine))

    @track_async_collective
    def all_reduce(self, flat: Tensor, group: Group, op: Op, reduce_dtype: torch.dtype | None,
                   bucket_size: int | None) -> CollectiveWork:
        """flat <- the reduction of every rank's `flat`."""
        wide = flat.to(reduce_dtype or flat.dtype)
        work = dist.all_reduce(wide, REDUCE_OPS[op], group=group.process_group_or_none, async_op=True)
        return CollectiveWork([work], None if wide is flat else lambda: flat.copy_(wide))

    @track_async_collective
    def broadcast(self, x: Tensor, src: int, group: Group) -> CollectiveWork:
        """x <- x of group rank `src`."""
        return CollectiveWork([dist.broadcast(x, group.ranks[src], group=group.process_group_or_none, async_op=True)])

    @track_async_collective
    def all_to_all(self, received: Tensor, sent: Tensor, group: Group) -> CollectiveWork:
        """received[k] <- this rank's row of rank k's `sent`; both are [size, n]."""
        return CollectiveWork(
            [dist.all_to_all_single(received, sent, group=group.process_group_or_none, async_op=True)])


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of `dtype` are summed: at least fp32."""
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype


def start_all_gather(full: Tensor, shard: Tensor, process_group: dist.ProcessGroup | None) -> dist.Work:
    # torch 2.13 renames it, and warns about the old name
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return cast(dist.Work, gather(full, shard, group=process_group, async_op=True))


SUM_BLOCK = 1 << 17  # elements summed at a time: the fp32 accumulator stays in the cache


class GlooBackend(CollectiveBackend):
    """The same collectives for the CPU, by broadcasts, sends and receives over gloo."""

    @track_async_collective
    def all_gather(self, full: Tensor, shard: Tensor, group: Group, bucket_size: int | None) -> CollectiveWork:
        parts = full.view(group.size, -1)  # [size * n] -> [size, n]: row r is the shard of rank r
        if parts[group.rank].data_ptr() != shard.data_ptr():
            parts[group.rank].copy_(shard.view(-1))
        # One broadcast per shard, straight into its place in `full`.
        return CollectiveWork([self.broadcast(piece, rank, group) for rank, part in enumerate(parts)
                               for piece in _segments(part, bucket_size)])

    @track_async_collective
    def reduce_scatter(self, shard: Tensor, full: Tensor, group: Group, reduce_dtype: torch.dtype | None,
                       bucket_size: int | None) -> CollectiveWork:
        own, mine = full.view(group.size, -1), shard.view(-1)  # [size, n], [n]
        # `bucket_size` elements are buffered at a time: one row of this width from every rank.
        width = len(mine) if bucket_size is None else max(1, bucket_size // group.size)
        starts = range(0, len(mine), max(1, width))

        def reduce_remaining() -> None:
            for start in starts[1:]:
                _reduce_scatter_by_sends(mine[start:start + width], own[:, start:start + width], group).wait()

        return CollectiveWork([_reduce_scatter_by_sends(mine[:width], own[:, :width], group)], reduce_remaining)

    @track_async_collective
    def all_reduce(self, flat: Tensor, group: Group, op: Op, reduce_dtype: torch.dtype | None,
                   bucket_size: int | None) -> CollectiveWork:
        return CollectiveWork([dist.all_reduce(piece, REDUCE_OPS[op], group=group.control_process_group, async_op=True)
                               for piece in _segments(flat, bucket_size)])

    @track_async_collective
    def broadcast(self, x: Tensor, src: int, group: Group) -> CollectiveWork:
        return CollectiveWork([dist.broadcast(x, group.ranks[src], group=group.control_process_group, async_op=True)])

    @track_async_collective
    def all_to_all(self, received: Tensor, sent: Tensor, group: Group) -> CollectiveWork:
        received[group.rank].copy_(sent[group.rank])
        return _send_and_receive(list(received), list(sent), group)


def _segments(flat: Tensor, bucket_size: int | None) -> Sequence[Tensor]:
    return flat.split(bucket_size) if bucket_size is not None and flat.numel() > bucket_size else [flat]


def _reduce_scatter_by_sends(mine: Tensor, own: Tensor, group: Group) -> CollectiveWork:
    """mine [n] <- the sum over ranks of row `group.rank` of their `own` [size, n]."""
    peers = _peers(group)
    is_free = mine.dtype == own.dtype and mine.data_ptr() != own[group.rank].data_ptr()
    buffers = [mine] if is_free else []  # the output can receive one peer's row
    received = buffers + [torch.empty_like(own[0]) for _ in peers[len(buffers):]]
    # In rank order on every rank, so that all ranks add in the same order and a sum has the same bits everywhere.
    parts = [*received[:group.rank], own[group.rank], *received[group.rank:]]  # size times [n]
    return _send_and_receive(parts, list(own), group, lambda: _sum_in_rank_order(parts, mine))


def _peers(group: Group) -> list[int]:
    return [rank for rank in range(group.size) if rank != group.rank]


def _send_and_receive(received: Sequence[Tensor], sent: Sequence[Tensor], group: Group,
                      on_complete: Callable[[], None] | None = None) -> CollectiveWork:
    """received[k] <- what rank k sends to this one; this rank's own entry is unchanged."""
    handle = group.control_process_group
    assert handle is not None, "a group of one sends nothing"
    operations = [dist.P2POp(dist.irecv, received[peer], group.ranks[peer], handle) for peer in _peers(group)]
    operations += [dist.P2POp(dist.isend, sent[peer], group.ranks[peer], handle) for peer in _peers(group)]
    # the timeout in force: gloo's sends and receives use the one from when the group was created
    options = getattr(handle._get_backend(torch.device("cpu")), "options", None)
    return CollectiveWork(dist.batch_isend_irecv(operations), on_complete, getattr(options, "_timeout", None))


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


def via_host(collective: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Run the collective on the host if ranks share a GPU over gloo. gloo accepts GPU tensors, but with two
    tensor-parallel ranks the functional collectives crashed with SIGSEGV (torch 2.11)."""
    @wraps(collective)
    def run_on_host(x: Tensor, group: Group, *how: Any) -> Tensor:
        if x.device.type == "cpu" or not group.gpu_tensors_use_gloo:
            return collective(x, group, *how)
        return collective(x.cpu(), group, *how).to(x.device)

    return run_on_host


@via_host
def functional_all_reduce(x: Tensor, group: Group, op: Op) -> Tensor:
    return _wait_tensor(torch.ops._c10d_functional.all_reduce(x, op, group.group_name_for(x)))


@via_host
def functional_all_gather(x: Tensor, group: Group) -> Tensor:
    """[n, ...] per rank -> [size * n, ...] in rank order."""
    return _wait_tensor(
        torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous(), group.size, group.group_name_for(x)))


def _wait_tensor(x: Tensor) -> Tensor:
    if torch.compiler.is_compiling():  # the tracker's counters cannot be traced
        return cast(Tensor, torch.ops._c10d_functional.wait_tensor(x))
    collective_tracker.mark_waiting()
    arrived = torch.ops._c10d_functional.wait_tensor(x)
    collective_tracker.mark_idle()
    return cast(Tensor, arrived)


TERMINATE_DELAY_SECONDS = 15.0


@cache
def delay_gloo_terminate() -> None:
    """Install the delay, once per process. No effect with another C++ library."""
    try:
        set_terminate = ctypes.CDLL("libstdc++.so.6")["_ZSt13set_terminatePFvvE"]
    except (OSError, AttributeError):
        return
    handler_type = ctypes.CFUNCTYPE(None)
    set_terminate.restype, set_terminate.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

    def delayed_terminate() -> None:
        Event().wait(TERMINATE_DELAY_SECONDS)
        handler_type(previous_handler)()

    handler = handler_type(delayed_terminate)
    previous_handler = set_terminate(ctypes.cast(handler, ctypes.c_void_p))
    # Reset it at exit: no Python runs in other threads during finalization. The lambda also keeps `handler` alive.
    atexit.register(lambda: handler and set_terminate(previous_handler))
