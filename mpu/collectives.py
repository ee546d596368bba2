"""The operations among the ranks of a group. How they travel is decided here, once, by where the tensors are.

Two families. *Out of place* (`all_reduce`, `all_gather`, `reduce_scatter`): return a new tensor and leave the
argument alone; the only ones allowed inside autograd, where reducing in place gives silently wrong gradients, and the
only ones that a compiler can trace.
*Into* (`..._into`): work asynchronously on flat buffers the caller owns and return a `Pending`; nothing may touch
the buffers until `wait()`. Several may be in flight: start and wait in the same order on every rank.

On a group of one every operation is the identity (a copy between two buffers) and needs no process group. Elsewhere
one of the wires does it (mpu/wire): the backend's own operations for an accelerator, gloo.py's for the CPU. Words
rather than tensors (`all_gather_json`, `agree`, `barrier`) go from host to host, by control.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mpu.device import on_accelerator
from mpu.groups import Group
from mpu.split import ParallelError, divide
from mpu.wire import functional
from mpu.wire.control import all_gather_json, all_reduce_min, all_reduce_scalar, barrier, broadcast_json
from mpu.wire.gloo import GlooBackend
from mpu.wire.interface import CollectiveBackend, CollectiveWork, Op
from mpu.wire.native import NativeBackend

__all__ = [
    "Op", "CollectiveWork", "all_reduce_scalar", "all_gather", "all_gather_into", "all_gather_json", "all_reduce",
    "all_reduce_into", "all_to_all_into", "barrier", "broadcast_into", "broadcast_json", "all_reduce_min",
    "reduce_scatter", "reduce_scatter_into"
]

_NATIVE, _GLOO = NativeBackend(), GlooBackend()


def backend_for(x: Tensor) -> CollectiveBackend:
    """The wire that x travels by."""
    return _NATIVE if on_accelerator(x) else _GLOO


# -- into: asynchronous, on flat buffers ---------------------------------------------------------------------------


def all_reduce_into(flat: Tensor, group: Group, op: Op = "sum", max_in_flight: int | None = None,
                    reduce_dtype: torch.dtype | None = None) -> CollectiveWork:
    """flat <- reduction of every rank's flat, in place, added up as it is or in `sum_in`; see wire/interface.py."""
    return CollectiveWork() if group.is_solo else backend_for(flat).all_reduce(flat, group, op, reduce_dtype,
                                                                               max_in_flight)


def all_gather_into(full: Tensor, shard: Tensor, group: Group, max_in_flight: int | None = None) -> CollectiveWork:
    """full <- the shards of all ranks in rank order. `shard` may be this rank's part of `full`."""
    _check_sizes(full, shard, group)
    if group.is_solo:
        if shard.data_ptr() != full.data_ptr():
            full.view(-1).copy_(shard.view(-1))
        return CollectiveWork()
    return backend_for(full).all_gather(full, shard, group, max_in_flight)


def reduce_scatter_into(shard: Tensor, full: Tensor, group: Group, max_in_flight: int | None = None,
                        reduce_dtype: torch.dtype | None = None) -> CollectiveWork:
    """shard <- this rank's part of the sum of every rank's `full`, which is left alone.

    `shard` may be wider than `full`, or this rank's part of `full`, which then is the one part of `full` that changes.
    16-bit values are added up in fp32, unless `sum_in` asks for another precision (wire/interface.py)."""
    _check_sizes(full, shard, group)
    if group.is_solo:
        shard.view(-1).copy_(full.view(-1))
        return CollectiveWork()
    return backend_for(full).reduce_scatter(shard, full, group, reduce_dtype, max_in_flight)


def all_to_all_into(received: Tensor, sent: Tensor, group: Group) -> CollectiveWork:
    """Row k of `received` <- this rank's row of what rank k sent. Both are [size, n], and not the same memory."""
    if group.is_solo:
        received.copy_(sent)
        return CollectiveWork()
    return backend_for(sent).all_to_all(received, sent, group)


def broadcast_into(x: Tensor, src: int, group: Group) -> CollectiveWork:
    """x <- x of the group's rank `src`."""
    return CollectiveWork() if group.is_solo else backend_for(x).broadcast(x, src, group)


def _check_sizes(full: Tensor, shard: Tensor, group: Group) -> None:
    if full.numel() != group.size * shard.numel():
        raise ParallelError(
            f"a full buffer of {full.numel()} elements does not hold {group.size} shards of {shard.numel()}: "
            f"pad it to {group.size * shard.numel()}"
        )


# -- out of place: for autograd and small values -------------------------------------------------------------------


def all_reduce(x: Tensor, group: Group, op: Op = "sum") -> Tensor:
    """The reduction of every rank's x (x itself on a group of one)."""
    return x if group.is_solo else functional.functional_all_reduce(x, group, op)


def all_gather(x: Tensor, group: Group, dim: int = -1) -> Tensor:
    """Every rank's x, joined along `dim` in rank order; the shapes are equal."""
    if group.is_solo:
        return x
    parts = functional.functional_all_gather(x.unsqueeze(0), group)
    return torch.cat(parts.unbind(0), dim)  # [size, ..., n, ...] -> [..., size * n, ...]


def reduce_scatter(x: Tensor, group: Group, dim: int = -1) -> Tensor:
    """This rank's part along `dim` of the sum of every rank's x."""
    if group.is_solo:
        return x
    each = divide(x.shape[dim], group.size, "length")
    parts = torch.stack(x.split(each, dim))  # [..., size * n, ...] -> [size, ..., n, ...]
    return functional.functional_reduce_scatter(parts, group).squeeze(0)
