"""Collectives over a `Group`: on flat buffers, out of place for autograd, and of JSON values between hosts.

`..._into` runs asynchronously on flat buffers of the caller and returns a `CollectiveWork`. `all_reduce` and
`all_gather` return a new tensor; only these may be used inside autograd, which may have saved the argument.
`all_gather_json`, `broadcast_json`, `all_reduce_scalars` and `barrier` run over gloo on the host (the group's control
process group), so they never wait behind a kernel. On a group of one every operation is the identity and needs no
process group.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from mpu import backends
from mpu.backends import (REDUCE_OPS, CollectiveBackend, CollectiveWork as CollectiveWork, GlooBackend, Op as Op,
                          start_all_gather)
from mpu.collective_tracker import track_collective
from mpu.device import on_accelerator
from mpu.groups import Group
from mpu.split import ParallelError


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


_NATIVE, _GLOO = CollectiveBackend(), GlooBackend()


def backend_for(x: Tensor) -> CollectiveBackend:
    """The backend for tensors on x's device."""
    return _NATIVE if on_accelerator(x) else _GLOO


# -- into: asynchronous, on flat buffers ---------------------------------------------------------------------------


def all_reduce_into(flat: Tensor, group: Group, op: Op = "sum", bucket_size: int | None = None,
                    reduce_dtype: torch.dtype | None = None) -> CollectiveWork:
    """flat <- reduction of every rank's flat, in place, summed in `reduce_dtype` (CollectiveBackend in backends.py)."""
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


# -- out of place: for autograd and small values -------------------------------------------------------------------


def all_reduce(x: Tensor, group: Group, op: Op = "sum") -> Tensor:
    """The reduction of every rank's x (x itself on a group of one)."""
    return x if group.is_solo else backends.functional_all_reduce(x, group, op)


def all_gather(x: Tensor, group: Group, dim: int = -1) -> Tensor:
    """Every rank's x concatenated along `dim` in rank order; shapes must be equal."""
    if group.is_solo:
        return x
    # The backend concatenates along the first dimension only, hence the extra one.
    parts = backends.functional_all_gather(x.unsqueeze(0), group)
    return torch.cat(parts.unbind(0), dim)  # [size, ..., n, ...] -> [..., size * n, ...]
