"""Record how a parameter is split over tensor parallel, and slice or join full tensors accordingly. No communication.

A split parameter carries its `Partition` (`partition_of`); Megatron's attributes (`model_parallel`, `partition_dim`,
...) are set too, for scripts that read them.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from mpu.split import Partition, divide

_PARTITION_ATTRIBUTE = "mpu_partition"


def set_partition(parameter: nn.Parameter, partition: Partition | None) -> None:
    """Record how `parameter` is split (None: replicated on every tp rank)."""
    record = cast(Any, parameter)
    setattr(record, _PARTITION_ATTRIBUTE, partition)
    record.model_parallel = record.tensor_model_parallel = partition is not None
    record.partition_dim = partition.dim if partition else -1
    record.partition_stride = partition.stride if partition else 1


def partition_of(parameter: Tensor) -> Partition | None:
    """How the parameter is split over tensor parallel; None if it is replicated."""
    return cast("Partition | None", getattr(parameter, _PARTITION_ATTRIBUTE, None))


def local_slice(full: Tensor, partition: Partition, rank: int, size: int) -> Tensor:
    """Slice `rank` of `size` of a full tensor; each of its `stride` parts is split. With stride 3 and 2 ranks, [q k v]
    -> rank 0: [q0 k0 v0], rank 1: [q1 k1 v1]."""
    dim, stride = partition.dim, partition.stride
    each = divide(divide(full.shape[dim], stride, "length"), size, "length")
    parts = full.unflatten(dim, (stride, size, each))  # [..., n, ...] -> [..., stride, size, each, ...]
    mine: Tensor = parts.select(dim + 1, rank)  # -> [..., stride, each, ...]
    return mine.flatten(dim, dim + 1)


def join_local_slices(slices: list[Tensor], partition: Partition) -> Tensor:
    """The inverse of `local_slice`: the full tensor of all ranks' slices."""
    dim, stride = partition.dim, partition.stride
    parts = [piece.unflatten(dim, (stride, -1)) for piece in slices]
    return torch.stack(parts, dim + 1).flatten(dim, dim + 2)  # [..., stride, size, each, ...] -> [..., n, ...]
