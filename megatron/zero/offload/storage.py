"""The interface of offload storage, and storage on the device and in host memory.

    for chunk in shard.chunks:
        with shard.open(chunk, writes=True) as tensors:     # kind -> tensor, on the device or on the host
            tensors["weight"].mul_(0.5)

A `StorageBackend` holds one `StoredShard` for each bucket: this rank's fp32 masters ("weight") and optimizer states, or
its 16-bit parameters. All kinds of a shard have equal length. A *chunk* is the slice of a shard that is accessed at a
time. `open` gives views where the data is in memory; from NVMe it gives a host copy, which is written back. An
optimizer step uses `StorageBackend.iter_chunks`, which prefetches the next chunk.

`HostStorage` keeps flat, page-locked tensors and is updated where it is, one chunk at a time. `StreamingHostStorage`
copies each chunk to the device for the update and back: at most three chunks are on the device, one arriving, one in
use and one leaving.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor

from megatron.zero.offload.chunk_sizes import STEP_BUFFER_SETS, OffloadRatio, split_into_chunks
from megatron.zero.offload.copy_streams import CopyEvent, CopyStream, CopyStreams
from megatron.zero.offload.direct_io import page_aligned_zeros

StateTensors = Mapping[str, Tensor]  # kind ("weight", "exp_avg", ...) -> the elements of one chunk

WEIGHT = "weight"

HOST = torch.device("cpu")

# Yields the tensors of each chunk of a step. A caller that stops early must close the generator.
ChunkIterator = Generator[list[StateTensors], None, None]


class Location(Enum):
    """Where a shard is stored between its uses, or which side computes an update (never NVMe)."""

    DEVICE = "on the device"
    HOST = "in host memory"
    NVME = "on an NVMe drive"


class StoredShard(ABC):
    """One bucket's shard in a storage backend: `numel` elements of each kind."""

    location: Location
    is_on_device = False
    is_in_memory = True  # `view` gives all elements of a kind

    def __init__(self, numel: int, dtype: torch.dtype, chunks: Sequence[slice]) -> None:
        # `chunks`: the slices that `open` accepts, in order and without gaps.
        self.numel, self.dtype, self.chunks = numel, dtype, chunks
        self.kinds: tuple[str, ...] = (WEIGHT,)

    @abstractmethod
    def open(self, chunk: slice, kinds: Sequence[str] | None = None, *, reads: bool = True,
             writes: bool = False) -> AbstractContextManager[StateTensors]:
        """Tensors of one chunk, of all kinds or of `kinds`. With `reads=False` the content is undefined; changes are
        kept only with `writes=True`."""

    def add_kinds(self, kinds: Sequence[str]) -> None:
        """Add optimizer states, initialized with zeros."""
        self.kinds += tuple(kinds)

    def view(self, kind: str) -> Tensor:
        """All elements of a kind as a writable view, on the device or in host memory; not for a shard on NVMe."""
        raise NotImplementedError(self.location)

    def prefetch(self) -> None:
        """Start to read the shard: it will be needed soon."""

    def copy_to_device(self, out: Tensor, stream: CopyStream) -> CopyEvent:
        """Copy all weights into `out` on the device; return the event of the last copy. For shards that are not on the
        device."""
        raise NotImplementedError

    def read(self, kind: str, start: int, out: Tensor) -> None:
        """out <- elements from `start` on."""
        for part, overlap in self._overlapping_chunks(start, start + len(out)):
            with self.open(part, [kind]) as kept:
                out[part.start + overlap.start - start : part.start + overlap.stop - start] = kept[kind][overlap]

    def fetch(self, kind: str, start: int, count: int) -> Tensor:
        """`count` elements from `start` on: a view if they are in memory, or a copy read from NVMe."""
        if self.is_in_memory:
            return self.view(kind)[start : start + count]
        self.read(kind, start, copy := torch.empty(count, dtype=self.dtype))
        return copy

    def write(self, kind: str, start: int, values: Tensor) -> None:
        """Elements from `start` on <- values."""
        for part, overlap in self._overlapping_chunks(start, start + len(values)):
            everything = overlap == slice(0, part.stop - part.start)
            with self.open(part, [kind], reads=not everything, writes=True) as kept:
                kept[kind][overlap] = values[part.start + overlap.start - start : part.start + overlap.stop - start]

    def _overlapping_chunks(self, start: int, stop: int) -> Iterator[tuple[slice, slice]]:
        """Chunks that overlap [start, stop), each with the overlap relative to the chunk's first element."""
        for part in self.chunks:
            low, high = max(start, part.start), min(stop, part.stop)
            if low < high:
                yield part, slice(low - part.start, high - part.start)


