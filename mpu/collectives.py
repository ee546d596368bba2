"""Collectives over a `Group`: on flat buffers, out of place for autograd, and of JSON values between hosts.

`..._into` starts an operation on flat buffers of the caller and returns a `CollectiveWork`. Until its `wait()` no
buffer may be written and no destination read. Several may be in flight: every rank starts them, and waits for them, in
the same order. `backend_for` chooses by where the tensors are: torch's own operations for accelerators, broadcasts and
sends over gloo for the CPU.

`all_reduce`, `all_gather` and `reduce_scatter` return a new tensor; only these may be used inside autograd, which may
have saved the argument. They are torch's functional collectives, which torch.compile can trace. `all_gather_json`,
`broadcast_json`, `all_reduce_scalars` and `barrier` run over gloo on the host (the group's control process group), so
they never wait behind a kernel. On a group of one every operation is the identity and needs no process group.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import reduce, wraps
from typing import Any, Concatenate, Literal, ParamSpec, cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives
from torch import Tensor
from torch.distributed import Work

from mpu import collective_tracker
from mpu.collective_tracker import track_async_collective, track_collective
from mpu.device import on_accelerator
from mpu.groups import Group
from mpu.split import ParallelError

Op = Literal["sum", "max", "min"]
REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


@dataclass(eq=False)
class CollectiveWork:
    """A collective in flight, like torch's Work. On an accelerator `wait` blocks the current stream, never the host."""

    works: Sequence[Work | CollectiveWork | None] = ()
    # Runs once, when the works are complete: a local sum, a dtype conversion.
    on_complete: Callable[[], object] | None = None
    # Passed to torch's works.
    timeout: timedelta | None = None

    def wait(self) -> None:
        """Complete the operation. Idempotent."""
        works, on_complete = self.works, self.on_complete
        self.works, self.on_complete = (), None
        for work in works:
            if isinstance(work, CollectiveWork):
                work.wait()
            elif work is not None:
                collective_tracker.mark_waiting()
                work.wait() if self.timeout is None else work.wait(self.timeout)
                collective_tracker.mark_idle()
        if on_complete is not None:
            on_complete()


# -- on flat buffers, asynchronous ----------------------------------------------------------------------------------


def all_reduce_into(flat: Tensor, group: Group, op: Op = "sum", bucket_size: int | None = None,
                    reduce_dtype: torch.dtype | None = None) -> CollectiveWork:
    """flat <- reduction of every rank's flat, in place, summed in `reduce_dtype` (see CollectiveBackend)."""
    return CollectiveWork() if group.is_solo else backend_for(flat).all_reduce(flat, group, op, reduce_dtype,
                                                                               bucket_size)


def all_gather_into(full: Tensor, shard: Tensor, group: Group, bucket_size: int | None = None) -> CollectiveWork:
    """full <- the shards of all ranks in rank order. `shard` may be this rank's slice of `full`."""
    _check_sizes(full, shard, group)
    if group.is_solo:
        if shard.data_ptr() != full.data_ptr():
            full.view(-1).copy_(shard.view(-1))
        return CollectiveWork()
    return backend_for(full).all_gather(full, shard, group, bucket_size)


def reduce_scatter_into(shard: Tensor, full: Tensor, group: Group, bucket_size: int | None = None,
                        reduce_dtype: torch.dtype | None = None) -> CollectiveWork:
    """shard <- this rank's slice of the sum of every rank's `full`, which is unchanged. `shard` may have a wider dtype
    than `full`, or be this rank's slice of `full`; then only that slice changes. 16-bit values are summed in fp32
    unless `reduce_dtype` says otherwise."""
    _check_sizes(full, shard, group)
    if group.is_solo:
        shard.view(-1).copy_(full.view(-1))
        return CollectiveWork()
    return backend_for(full).reduce_scatter(shard, full, group, reduce_dtype, bucket_size)


def all_to_all_into(received: Tensor, sent: Tensor, group: Group) -> CollectiveWork:
    """received[k] <- this rank's row of rank k's `sent`. Both are [size, n] in distinct memory."""
    if group.is_solo:
        received.copy_(sent)
        return CollectiveWork()
    return backend_for(sent).all_to_all(received, sent, group)


def broadcast_into(x: Tensor, src: int, group: Group) -> CollectiveWork:
    """x <- x of group rank `src`."""
    return CollectiveWork() if group.is_solo else backend_for(x).broadcast(x, src, group)


def _check_sizes(full: Tensor, shard: Tensor, group: Group) -> None:
    if full.numel() != group.size * shard.numel():
        raise ParallelError(f"a full buffer of {full.numel()} elements does not hold {group.size} shards of "
                            f"{shard.numel()}: pad it to {group.size * shard.numel()}")


