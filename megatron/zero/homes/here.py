"""The home of what stays on the device: nothing is fetched, nothing is put back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor

from megatron.zero.homes.shelf import WEIGHT, ChunkIterator, StateTensors, StoredShard


@final
class DeviceShard(StoredShard):
    """Tensors on the device; opened, they are themselves."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__(len(weight), weight.dtype)
        self.tensors = {WEIGHT: weight}

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(self.tensors)

    @property
    def chunks(self) -> Sequence[slice]:
        return [slice(0, self.numel)]

    @contextmanager
    def open(self, chunk: slice, kinds: Sequence[str] | None = None, *, reads: bool = True,
             writes: bool = False) -> Iterator[StateTensors]:
        yield self.tensors

    def add_kinds(self, kinds: Sequence[str]) -> None:
        self.tensors |= {kind: torch.zeros_like(self.tensors[WEIGHT]) for kind in kinds}

    def device_view(self, kind: str) -> Tensor | None:
        return self.tensors[kind]


class DeviceStorage:
    is_offloaded = updates_on_host = False

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self._device, self._dtype = device, dtype

    def allocate_shard(self, name: str, numel: int) -> StoredShard:
        return DeviceShard(torch.zeros(numel, dtype=self._dtype, device=self._device))

    def iter_chunks(self, steps: Iterable[Sequence[tuple[StoredShard, slice]]]) -> ChunkIterator:
        for step in steps:
            yield [shelf.tensors for shelf, _ in step if isinstance(shelf, DeviceShard)]

    def wait_for_writes(self) -> None:
        """It is."""

    def close(self) -> None:
        """Nothing is left anywhere."""
