"""Give every tensor-parallel rank the batch of the first one.

Only rank 0 of a tensor-parallel group needs to read data. It announces keys, shapes and dtype (as JSON) and then
sends all tensors as one flat buffer. The tensors share one dtype, and arrive on the device of the group's backend.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mpu.collectives import all_gather_json, broadcast_into
from mpu.groups import Group
from mpu.parallel_state import tp_group_or_current
from mpu.split import ParallelError

MAX_DIMS = 4


def broadcast_data(keys: Sequence[str], data: Mapping[str, Tensor] | None, dtype: torch.dtype,
                   tp: Group | None = None) -> dict[str, Tensor]:
    """`data[key]` of the group's first rank for every key, on every rank; other ranks may pass None. A wrong key, dtype
    or shape raises ParallelError on every rank."""
    group = tp_group_or_current(tp)
    described, problem = _describe_batch(keys, data, dtype) if group.rank == 0 else ({}, None)
    shapes, problem = all_gather_json([described, problem], group)[0]
    if problem is not None:
        raise ParallelError(problem)
    if group.is_solo:
        assert data is not None
        return {key: data[key] for key in keys}
    device = torch.device("cpu" if group.own_backend_serves_cpu else f"cuda:{torch.cuda.current_device()}")
    sizes = [math.prod(shapes[key]) for key in keys]
    if group.rank == 0:
        assert data is not None
        flat = torch.cat([data[key].to(device).reshape(-1) for key in keys])
    else:
        flat = torch.empty(sum(sizes), dtype=dtype, device=device)
    broadcast_into(flat, 0, group).wait()
    return {key: part.view(shapes[key]) for key, part in zip(keys, flat.split(sizes))}


def _describe_batch(keys: Sequence[str], data: Mapping[str, Tensor] | None,
                    dtype: torch.dtype) -> tuple[dict[str, list[int]], str | None]:
    """(shape by key, error text or None)."""
    data = data or {}
    for key in keys:
        if key not in data:
            return {}, f"broadcast_data: key {key!r} is not in the batch {sorted(data)}"
        if data[key].dtype != dtype:
            return {}, f"broadcast_data: {key!r} is {data[key].dtype}, expected {dtype}: convert it"
        if data[key].dim() > MAX_DIMS:
            return {}, f"broadcast_data: {key!r} has {data[key].dim()} dimensions, at most {MAX_DIMS} are sent"
    return {key: list(data[key].shape) for key in keys}, None
