"""The only file that names torch.distributed operations.

Two families. *Out of place* (`all_reduce`, `all_gather`, `reduce_scatter`): return a new tensor and leave the
argument alone; the only ones allowed inside autograd, where reducing in place gives silently wrong gradients.
*Into* (`..._into`): work asynchronously on flat buffers the caller owns and return a `Pending`; nothing may touch
the buffers until `wait()`. Several may be in flight: start and wait in the same order on every rank.

On a group of one every operation is the identity (a copy between two buffers) and needs no process group.

Backends. CUDA tensors travel by NCCL with its own operations. CPU tensors travel by gloo, whose all-gather and
reduce-scatter are slower (at 2 ranks) than the same exchange by broadcasts and by sends and a sum taken
here, so those are used instead.

Sums. A reduce-scatter on CPU adds in rank order, 16-bit values in fp32; with 2 ranks its fp32 result is bit for bit
that of an all-reduce, as a + b is b + a. All else adds in the order and precision of the backend.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor

from mpu.device import on_accelerator
from mpu.groups import Group
from mpu.split import ParallelError, divide

Op = Literal["sum", "max", "min"]

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

# torch 2.13 renames these two and warns at the old names.
_native_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_native_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_CPU_SUM_BLOCK = 1 << 17
"""Elements summed at a time on CPU: the fp32 accumulator stays in the cache."""


class Pending:
    """A collective under way. On CUDA `wait` makes the current stream wait, never the host."""

    def __init__(self, works: Sequence[dist.Work | Pending | None] = (),
                 finish: Callable[[], None] | None = None) -> None:
        self._works = works
        self._finish = finish

    def wait(self) -> None:
        """Complete the operation; again: nothing. `finish` (a local sum) runs here, once."""
        works, finish = self._works, self._finish
        self._works, self._finish = (), None
        for work in works:
            if work is not None:
                work.wait()
        if finish is not None:
            finish()


# -- into: asynchronous, on flat buffers ---------------------------------------------------------------------------


def all_reduce_into(flat: Tensor, group: Group, op: Op = "sum", at_a_time: int | None = None) -> Pending:
    """flat <- reduction of every rank's flat, in place; `at_a_time` elements in one operation."""
    if group.is_solo:
        return Pending()
    pieces = flat.split(at_a_time) if at_a_time and flat.numel() > at_a_time else [flat]
    return Pending([dist.all_reduce(piece, _OPS[op], group=group.handle, async_op=True) for piece in pieces])


def all_gather_into(full: Tensor, shard: Tensor, group: Group, at_a_time: int | None = None,
                    broadcasts: bool = False) -> Pending:
    """full <- the shards of all ranks in rank order. `shard` may be this rank's part of `full`.

    At most `at_a_time` elements travel in one operation: beyond that, or when asked to, by broadcasts of the shards.
    """
    _check_sizes(full, shard, group)
    fits = at_a_time is None or full.numel() <= at_a_time
    if on_accelerator(full) and fits and not broadcasts and not group.is_solo:
        return Pending([_native_all_gather(full, shard, group=group.handle, async_op=True)])
    parts = full.view(group.size, -1)
    if parts[group.rank].data_ptr() != shard.data_ptr():
        parts[group.rank].copy_(shard.view(-1))
    if group.is_solo:
        return Pending()
    return Pending([_broadcast(piece, rank, group) for rank, part in enumerate(parts)
                    for piece in part.split(at_a_time or max(1, part.numel()))])


