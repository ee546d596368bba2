"""Quantisation in training: the weights at work are rounded to a grid whenever they are published; masters are not.

    Quantisation   of an engine: how far the bits have fallen. A step that is applied advances it
    Rounding       of a bucket: rounds this rank's part of the weights at work before it is sent to the others

What rounding to a grid needs to know of a whole matrix is found for this rank's part and combined over the ranks that
have the others, tensor parallel ones too (rows.py). So the weights are the same bits at every stage, for every tensor
parallel size, in every home.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from megatron.config.quantize import QuantizeConfig
from megatron.errors import ConfigError
from megatron.quantize import BitSchedule, BitState, period_factor, relative_eigenvalues
from megatron.zero.bucket import FlatBucket
from megatron.zero.homes.shelf import HOST, WEIGHT
from megatron.zero.rows import MatrixRounding, QuantGroupStats, QuantizedMatrix, QuantRowBlock, row_blocks_of
from mpu.collectives import Op, all_reduce
from mpu.draws import rng_key
from mpu.groups import Group, Groups
from mpu.layers import VocabParallelEmbedding


class MoQState:
    """How far the bits of an engine have fallen."""

    def __init__(self, config: QuantizeConfig, schedule: BitSchedule, module: nn.Module,
                 buckets: Sequence[FlatBucket], groups: Groups, seed: int) -> None:
        self.config, self.schedule, self.seed = config, schedule, seed
        self.blocks = ["", *(_eigenvalue_blocks(config, module) if config.quantize_eigenvalue else ())]
        """Names; the first one is of what is in no other."""
        self.period_factors = [1] * len(self.blocks)
        """What the periods are multiplied by when bits fall."""
        self.rounded_names = sorted(slot.name for bucket in buckets for slot in bucket.layout.slots
                                    if is_matrix(slot.shape))
        self.counter, self.progress = 0, [schedule.initial_state() for _ in self.blocks]
        self.is_rounding = config.quantize_offset == 0
        """Weights are rounded."""
        self.messages: list[str] = []
        """What is to be told of bits that fell, with `quantize_verbose`."""
        tables = frozenset(f"{path}.weight" for path, part in module.named_modules()
                           if isinstance(part, nn.Embedding | VocabParallelEmbedding))
        for bucket in buckets:
            bucket.rounding = BucketRounding(self, bucket, groups.tp, tables)

    def advance(self, applied: int) -> None:
        """A step is being applied: with it there are so many. Before its weights are published."""
        if applied > self.config.quantize_offset:
            self.counter += 1
            for index, now in enumerate(self.progress):
                after = self.progress[index] = self.schedule.next_state(now, self.counter, self.period_factors[index])
                if after is not now and self.config.quantize_verbose:
                    self.messages.append(f"Quantization settings: current bit-precision = {after.bits}, step = "
                                         f"{self.counter}, quantization period = {after.period}, index = {index}")
        self.is_rounding = applied >= self.config.quantize_offset

    def bits_fall_next_step(self, applied: int) -> bool:
        """With the next step that is applied, after so many, a bit falls."""
        return applied >= self.config.quantize_offset and any(
            self.schedule.is_due(now, self.counter + 1) for now in self.progress)

    @property
    def bits_may_fall_soon(self) -> bool:
        """With the step after the next one a bit may fall."""
        return any(self.schedule.is_due(now, self.counter + 2) for now in self.progress)

    def set_eigenvalues(self, eigenvalues: Sequence[float]) -> None:
        """Of every block but the first, before a bit falls."""
        self.period_factors = [1, *map(period_factor, relative_eigenvalues(list(eigenvalues)))]
        if self.config.eigenvalue_verbose:
            values = ", ".join(f"{name} {value:.4g} (x {factor})" for name, value, factor in
                               zip(self.blocks[1:], eigenvalues, self.period_factors[1:], strict=True))
            self.messages.append(f"eigenvalues before step {self.counter + 1}: {values}")

    def progress_of(self, name: str) -> BitState:
        """Of the block that a parameter is in."""
        return self.progress[block_of(name, self.blocks)]

    def noise_key_of(self, name: str) -> int | None:
        """Of the noise that a matrix is rounded with now, where there is any."""
        return noise_key(self.seed, self.counter, name) if self.config.quantize_rounding == "stochastic" else None

    def take_messages(self) -> list[str]:
        messages, self.messages = self.messages, []
        return messages

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run must know, as JSON values."""
        return {
            "counter": self.counter, "blocks": self.blocks, "bits": [now.bits for now in self.progress],
            "periods": [now.period for now in self.progress], "fell_at": [now.last_drop_at for now in self.progress],
            "factors": self.period_factors, "rounded": self.rounded_names
        }

    def load_state_dict(self, saved: Mapping[str, Any] | None, applied: int) -> None:
        """Go on from what `numbers` returned; a run that was not quantised begins now."""
        self.counter = 0 if saved is None else saved["counter"]
        known = {} if saved is None else saved_bit_progress(saved)
        self.progress = [known.get(name, known.get("", self.schedule.initial_state())) for name in self.blocks]
        self.period_factors = [1] * len(self.blocks)
        if saved is not None and saved["blocks"] == self.blocks:
            self.period_factors = list(saved["factors"])
        self.is_rounding = applied >= self.config.quantize_offset