# -- their backends ------------------------------------------------------------------------------------------------


class CollectiveBackend:
    """The operations above as torch's own, for accelerators, on groups of several ranks.

    `reduce_dtype` is the dtype in which the communication library sums; `GlooBackend.reduce_scatter`, which sums by
    itself, always uses at least fp32. `bucket_size` limits the elements in flight where received copies are buffered,
    as in `GlooBackend`."""

    @track_async_collective
    def all_gather(self, full: Tensor, shard: Tensor, group: Group, bucket_size: int | None) -> CollectiveWork:
        return CollectiveWork([start_all_gather(full, shard, group.process_group_or_none)])

    @track_async_collective
    def reduce_scatter(self, shard: Tensor, full: Tensor, group: Group, reduce_dtype: torch.dtype | None,
                       bucket_size: int | None) -> CollectiveWork:
        wide = full.to(reduce_dtype or accumulation_dtype(full.dtype))  # [size * n]; `full` itself in its own dtype
        mine = shard if shard.dtype == wide.dtype else torch.empty_like(shard, dtype=wide.dtype)
        # torch 2.13 renames it, and warns about the old name
        start = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        work = start(mine, wide, group=group.process_group_or_none, async_op=True)
        return CollectiveWork([work], None if mine is shard else lambda: shard.copy_(mine))

    @track_async_collective
    def all_reduce(self, flat: Tensor, group: Group, op: Op, reduce_dtype: torch.dtype | None,
                   bucket_size: int | None) -> CollectiveWork:
        wide = flat.to(reduce_dtype or flat.dtype)
        work = dist.all_reduce(wide, REDUCE_OPS[op], group=group.process_group_or_none, async_op=True)
        return CollectiveWork([work], None if wide is flat else lambda: flat.copy_(wide))

    @track_async_collective
    def broadcast(self, x: Tensor, src: int, group: Group) -> CollectiveWork:
        return CollectiveWork([dist.broadcast(x, group.ranks[src], group=group.process_group_or_none, async_op=True)])

    @track_async_collective
    def all_to_all(self, received: Tensor, sent: Tensor, group: Group) -> CollectiveWork:
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

        return CollectiveWork([_reduce_scatter_by_sends(mine[:width], own[:, :width], group)],
                              reduce_remaining if len(starts) > 1 else None)

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
    is_free = mine.dtype == own.dtype and mine.data_ptr() != own[group.rank].data_ptr()
    buffers = [mine] if is_free else []  # the output can receive one peer's row
    received = buffers + [torch.empty_like(own[0]) for _ in range(group.size - 1 - len(buffers))]
    # In rank order on every rank, so that all ranks add in the same order and a sum has the same bits everywhere.
    parts = [*received[:group.rank], own[group.rank], *received[group.rank:]]  # size times [n]
    return _send_and_receive(parts, list(own), group, lambda: _sum_in_rank_order(parts, mine))


def _send_and_receive(received: Sequence[Tensor], sent: Sequence[Tensor], group: Group,
                      on_complete: Callable[[], None] | None = None) -> CollectiveWork:
    """received[k] <- what rank k sends to this one; this rank's own entry is unchanged."""
    handle = group.control_process_group
    assert handle is not None, "a group of one sends nothing"
    peers = [rank for rank in range(group.size) if rank != group.rank]
    operations = [dist.P2POp(dist.irecv, received[peer], group.ranks[peer], handle) for peer in peers]
    operations += [dist.P2POp(dist.isend, sent[peer], group.ranks[peer], handle) for peer in peers]
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


_NATIVE, _GLOO = CollectiveBackend(), GlooBackend()


def backend_for(x: Tensor) -> CollectiveBackend:
    """The backend for tensors on x's device."""
    return _NATIVE if on_accelerator(x) else _GLOO


# -- out of place: for autograd and small values -------------------------------------------------------------------


P = ParamSpec("P")


def via_host(collective: Callable[Concatenate[Tensor, Group, P], Tensor]
             ) -> Callable[Concatenate[Tensor, Group, P], Tensor]:
    """Run the collective on the host if ranks share a GPU over gloo. gloo accepts GPU tensors, but with two
    tensor-parallel ranks the functional collectives crashed with SIGSEGV (torch 2.11)."""
    @wraps(collective)
    def run_on_host(x: Tensor, group: Group, /, *args: P.args, **kwargs: P.kwargs) -> Tensor:
        if x.device.type == "cpu" or not group.gpu_tensors_use_gloo:
            return collective(x, group, *args, **kwargs)
        return collective(x.cpu(), group, *args, **kwargs).to(x.device)

    return run_on_host


