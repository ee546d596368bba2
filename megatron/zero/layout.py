"""Layout of flat buffers: where each parameter is in its bucket's buffer and shards. Pure arithmetic, no torch.

A *slot* is one parameter's place in a flat buffer. A *layout* is the list of slots of one bucket, cut into equal
shards, one per rank; the last one ends in padding. A *segment* is the part of one slot that lies in one shard.
Norms, checkpoint pieces and resharding are loops over `segments(rank)`. Slots are sorted by param group, so each
group is one contiguous range of every shard.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from mpu.split import Partition

# Slots and shards start at multiples of this many elements. Views are then aligned for vector loads and collectives,
# and sums over rows of this length (mpu/grads.py) do not depend on how a buffer is sharded.
ALIGNMENT = 128


@dataclass(frozen=True)
class Slot:
    """One parameter: its name, local shape, hyper-parameter group, tensor-parallel cut and place in the buffer."""

    name: str
    shape: tuple[int, ...]
    group: int = 0
    partition: Partition | None = None
    offset: int = 0

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @cached_property
    def stride(self) -> tuple[int, ...]:
        """Of the contiguous parameter."""
        return tuple(prod(self.shape[dim + 1 :]) for dim in range(len(self.shape)))

    @property
    def end(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True)
class Segment:
    """`count` elements from `slot_offset` of the slot are at `shard_offset` of the shard."""

    slot: Slot
    slot_offset: int
    shard_offset: int
    count: int

    @property
    def shard_range(self) -> slice:
        """Its elements in the shard."""
        return slice(self.shard_offset, self.shard_offset + self.count)


class FlatLayout:
    """The slots of one bucket in one flat buffer of `shards` equal shards."""

    def __init__(self, slots: Sequence[Slot], shards: int = 1) -> None:
        placed, offset = [], 0
        for slot in sorted(slots, key=lambda slot: slot.group):
            placed.append(replace(slot, offset=offset))
            offset += align(slot.numel)
        self.slots, self.shards = tuple(placed), shards
        used = self.slots[-1].end if self.slots else 0
        self.shard_numel = align(-(-used // shards))
        self.numel = self.shard_numel * shards
        # Equal for layouts that can use each other's buffers.
        self.buffer_key = self.numel, tuple((slot.offset, slot.shape) for slot in self.slots)

    def shard_slice(self, rank: int) -> slice:
        """Of the buffer: shard `rank`."""
        return slice(rank * self.shard_numel, (rank + 1) * self.shard_numel)

    def segments(self, rank: int, chunk: slice | None = None) -> Iterator[Segment]:
        """The segments of shard `rank`, in order; with `chunk`, of this slice of the shard."""
        start = rank * self.shard_numel
        first, last = (0, self.shard_numel) if chunk is None else (chunk.start, chunk.stop)
        for slot in self.slots:
            low, high = max(start + first, slot.offset), min(start + last, slot.end)
            if low < high:
                yield Segment(slot, low - slot.offset, low - start, high - low)

    def padding_ranges(self) -> Iterator[tuple[int, int]]:
        """The padding behind every slot, as (start, stop) in the buffer."""
        ends = [*(slot.offset for slot in self.slots[1:]), self.numel]
        yield from ((slot.end, end) for slot, end in zip(self.slots, ends) if slot.end < end)

    def group_range(self, rank: int, group: int) -> tuple[int, int]:
        """(start, stop) of a param group in shard `rank`: one contiguous range, maybe empty.

        Ranges begin and end at multiples of ALIGNMENT (padding belongs to the group before it). A vectorised kernel
        then treats every element alike, and a sharded update gives the same bits as an unsharded one.
        """
        low = next((slot.offset for slot in self.slots if slot.group >= group), self.numel)
        high = next((slot.offset for slot in self.slots if slot.group > group), self.numel)
        start, stop = rank * self.shard_numel, (rank + 1) * self.shard_numel
        low, high = max(low, start) - start, min(high, stop) - start
        return (low, high) if low < high else (0, 0)

    def slot_ranges(self, rank: int) -> Iterator[tuple[int, int, int]]:
        """(index of the slot, start, stop) of each segment of shard `rank`."""
        number = {slot.name: index for index, slot in enumerate(self.slots)}
        for segment in self.segments(rank):
            yield number[segment.slot.name], segment.shard_offset, segment.shard_offset + segment.count


def align(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT
