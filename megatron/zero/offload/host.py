"""Offload to host memory: flat, page-locked tensors, updated by the host or streamed through the device.

`HostStorage` is updated where it is, one chunk at a time. `StreamingHostStorage` copies each chunk to the device for
the update and back: at most three chunks are on the device, one arriving, one in use and one leaving.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor

from megatron.zero.offload.chunk_sizes import STEP_BUFFER_SETS, split_into_chunks
from megatron.zero.offload.copy_streams import CopyEvent, CopyStream, CopyStreams
from megatron.zero.offload.direct_io import page_aligned_zeros
from megatron.zero.offload.storage import (WEIGHT, ChunkIterator, Location, StateTensors, StorageBackend,
                                           StoredShard)


@final
class HostShard(StoredShard):
    """A shard in host memory; `open` gives views. Reads wait for pending copies and updates first."""

    location = Location.HOST

    def __init__(self, numel: int, dtype: torch.dtype, chunks: Sequence[slice], *, pinned: bool) -> None:
        super().__init__(numel, dtype, chunks)
        self._pinned = pinned
        self._tensors = {WEIGHT: page_aligned_zeros(numel, dtype, pinned=pinned)}
        self._pending_copies: dict[tuple[CopyStream, int, int], CopyEvent] = {}
        """(stream, start, stop) -> the last copy of that range on that stream."""
        self._pending_update: Future[None] | None = None

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

    def lend_chunk(self, chunk: slice) -> StateTensors:
        """Views of a chunk for a background update; the caller registers it with `set_pending_update`."""
        self.wait_for_pending()
        return {kind: everything[chunk] for kind, everything in self._tensors.items()}

    def set_pending_update(self, update: Future[None]) -> None:
        self._pending_update = update

    def wait_for_pending(self) -> None:
        if self._pending_update is not None:
            wait([self._pending_update])
            self._pending_update = None
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
        return self._record_copy(chunk, stream, event)

    def copy_chunk_from_device(self, values: StateTensors, chunk: slice, stream: CopyStream) -> CopyEvent:
        """Copy `values` to the host, after pending copies out of this range."""
        after = self._overlapping_copies(chunk, stream)
        for kind, source in values.items():
            event = stream.copy(self._tensors[kind][chunk], source, after)
        return self._record_copy(chunk, stream, event)

    def _record_copy(self, chunk: slice, stream: CopyStream, event: CopyEvent) -> CopyEvent:
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

    def close(self) -> None:
        self.wait_for_writes()


@final
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
        ring = deque(_DeviceChunkBuffers(self._device, size) for _ in range(STEP_BUFFER_SETS))
        arriving: deque[tuple[_DeviceChunkBuffers, StateTensors, CopyEvent]] = deque()
        for number, (shard, part) in enumerate(order):
            # keep one chunk ahead: the next copy overlaps this chunk's update
            for next_shard, next_chunk in order[number + len(arriving) : number + 2]:
                ring.rotate(-1)
                kept = ring[0].views(next_shard, next_chunk)
                arriving.append((ring[0], kept, next_shard.copy_chunk_to_device(
                    kept, next_chunk, self._copy_streams.to_device, ring[0].copies_to_host)))
            buffers, kept, arrival = arriving.popleft()
            arrival.wait_on_device()
            yield [kept]
            buffers.copies_to_host = [shard.copy_chunk_from_device(kept, part, self._copy_streams.to_host)]
        for buffers in ring:  # which are freed now
            for event in buffers.copies_to_host:
                event.wait_on_device()


class _DeviceChunkBuffers:
    """Device buffers for one chunk, one for each kind."""

    def __init__(self, device: torch.device, size: int) -> None:
        self._device, self._size = device, size
        self._buffers: dict[str, Tensor] = {}
        self.copies_to_host: Sequence[CopyEvent] = ()
        """Copies of the last chunk back to the host; the buffers are free once these are done."""

    def views(self, shard: StoredShard, chunk: slice) -> StateTensors:
        for kind in shard.kinds:
            if kind not in self._buffers:
                self._buffers[kind] = torch.empty(self._size, dtype=shard.dtype, device=self._device)
        return {kind: self._buffers[kind][: chunk.stop - chunk.start] for kind in shard.kinds}
