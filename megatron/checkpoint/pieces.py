"""A piece: consecutive elements of one parameter's state, as the engine hands it to a save. See
docs/architecture.md."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch

from megatron.checkpoint.manifest import TensorEntry
from megatron.checkpoint.reshard import DPSharding, TPSharding
from megatron.checkpoint.safetensors_io import DTYPE_NAMES
from megatron.errors import NumericsError
from mpu.split import Partition


@dataclass(frozen=True)
class LazyData:
    """Data that is loaded when it is written (from NVMe, for example), so that a rank never holds all of it."""

    count: int
    dtype: torch.dtype
    load: Callable[[], torch.Tensor]


@dataclass(frozen=True)
class TensorPiece:
    """Elements from `offset` on of the flattened local tensor of one tensor-parallel rank."""

    name: str
    kind: str
    shape: tuple[int, ...]
    """Local (tensor-parallel) shape of the full parameter."""
    partition: Partition | None
    tp_rank: int
    tp_size: int
    offset: int
    data: torch.Tensor | LazyData
    """1-D, on any device."""

    @property
    def count(self) -> int:
        return self.data.count if isinstance(self.data, LazyData) else self.data.numel()

    @property
    def key(self) -> str:
        """Unique in a checkpoint: pieces of replicated tensors are written with tp_rank 0."""
        return f"{self.kind}/{self.name}/{self.tp_rank}/{self.offset}"

    def load(self) -> torch.Tensor:
        """The data; NumericsError if it is not finite, so that no such checkpoint is committed."""
        data = self.data.load() if isinstance(self.data, LazyData) else self.data
        # A sum is fast and finds any non-finite element, but may overflow itself: then check each element.
        if data.is_floating_point() and not data.sum().isfinite() and not data.isfinite().all():
            raise NumericsError(f"{self.kind} {self.name!r} holds a non-finite value; not saved")
        return data

    def to_tensor_entry(self) -> TensorEntry:
        """The manifest entry if one data-parallel rank holds the whole tensor."""
        return TensorEntry(self.kind, self.name, DTYPE_NAMES[self.data.dtype],
                           tp_sharding_of(self.shape, self.partition, self.tp_size), DPSharding(0, prod(self.shape)))


def tp_sharding_of(shape: tuple[int, ...], partition: Partition | None, tp_size: int) -> TPSharding:
    """mpu's Partition as a TPSharding."""
    if partition is None:
        return TPSharding(tuple(shape), None, 1, None, 1)
    return TPSharding(tuple(shape), partition.dim % len(shape), partition.stride, partition.size, tp_size)
