"""The masters of a bucket: this rank's shard of them, and gathering, storing and broadcasting full values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron.zero.bucket import FlatBucket
from megatron.zero.offload.storage import WEIGHT
from megatron.zero.partitioned_param import release_param, set_param_data
from mpu.collectives import all_gather_into, broadcast_into, broadcast_json
from mpu.groups import Group


def gather_shards(bucket: FlatBucket, shard: Tensor) -> list[Tensor]:
    """All-gather `shard` into one tensor for each parameter, on the bucket's device. Collective."""
    flat = torch.empty(bucket.layout.numel, dtype=shard.dtype, device=bucket.device)
    # [shard_numel] on each rank -> [numel], padding included
    all_gather_into(flat, shard.to(bucket.device), bucket.shard_group).wait()
    return [flat[slot.offset : slot.end].view(slot.shape) for slot in bucket.layout.slots]


def param_ranges(bucket: FlatBucket) -> list[tuple[int, int, int]]:
    """For each parameter (start, stop) in this rank's shard and the offset in the parameter; zeros if it has no
    elements here."""
    by_name = {segment.slot.name: segment for segment in bucket.layout.segments(bucket.shard_group.rank)}
    return [(0, 0, 0) if (one := by_name.get(slot.name)) is None else
            (one.shard_offset, one.shard_offset + one.count, one.slot_offset) for slot in bucket.layout.slots]


def local_masters(bucket: FlatBucket) -> Tensor:
    """This rank's shard of the masters: a view, on the device or the host."""
    return bucket.master_state.view(WEIGHT)


def gather_masters(bucket: FlatBucket) -> list[Tensor]:
    """One full tensor for each parameter. Collective."""
    return gather_shards(bucket, local_masters(bucket))


def store_masters(bucket: FlatBucket, full_values: Sequence[Tensor]) -> None:
    """Copy this rank's segments of `full_values` into its masters."""
    shard = local_masters(bucket)
    for value, (start, stop, offset) in zip(full_values, param_ranges(bucket), strict=True):
        shard[start:stop].copy_(value.detach().flatten()[offset : offset + stop - start])


@contextmanager
def temporarily_replaced(entries: Sequence[tuple[dict[str, Any], str, Any]]) -> Iterator[None]:
    """Inside, `dict[name]` is `value`, for each (dict, name, value); the dicts hold a module's parameters or
    buffers."""
    before = [(of, name, of[name]) for of, name, _ in entries]
    try:
        for of, name, value in entries:
            of[name] = value
        yield
    finally:
        for of, name, value in before:
            of[name] = value


def broadcast_masters_from_rank0(bucket: FlatBucket, new_values: list[Tensor | None]) -> None:
    """Set the masters on all ranks to rank 0's `new_values`; None keeps a parameter. Collective."""
    whole = gather_masters(bucket)
    for value, new in zip(whole, new_values, strict=True):
        if new is not None:
            value.copy_(new.detach())
    # the views of one gather share a storage, which is broadcast at once
    flat = torch.empty(0, dtype=whole[0].dtype, device=bucket.device).set_(whole[0].untyped_storage())
    broadcast_into(flat, 0, bucket.dp).wait()
    store_masters(bucket, whole)


def broadcast_nested(value: Any, group: Group, device: torch.device, keep: Callable[[tuple[Any, ...], Tensor], Any],
                     ) -> Any:
    """Rank 0's nested dicts, lists and tuples of numbers, strings and tensors, on every rank. `keep(path, tensor)` says
    what stays of each full tensor, which is on the device; one is there at a time. Collective."""
    def encode(node: Any) -> Any:
        if isinstance(node, Tensor):
            return {"tensor": [str(node.dtype).removeprefix("torch."), list(node.shape)]}
        if isinstance(node, dict):
            return {"dict": [[key, encode(inner)] for key, inner in node.items()]}
        if isinstance(node, list | tuple):
            return {"tuple" if isinstance(node, tuple) else "list": [encode(inner) for inner in node]}
        return node

    def receive(code: Any, own: Any, path: tuple[Any, ...]) -> Any:
        if not isinstance(code, dict):
            return code
        (kind, content), = code.items()
        if kind == "dict":
            return {key: receive(inner, own[key] if own else None, (*path, key)) for key, inner in content}
        if kind == "tensor":
            full = torch.empty(content[1], dtype=getattr(torch, content[0]), device=device)
            if group.rank == 0:
                full.copy_(own)
            broadcast_into(full.view(-1).view(torch.uint8), 0, group).wait()  # bytes: works for every dtype
            return keep(path, full)
        items = [receive(inner, own[index] if own else None, (*path, index)) for index, inner in enumerate(content)]
        return tuple(items) if kind == "tuple" else items

    own = value if group.rank == 0 else None
    return receive(broadcast_json(encode(own), group), own, ())


def restore_full_params(bucket: FlatBucket) -> None:
    """Make the parameters ordinary full tensors in the masters' dtype, without an owner. Collective."""
    for parameter, value in zip(bucket.parameters, gather_masters(bucket), strict=True):
        set_param_data(parameter, value.clone())
        release_param(parameter)
