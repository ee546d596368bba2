"""Megatron's global model-parallel state: `initialize_model_parallel`, the `get_..._parallel_...` functions, and what
works on the current groups (`broadcast_data`, the regions).

The current `Groups` is held here and nowhere else. The rest of `mpu` takes a `Group` as an argument; `tp=None` means
the current tensor-parallel group (`tp_group_or_current`).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mpu.collectives import all_gather_json, broadcast_into
from mpu.groups import Group, Groups, build, group_from_process_group, subgroup
from mpu.regions import copy_to_region, gather_from_region, reduce_from_region, scatter_to_region
from mpu.split import ParallelError, split_range

T = TypeVar("T")


class _GlobalGroups:
    """The current groups; None before initialize_model_parallel."""

    groups: Groups | None = None


def tp_group_or_current(tp: Group | None) -> Group:
    """`tp`, or the current tensor-parallel group if it is None."""
    return current_groups().tp if tp is None else tp


def current_groups() -> Groups:
    if _GlobalGroups.groups is None:
        raise ParallelError("model parallelism is not initialised: call initialize_model_parallel, or pass tp=Group")
    if dist.is_initialized() and dist.get_world_size() != _GlobalGroups.groups.world.size:
        raise ParallelError(
            f"model parallelism was initialised for {_GlobalGroups.groups.world.size} ranks, and torch.distributed has "
            f"{dist.get_world_size()}: call init_process_group before initialize_model_parallel")
    return _GlobalGroups.groups


def tp_group_of(model_parallel_unit: Any) -> Group:
    """The tensor-parallel group of an object with Megatron's accessors; this package itself works without
    torch.distributed."""
    return current_groups().tp if model_parallel_unit is sys.modules["mpu"] else group_from_process_group(
        model_parallel_unit.get_model_parallel_group())


def initialize_model_parallel(model_parallel_size: int = 1) -> Groups:
    """Build the groups of this run (grid: mpu.groups) and make them current."""
    if _GlobalGroups.groups is not None:
        raise ParallelError("model parallelism is already initialised: call destroy_model_parallel first")
    _GlobalGroups.groups = build(model_parallel_size)
    return _GlobalGroups.groups


def model_parallel_is_initialized() -> bool:
    return _GlobalGroups.groups is not None


def is_unitialized() -> bool:
    """Spelled as in Megatron."""
    return not model_parallel_is_initialized()


def destroy_model_parallel() -> None:
    _GlobalGroups.groups = None


def _of_current_groups(read: Callable[[Groups], T]) -> Callable[[], T]:
    """Raises before initialize_model_parallel. Process groups exist even for one rank."""
    return lambda: read(current_groups())


get_model_parallel_group = get_tensor_model_parallel_group = _of_current_groups(lambda groups: groups.tp.process_group)
get_model_parallel_rank = get_tensor_model_parallel_rank = _of_current_groups(lambda groups: groups.tp.rank)
get_model_parallel_world_size = get_tensor_model_parallel_world_size = _of_current_groups(lambda groups: groups.tp.size)
# World rank of the first rank of this group, as below.
get_model_parallel_src_rank = get_tensor_model_parallel_src_rank = _of_current_groups(lambda groups: groups.tp.ranks[0])
get_data_parallel_group = _of_current_groups(lambda groups: groups.dp.process_group)
get_data_parallel_rank = _of_current_groups(lambda groups: groups.dp.rank)
get_data_parallel_world_size = _of_current_groups(lambda groups: groups.dp.size)
get_data_parallel_src_rank = _of_current_groups(lambda groups: groups.dp.ranks[0])
# This rank alone, since there is one pipeline stage.
get_pipeline_model_parallel_group = _of_current_groups(lambda groups: subgroup(groups.world, 1).process_group)


def _of_one_stage(answer: T) -> Callable[..., T]:
    def accessor(ignore_virtual: bool = False) -> T:
        current_groups()  # raises before initialize_model_parallel
        return answer

    return accessor


get_pipeline_model_parallel_rank = _of_one_stage(0)
get_pipeline_model_parallel_world_size = _of_one_stage(1)
is_pipeline_first_stage = is_pipeline_last_stage = _of_one_stage(True)
get_virtual_pipeline_model_parallel_rank = get_virtual_pipeline_model_parallel_world_size = _of_one_stage(None)


def _with_current_tp(region: Callable[[Tensor, Group], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: region(x, current_groups().tp)


copy_to_model_parallel_region = _with_current_tp(copy_to_region)
reduce_from_model_parallel_region = _with_current_tp(reduce_from_region)
scatter_to_model_parallel_region = _with_current_tp(scatter_to_region)
gather_from_model_parallel_region = _with_current_tp(gather_from_region)


class VocabUtility:
    """Megatron's vocabulary ranges: [first, last) of a rank."""

    @staticmethod
    def vocab_range_from_per_partition_vocab_size(per_partition: int, rank: int, world_size: int) -> tuple[int, int]:
        return split_range(rank, world_size, per_partition * world_size)

    @staticmethod
    def vocab_range_from_global_vocab_size(global_size: int, rank: int, world_size: int) -> tuple[int, int]:
        return split_range(rank, world_size, global_size)


def broadcast_data(keys: Sequence[str], data: Mapping[str, Tensor] | None, dtype: torch.dtype,
                   tp: Group | None = None) -> dict[str, Tensor]:
    """`data[key]` of the group's first rank for every key, on every rank; other ranks may pass None. The tensors, of
    one dtype, travel as one flat buffer and arrive on the device of the group's backend. A wrong key or dtype
    raises ParallelError on every rank."""
    group = tp_group_or_current(tp)
    # Every rank gets the first one's answer, so that a wrong key raises everywhere and no rank waits for a broadcast.
    shapes, problem = all_gather_json(_shapes_of(keys, data or {}, dtype) if group.rank == 0 else None, group)[0]
    if problem is not None:
        raise ParallelError(problem)
    if group.is_solo:
        assert data is not None
        return {key: data[key] for key in keys}
    device = torch.device("cpu" if group.own_backend_serves_cpu else f"cuda:{torch.cuda.current_device()}")
    sizes = [math.prod(shape) for shape in shapes]
    if group.rank == 0:  # keys in the given order: [shape], ... -> [sum of sizes]
        assert data is not None
        flat = torch.cat([data[key].to(device).reshape(-1) for key in keys])
    else:
        flat = torch.empty(sum(sizes), dtype=dtype, device=device)
    broadcast_into(flat, 0, group).wait()
    return {key: part.view(shape) for key, part, shape in zip(keys, flat.split(sizes), shapes, strict=True)}


def _shapes_of(keys: Sequence[str], data: Mapping[str, Tensor], dtype: torch.dtype) -> tuple[list[Any], str | None]:
    """(shape of each key, error text or None)."""
    for key in keys:
        if key not in data:
            return [], f"broadcast_data: key {key!r} is not in the batch {sorted(data)}"
        if data[key].dtype != dtype:
            return [], f"broadcast_data: {key!r} is {data[key].dtype}, expected {dtype}: convert it"
    return [list(data[key].shape) for key in keys], None
