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
from megatron.quantize import BitSchedule, Progress, factor_of, shares
from megatron.zero.bucket import FlatBucket
from megatron.zero.homes.shelf import HOST, WEIGHT
from megatron.zero.rows import Matrix, Rounded, Strip, Survey, strips_of
from mpu.collectives import Op, all_reduce
from mpu.draws import rng_key
from mpu.groups import Group, Groups
from mpu.layers import VocabParallelEmbedding


class Quantisation:
    """How far the bits of an engine have fallen."""

    def __init__(self, config: QuantizeConfig, schedule: BitSchedule, module: nn.Module,
                 buckets: Sequence[FlatBucket], groups: Groups, seed: int) -> None:
        self.config, self.schedule, self.seed = config, schedule, seed
        self.blocks = ["", *(_blocks_of(config, module) if config.quantize_eigenvalue else ())]
        """Names; the first one is of what is in no other."""
        self.factors = [1] * len(self.blocks)
        """What the periods are multiplied by when bits fall."""
        self.rounded = sorted(slot.name for bucket in buckets for slot in bucket.layout.slots if is_matrix(slot.shape))
        self.counter, self.progress = 0, [schedule.begin() for _ in self.blocks]
        self.is_on = config.quantize_offset == 0
        """Weights are rounded."""
        self.news: list[str] = []
        """What is to be told of bits that fell, with `quantize_verbose`."""
        tables = frozenset(f"{path}.weight" for path, part in module.named_modules()
                           if isinstance(part, nn.Embedding | VocabParallelEmbedding))
        for bucket in buckets:
            bucket.rounding = Rounding(self, bucket, groups.tp, tables)

    def advance(self, applied: int) -> None:
        """A step is being applied: with it there are so many. Before its weights are published."""
        if applied > self.config.quantize_offset:
            self.counter += 1
            for index, now in enumerate(self.progress):
                after = self.progress[index] = self.schedule.after(now, self.counter, self.factors[index])
                if after is not now and self.config.quantize_verbose:
                    self.news.append(f"Quantization settings: current bit-precision = {after.bits}, step = "
                                     f"{self.counter}, quantization period = {after.period}, index = {index}")
        self.is_on = applied >= self.config.quantize_offset

    def is_due(self, applied: int) -> bool:
        """With the next step that is applied, after so many, a bit falls."""
        return applied >= self.config.quantize_offset and any(
            self.schedule.is_due(now, self.counter + 1) for now in self.progress)

    @property
    def is_near(self) -> bool:
        """With the step after the next one a bit may fall."""
        return any(self.schedule.is_due(now, self.counter + 2) for now in self.progress)

    def learn(self, eigenvalues: Sequence[float]) -> None:
        """Of every block but the first, before a bit falls."""
        self.factors = [1, *map(factor_of, shares(list(eigenvalues)))]
        if self.config.eigenvalue_verbose:
            told = ", ".join(f"{name} {value:.4g} (x {factor})" for name, value, factor in
                             zip(self.blocks[1:], eigenvalues, self.factors[1:], strict=True))
            self.news.append(f"eigenvalues before step {self.counter + 1}: {told}")

    def progress_of(self, name: str) -> Progress:
        """Of the block that a parameter is in."""
        return self.progress[block_of(name, self.blocks)]

    def key(self, name: str) -> int | None:
        """Of the noise that a matrix is rounded with now, where there is any."""
        return noise_key(self.seed, self.counter, name) if self.config.quantize_rounding == "stochastic" else None

    def take_news(self) -> list[str]:
        told, self.news = self.news, []
        return told

    def numbers(self) -> dict[str, Any]:
        """What a resumed run must know, as JSON values."""
        return {"counter": self.counter, "blocks": self.blocks, "bits": [now.bits for now in self.progress],
                "periods": [now.period for now in self.progress], "fell_at": [now.fell_at for now in self.progress],
                "factors": self.factors, "rounded": self.rounded}

    def restore(self, saved: Mapping[str, Any] | None, applied: int) -> None:
        """Go on from what `numbers` returned; a run that was not quantised begins now."""
        self.counter = 0 if saved is None else saved["counter"]
        known = {} if saved is None else progress_in(saved)
        self.progress = [known.get(name, known.get("", self.schedule.begin())) for name in self.blocks]
        self.factors = [1] * len(self.blocks)
        if saved is not None and saved["blocks"] == self.blocks:
            self.factors = list(saved["factors"])
        self.is_on = applied >= self.config.quantize_offset


