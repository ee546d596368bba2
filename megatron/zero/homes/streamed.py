"""A home on the host whose parts come to the device for a step, and go back: the arithmetic stays on the device.

Three parts are on the device at a time: one comes, one is used, one goes back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import final

import torch
from torch import Tensor

from megatron.zero.homes.ferry import CopyEvent, CopyStreams
from megatron.zero.homes.host import HostShard, HostStorage
from megatron.zero.homes.parts import STEP_BUFFER_SETS
from megatron.zero.homes.shelf import ChunkIterator, StateTensors, StoredShard


@final
class StreamingHostStorage:
    is_offloaded, updates_on_host = True, False

    def __init__(self, host: HostStorage, copy_streams: CopyStreams, device: torch.device) -> None:
        self._host, self._copy_streams, self._device = host, copy_streams, device

    def allocate_shard(self, name: str, numel: int) -> StoredShard:
        return self._host.allocate_shard(name, numel)

    def iter_chunks(self, steps: Iterable[Sequence[tuple[StoredShard, slice]]]) -> ChunkIterator:
        order = [(shelf, part) for ((shelf, part),) in steps if isinstance(shelf, HostShard)]
        sets = _DeviceBufferRing(self._device, max((part.stop - part.start for _, part in order), default=0))
        arriving: deque[tuple[_DeviceChunkBuffers, StateTensors, CopyEvent]] = deque()
        for number, (shelf, part) in enumerate(order):
            for next_shard, next_chunk in order[number + len(arriving) : number + 2]:
                arriving.append(self._copy_chunk_to_device(next_shard, next_chunk, sets.next()))
            buffers, kept, arrival = arriving.popleft()
            arrival.wait_on_device()
            yield [kept]
            buffers.copies_to_host = [shelf.copy_chunk_from_device(kept, part, self._copy_streams.to_host)]
        sets.wait_on_device()

    def _copy_chunk_to_device(self, shard: HostShard, chunk: slice,
                              into: _DeviceChunkBuffers) -> tuple[_DeviceChunkBuffers, StateTensors, CopyEvent]:
        kept = into.views(shard, chunk)
        return into, kept, shard.copy_chunk_to_device(kept, chunk, self._copy_streams.to_device, into.copies_to_host)

    def wait_for_writes(self) -> None:
        self._host.wait_for_writes()

    def close(self) -> None:
        self._host.close()


class _DeviceChunkBuffers:
    """A buffer on the device for each kind."""

    def __init__(self, device: torch.device, size: int) -> None:
        self._device, self._size = device, size
        self._buffers: dict[str, Tensor] = {}
        self.copies_to_host: Sequence[CopyEvent] = ()
        """What was in it has gone back then."""

    def views(self, shard: StoredShard, chunk: slice) -> StateTensors:
        for kind in shard.kinds:
            if kind not in self._buffers:
                self._buffers[kind] = torch.empty(self._size, dtype=shard.dtype, device=self._device)
        return {kind: self._buffers[kind][: chunk.stop - chunk.start] for kind in shard.kinds}


class _DeviceBufferRing:
    """In turns."""

    def __init__(self, device: torch.device, size: int) -> None:
        self._ring = deque(_DeviceChunkBuffers(device, size) for _ in range(STEP_BUFFER_SETS))

    def wait_on_device(self) -> None:
        """They may be freed."""
        for buffers in self._ring:
            for mark in buffers.copies_to_host:
                mark.wait_on_device()

    def next(self) -> _DeviceChunkBuffers:
        self._ring.rotate(-1)
        return self._ring[0]
