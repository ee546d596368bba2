"""The interface of offload storage, and its device implementation.

    for chunk in shard.chunks:
        with shard.open(chunk, writes=True) as tensors:     # kind -> tensor, on the device or on the host
            tensors["weight"].mul_(0.5)

A `StorageBackend` holds one `StoredShard` for each bucket: this rank's fp32 masters ("weight") and optimizer states, or its
16-bit parameters. All kinds of a shard have equal length. A *chunk* is the slice of a shard that is accessed at a time.
`open` gives views where the data is in memory; from NVMe it gives a host copy, which is written back. An optimizer step uses
`StorageBackend.iter_chunks`, which prefetches the next chunk.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol, final

import torch
from torch import Tensor

from megatron.zero.offload.chunk_sizes import OffloadRatio
from megatron.zero.offload.copy_streams import CopyEvent, CopyStream, CopyStreams

StateTensors = Mapping[str, Tensor]
"""Kind -> the numbers of one part."""

WEIGHT = "weight"

HOST = torch.device("cpu")

ChunkIterator = Generator[list[StateTensors], None, None]
"""Of a step through its parts. Whoever leaves it half way closes it."""


class StoredShard(ABC):
    """Of `numel` numbers of each kind."""

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        self.numel, self.dtype = numel, dtype

    @property
    @abstractmethod
    def kinds(self) -> tuple[str, ...]: ...

    @property
    @abstractmethod
    def chunks(self) -> Sequence[slice]:
        """In order, without gaps: what is opened at a time."""

    @abstractmethod
    def open(self, chunk: slice, kinds: Sequence[str] | None = None, *, reads: bool = True,
             writes: bool = False) -> AbstractContextManager[StateTensors]:
        """One of the parts, all kinds of it or these. Without `reads` the content is of no interest; what is changed
        lasts if `writes`."""

    @abstractmethod
    def add_kinds(self, kinds: Sequence[str]) -> None:
        """Keep these as well; they begin as zeros."""

    def device_view(self, kind: str) -> Tensor | None:
        """All numbers of a kind, to look at and to change, where they are on the device."""
        return None

    @property
    def is_on_nvme(self) -> bool:
        return False

    def memory_view(self, kind: str) -> Tensor | None:
        """The same where they are on the device, or on the host beside it."""
        return self.device_view(kind)

    def prefetch(self) -> None:
        """All of it will be read soon."""

    def copy_to_device(self, out: Tensor, stream: CopyStream) -> CopyEvent:
        """out, on the device, <- all weights, which are not there. The last copy under way, if there are several."""
        raise NotImplementedError

    def read(self, kind: str, start: int, out: Tensor) -> None:
        """out <- the numbers from `start` on."""
        for part, overlap in self._overlapping_chunks(start, start + len(out)):
            with self.open(part, [kind]) as kept:
                out[part.start + overlap.start - start : part.start + overlap.stop - start] = kept[kind][overlap]

    def write(self, kind: str, start: int, values: Tensor) -> None:
        """The numbers from `start` on <- values."""
        for part, overlap in self._overlapping_chunks(start, start + len(values)):
            everything = overlap == slice(0, part.stop - part.start)
            with self.open(part, [kind], reads=not everything, writes=True) as kept:
                kept[kind][overlap] = values[part.start + overlap.start - start : part.start + overlap.stop - start]

    def _overlapping_chunks(self, start: int, stop: int) -> Iterator[tuple[slice, slice]]:
        """Parts, and where in them."""
        for part in self.chunks:
            low, high = max(start, part.start), min(stop, part.stop)
            if low < high:
                yield part, slice(low - part.start, high - part.start)


@dataclass(frozen=True)
class StateSegment:
    """Consecutive numbers of one kind."""

    shard: StoredShard
    kind: str
    start: int
    count: int

    @property
    def device_view(self) -> Tensor | None:
        """Themselves, where they need not be fetched."""
        everything = self.shard.device_view(self.kind)
        return None if everything is None else everything[self.start : self.start + self.count]

    def fetch(self) -> Tensor:
        """Themselves, or a copy."""
        if (everything := self.shard.memory_view(self.kind)) is not None:
            return everything[self.start : self.start + self.count]
        copy = torch.empty(self.count, dtype=self.shard.dtype)
        self.shard.read(self.kind, self.start, copy)
        return copy


class StorageBackend(Protocol):
    """Where the masters and states of all buckets of an engine are when they are not in use, or the parts that the
    ranks have of weights at work."""

    is_offloaded: bool
    """Not on the device: there are masters even where the weights at work are the same numbers, and a step takes one
    part after the other."""

    @property
    def updates_on_host(self) -> bool:
        """The parts of a walk are on the host, and the device is not: that is where a step's arithmetic is."""

    def allocate_shard(self, name: str, numel: int) -> StoredShard:
        """A new one; all numbers are zero."""

    def iter_chunks(self, steps: Iterable[Sequence[tuple[StoredShard, slice]]]) -> ChunkIterator:
        """The parts of each step, one after the other, to be changed; they are put back when the next are asked for."""

    def wait_for_writes(self) -> None:
        """Everything that was put back is there; an error of that comes now."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class EngineStorage:
    """Of one engine."""

    optimizer: StorageBackend
    params: StorageBackend
    """Of weights that come and go."""
    copy_streams: CopyStreams | None = None
    """Where the device is not its own host."""
    pin_memory: bool = False
    """What travels is page-locked on the host."""
    delays_update: bool = False
    """The host updates beside the next forward and backward."""
    device_optimizer: StorageBackend | None = None
    """The device, where only a `share` of the masters and states goes to the home of the optimizer."""
    offload_ratio: OffloadRatio = field(default_factory=OffloadRatio)

    def storage_for_masters(self, numel: int) -> StorageBackend:
        """For the next bucket, whose shard has so many numbers."""
        return self.optimizer if self.device_optimizer is None or self.offload_ratio.offloads_next(
            numel) else self.device_optimizer

    @property
    def has_offloaded_state(self) -> bool:
        """There is something that is not on the device."""
        return self.optimizer.is_offloaded or self.params.is_offloaded

    def wait_for_writes(self) -> None:
        self.optimizer.wait_for_writes()
        self.params.wait_for_writes()

    def close(self) -> None:
        self.optimizer.close()
        self.params.close()


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
