"""The home on the host, beside the device: flat page-locked memory, updated where it is a part at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor

from megatron.zero.homes.ferry import CopyEvent, CopyStream
from megatron.zero.homes.memory import page_aligned_zeros
from megatron.zero.homes.parts import split_into_chunks
from megatron.zero.homes.shelf import WEIGHT, ChunkIterator, StateTensors, StoredShard


@final
class HostShard(StoredShard):
    """Opened, it gives views. Whoever looks waits for what is on its way from here or to here."""

    def __init__(self, numel: int, dtype: torch.dtype, chunks: Sequence[slice], *, pinned: bool) -> None:
        super().__init__(numel, dtype)
        self._chunks, self._pinned = chunks, pinned
        self._tensors = {WEIGHT: page_aligned_zeros(numel, dtype, pinned=pinned)}
        self._pending_copies: dict[tuple[CopyStream, int, int], CopyEvent] = {}
        """The last copy by each lane of each stretch that was copied."""
        self._pending_update: Future[None] | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    @property
    def chunks(self) -> Sequence[slice]:
        return self._chunks

    def add_kinds(self, kinds: Sequence[str]) -> None:
        self._tensors |= {kind: page_aligned_zeros(self.numel, self.dtype, pinned=self._pinned) for kind in kinds}

    @contextmanager
    def open(self, chunk: slice, kinds: Sequence[str] | None = None, *, reads: bool = True,
             writes: bool = False) -> Iterator[StateTensors]:
        yield {kind: self.memory_view(kind)[chunk] for kind in self.kinds if kinds is None or kind in kinds}

    def memory_view(self, kind: str) -> Tensor:
        self.wait_for_pending()
        return self._tensors[kind]

    def lend_chunk(self, chunk: slice) -> StateTensors:
        """For somebody whom others `wait_for`."""
        self.wait_for_pending()
        return {kind: everything[chunk] for kind, everything in self._tensors.items()}

    def set_pending_update(self, update: Future[None]) -> None:
        self._pending_update = update

    def wait_for_pending(self) -> None:
        if self._pending_update is not None:
            wait([self._pending_update])
            self._pending_update = None
        for mark in self._pending_copies.values():
            mark.wait_on_host()
        self._pending_copies.clear()

    def copy_to_device(self, out: Tensor, stream: CopyStream) -> CopyEvent:
        return self.copy_chunk_to_device({WEIGHT: out}, slice(0, self.numel), stream)

    def copy_chunk_to_device(self, out: StateTensors, chunk: slice, stream: CopyStream,
                             after: Sequence[CopyEvent] = ()) -> CopyEvent:
        """Of the kinds of `out`; after what came there, too."""
        after = [*after, *self._overlapping_copies(chunk, stream)]
        for kind, target in out.items():
            mark = stream.copy(target, self._tensors[kind][chunk], after)
        return self._record_copy(chunk, stream, mark)

    def copy_chunk_from_device(self, values: StateTensors, chunk: slice, stream: CopyStream) -> CopyEvent:
        """After what left from there."""
        after = self._overlapping_copies(chunk, stream)
        for kind, source in values.items():
            mark = stream.copy(self._tensors[kind][chunk], source, after)
        return self._record_copy(chunk, stream, mark)

    def _record_copy(self, chunk: slice, stream: CopyStream, event: CopyEvent) -> CopyEvent:
        self._pending_copies[stream, chunk.start, chunk.stop] = event
        return event

    def _overlapping_copies(self, chunk: slice, stream: CopyStream) -> list[CopyEvent]:
        return [mark for (other, start, stop), mark in self._pending_copies.items()
                if other is not stream and start < chunk.stop and chunk.start < stop]


class HostStorage:
    is_offloaded = updates_on_host = True

    def __init__(self, dtype: torch.dtype, chunk_numel: int, *, pinned: bool) -> None:
        """`part` is how many numbers a step takes at a time; 0: all of a shelf."""
        self._dtype, self._chunk_numel, self._pinned = dtype, chunk_numel, pinned
        self._shards: list[HostShard] = []

    def allocate_shard(self, name: str, numel: int) -> HostShard:
        shelf = HostShard(numel,
                          self._dtype,
                          split_into_chunks(numel, self._chunk_numel or max(1, numel)),
                          pinned=self._pinned)
        self._shards.append(shelf)
        return shelf

    def iter_chunks(self, steps: Iterable[Sequence[tuple[StoredShard, slice]]]) -> ChunkIterator:
        for ((shelf, part),) in steps:
            with shelf.open(part) as kept:
                yield [kept]

    def wait_for_writes(self) -> None:
        for shelf in self._shards:
            shelf.wait_for_pending()

    def close(self) -> None:
        self.wait_for_writes()