@via_host
def all_reduce(x: Tensor, group: Group, op: Op = "sum") -> Tensor:
    """The reduction of every rank's x (x itself on a group of one)."""
    if group.is_solo:
        return x
    return _wait_tensor(torch.ops._c10d_functional.all_reduce(x, op, group.group_name_for(x)))


@via_host
def all_gather(x: Tensor, group: Group, dim: int = -1) -> Tensor:
    """Every rank's x concatenated along `dim` in rank order; shapes must be equal."""
    if group.is_solo:
        return x
    # torch concatenates along the first dimension only, hence the extra one: [1, ..., n, ...] -> [size, ..., n, ...]
    parts = _wait_tensor(torch.ops._c10d_functional.all_gather_into_tensor(
        x.unsqueeze(0).contiguous(), group.size, group.group_name_for(x)))
    # [size, ..., n, ...] -> [..., size * n, ...]; the first dimension is joined already
    return parts.flatten(0, 1) if dim == 0 else torch.cat(parts.unbind(0), dim)


@via_host
def reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """This rank's slice along dimension 0 of the sum of every rank's x."""
    if group.is_solo:
        return x
    name, rows = group.group_name_for(x), x.unflatten(0, (group.size, -1)).contiguous()  # row r is for rank r
    if on_accelerator(x):
        return _wait_tensor(torch.ops._c10d_functional.reduce_scatter_tensor(rows, "sum", group.size, name)).squeeze(0)
    # gloo's own takes as long as its all-reduce; exchanged rows, added here, take half of that
    each = [1] * group.size
    received = _wait_tensor(torch.ops._c10d_functional.all_to_all_single(rows, each, each, name))
    return reduce(torch.add, received.unbind(0))


def _wait_tensor(x: Tensor) -> Tensor:
    if torch.compiler.is_compiling():  # the tracker's counters cannot be traced
        return cast(Tensor, torch.ops._c10d_functional.wait_tensor(x))
    collective_tracker.mark_waiting()
    arrived = torch.ops._c10d_functional.wait_tensor(x)
    collective_tracker.mark_idle()
    return cast(Tensor, arrived)


# -- on the host ----------------------------------------------------------------------------------------------------


@track_collective
def all_reduce_scalars(numbers: Sequence[float], group: Group, op: Op = "max") -> list[float]:
    """Reduce each number over ranks, in one collective on the hosts; exact for integers below 2**53."""
    values = torch.tensor(numbers, dtype=torch.float64)  # [count]
    if not group.is_solo:
        dist.all_reduce(values, REDUCE_OPS[op], group=group.control_process_group)
    return cast(list[float], values.tolist())


def all_reduce_scalar(number: float, group: Group, op: Op = "max") -> float:
    return all_reduce_scalars([number], group, op)[0]


def barrier(group: Group) -> None:
    """Return when every rank has called it."""
    all_reduce_scalar(0.0, group)


@track_collective
def all_gather_json(value: Any, group: Group) -> list[Any]:
    """Every rank's value, via JSON: tuples become lists, and received data cannot run code."""
    text = json.dumps(value).encode()
    if group.is_solo:
        return [json.loads(text)]
    # Lengths first, then rows padded to the longest: [size, longest] bytes.
    sizes = torch.empty(group.size, dtype=torch.int64)
    start_all_gather(sizes, torch.tensor([len(text)]), group.control_process_group).wait()
    longest = int(sizes.max())
    rows = torch.empty(group.size * longest, dtype=torch.uint8)
    padded = torch.frombuffer(bytearray(text.ljust(longest)), dtype=torch.uint8)
    start_all_gather(rows, padded, group.control_process_group).wait()
    return [json.loads(row[:size].numpy().tobytes()) for row, size in zip(rows.split(longest), sizes.tolist())]


@track_collective
def broadcast_json(value: Any, group: Group, src: int = 0) -> Any:
    """The value of group rank `src` on every rank, via JSON; other ranks' values are ignored."""
    # The length first, then the bytes: the other ranks need a buffer of the right size.
    text = json.dumps(value).encode() if group.rank == src else b""
    if group.is_solo:
        return json.loads(text)
    size = torch.tensor([len(text)])
    dist.broadcast(size, group.ranks[src], group=group.control_process_group)
    row = torch.frombuffer(bytearray(text or int(size)), dtype=torch.uint8)
    dist.broadcast(row, group.ranks[src], group=group.control_process_group)
    return json.loads(text or row.numpy().tobytes())