def reduce_scatter_into(shard: Tensor, full: Tensor, group: Group, at_a_time: int | None = None) -> Pending:
    """shard <- this rank's part of the sum of every rank's `full`, which is left alone.

    `shard` may be wider than `full` (fp32 and bf16): 16-bit values travel and their sum is taken in fp32. It may also
    be this rank's part of `full`, which then is the one part of `full` that changes. At most `at_a_time` elements of
    `full` are on their way at once; `wait` sends the rest.
    """
    _check_sizes(full, shard, group)
    own, mine = full.view(group.size, -1), shard.view(-1)
    if group.is_solo:
        mine.copy_(own[0])
        return Pending()
    width = max(1, (at_a_time or full.numel()) // group.size)
    if len(mine) <= width:
        return _reduce_scatter_columns(mine, own, group)
    starts = range(0, len(mine), width)

    def one_by_one() -> None:
        for start in starts[1:]:
            _reduce_scatter_columns(mine[start:start + width], own[:, start:start + width], group).wait()

    first = _reduce_scatter_columns(mine[:width], own[:, :width], group)
    return Pending([first], one_by_one)


def _reduce_scatter_columns(mine: Tensor, own: Tensor, group: Group) -> Pending:
    """mine [n] <- the sum over the ranks of row `group.rank` of their `own` [size, n]."""
    if on_accelerator(own) and own.dtype == mine.dtype:
        flat = own.reshape(-1)  # a copy where these are some columns of more
        return Pending([_native_reduce_scatter(mine, flat, group=group.handle, async_op=True)])
    peers = [rank for rank in range(group.size) if rank != group.rank]
    is_free = mine.dtype == own.dtype and mine.data_ptr() != own[group.rank].data_ptr()
    places = [mine] if is_free else []  # the place of the sum can take what one of the others has for this rank
    received = places + [torch.empty_like(own[0]) for _ in peers[len(places):]]
    exchange = [dist.P2POp(dist.irecv, part, group.ranks[peer], group.handle) for peer, part in zip(peers, received)]
    exchange += [dist.P2POp(dist.isend, own[peer], group.ranks[peer], group.handle) for peer in peers]
    parts = [*received[:group.rank], own[group.rank], *received[group.rank:]]  # in rank order
    return Pending(dist.batch_isend_irecv(exchange), lambda: _sum_in_rank_order(parts, mine))


def broadcast_into(x: Tensor, src: int, group: Group) -> Pending:
    """x <- x of the group's rank `src`."""
    return Pending() if group.is_solo else Pending([_broadcast(x, src, group)])


def _broadcast(x: Tensor, src: int, group: Group) -> dist.Work | None:
    return cast("dist.Work | None", dist.broadcast(x, group.ranks[src], group=group.handle, async_op=True))


def _check_sizes(full: Tensor, shard: Tensor, group: Group) -> None:
    if full.numel() != group.size * shard.numel():
        raise ParallelError(
            f"a full buffer of {full.numel()} elements does not hold {group.size} shards of {shard.numel()}: "
            f"pad it to {group.size * shard.numel()}"
        )


def _sum_in_rank_order(parts: Sequence[Tensor], out: Tensor) -> None:
    """out[i] <- parts[0][i] + parts[1][i] + ..., 16-bit values in fp32; `out` may be one of the parts."""
    step = max(1, len(out) if on_accelerator(out) else min(len(out), _CPU_SUM_BLOCK))
    first = parts[0]
    total = first.new_empty(step, dtype=first.dtype if first.element_size() >= 4 else torch.float32)
    for start in range(0, len(out), step):
        blocks = [part[start:start + step] for part in parts]
        sums = total[:len(blocks[0])].copy_(blocks[0])
        for block in blocks[1:]:
            sums += block
        out[start:start + step].copy_(sums)


# -- out of place: for autograd and small values -------------------------------------------------------------------


def all_reduce(x: Tensor, group: Group, op: Op = "sum") -> Tensor:
    """The reduction of every rank's x (x itself on a group of one)."""
    if group.is_solo:
        return x
    y = x.clone(memory_format=torch.contiguous_format)
    all_reduce_into(y, group, op).wait()
    return y


def all_gather(x: Tensor, group: Group, dim: int = -1) -> Tensor:
    """Every rank's x, joined along `dim` in rank order; the shapes are equal."""
    if group.is_solo:
        return x
    parts = x.new_empty((group.size, *x.shape))
    all_gather_into(parts.view(-1), x.contiguous().view(-1), group).wait()
    return torch.cat(parts.unbind(0), dim)  # [size, ..., n, ...] -> [..., size * n, ...]


def reduce_scatter(x: Tensor, group: Group, dim: int = -1) -> Tensor:
    """This rank's part along `dim` of the sum of every rank's x."""
    if group.is_solo:
        return x
    each = divide(x.shape[dim], group.size, "length")
    parts = torch.stack(x.split(each, dim))  # [..., size * n, ...] -> [size, ..., n, ...]
    mine = torch.empty_like(parts[0])
    reduce_scatter_into(mine.view(-1), parts.view(-1), group).wait()
    return mine


def barrier(group: Group) -> None:
    """Return when every rank has come here."""
    agree(0.0, group)


def agree(number: float, group: Group, op: Op = "max") -> float:
    """The reduction of one number per rank, on the host of every rank (exact for integers below 2**53)."""
    if group.is_solo:
        return float(number)
    return float(all_reduce(torch.tensor([number], dtype=torch.float64, device=wire_device(group)), group, op).item())


def all_gather_json(value: Any, group: Group) -> list[Any]:
    """Every rank's value, by way of JSON: tuples come back as lists, and nothing on the wire can run code."""
    text = json.dumps(value).encode()
    if group.is_solo:
        return [json.loads(text)]
    wire = wire_device(group)
    sizes = all_gather(torch.tensor([len(text)], device=wire), group).tolist()
    padded = torch.frombuffer(bytearray(text.ljust(max(sizes))), dtype=torch.uint8).to(wire)
    rows = all_gather(padded.unsqueeze(0), group, dim=0).cpu()  # [size, longest]
    return [json.loads(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes)]


def wire_device(group: Group) -> torch.device:
    """The device that the backend of a group (of several ranks) sends from: the CPU wherever gloo is part of it."""
    on_cpu = "gloo" in dist.get_backend(group.handle)
    return torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
