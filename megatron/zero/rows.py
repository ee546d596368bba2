"""Rows of matrices in groups, and the grids of these groups (optim/grid.py): what is rounded alike.

    Matrix     the part of a parameter that a tensor parallel rank has: its rows, and the group of each
    Strip      a few of its rows, or a part of one, in flat memory
    Survey     finds grids: walks over the numbers that are here, and combines what it finds over those who have others
    Rounded    how a matrix is rounded: its grid, the blend, the noise

Groups are runs of rows of the logical tensor. Extremes and sums of integers are exact in any order, each element is
then rounded by itself, and noise is drawn by its place in the logical tensor (mpu/draws.py): the result does not depend
on how a tensor is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from megatron.errors import ConfigError
from megatron.optim.grid import (MagnitudeUnit, Quantizer, binary_quantizer, quantize_to_levels, ternary_quantizer,
                                 ternary_threshold, uniform_quantizer)
from megatron.quantize import MIN_UNIFORM_BITS
from megatron.zero.layout import Segment, Slot
from mpu.collectives import Op
from mpu.draws import StridedSegments, UniformInitializer, strided_segments_of
from mpu.groups import Group

MAX_FP32_NUMEL = 1 << 22
"""Numbers that are in memory in fp32."""

RowIterator = Callable[[Mapping[str, "QuantizedMatrix"]], Iterator[tuple[Tensor, Tensor, "QuantizedMatrix"]]]
"""(numbers [rows, columns] in fp32, the group of each row among those of all matrices, their matrix) of these."""


@dataclass(frozen=True)
class QuantizedMatrix:
    """The part of a parameter that a tensor parallel rank has, as rows, and the groups they belong to."""

    slot: Slot
    columns: int
    groups: slice
    """Among those of the bucket."""
    group_numel: list[int]
    """Numbers of each, in the logical tensor."""
    group_of_row: Tensor
    """Counted from 0; one more than there are for padding."""
    blocks: StridedSegments
    is_tp_sharded: bool
    """Over tensor parallel ranks."""

    @staticmethod
    def of(slot: Slot, wanted: int, first: int, tp: Group, device: torch.device, is_table: bool) -> QuantizedMatrix:
        blocks = strided_segments_of(slot.shape, slot.partition, tp.rank, tp.size)
        rows, columns = slot.shape[0], prod(slot.shape[1:])
        cut_rows = slot.partition is not None and slot.partition.dim % len(slot.shape) == 0
        stride = 1 if slot.partition is None else slot.partition.stride
        if cut_rows:
            block, place = np.divmod(np.arange(rows), blocks.segment_length // columns)
            size = blocks.full_length // columns
            there = block * size + blocks.offset // columns + place
            is_padding = blocks.offset // columns + place >= size
            logical, width = stride * size, columns
        else:
            there, is_padding = np.arange(rows), np.zeros(rows, bool)
            logical, width = rows, columns * blocks.full_length // blocks.segment_length
        if logical % wanted and not (is_table and wanted <= logical):
            raise ConfigError(f"--quantize-groups {wanted} does not divide the {logical} rows of {slot.name}: give a "
                              "divisor of the rows of every matrix")
        each = -(-logical // wanted)
        count = -(-logical // each)
        members = [(min(logical, (group + 1) * each) - group * each) * width for group in range(count)]
        index = np.where(is_padding, count, there // each)
        return QuantizedMatrix(slot, columns, slice(first, first + count + 1), members,
                               torch.from_numpy(index).to(device), blocks, slot.partition is not None)


@dataclass(frozen=True)
class QuantRowBlock:
    """Rows of a matrix, or a part of one, in a part of a shard."""

    matrix: QuantizedMatrix
    row: int
    column: int
    rows: int
    width: int
    start: int
    """In the part."""

    def view_in(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.start + self.rows * self.width].view(self.rows, self.width)

    @property
    def group(self) -> Tensor:
        """Of each row."""
        return self.matrix.group_of_row[self.row : self.row + self.rows]

    def noise(self, key: int, device: torch.device) -> Tensor:
        out = torch.empty(self.rows * self.width, device=device)
        UniformInitializer(key, self.matrix.blocks)(out, self.row * self.matrix.columns + self.column)
        return out.view(self.rows, self.width)


@dataclass(frozen=True)
class QuantGroupStats:
    matrices: Mapping[str, QuantizedMatrix]
    iter_rows: RowIterator
    all_reduce: Callable[[Tensor, Op], Tensor]
    device: torch.device
    counts_replicated: bool = True
    """Of matrices that all tensor parallel ranks have whole, this one counts the numbers."""

    @property
    def group_count(self) -> int:
        return max((one.groups.stop for one in self.matrices.values()), default=0)

    def make_grids(self, bits: Mapping[str, int], *, symmetric: bool) -> dict[str, Quantizer]:
        """Of every matrix, by its name."""
        highest, lowest = self._extremes()
        few = {name: one for name, one in self.matrices.items() if bits[name] < MIN_UNIFORM_BITS}
        found: dict[str, Quantizer] = {name: uniform_quantizer(bits[name], highest[one.groups], lowest[one.groups],
                                                               symmetric=symmetric)
                                       for name, one in self.matrices.items() if name not in few}
        return {**found, **(self._low_bit_grids(few, torch.maximum(highest, -lowest), bits) if few else {})}

    def _extremes(self) -> tuple[Tensor, Tensor]:
        """The largest and the smallest number of each group."""
        found = torch.full((2, self.group_count), -torch.inf, device=self.device)
        for x, group, _ in self.iter_rows(self.matrices):
            found[0].scatter_reduce_(0, group, x.amax(1), "amax")
            found[1].scatter_reduce_(0, group, -x.amin(1), "amax")
        found = self.all_reduce(found, "max")
        for one in self.matrices.values():
            found[:, one.groups.stop - 1] = 0  # padding
        return found[0], -found[1]

    def _low_bit_grids(self, few: Mapping[str, QuantizedMatrix], largest: Tensor,
                       bits: Mapping[str, int]) -> dict[str, Quantizer]:
        members = torch.ones(self.group_count, dtype=torch.int64)
        for one in few.values():
            members[one.groups.start : one.groups.stop - 1] = torch.tensor(one.group_numel)
        members = members.to(self.device)
        unit = MagnitudeUnit.for_groups(largest, members)
        mean = unit.mean(self._group_sums(few, unit.to_units), members)
        ternary = {name: one for name, one in few.items() if bits[name] == 2}
        binary: dict[str, Quantizer] = {name: binary_quantizer(mean[one.groups]) for name, one in few.items()
                                        if name not in ternary}
        return {**binary, **(self._ternary_grids(ternary, unit, ternary_threshold(mean)) if ternary else {})}

    def _ternary_grids(self, matrices: Mapping[str, QuantizedMatrix], unit: MagnitudeUnit,
                       threshold: Tensor) -> dict[str, Quantizer]:
        def beyond(x: Tensor, group: Tensor) -> Tensor:
            return x.abs() > threshold[group].unsqueeze(1)

        sums = self._group_sums(matrices, lambda x, group: unit.to_units(x, group).mul_(beyond(x, group)))
        mean = unit.mean(sums, self._group_sums(matrices, lambda x, group: beyond(x, group).long()))
        return {name: ternary_quantizer(threshold[one.groups], mean[one.groups]) for name, one in matrices.items()}

    def _group_sums(self, matrices: Mapping[str, QuantizedMatrix], count: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        found = torch.zeros(self.group_count, dtype=torch.int64, device=self.device)
        for x, group, matrix in self.iter_rows(matrices):
            if matrix.is_tp_sharded or self.counts_replicated:
                found.index_add_(0, group, count(x, group).sum(1))
        return self.all_reduce(found, "sum")


@dataclass(frozen=True)
class MatrixRounding:
    """How a matrix is rounded."""

    grid: Quantizer
    blend: float
    key: int | None
    """Of the noise, where there is any."""

    def round_values(self, x: Tensor, strip: QuantRowBlock) -> Tensor:
        rounded = quantize_to_levels(self.grid, x, strip.group, self._noise(x, strip))
        return rounded.mul_(1 - self.blend).add_(x * self.blend) if self.blend else rounded

    def levels(self, x: Tensor, strip: QuantRowBlock) -> Tensor:
        """Of the grid, as if there were no blend."""
        return self.grid.levels(x, strip.group, self._noise(x, strip))

    def _noise(self, x: Tensor, strip: QuantRowBlock) -> Tensor | None:
        return None if self.key is None else strip.noise(self.key, x.device)


def row_blocks_of(matrix: QuantizedMatrix, segment: Segment, start: int) -> Iterator[QuantRowBlock]:
    """A part of a row, whole rows AT_A_TIME, a part of a row."""
    at, end = segment.slot_offset, segment.slot_offset + segment.count
    while at < end:
        row, column = divmod(at, matrix.columns)
        if column or end - at < matrix.columns:
            rows, width = 1, min(matrix.columns - column, end - at)
        else:
            rows, width = max(1, min((end - at) // matrix.columns, MAX_FP32_NUMEL // matrix.columns)), matrix.columns
        yield QuantRowBlock(matrix, row, column, rows, width, start)
        at, start = at + rows * width, start + rows * width
