"""Index arithmetic for resharding: local element <-> logical element under tensor parallelism, and element ->
data-parallel shard.

A *logical* tensor is what one process without tensor parallelism or padding would hold. Cut along `dim` with stride s
over tp ranks it is a row of equal blocks, one for each index of the dimensions before `dim` and each of the s parts.
Flattened, rank r holds elements [r * local, (r + 1) * local) of every block, so a cut is two numbers (`block_lengths`).
Padding is at the end of each block, on the last ranks.

    qkv weight [3 * 4, h], stride 3, tp 2:   block q   block k   block v      local = 2 * h
                                             0 0 1 1   0 0 1 1   0 0 1 1      logical = 4 * h   (digits: owner of a row)

A rank's local tensors lie in a flat buffer, cut into equal shards, one per data-parallel rank (`DPSharding`). No torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

from mpu.split import Partition


@dataclass(frozen=True)
class TensorSegment:
    """`count` elements that are contiguous in both the local tensor of `tp_rank` and the logical tensor."""

    tp_rank: int
    local_start: int
    logical_start: int
    count: int


@dataclass(frozen=True)
class TPSharding:
    """How one tensor is split over tensor-parallel ranks: mpu's Partition with the local shape and the number of ranks.
    """

    local_shape: tuple[int, ...]
    dim: int | None  # None: replicated on every rank (stride is 1, size None, tp_size 1)
    stride: int
    size: int | None  # unpadded logical length along `dim`; None without padding
    tp_size: int

    @property
    def logical_shape(self) -> tuple[int, ...]:
        """The unpadded logical shape."""
        if self.dim is None:
            return self.local_shape
        length = self.local_shape[self.dim] * self.tp_size if self.size is None else self.size
        return self.local_shape[:self.dim] + (length,) + self.local_shape[self.dim + 1:]

    @cached_property
    def block_lengths(self) -> tuple[int, int]:
        """Elements of one block: on each rank, and of the logical block."""
        if self.dim is None:
            return prod(self.local_shape), prod(self.local_shape)
        inner = prod(self.local_shape[self.dim + 1:])
        local = self.local_shape[self.dim] // self.stride * inner
        return local, local * self.tp_size if self.size is None else self.size * inner

    def to_logical(self, tp_rank: int, start: int, stop: int) -> Iterator[TensorSegment]:
        """Segments of [start, stop) of rank `tp_rank`'s flattened local tensor, in order; padding is in no segment."""
        local, logical = self.block_lengths
        if local == 0 or logical == 0:
            return
        for block in range(start // local, -(-stop // local)):
            low, high = max(start, block * local), min(stop, (block + 1) * local)
            shift = tp_rank * local - block * local  # from the local tensor to the logical block
            first, last = low + shift, min(high + shift, logical)  # beyond `logical` is padding
            if first < last:
                yield TensorSegment(tp_rank, low, block * logical + first, last - first)

    def to_local(self, start: int, stop: int) -> Iterator[TensorSegment]:
        """Segments of [start, stop) of the flattened logical tensor, in order, with the ranks that hold them."""
        local, logical = self.block_lengths
        while start < stop:
            block, within = divmod(start, logical)
            tp_rank, beyond = divmod(within, local)
            # To the end of the request, of the block, or of this rank's part of it.
            count = min(stop - start, logical - within, local - beyond)
            yield TensorSegment(tp_rank, block * local + beyond, start, count)
            start += count

    @property
    def can_exist(self) -> bool:
        if self.dim is None:
            return (self.stride, self.size, self.tp_size) == (1, None, 1)
        return self.tp_size >= 1 and self.dim < len(self.local_shape) and self.stride >= 1 \
            and self.local_shape[self.dim] % self.stride == 0 \
            and (self.size is None or self.stride == 1 and self.size <= self.local_shape[self.dim] * self.tp_size)


@dataclass(frozen=True)
class TPSlice:
    """What one tensor-parallel rank holds of a tensor; by default the whole of it."""

    shape: tuple[int, ...]  # local (tensor-parallel) shape
    partition: Partition | None = None
    tp_rank: int = 0
    tp_size: int = 1

    @property
    def sharding(self) -> TPSharding:
        """The same for all ranks of the tensor."""
        shape, partition = tuple(self.shape), self.partition
        if partition is None:
            return TPSharding(shape, None, 1, None, 1)
        return TPSharding(shape, partition.dim % len(shape), partition.stride, partition.size, self.tp_size)

    @property
    def stored_rank(self) -> int:
        """The rank under which a checkpoint holds it: replicated tensors are stored once."""
        return 0 if self.partition is None else self.tp_rank


@dataclass(frozen=True)
class DPSharding:
    """Position of a flattened local tensor in a flat buffer that is split into shards of `shard_size` elements."""

    start: int
    shard_size: int

    def locate(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """Elements [start, stop) in order, as (shard, offset of its piece, start within the piece, count)."""
        while start < stop:
            shard = (self.start + start) // self.shard_size
            offset = max(shard * self.shard_size - self.start, 0)
            count = min(stop, (shard + 1) * self.shard_size - self.start) - start
            yield shard, offset, start - offset, count
            start += count
