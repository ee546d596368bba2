"""Offload to NVMe (ZeRO-Infinity): one swap file for each bucket, behind a few staging buffers in host memory.

A chunk holds as many elements of each kind as fit a buffer; in the file each kind of a chunk is one tile. A set of
staging buffers (one buffer for each kind) serves one chunk at a time. A released set keeps its chunk until another
chunk needs the buffers, so a chunk that was used last is not read again; `prefetch` acquires a set, starts the read and
releases it. A step reads into one set, computes in a second and writes from a third. Tiles that were never written read
as zeros.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron.errors import ConfigError
from megatron.metrics.step_metrics import NvmeStats
from megatron.zero.offload.chunk_sizes import largest_chunk, split_into_chunks
from megatron.zero.offload.copy_streams import CopyEvent, CopyStream
from megatron.zero.offload.direct_io import page_aligned_bytes
from megatron.zero.offload.storage import (WEIGHT, ChunkIterator, DeviceShard, HostShard, Location, StateTensors,
                                           StorageBackend, StoredShard)
from megatron.zero.offload.swap_drive import AsyncSwapFile, SwapDrive, SwapRequest


@dataclass(frozen=True, kw_only=True)
class NvmeSettings:
    chunk_numel: int  # elements of a chunk, at most; 0 for the whole shard
    # Elements of a chunk that a step writes at a time; chunks do not cross its boundaries.
    write_chunk_numel: int | None = None
    buffer_sets: int  # staging buffer sets on the host, at most; at least one more than a step uses at a time
    dtype: torch.dtype = torch.float32
    host_numel: int = 0  # elements that stay in host memory: the shards that are allocated first
    pinned: bool = False
    device_is_separate: bool = False  # the device is an accelerator, not the host
    pipeline_read: bool = True
    pipeline_write: bool = True


@dataclass(eq=False)
class _StagingBuffers:
    """Host buffers for one chunk, one for each kind."""

    buffers: Mapping[str, Tensor]
    # Kinds that need no read: the buffer equals the tile on disk, or will when pending writes are done.
    valid_kinds: set[str] = field(default_factory=set)
    pending_io: list[SwapRequest] = field(default_factory=list)
    pending_copy: CopyEvent | None = None  # copy from the buffers to the device

    def wait_for_copy(self) -> None:
        """Wait until no copy to the device reads from the buffers."""
        if self.pending_copy is not None:
            self.pending_copy.wait_on_host()
            self.pending_copy = None


class NvmeShard(StoredShard):
    location = Location.NVME
    is_in_memory = False

    def __init__(self, storage: NvmeStorage, file: AsyncSwapFile, numel: int, chunks: Sequence[slice]) -> None:
        super().__init__(numel, storage.settings.dtype, chunks)
        self.file, self._storage = file, storage
        self._chunk_index = {part.start: number for number, part in enumerate(chunks)}

    @contextmanager
    def open(self, chunk: slice, kinds: Sequence[str] | None = None, *, reads: bool = True,
             writes: bool = False) -> Iterator[StateTensors]:
        kinds = self.kinds if kinds is None else kinds
        with self._storage.staging_buffers(self.chunk_key(chunk)) as buffers:
            if not reads:
                buffers.valid_kinds.update(kinds)
            kept = self.start_read(chunk, kinds, buffers)
            self._storage.wait_for_io(buffers)
            yield kept
            if writes:
                self.start_write(chunk, kinds, buffers)

    def prefetch(self) -> None:
        for part in self.chunks[: self._storage.settings.buffer_sets - 1]:
            if self.chunk_key(part) not in self._storage.released_buffers:
                with self._storage.staging_buffers(self.chunk_key(part)) as buffers:
                    self.start_read(part, self.kinds, buffers)

    def copy_to_device(self, out: Tensor, stream: CopyStream) -> CopyEvent:
        for part in self.chunks:
            with self._storage.staging_buffers(self.chunk_key(part)) as buffers:
                kept = self.start_read(part, [WEIGHT], buffers)
                self._storage.wait_for_io(buffers)
                event = buffers.pending_copy = stream.copy(out[part], kept[WEIGHT])
        return event

    def chunk_key(self, chunk: slice) -> tuple[int, int]:
        return id(self), chunk.start

    def start_read(self, chunk: slice, kinds: Sequence[str], buffers: _StagingBuffers) -> StateTensors:
        """Start to read a chunk; the tensors are valid after `NvmeStorage.wait_for_io`."""
        for kind in kinds:
            if kind in buffers.valid_kinds:
                continue
            if self.file.is_written(tile := self._tile_index(chunk, kind)):
                buffers.pending_io.append(self.file.read(tile, buffers.buffers[kind]))
            else:
                buffers.buffers[kind].zero_()
            buffers.valid_kinds.add(kind)
        return {kind: buffers.buffers[kind].view(self.dtype)[: chunk.stop - chunk.start] for kind in kinds}

    def start_write(self, chunk: slice, kinds: Iterable[str], buffers: _StagingBuffers) -> None:
        for kind in kinds:
            buffers.pending_io.append(self.file.write(self._tile_index(chunk, kind), buffers.buffers[kind]))

    def _tile_index(self, chunk: slice, kind: str) -> int:
        return self._chunk_index[chunk.start] * len(self._storage.kinds) + self._storage.kinds.index(kind)


class NvmeStorage(StorageBackend):
    """NVMe storage of one engine on one rank."""

    location = Location.NVME

    def __init__(self, drive: SwapDrive, name: str, states: Sequence[str], settings: NvmeSettings) -> None:
        self.kinds, self.settings = (WEIGHT, *states), settings
        self._drive, self._name = drive, name
        self._files: list[AsyncSwapFile] = []
        self._host_shards: list[HostShard] = []
        # By the chunk in them or being read into them, least recently released first.
        self.released_buffers: dict[tuple[int, int], _StagingBuffers] = {}
        # Chunks whose buffers are acquired. After an error their buffers are dropped and replaced, not reused: an
        # interrupt may have left a read into them that is not recorded in `pending_io`.
        self._chunks_in_use: set[tuple[int, int]] = set()
        self.update_location = Location.HOST if settings.device_is_separate else Location.DEVICE
        self._is_closed = False
        self._wait_seconds = 0.0
        self._buffer_bytes = 0
        self._host_numel = 0

    def allocate_shard(self, name: str, numel: int) -> StoredShard:
        if self._host_numel + numel <= self.settings.host_numel:
            self._host_numel += numel
            if self.settings.device_is_separate:
                self._host_shards.append(HostShard(numel, self.settings.dtype, [slice(0, numel)],
                                                   pinned=self.settings.pinned))
                return self._host_shards[-1]
            return DeviceShard(torch.zeros(numel, dtype=self.settings.dtype))
        parts = split_into_chunks(numel, self.settings.chunk_numel or numel, self.settings.write_chunk_numel)
        tiles = [(part.stop - part.start) * self.settings.dtype.itemsize for part in parts for _ in self.kinds]
        file = AsyncSwapFile(self._drive, f"{self._name}-{len(self._files)}-{name}", tiles)
        self._files.append(file)
        self._buffer_bytes = max(self._buffer_bytes, largest_chunk(parts) * self.settings.dtype.itemsize)
        return NvmeShard(self, file, numel, parts)

    @property
    def has_nvme_shards(self) -> bool:
        """At least one shard is on NVMe (not all are on the host)."""
        return bool(self._files)

    @property
    def stats(self) -> NvmeStats:
        """Since the engine was created."""
        return NvmeStats(self._wait_seconds, sum(file.read_bytes for file in self._files),
                         sum(file.written_bytes for file in self._files))

    def iter_chunks(self, steps: Iterable[Sequence[tuple[StoredShard, slice]]]) -> ChunkIterator:
        order = [(shard, part) for ((shard, part),) in steps if isinstance(shard, NvmeShard)]
        acquired: deque[_StagingBuffers] = deque()
        try:
            for number, (shard, part) in enumerate(order):
                shard.file.raise_if_lost()  # fail early: an earlier write was lost
                # with pipeline_read, one chunk ahead of the one that is yielded
                for next_shard, next_chunk in order[number + len(acquired) : number + 1 + self.settings.pipeline_read]:
                    acquired.append(self._acquire_buffers(next_shard.chunk_key(next_chunk)))
                    next_shard.start_read(next_chunk, next_shard.kinds, acquired[-1])
                self.wait_for_io(acquired[0])
                yield [shard.start_read(part, shard.kinds, acquired[0])]
                shard.start_write(part, shard.kinds, acquired[0])
                if not self.settings.pipeline_write:
                    self.wait_for_io(acquired[0])
                self._release_buffers(shard.chunk_key(part), acquired.popleft())
        except BaseException:
            self._chunks_in_use.difference_update(shard.chunk_key(part) for shard, part in order)
            raise

    @contextmanager
    def staging_buffers(self, key: tuple[int, int]) -> Iterator[_StagingBuffers]:
        buffers = None
        try:
            buffers = self._acquire_buffers(key)
            yield buffers
            self._release_buffers(key, buffers)
        except BaseException:
            if buffers is not None:
                buffers.wait_for_copy()
            self._chunks_in_use.discard(key)  # changes in the buffers are discarded
            raise

    def wait_for_io(self, buffers: _StagingBuffers) -> None:
        """Wait for the buffers' pending I/O. After an error they are invalid and the error is raised."""
        if (error := self._drain_io(buffers)) is not None:
            raise error

    def _drain_io(self, buffers: _StagingBuffers) -> BaseException | None:
        """As `wait_for_io`, but return the error. A caller that discards the content may ignore it: a tile whose write
        failed raises by itself until it is written again."""
        first: BaseException | None = None
        buffers.wait_for_copy()
        begin = time.perf_counter()
        while buffers.pending_io:
            error = buffers.pending_io[-1].error()
            buffers.pending_io.pop()
            if error is not None:
                buffers.valid_kinds.clear()
                first = first or error
        self._wait_seconds += time.perf_counter() - begin
        return first

    def _acquire_buffers(self, key: tuple[int, int]) -> _StagingBuffers:
        """The buffers that hold the chunk, or others that are assigned to it. Raises ConfigError after `close`."""
        self._drive.check_same_process()
        if self._is_closed:
            raise ConfigError("this engine's state was on a drive, and went with engine.destroy(): save before it")
        assert key not in self._chunks_in_use, "two sets of one part would know nothing of each other's changes"
        found = self.released_buffers.pop(key, None)
        if found is None and len(self.released_buffers) + len(self._chunks_in_use) >= self.settings.buffer_sets:
            found = self.released_buffers.pop(next(iter(self.released_buffers)))
            self._drain_io(found)
            found.valid_kinds.clear()
            if len(found.buffers[WEIGHT]) < self._buffer_bytes:  # the largest chunk was allocated after these buffers
                found = None
        if found is None:
            found = _StagingBuffers({kind: page_aligned_bytes(self._buffer_bytes, pinned=self.settings.pinned)
                                     for kind in self.kinds})
        self._drain_io(found)
        self._chunks_in_use.add(key)
        return found

    def _release_buffers(self, key: tuple[int, int], buffers: _StagingBuffers) -> None:
        """The buffers keep their chunk, which equals the disk's once pending writes are done."""
        self._chunks_in_use.discard(key)
        self.released_buffers[key] = buffers

    def wait_for_writes(self) -> None:
        for buffers in self.released_buffers.values():
            self._drain_io(buffers)
        for shard in self._host_shards:
            shard.wait_for_pending()
        for file in self._files:
            file.wait_for_requests()

    def close(self) -> None:
        self._is_closed = True
        for buffers in self.released_buffers.values():
            buffers.wait_for_copy()
        self.released_buffers.clear()
        self._drive.close()