def _blocks_of(config: QuantizeConfig, module: nn.Module) -> list[str]:
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


def progress_in(saved: Mapping[str, Any]) -> dict[str, Progress]:
    """By the name of a block, from what `Quantisation.numbers` gave."""
    return dict(zip(saved["blocks"], map(Progress, saved["bits"], saved["periods"], saved["fell_at"]), strict=True))


def block_of(name: str, blocks: Sequence[str]) -> int:
    """Which of the blocks a parameter is in; 0: none."""
    return next((index for index, block in enumerate(blocks) if block and name.startswith(f"{block}.")), 0)


def noise_key(seed: int, counter: int, name: str) -> int:
    """Of the noise that a matrix is rounded with at this counter."""
    return rng_key(seed, f"rounding {counter} {name}")


class Rounding:
    """Of one bucket."""

    def __init__(self, whole: Quantisation, bucket: FlatBucket, tp: Group, tables: Collection[str]) -> None:
        self._whole, self._bucket, self._tp = whole, bucket, tp
        self._device = bucket.device if bucket.is_at_hand else HOST
        """Where the weights at work are."""
        self._matrices: dict[str, Matrix] = {}
        count = 0
        for slot in bucket.layout.slots:
            if is_matrix(slot.shape) and slot.numel:
                made = Matrix.of(slot, whole.config.quantize_groups, count, tp, self._device, slot.name in tables)
                self._matrices[slot.name], count = made, made.groups.stop
        self._grids: dict[str, Rounded] = {}
        """What the weights at work were rounded by when they were last published."""

    def __call__(self) -> None:
        """Round this rank's part of the weights at work, which are those of the masters. Collective."""
        self._grids = self._found() if self._whole.is_on and self._matrices else {}
        if self._grids:
            for part in self._bucket.work.parts:
                with self._bucket.work.open(part, [WEIGHT], writes=True) as kept:
                    self._round(part, kept[WEIGHT])

    def of_masters(self, part: slice, masters: Tensor) -> Tensor:
        """What a part of the masters became when it was last published."""
        weights = masters.to(self._device, self._bucket.work.dtype)
        if not self._grids:
            return weights
        weights = weights.clone() if weights is masters else weights
        self._round(part, weights)
        return weights

    def _round(self, part: slice, weights: Tensor) -> None:
        for strip in self._strips(part):
            place = strip.of(weights)
            place.copy_(self._grids[strip.matrix.slot.name].of(place.float(), strip))

    def _found(self) -> dict[str, Rounded]:
        """Collective."""
        whole, config, device = self._whole, self._whole.config, self._device
        now = {name: whole.progress_of(name) for name in self._matrices}
        survey = Survey(self._matrices, self._walk, self._combined, device, counts_whole=self._tp.rank == 0)
        grids = survey.grids({name: one.bits for name, one in now.items()},
                             symmetric=config.quantize_type == "symmetric")
        return {name: Rounded(grid, whole.schedule.blend(now[name], whole.counter), whole.key(name))
                for name, grid in grids.items()}

    def _combined(self, found: Tensor, op: Op) -> Tensor:
        """Over the ranks that have other parts of the same tensors."""
        bucket = self._bucket
        if bucket.shard_group.is_solo and self._tp.is_solo:
            return found
        bucket.log.note(f"scales of {bucket.name}")
        return all_reduce(all_reduce(found.to(bucket.device), bucket.shard_group, op), self._tp, op).to(self._device)

    def _walk(self, matrices: Mapping[str, Matrix]) -> Iterator[tuple[Tensor, Tensor, Matrix]]:
        """(numbers [rows, columns] in fp32, the group of each row among those of the bucket, their matrix)."""
        for part in self._bucket.work.parts:
            with self._bucket.work.open(part, [WEIGHT]) as kept:
                for strip in self._strips(part):
                    if strip.matrix.slot.name in matrices:
                        x = strip.of(kept[WEIGHT]).float()
                        yield x, strip.group + strip.matrix.groups.start, strip.matrix

    def _strips(self, part: slice) -> Iterator[Strip]:
        for segment in self._bucket.layout.segments(self._bucket.shard_group.rank, part):
            if (matrix := self._matrices.get(segment.slot.name)) is not None:
                yield from strips_of(matrix, segment, segment.shard_offset - part.start)