class StorageBackend(ABC):
    """Stores the masters and optimizer states of all buckets of an engine, or its 16-bit parameter shards."""

    # If it is not the device, masters exist even if the parameters are fp32, and a step updates chunk by chunk.
    location: Location
    # Where `iter_chunks` yields the tensors. Without an accelerator the device is the host.
    update_location: Location

    @abstractmethod
    def allocate_shard(self, name: str, numel: int) -> StoredShard:
        """A new shard of zeros."""

    @abstractmethod
    def iter_chunks(self, steps: Iterable[Sequence[tuple[StoredShard, slice]]]) -> ChunkIterator:
        """Yield the chunks of each step for an in-place update; a chunk is written back when the next one is
        requested."""

    def wait_for_writes(self) -> None:
        """Wait until all writes are done; raise their errors."""

    def close(self) -> None:
        """Free what is not memory of torch's."""
        self.wait_for_writes()


@dataclass(frozen=True)
class EngineStorage:
    """The storage backends of one engine."""

    optimizer: StorageBackend
    params: StorageBackend  # where sharded parameters are (stage 3)
    copy_streams: CopyStreams | None = None  # None if the device is the host
    pin_memory: bool = False  # host buffers of device copies are page-locked
    # The host update overlaps the next forward and backward (`delayed_param_update`).
    delays_update: bool = False
    # Holds the buckets that stay on the device, if `offload_ratio` offloads only some.
    device_optimizer: StorageBackend | None = None
    offload_ratio: OffloadRatio = field(default_factory=OffloadRatio)

    def storage_for_masters(self, numel: int) -> StorageBackend:
        """The backend of the next bucket, whose shard has `numel` elements."""
        return (self.optimizer if self.device_optimizer is None or self.offload_ratio.offloads_next(numel)
                else self.device_optimizer)

    @property
    def has_offloaded_state(self) -> bool:
        """Some state is not on the device."""
        return {self.optimizer.location, self.params.location} != {Location.DEVICE}

    def wait_for_writes(self) -> None:
        self.optimizer.wait_for_writes()
        self.params.wait_for_writes()

    def close(self) -> None:
        self.optimizer.close()
        self.params.close()


class DeviceShard(StoredShard):
    """Tensors on the device; `open` yields the tensors themselves."""

    location = Location.DEVICE
    is_on_device = True

    def __init__(self, weight: Tensor) -> None:
        super().__init__(len(weight), weight.dtype, [slice(0, len(weight))])
        self.tensors = {WEIGHT: weight}

    @contextmanager
    def open(self, chunk: slice, kinds: Sequence[str] | None = None, *, reads: bool = True,
             writes: bool = False) -> Iterator[StateTensors]:
        yield self.tensors

    def add_kinds(self, kinds: Sequence[str]) -> None:
        super().add_kinds(kinds)
        self.tensors |= {kind: torch.zeros_like(self.tensors[WEIGHT]) for kind in kinds}

    def view(self, kind: str) -> Tensor:
        return self.tensors[kind]


class DeviceStorage(StorageBackend):
    location = update_location = Location.DEVICE

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self._device, self._dtype = device, dtype

    def allocate_shard(self, name: str, numel: int) -> StoredShard:
        return DeviceShard(torch.zeros(numel, dtype=self._dtype, device=self._device))

    def iter_chunks(self, steps: Iterable[Sequence[tuple[StoredShard, slice]]]) -> ChunkIterator:
        for step in steps:
            yield [shard.tensors for shard, _ in step if isinstance(shard, DeviceShard)]