def _eigenvalue_blocks(config: QuantizeConfig, module: nn.Module) -> list[str]:
    """Names of the modules of the list that is meant."""
    lists = {path: part for path, part in module.named_modules() if isinstance(part, nn.ModuleList)}
    wanted = config.eigenvalue_layer_name
    name = wanted if wanted is not None else next(iter(lists), None)
    if name is None:
        raise ConfigError("--quantize-eigenvalue needs a list of modules in the model, its blocks: there is none")
    if name not in lists:
        there = f"its lists are {', '.join(lists)}" if lists else "it has no list of modules"
        raise ConfigError(f"--eigenvalue-layer-name {name}: the model has no such list of blocks; {there}")
    found = [f"{name}.{number}" for number in range(len(lists[name]))]
    if config.eigenvalue_layer_num not in (0, len(found)):
        raise ConfigError(f"--eigenvalue-layer-num is {config.eigenvalue_layer_num}, and {name} has {len(found)}: give "
                          "that number, or leave it out")
    return found


def is_matrix(shape: Sequence[int]) -> bool:
    """A parameter of this shape is rounded, where it is trained."""
    return len(shape) > 1


def saved_bit_progress(saved: Mapping[str, Any]) -> dict[str, BitState]:
    """By the name of a block, from what `MoQState.numbers` gave."""
    return dict(zip(saved["blocks"], map(BitState, saved["bits"], saved["periods"], saved["fell_at"]), strict=True))


def block_of(name: str, blocks: Sequence[str]) -> int:
    """Which of the blocks a parameter is in; 0: none."""
    return next((index for index, block in enumerate(blocks) if block and name.startswith(f"{block}.")), 0)


def noise_key(seed: int, counter: int, name: str) -> int:
    """Of the noise that a matrix is rounded with at this counter."""
    return rng_key(seed, f"rounding {counter} {name}")


class BucketRounding:
    """Of one bucket."""

    def __init__(self, moq: MoQState, bucket: FlatBucket, tp: Group, tables: Collection[str]) -> None:
        self._moq, self._bucket, self._tp = moq, bucket, tp
        self._device = bucket.device if bucket.is_on_device else HOST
        """Where the weights at work are."""
        self._matrices: dict[str, QuantizedMatrix] = {}
        count = 0
        for slot in bucket.layout.slots:
            if is_matrix(slot.shape) and slot.numel:
                made = QuantizedMatrix.of(slot, moq.config.quantize_groups, count, tp, self._device, slot.name
                                          in tables)
                self._matrices[slot.name], count = made, made.groups.stop
        self._matrix_roundings: dict[str, MatrixRounding] = {}
        """What the weights at work were rounded by when they were last published."""

    def __call__(self) -> None:
        """Round this rank's part of the weights at work, which are those of the masters. Collective."""
        self._matrix_roundings = self._make_matrix_roundings() if self._moq.is_rounding and self._matrices else {}
        if self._matrix_roundings:
            for chunk in self._bucket.param_shard.chunks:
                with self._bucket.param_shard.open(chunk, [WEIGHT], writes=True) as kept:
                    self._round(chunk, kept[WEIGHT])

    def round_masters(self, chunk: slice, masters: Tensor) -> Tensor:
        """What a part of the masters became when it was last published."""
        weights = masters.to(self._device, self._bucket.param_shard.dtype)
        if not self._matrix_roundings:
            return weights
        weights = weights.clone() if weights is masters else weights
        self._round(chunk, weights)
        return weights

    def _round(self, chunk: slice, weights: Tensor) -> None:
        for strip in self._iter_row_blocks(chunk):
            block = strip.view_in(weights)
            block.copy_(self._matrix_roundings[strip.matrix.slot.name].round_values(block.float(), strip))

    def _make_matrix_roundings(self) -> dict[str, MatrixRounding]:
        """Collective."""
        moq, config, device = self._moq, self._moq.config, self._device
        now = {name: moq.progress_of(name) for name in self._matrices}
        stats = QuantGroupStats(self._matrices,
                                self._iter_rows,
                                self._all_reduce,
                                device,
                                counts_replicated=self._tp.rank == 0)
        grids = stats.make_grids({name: one.bits for name, one in now.items()},
                                 symmetric=config.quantize_type == "symmetric")
        return {name: MatrixRounding(grid, moq.schedule.blend(now[name], moq.counter), moq.noise_key_of(name))
                for name, grid in grids.items()}

    def _all_reduce(self, found: Tensor, op: Op) -> Tensor:
        """Over the ranks that have other parts of the same tensors."""
        bucket = self._bucket
        if bucket.shard_group.is_solo and self._tp.is_solo:
            return found
        bucket.log.record_collective(f"scales of {bucket.name}")
        return all_reduce(all_reduce(found.to(bucket.device), bucket.shard_group, op), self._tp, op).to(self._device)

    def _iter_rows(self, matrices: Mapping[str, QuantizedMatrix]) -> Iterator[tuple[Tensor, Tensor, QuantizedMatrix]]:
        """(numbers [rows, columns] in fp32, the group of each row among those of the bucket, their matrix)."""
        for chunk in self._bucket.param_shard.chunks:
            with self._bucket.param_shard.open(chunk, [WEIGHT]) as kept:
                for strip in self._iter_row_blocks(chunk):
                    if strip.matrix.slot.name in matrices:
                        x = strip.view_in(kept[WEIGHT]).float()
                        yield x, strip.group + strip.matrix.groups.start, strip.matrix

    def _iter_row_blocks(self, chunk: slice) -> Iterator[QuantRowBlock]:
        for segment in self._bucket.layout.segments(self._bucket.shard_group.rank, chunk):
            if (matrix := self._matrices.get(segment.slot.name)) is not None:
                yield from row_blocks_of(matrix, segment, segment.shard_offset - chunk.start)
