"""A run of a flat parameter as rectangles of the parameter: what torch.distributed.checkpoint stores and reads.

A run begins and ends in the middle of a row, a plane, and so on: of n dimensions it has 2n - 1 rectangles at most.
`CheckpointableTensor` is torch's protocol for a tensor that a rank has a part of; what is written so is read by any number of
ranks, by torch's `fully_shard`, and as whole tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:  # torch.distributed.checkpoint takes half a second to import
    from torch.distributed.checkpoint import ChunkStorageMetadata
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


class TensorBox(NamedTuple):
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    """Of its elements, which follow each other, in the run."""

    def view_of(self, segment: Tensor) -> Tensor:
        return segment[self.start : self.start + prod(self.sizes)].view(self.sizes)


def split_into_boxes(shape: Sequence[int], start: int, count: int) -> Iterator[TensorBox]:
    """Of the elements `start` to `start + count` of a flat tensor of that shape, in order."""
    if not count:
        return
    if len(shape) <= 1:
        yield TensorBox((start,), (count,), 0) if shape else TensorBox((), (), 0)
        return
    row, done = prod(shape[1:]), 0
    while done < count:
        number, within = divmod(start + done, row)
        rows = (count - done) // row if not within else 0
        if rows:
            yield TensorBox((number, *(0 for _ in shape[1:])), (rows, *shape[1:]), done)
            done += rows * row
        else:
            part = min(count - done, row - within)
            for inner in split_into_boxes(shape[1:], within, part):
                yield TensorBox((number, *inner.offsets), (1, *inner.sizes), done + inner.start)
            done += part


class CheckpointableTensor:
    """The methods that torch.distributed.checkpoint looks for."""

    def _local_boxes(self) -> tuple[Tensor, list[TensorBox], torch.Size]:
        """This rank's elements, what they are of the whole, and its size."""
        raise NotImplementedError

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint import ChunkStorageMetadata
        return [ChunkStorageMetadata(torch.Size(one.offsets), torch.Size(one.sizes)) for one in self._local_boxes()[1]]

    def __create_write_items__(self, name: str, part: Tensor) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
        run, _, whole = self._local_boxes()
        return [WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=TensorWriteData(
            chunk, TensorProperties.create_from_tensor(run), whole)) for chunk in self.__create_chunk_list__()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        run, found, _ = self._local_boxes()
        return next(one.view_of(run) for one in found if one.offsets == tuple(index.offset or ()))
