"""MoQ, quantization in training: parameters are rounded to fewer and fewer bits when masters are copied to them.

    MoQState          bits and periods of each block; each applied step advances it
    BucketRounding    rounds this rank's shard of one bucket before the all-gather
    QuantizedMatrix   a parameter as rows in quantization groups; QuantRowBlock: some of its rows in flat memory
    QuantGroupStats   extremes and sums of each group, combined over the ranks that hold other parts

Extremes and integer sums are exact in any order and noise depends on an element's place in the logical tensor, so
the rounded weights are bit-equal at every stage and tensor parallel size. The schedule is pure arithmetic elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megatron.bit_schedule import MIN_UNIFORM_BITS, BitSchedule, BitState, period_factor, relative_eigenvalues
from megatron.config.model_config import QuantizeConfig
from megatron.errors import ConfigError
from megatron.optim.quantizer import (TERNARY_THRESHOLD, MagnitudeUnit, Quantizer, SignQuantizer, quantize_to_levels,
                                      uniform_quantizer)
from megatron.zero.bucket import FlatBucket
from megatron.zero.layout import Segment, Slot
from megatron.zero.offload.storage import HOST, WEIGHT
from mpu.collectives import Op, all_reduce
from mpu.groups import Group, Groups
from mpu.layers import VocabParallelEmbedding
from mpu.weight_init import StridedSegments, fill_uniform, rng_key, strided_segments_of

MAX_FP32_NUMEL = 1 << 22  # elements that are in memory in fp32 at a time

# Yields (values [rows, columns] in fp32, group of each row, matrix) for the given matrices. Groups are numbered over
# all matrices of the bucket.
RowIterator = Callable[[Mapping[str, "QuantizedMatrix"]], Iterator[tuple[Tensor, Tensor, "QuantizedMatrix"]]]


@dataclass(frozen=True)
class QuantizedMatrix:
    """This tensor parallel rank's slice of a parameter, as a matrix whose rows belong to quantization groups."""

    slot: Slot
    columns: int
    groups: slice  # its groups among those of the bucket; the last one is for padding rows
    group_numel: list[int]  # elements of each group in the logical tensor
    group_of_row: Tensor  # [rows], from 0; padding rows have the index len(group_numel)
    blocks: StridedSegments
    is_tp_sharded: bool

    @staticmethod
    def of(slot: Slot, wanted: int, first: int, tp: Group, device: torch.device, is_table: bool) -> QuantizedMatrix:
        blocks = strided_segments_of(slot.shape, slot.partition, tp.rank, tp.size)
        rows, columns = slot.shape[0], prod(slot.shape[1:])
        cut_rows = slot.partition is not None and slot.partition.dim % len(slot.shape) == 0
        stride = 1 if slot.partition is None else slot.partition.stride
        if cut_rows:
            block, place = np.divmod(np.arange(rows), blocks.segment_length // columns)
            size = blocks.full_length // columns
            logical_row = block * size + blocks.offset // columns + place
            is_padding = blocks.offset // columns + place >= size
            logical, width = stride * size, columns
        else:
            logical_row, is_padding = np.arange(rows), np.zeros(rows, bool)
            logical, width = rows, columns * blocks.full_length // blocks.segment_length
        if logical % wanted and not (is_table and wanted <= logical):
            raise ConfigError(f"--quantize-groups {wanted} does not divide the {logical} rows of {slot.name}: give a "
                              "divisor of the rows of every matrix")
        each = -(-logical // wanted)
        count = -(-logical // each)
        group_numel = [(min(logical, (group + 1) * each) - group * each) * width for group in range(count)]
        index = np.where(is_padding, count, logical_row // each)
        return QuantizedMatrix(slot, columns, slice(first, first + count + 1), group_numel,
                               torch.from_numpy(index).to(device), blocks, slot.partition is not None)


@dataclass(frozen=True)
class QuantRowBlock:
    """Full rows of a matrix, or a part of one row, in a chunk of a shard."""

    matrix: QuantizedMatrix
    row: int
    column: int
    rows: int
    width: int
    start: int  # offset in the chunk

    def view_in(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.start + self.rows * self.width].view(self.rows, self.width)

    @property
    def group(self) -> Tensor:
        """[rows]: the group of each row, counted within the matrix."""
        return self.matrix.group_of_row[self.row : self.row + self.rows]

    def noise(self, key: int | None, device: torch.device) -> Tensor | None:
        if key is None:
            return None
        out = torch.empty(self.rows * self.width, device=device)
        fill_uniform(out, key, self.row * self.matrix.columns + self.column, self.matrix.blocks)
        return out.view(self.rows, self.width)


@dataclass(frozen=True)
class QuantGroupStats:
    matrices: Mapping[str, QuantizedMatrix]
    iter_rows: RowIterator
    all_reduce: Callable[[Tensor, Op], Tensor]
    device: torch.device
    counts_replicated: bool = True  # this rank counts matrices that are replicated over tensor parallel ranks

    @property
    def group_count(self) -> int:
        return max((one.groups.stop for one in self.matrices.values()), default=0)

    def make_grids(self, bits: Mapping[str, int], *, symmetric: bool) -> dict[str, Quantizer]:
        """Name -> quantizer of each matrix, for its number of bits. Collective."""
        extremes = torch.full((2, self.group_count), -torch.inf, device=self.device)  # largest, -smallest
        for x, group, _ in self.iter_rows(self.matrices):
            extremes[0].scatter_reduce_(0, group, x.amax(1), "amax")
            extremes[1].scatter_reduce_(0, group, -x.amin(1), "amax")
        extremes = self.all_reduce(extremes, "max")
        for one in self.matrices.values():
            extremes[:, one.groups.stop - 1] = 0  # padding
        highest, lowest = extremes[0], -extremes[1]
        low_bit = {name: one for name, one in self.matrices.items() if bits[name] < MIN_UNIFORM_BITS}
        grids: dict[str, Quantizer] = {name: uniform_quantizer(bits[name], highest[one.groups], lowest[one.groups],
                                                               symmetric=symmetric)
                                       for name, one in self.matrices.items() if name not in low_bit}
        return {**grids, **(self._low_bit_grids(low_bit, torch.maximum(highest, -lowest), bits) if low_bit else {})}

    def _low_bit_grids(self, matrices: Mapping[str, QuantizedMatrix], largest: Tensor,
                       bits: Mapping[str, int]) -> dict[str, Quantizer]:
        """Binary and ternary quantizers. `largest`: [groups], the largest magnitude of each group."""
        group_numel = torch.ones(self.group_count, dtype=torch.int64)
        for one in matrices.values():
            group_numel[one.groups.start : one.groups.stop - 1] = torch.tensor(one.group_numel)
        group_numel = group_numel.to(self.device)
        unit = MagnitudeUnit.for_groups(largest, group_numel)
        mean = unit.mean(self._group_sums(matrices, unit.to_units), group_numel)
        grids: dict[str, Quantizer] = {
            name: SignQuantizer(mean[one.groups], torch.full_like(mean[one.groups], -1.0))
            for name, one in matrices.items() if bits[name] != 2}
        ternary = {name: one for name, one in matrices.items() if bits[name] == 2}
        if not ternary:
            return grids
        threshold = mean * TERNARY_THRESHOLD

        def beyond(x: Tensor, group: Tensor) -> Tensor:
            return x.abs() > threshold[group].unsqueeze(1)

        sums = self._group_sums(ternary, lambda x, group: unit.to_units(x, group).mul_(beyond(x, group)))
        mean = unit.mean(sums, self._group_sums(ternary, lambda x, group: beyond(x, group).long()))
        return {**grids, **{name: SignQuantizer(mean[one.groups], threshold[one.groups])
                            for name, one in ternary.items()}}

    def _group_sums(self, matrices: Mapping[str, QuantizedMatrix], count: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        sums = torch.zeros(self.group_count, dtype=torch.int64, device=self.device)
        for x, group, matrix in self.iter_rows(matrices):
            if matrix.is_tp_sharded or self.counts_replicated:
                sums.index_add_(0, group, count(x, group).sum(1))
        return self.all_reduce(sums, "sum")


@dataclass(frozen=True)
class MatrixRounding:
    """How a matrix is rounded."""

    grid: Quantizer
    blend: float  # share of the unrounded value in the result
    key: int | None  # key of the random noise; None: round to nearest

    def round_values(self, x: Tensor, row_block: QuantRowBlock) -> Tensor:
        rounded = quantize_to_levels(self.grid, x, row_block.group, row_block.noise(self.key, x.device))
        return rounded.mul_(1 - self.blend).add_(x * self.blend) if self.blend else rounded

    def levels(self, x: Tensor, row_block: QuantRowBlock) -> Tensor:
        """The grid levels of `x`, without blending."""
        return self.grid.levels(x, row_block.group, row_block.noise(self.key, x.device))


def row_blocks_of(matrix: QuantizedMatrix, segment: Segment, start: int) -> Iterator[QuantRowBlock]:
    """Cut a segment into a part of a row, full rows (at most MAX_FP32_NUMEL elements each), and a part of a row."""
    at, end = segment.slot_offset, segment.slot_offset + segment.count
    while at < end:
        row, column = divmod(at, matrix.columns)
        if column or end - at < matrix.columns:
            rows, width = 1, min(matrix.columns - column, end - at)
        else:
            rows, width = max(1, min((end - at) // matrix.columns, MAX_FP32_NUMEL // matrix.columns)), matrix.columns
        yield QuantRowBlock(matrix, row, column, rows, width, start)
        at, start = at + rows * width, start + rows * width


class MoQState:
    """The bits of each block, as training goes on; attaches the rounding to the buckets."""

    def __init__(self, config: QuantizeConfig, schedule: BitSchedule, module: nn.Module,
                 buckets: Sequence[FlatBucket], groups: Groups, seed: int) -> None:
        self.config, self.schedule, self.seed = config, schedule, seed
        # Name prefixes of blocks; the first is for parameters outside of blocks.
        self.blocks = ["", *(_eigenvalue_blocks(config, module) if config.quantize_eigenvalue else ())]
        self.period_factors = [1] * len(self.blocks)  # factors for the periods of the blocks when bits fall
        self.rounded_names = sorted(slot.name for bucket in buckets for slot in bucket.layout.slots
                                    if len(slot.shape) > 1)
        self.counter, self.progress = 0, [schedule.initial_state() for _ in self.blocks]
        self.is_rounding = config.quantize_offset == 0
        self.messages: list[str] = []  # messages about bits that fell, with `quantize_verbose`
        tables = frozenset(f"{path}.weight" for path, part in module.named_modules()
                           if isinstance(part, nn.Embedding | VocabParallelEmbedding))
        for bucket in buckets:
            bucket.rounding = BucketRounding(self, bucket, groups.tp, tables)

    def advance(self, applied: int) -> None:
        """Count a step, before its masters are copied to the parameters. `applied` includes this step."""
        if applied > self.config.quantize_offset:
            self.counter += 1
            for index, now in enumerate(self.progress):
                after = self.progress[index] = self.schedule.next_state(now, self.counter, self.period_factors[index])
                if after is not now and self.config.quantize_verbose:
                    self.messages.append(f"Quantization settings: current bit-precision = {after.bits}, step = "
                                         f"{self.counter}, quantization period = {after.period}, index = {index}")
        self.is_rounding = applied >= self.config.quantize_offset

    def bits_fall_next_step(self, applied: int) -> bool:
        """Bits fall with the next applied step, after `applied` steps."""
        return applied >= self.config.quantize_offset and any(
            self.schedule.is_due(now, self.counter + 1) for now in self.progress)

    @property
    def bits_may_fall_soon(self) -> bool:
        """Bits may fall with the step after the next one."""
        return any(self.schedule.is_due(now, self.counter + 2) for now in self.progress)

    def set_eigenvalues(self, eigenvalues: Sequence[float]) -> None:
        """Set the eigenvalues of all blocks but the first. Call it before bits fall."""
        self.period_factors = [1, *map(period_factor, relative_eigenvalues(list(eigenvalues)))]
        if self.config.eigenvalue_verbose:
            values = ", ".join(f"{name} {value:.4g} (x {factor})" for name, value, factor in
                               zip(self.blocks[1:], eigenvalues, self.period_factors[1:], strict=True))
            self.messages.append(f"eigenvalues before step {self.counter + 1}: {values}")

    def take_messages(self) -> list[str]:
        messages, self.messages = self.messages, []
        return messages

    def state_dict(self) -> dict[str, Any]:
        """The state for a resumed run, as JSON values."""
        return {"counter": self.counter, "blocks": self.blocks, "bits": [now.bits for now in self.progress],
                "periods": [now.period for now in self.progress],
                "fell_at": [now.last_drop_at for now in self.progress], "factors": self.period_factors,
                "rounded": self.rounded_names}

    def load_state_dict(self, saved: Mapping[str, Any] | None, applied: int) -> None:
        """Restore the result of `state_dict`. None (a run without quantization): begin now."""
        self.counter = 0 if saved is None else saved["counter"]
        known = {} if saved is None else saved_bit_progress(saved)
        self.progress = [known.get(name, known.get("", self.schedule.initial_state())) for name in self.blocks]
        self.period_factors = [1] * len(self.blocks)
        if saved is not None and saved["blocks"] == self.blocks:
            self.period_factors = list(saved["factors"])
        self.is_rounding = applied >= self.config.quantize_offset


def _eigenvalue_blocks(config: QuantizeConfig, module: nn.Module) -> list[str]:
    """Names of the blocks of `eigenvalue_layer_name`, by default those of the first ModuleList."""
    lists = {path: part for path, part in module.named_modules() if isinstance(part, nn.ModuleList)}
    name = next(iter(lists), None) if config.eigenvalue_layer_name is None else config.eigenvalue_layer_name
    if name is None:
        raise ConfigError("--quantize-eigenvalue needs a list of modules in the model, its blocks: there is none")
    if name not in lists:
        there = f"its lists are {', '.join(lists)}" if lists else "it has no list of modules"
        raise ConfigError(f"--eigenvalue-layer-name {name}: the model has no such list of blocks; {there}")
    count = len(lists[name])
    if config.eigenvalue_layer_num not in (0, count):
        raise ConfigError(f"--eigenvalue-layer-num is {config.eigenvalue_layer_num}, and {name} has {count}: give that "
                          "number, or leave it out")
    return [f"{name}.{number}" for number in range(count)]


def saved_bit_progress(saved: Mapping[str, Any]) -> dict[str, BitState]:
    """Block name -> bit state, from the result of `MoQState.state_dict`."""
    return dict(zip(saved["blocks"], map(BitState, saved["bits"], saved["periods"], saved["fell_at"]), strict=True))


def block_of(name: str, blocks: Sequence[str]) -> int:
    """Index of the block of a parameter; 0: outside of blocks."""
    return next((index for index, block in enumerate(blocks) if block and name.startswith(f"{block}.")), 0)


def noise_key(seed: int, counter: int, name: str) -> int:
    """The RNG key of a matrix's rounding noise at this counter."""
    return rng_key(seed, f"rounding {counter} {name}")


class BucketRounding:
    def __init__(self, moq: MoQState, bucket: FlatBucket, tp: Group, tables: Collection[str]) -> None:
        self._moq, self._bucket, self._tp = moq, bucket, tp
        # The device of the parameter shard.
        self._device = bucket.device if bucket.param_shard.is_on_device else HOST
        self._matrices: dict[str, QuantizedMatrix] = {}
        count = 0
        for slot in bucket.layout.slots:
            if len(slot.shape) > 1 and slot.numel:  # vectors are not rounded
                matrix = QuantizedMatrix.of(slot, moq.config.quantize_groups, count, tp, self._device,
                                            slot.name in tables)
                self._matrices[slot.name], count = matrix, matrix.groups.stop
        # The roundings that the current parameters were made with.
        self._matrix_roundings: dict[str, MatrixRounding] = {}

    def __call__(self) -> None:
        """Round this rank's parameter shard, which has the values of the masters. Collective."""
        moq, config = self._moq, self._moq.config
        roundings: dict[str, MatrixRounding] = {}
        if moq.is_rounding and self._matrices:
            progress = {name: moq.progress[block_of(name, moq.blocks)] for name in self._matrices}
            stats = QuantGroupStats(self._matrices, self._iter_rows, self._all_reduce, self._device,
                                    counts_replicated=self._tp.rank == 0)
            grids = stats.make_grids({name: state.bits for name, state in progress.items()},
                                     symmetric=config.quantize_type == "symmetric")
            for name, grid in grids.items():
                key = noise_key(moq.seed, moq.counter, name) if config.quantize_rounding == "stochastic" else None
                roundings[name] = MatrixRounding(grid, moq.schedule.blend(progress[name], moq.counter), key)
        self._matrix_roundings = roundings
        for chunk in self._bucket.param_shard.chunks if roundings else ():
            with self._bucket.param_shard.open(chunk, [WEIGHT], writes=True) as opened:
                self._round(chunk, opened[WEIGHT])

    def round_masters(self, chunk: slice, masters: Tensor) -> Tensor:
        """The rounded values of one chunk of the masters, as last written to the parameters."""
        weights = masters.to(self._device, self._bucket.param_shard.dtype)
        if not self._matrix_roundings:
            return weights
        weights = weights.clone() if weights is masters else weights
        self._round(chunk, weights)
        return weights

    def _round(self, chunk: slice, weights: Tensor) -> None:
        for row_block in self._iter_row_blocks(chunk):
            values = row_block.view_in(weights)
            rounding = self._matrix_roundings[row_block.matrix.slot.name]
            values.copy_(rounding.round_values(values.float(), row_block))

    def _all_reduce(self, stats: Tensor, op: Op) -> Tensor:
        """Over data and tensor parallel ranks that hold other parts of the same tensors."""
        bucket = self._bucket
        if bucket.shard_group.is_solo and self._tp.is_solo:
            return stats
        bucket.log.record_collective(f"scales of {bucket.name}")
        return all_reduce(all_reduce(stats.to(bucket.device), bucket.shard_group, op), self._tp, op).to(self._device)

    def _iter_rows(self, matrices: Mapping[str, QuantizedMatrix]) -> Iterator[tuple[Tensor, Tensor, QuantizedMatrix]]:
        """The `RowIterator` of this rank's parameter shard."""
        for chunk in self._bucket.param_shard.chunks:
            with self._bucket.param_shard.open(chunk, [WEIGHT]) as opened:
                for row_block in self._iter_row_blocks(chunk):
                    if (matrix := row_block.matrix).slot.name in matrices:
                        x = row_block.view_in(opened[WEIGHT]).float()
                        yield x, row_block.group + matrix.groups.start, matrix

    def _iter_row_blocks(self, chunk: slice) -> Iterator[QuantRowBlock]:
        for segment in self._bucket.layout.segments(self._bucket.shard_group.rank, chunk):
            if (matrix := self._matrices.get(segment.slot.name)) is not None:
                yield from row_blocks_of(matrix, segment, segment.shard_offset - chunk.start)