class HostShard(StoredShard):
    """A shard in host memory; `open` gives views. Reads wait for pending copies and updates first."""

    location = Location.HOST

    def __init__(self, numel: int, dtype: torch.dtype, chunks: Sequence[slice], *, pinned: bool) -> None:
        super().__init__(numel, dtype, chunks)
        self._pinned = pinned
        self._tensors = {WEIGHT: page_aligned_zeros(numel, dtype, pinned=pinned)}
        # (stream, start, stop) -> the last copy of that range on that stream.
        self._pending_copies: dict[tuple[CopyStream, int, int], CopyEvent] = {}
        # A background update of the tensors, set by the one who runs it.
        self.pending_update: Future[None] | None = None

    def add_kinds(self, kinds: Sequence[str]) -> None:
        super().add_kinds(kinds)
        self._tensors |= {kind: page_aligned_zeros(self.numel, self.dtype, pinned=self._pinned) for kind in kinds}

    @contextmanager
    def open(self, chunk: slice, kinds: Sequence[str] | None = None, *, reads: bool = True,
             writes: bool = False) -> Iterator[StateTensors]:
        yield {kind: self.view(kind)[chunk] for kind in self.kinds if kinds is None or kind in kinds}

    def view(self, kind: str) -> Tensor:
        self.wait_for_pending()
        return self._tensors[kind]

    def wait_for_pending(self) -> None:
        if self.pending_update is not None:
            wait([self.pending_update])
            self.pending_update = None
        for event in self._pending_copies.values():
            event.wait_on_host()
        self._pending_copies.clear()

    def copy_to_device(self, out: Tensor, stream: CopyStream) -> CopyEvent:
        return self.copy_chunk_to_device({WEIGHT: out}, slice(0, self.numel), stream)

    def copy_chunk_to_device(self, out: StateTensors, chunk: slice, stream: CopyStream,
                             after: Sequence[CopyEvent] = ()) -> CopyEvent:
        """Copy the kinds in `out` from the host, after `after` and after pending copies into this range."""
        after = [*after, *self._overlapping_copies(chunk, stream)]
        for kind, target in out.items():
            event = stream.copy(target, self._tensors[kind][chunk], after)
        self._pending_copies[stream, chunk.start, chunk.stop] = event
        return event

    def copy_chunk_from_device(self, values: StateTensors, chunk: slice, stream: CopyStream) -> CopyEvent:
        """Copy `values` to the host, after pending copies out of this range."""
        after = self._overlapping_copies(chunk, stream)
        for kind, source in values.items():
            event = stream.copy(self._tensors[kind][chunk], source, after)
        self._pending_copies[stream, chunk.start, chunk.stop] = event
        return event

    def _overlapping_copies(self, chunk: slice, stream: CopyStream) -> list[CopyEvent]:
        return [event for (other, start, stop), event in self._pending_copies.items()
                if other is not stream and start < chunk.stop and chunk.start < stop]


class HostStorage(StorageBackend):
    """Chunks are updated where they are."""

    location = update_location = Location.HOST

    def __init__(self, dtype: torch.dtype, chunk_numel: int, *, pinned: bool) -> None:
        """`chunk_numel`: elements of a shard that a step updates at a time; 0 for the whole shard."""
        self._dtype, self._chunk_numel, self._pinned = dtype, chunk_numel, pinned
        self._shards: list[HostShard] = []

    def allocate_shard(self, name: str, numel: int) -> HostShard:
        shard = HostShard(numel, self._dtype, split_into_chunks(numel, self._chunk_numel or max(1, numel)),
                          pinned=self._pinned)
        self._shards.append(shard)
        return shard

    def iter_chunks(self, steps: Iterable[Sequence[tuple[StoredShard, slice]]]) -> ChunkIterator:
        for ((shard, part),) in steps:
            with shard.open(part) as kept:
                yield [kept]

    def wait_for_writes(self) -> None:
        for shard in self._shards:
            shard.wait_for_pending()


@dataclass
class _DeviceChunkBuffers:
    """Device buffers for one chunk, one for each kind."""

    tensors: StateTensors
    # Copies of the last chunk back to the host; the buffers are free once these are done.
    copies_to_host: Sequence[CopyEvent] = ()


class StreamingHostStorage(HostStorage):
    """Chunks are copied to the device, updated there and copied back."""

    update_location = Location.DEVICE

    def __init__(self, dtype: torch.dtype, chunk_numel: int, copy_streams: CopyStreams, device: torch.device, *,
                 pinned: bool) -> None:
        super().__init__(dtype, chunk_numel, pinned=pinned)
        self._copy_streams, self._device = copy_streams, device

    def iter_chunks(self, steps: Iterable[Sequence[tuple[StoredShard, slice]]]) -> ChunkIterator:
        order = [(shard, part) for ((shard, part),) in steps if isinstance(shard, HostShard)]
        size = max((part.stop - part.start for _, part in order), default=0)
        ring = deque(_DeviceChunkBuffers({kind: torch.empty(size, dtype=self._dtype, device=self._device)
                                          for kind in order[0][0].kinds})
                     for _ in range(min(STEP_BUFFER_SETS, len(order))))
        arriving: deque[tuple[_DeviceChunkBuffers, StateTensors, CopyEvent]] = deque()
        for number, (shard, part) in enumerate(order):
            # keep one chunk ahead: the next copy overlaps this chunk's update
            for next_shard, next_chunk in order[number + len(arriving) : number + 2]:
                ring.rotate(-1)
                count = next_chunk.stop - next_chunk.start
                kept: StateTensors = {kind: tensor[:count] for kind, tensor in ring[0].tensors.items()}
                arriving.append((ring[0], kept, next_shard.copy_chunk_to_device(
                    kept, next_chunk, self._copy_streams.to_device, ring[0].copies_to_host)))
            buffers, kept, arrival = arriving.popleft()
            arrival.wait_on_device()
            yield [kept]
            buffers.copies_to_host = [shard.copy_chunk_from_device(kept, part, self._copy_streams.to_host)]
        for buffers in ring:  # which are freed now
            for event in buffers.copies_to_host:
                event.wait_on_device()
