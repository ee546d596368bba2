"""Loads a trained GPT-2 from a checkpoint of this project or a Hugging Face folder, at any tensor parallel size.

Parameters are created and read one at a time, in blocks, so no more than one block is in memory besides this rank's
part; int8 weights are quantized while they are read. Data parallel ranks hold the same part: the first one reads
and broadcasts it. The weights of a run with quantized training (MoQ) are rounded to the grids of its last step, bit
for bit; where the grid fits int8 its levels are used directly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from math import gcd
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import data.tokenizer
from data.default_corpus import DEFAULT_FOLDER
from data.indexed import TokenizerFacts
from data.tokenizer import Tokenizer
from megatron.checkpoint.convert.external_checkpoint import assert_same_weights
from megatron.checkpoint.convert.importers import open_huggingface
from megatron.checkpoint.int8_weights import INT8_KIND, SCALE_KIND, ReadRange, is_quantised, quantise_into, row_maxima
from megatron.checkpoint.reader import Checkpoint, open_checkpoint, read_recorded_model
from megatron.checkpoint.reshard import TPSlice
from megatron.checkpoint.tags import find_tag_of_step, parse_checkpoint_path
from megatron.config.hf_config import read_model_fields, read_tokenizer_fields
from megatron.config.model_config import QuantizeConfig
from megatron.config.tree import ModelConfig, require
from megatron.distributed.consistency import all_succeed_or_raise
from megatron.errors import CheckpointError
from megatron.inference.decoder import Decoder
from megatron.inference.generation import Generator
from megatron.inference.int8 import Int8, activation_dtype, allocate_levels
from megatron.inference.model_args import TOKENIZER_FLAGS, ModelSource
from megatron.model.gpt2 import GPT2, count_parameters
from megatron.zero.layout import Segment, Slot
from megatron.zero.moq import (MatrixRounding, QuantGroupStats, QuantizedMatrix, block_of, noise_key, row_blocks_of,
                               saved_bit_progress)
from megatron.zero.offload.storage import HOST, WEIGHT
from megatron.zero.tiling import tile_linears
from mpu import groups as mpu_groups
from mpu.collectives import all_reduce_into, broadcast_into
from mpu.groups import SOLO, Group, Groups
from mpu.partition import partition_of
from mpu.split import Partition


def open_moq_weights(checkpoint: Checkpoint, dtype: torch.dtype) -> MoQWeights | None:
    """None: the run does not quantize its weights, or had not begun to. `dtype`: their precision in training."""
    config = QuantizeConfig(**checkpoint.config.get("quantize", {}))
    engine = checkpoint.shared_state.get("engine") or {}
    applied = engine["global_steps"] - engine["skipped_steps"] if engine else 0
    if "quantisation" not in engine or not config.quantize_training or applied < config.quantize_offset:
        return None
    return MoQWeights(checkpoint, config, engine["quantisation"], dtype)


class MoQWeights:
    """Reads a checkpoint as the quantized forward of its last step saw it."""

    def __init__(self, checkpoint: Checkpoint, config: QuantizeConfig, saved: Mapping[str, Any],
                 dtype: torch.dtype) -> None:
        assert config.schedule is not None
        self._checkpoint, self._config, self._schedule, self._dtype = checkpoint, config, config.schedule, dtype
        self._seed = checkpoint.config["train"]["seed"]
        self._progress, self._counter = saved_bit_progress(saved), saved["counter"]
        self._names: list[str] = saved["rounded"]  # names of the quantized matrices
        self._rounding = cache(self._compute_rounding)

    def has_int8_levels(self, name: str) -> bool:
        """Whether the grid of a matrix fits int8 and is not blended with unquantized values."""
        return name in self._names and self._rounding(name).blend == 0 and self._rounding(name).grid.fits_int8

    def read_slice(self, kind: str, name: str, local: TPSlice, offset: int, out: Tensor) -> None:
        """As `Checkpoint.read_slice`; `kind` may also be one of an int8 model."""
        tp = Group(local.tp_rank, local.tp_size, tuple(range(local.tp_size)))
        if kind == SCALE_KIND:
            shape = (local.shape[0], *self._checkpoint.shape(WEIGHT, name)[1:])
            group = self._matrix(name, shape, local.partition, tp).group_of_row
            out.copy_(self._rounding(name).grid.scale[group[offset : offset + len(out)]])
            return
        numbers = torch.empty(len(out)) if kind == INT8_KIND else out
        self._checkpoint.read_slice(WEIGHT, name, local, offset, numbers)
        if name in self._names:
            rounded, matrix = self._rounding(name), self._matrix(name, local.shape, local.partition, tp)
            for strip in row_blocks_of(matrix, Segment(matrix.slot, offset, 0, len(numbers)), 0):
                place = strip.view_in(numbers)
                x = place.to(self._dtype).float()
                place.copy_(
                    rounded.levels(x, strip) if kind == INT8_KIND else rounded.round_values(x, strip).to(self._dtype))
        if numbers is not out:
            out.copy_(numbers)

    def _matrix(self, name: str, shape: tuple[int, ...], partition: Partition | None, tp: Group) -> QuantizedMatrix:
        slot = Slot(name, shape, partition=partition)
        return QuantizedMatrix.of(slot, self._config.quantize_groups, 0, tp, HOST, is_table=True)

    def _compute_rounding(self, name: str) -> MatrixRounding:
        """The quantization grid of the full matrix, which is read a block of rows at a time."""
        matrix = self._matrix(name, tuple(self._checkpoint.shape(WEIGHT, name)), None, SOLO)
        blocks = list(self._progress)
        now = self._progress[blocks[block_of(name, blocks)]]

        def read_strips(matrices: Mapping[str, QuantizedMatrix]) -> Iterator[tuple[Tensor, Tensor, QuantizedMatrix]]:
            for strip in row_blocks_of(matrix, Segment(matrix.slot, 0, 0, matrix.slot.numel), 0):
                flat = torch.empty(strip.rows * strip.width)
                self._checkpoint.read_slice(WEIGHT, name, TPSlice(matrix.slot.shape), strip.start, flat)
                yield flat.view(strip.rows, strip.width).to(self._dtype).float(), strip.group, matrix

        survey = QuantGroupStats({name: matrix}, read_strips, lambda mine, op: mine, HOST)
        grid = survey.make_grids({name: now.bits}, symmetric=self._config.quantize_type == "symmetric")[name]
        draws = self._config.quantize_rounding == "stochastic"
        return MatrixRounding(grid, self._schedule.blend(now, self._counter),
                              noise_key(self._seed, self._counter, name) if draws else None)


READ_ELEMENTS = 1 << 18  # elements read at a time

BROADCAST_ELEMENTS = 1 << 24  # elements broadcast at a time

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8}


@dataclass(frozen=True)
class OpenedModel:
    """A model whose weights are not read yet."""

    # `Checkpoint.read_slice`, or another with its arguments.
    read_slice: Callable[[str, str, TPSlice, int, Tensor], None]
    shape: ModelConfig
    data: Mapping[str, Any]  # the section of its configuration with the tokenizer
    precision: str  # a key of DTYPES
    name: str
    trained_tokenizer: TokenizerFacts | None = None  # None: unknown
    # Whether the int8 levels of a matrix can be read: stored, or of quantized training.
    has_int8_levels: Callable[[str], bool] = lambda name: False

    def reader(self, name: str, parameter: Tensor, tp: Group, kind: str = WEIGHT) -> ReadRange:
        """Reads this rank's part of a parameter; of the kind SCALE_KIND, one number for each of its rows."""
        shape, partition = tuple(parameter.shape), partition_of(parameter)
        if kind == SCALE_KIND:
            shape, partition = shape[:1], partition if partition is not None and partition.dim == 0 else None
        return partial(self.read_slice, kind, name, TPSlice(shape, partition, tp.rank, tp.size))


@dataclass(frozen=True)
class LoadedModel:
    model: GPT2
    tokenizer: Tokenizer
    description: str

    @property
    def eod(self) -> int | None:
        """The token that ends a document; None: the model does not know it."""
        return self.tokenizer.eod if self.tokenizer.eod < self.model.config.known_vocab_size else None

    def generator(self, rows: int, sliding_window: bool = False) -> Generator:
        return Generator(Decoder(self.model, rows), vocabulary=self.tokenizer.vocab_size, eod=self.eod,
                         sliding_window=sliding_window, decode=self.tokenizer.decode)


def build_groups(source: ModelSource, ranks: int, module: str) -> Groups:
    """One tensor parallel group of all ranks."""
    size = source.model_parallel_size
    require(ranks == size or size > 1, f"there are {ranks} ranks and one model, whose layers they have to share: add "
            f"--model-parallel-size {ranks}, or start one rank")
    require(ranks == size, f"--model-parallel-size {size} needs as many ranks, and there are {ranks}: start them with "
            f"python -m megatron.launch --nproc-per-node {size} -m {module.removeprefix('python -m ')} ...")
    return mpu_groups.build(size)


def open_model(source: ModelSource, groups: Groups) -> OpenedModel:
    """Raises ConfigError if it has another shape than the flags say. Collective."""
    if source.load_hf:
        opened = open_hf_folder(source.load_hf, groups)
    else:
        opened = open_run_checkpoint(source.load or "", groups, source.step)
    tp, shape = groups.tp.size, opened.shape
    widths = shape.kv_heads, shape.hidden_size, shape.ffn_size
    *most, last = [str(size) for size in range(1, gcd(*widths) + 1) if gcd(*widths) % size == 0]
    allowed = f"{', '.join(most)} and {last}" if most else last
    require(gcd(*widths) % tp == 0, f"--model-parallel-size {tp} does not divide {opened.name}, which has {widths[0]} "
            f"attention heads, hidden size {widths[1]} and MLP width {widths[2]}: it can be {allowed}")
    its = {**asdict(shape), "intermediate_size": shape.ffn_size, "seq_length": shape.max_position_embeddings}
    differing = [f"--{name.replace('_', '-')} {value}, and its own is {its[name]}"
                 for name, value in source.shape.items() if value != its[name]]
    require(not differing, f"{opened.name} is another model: {'; '.join(differing)}; leave the flags of its shape out, "
            "or name another --load")
    is_hf = source.load_hf is not None
    return replace(opened, data=source.tokenizer if is_hf and source.tokenizer else {**opened.data, **source.tokenizer})


def load_model(source: ModelSource, groups: Groups, device: torch.device) -> LoadedModel:
    """Collective."""
    opened = open_model(source, groups)
    tokenizer = all_succeed_or_raise(lambda: build_tokenizer(opened, source.tokenizer), groups.world)
    dtype = source.dtype or opened.precision
    model = build_model(opened, groups, DTYPES[dtype], device)
    return LoadedModel(model, tokenizer, describe(opened, dtype, tokenizer))


def describe(opened: OpenedModel, dtype: str, tokenizer: Tokenizer) -> str:
    is_assumed = not any(opened.data.get(name) for name in TOKENIZER_FLAGS)
    doubt = " (assumed: nothing beside the weights says which it is)" if is_assumed else ""
    count, _ = count_parameters(opened.shape)
    return f"{opened.name}: {count:,} parameters in {dtype}, {tokenizer.facts.description}{doubt}"


def open_run_checkpoint(folder: str, groups: Groups, step: int | None = None) -> OpenedModel:
    """`folder`: `DIR` (the latest checkpoint, or that of iteration `step`), `DIR:TAG` or the folder of a tag. Verifies
    all checksums. Collective."""
    root, tag = parse_checkpoint_path(folder)
    if step is not None:
        require(tag is None, f"--load {folder} names a tag already: leave out --ckpt-step {step}")
        tag, _ = all_succeed_or_raise(lambda: find_tag_of_step(root, step), groups.world)
    checkpoint = open_checkpoint(root, tag, world=groups.world, int8=True)
    recorded = all_succeed_or_raise(lambda: read_recorded_model(checkpoint), groups.world)
    opened = OpenedModel(checkpoint.read_slice, recorded.shape, recorded.data, recorded.precision,
                         f"{checkpoint.tag} of {root}", recorded.tokenizer)
    if INT8_KIND in checkpoint.kinds:
        return replace(opened, precision="int8", has_int8_levels=lambda name: True)
    moq = all_succeed_or_raise(lambda: open_moq_weights(checkpoint, DTYPES[recorded.precision]), groups.world)
    return opened if moq is None else replace(opened, read_slice=moq.read_slice, has_int8_levels=moq.has_int8_levels)


def open_hf_folder(folder: str, groups: Groups) -> OpenedModel:
    """Collective."""
    all_succeed_or_raise(lambda: read_model_fields(folder), groups.world)  # or what is wrong with the folder
    weights = all_succeed_or_raise(lambda: open_huggingface(Path(folder)), groups.world)
    assert_same_weights(weights, groups.world)
    tokenizer_fields = all_succeed_or_raise(lambda: read_tokenizer_fields(folder), groups.world)
    return OpenedModel(weights.read_slice, weights.model, tokenizer_fields, "fp32", folder)


def build_tokenizer(opened: OpenedModel, flags: Mapping[str, str]) -> Tokenizer:
    """The model's tokenizer; `flags` override its recorded files."""
    settings = {**opened.data, **flags}
    kind, path = settings.get("tokenizer_type") or "GPT2BPETokenizer", settings.get("tokenizer_path")
    if path is None and kind == "SentencePieceTokenizer" and "default" in settings.get("train_data", ()):
        path = str(DEFAULT_FOLDER / "tokenizer.model")
    recorded_kind = data.tokenizer.canonical_kind(kind)
    used = {"GPT2BPETokenizer": ("vocab_file", "merge_file"), "CharacterLevelTokenizer": ("vocab_file",),
            "SentencePieceTokenizer": ("tokenizer_path",)}.get(recorded_kind, ())
    gone = {f"--{name.replace('_', '-')}": file for name in used if name not in flags
            and (file := opened.data.get(name)) is not None and not Path(file).is_file()}
    require(not gone, f"{opened.name} remembers the files of its {recorded_kind}, and "
            f"{' and '.join(map(str, gone.values()))} {'are' if len(gone) > 1 else 'is'} not there: say where now, "
            f"with {' '.join(f'{flag} FILE' for flag in gone)}")
    made = data.tokenizer.build(kind, vocab_file=settings.get("vocab_file"), merge_file=settings.get("merge_file"),
                                tokenizer_path=path)
    require(made.vocab_size <= opened.shape.known_vocab_size, f"{opened.name} has {opened.shape.known_vocab_size} "
            f"tokens, fewer than the {made.vocab_size} of {made.name}: give the tokenizer it was trained with, "
            "--tokenizer-type with its files (--tokenizer-path or --vocab-file)")
    if (known := opened.trained_tokenizer) is not None:
        require(known == made.facts, f"{opened.name} was trained with {known.description}, and this is "
                f"{made.facts.description}: give its own, --tokenizer-type with its files (--tokenizer-path or "
                "--vocab-file)")
    return made


@torch.no_grad()
def build_model(opened: OpenedModel, groups: Groups, dtype: torch.dtype, device: torch.device,
                activations: torch.dtype | None = None) -> GPT2:
    """This rank's part of the model. With `torch.int8` the matrices are int8 and the rest has dtype `activations`
    (default: by the device). Collective: a read error of one rank is raised on all."""
    require(dtype == torch.int8 or opened.precision != "int8",
            f"{opened.name} holds int8 weights: give --dtype int8, or the checkpoint they were made from")
    model, tp, dp, world = empty_model(opened.shape, groups.tp), groups.tp, groups.dp, groups.world
    parameters = dict(model.named_parameters())
    other_dtype = dtype if dtype != torch.int8 else activation_dtype(device) if activations is None else activations
    matrices = {name: parameter for name, parameter in parameters.items()
                if dtype == torch.int8 and is_quantised(name, parameter.shape)}
    stored = all_succeed_or_raise(lambda: [name for name in matrices if opened.has_int8_levels(name)], world)
    maxima = _row_maxima(opened, {name: matrices[name] for name in matrices if name not in stored}, groups)

    def read(name: str, numbers: Tensor, scale: Tensor | None) -> None:
        parameter, where = parameters[name], f"{opened.name}: {name}"
        if scale is None:
            read_finite(opened.reader(name, parameter, tp), where, numbers)
        elif name in stored:
            stored_scale = torch.empty(len(scale))
            opened.reader(name, parameter, tp, INT8_KIND)(0, numbers.view(-1))
            opened.reader(name, parameter, tp, SCALE_KIND)(0, stored_scale)
            scale.copy_(stored_scale)
        else:
            scale.copy_(quantise_into(numbers, opened.reader(name, parameter, tp), where, maxima.get(name)))

    def fill() -> None:
        all_levels = allocate_levels({name: matrix.shape for name, matrix in matrices.items()}, device)
        for name, parameter in parameters.items():
            numbers, scale = all_levels.get(name), None
            if numbers is None:
                numbers = torch.empty(parameter.shape, dtype=other_dtype, device=device)
            else:
                scale = torch.empty(len(numbers), dtype=other_dtype, device=device)
            # the first data parallel rank reads, and broadcasts what it has
            all_succeed_or_raise(partial(read, name, numbers, scale) if dp.rank == 0 else lambda: None, dp)
            for tensor in (numbers,) if scale is None else (numbers, scale):
                for part in tensor.view(-1).split(BROADCAST_ELEMENTS):
                    broadcast_into(part, 0, dp).wait()
            set_parameter(model, name, numbers if scale is None else Int8(numbers, scale))

    all_succeed_or_raise(fill, world)
    return model.eval().requires_grad_(False)


def empty_model(shape: ModelConfig, tp: Group) -> GPT2:
    """A model on the meta device; `set_parameter` gives its parameters their values."""
    model = GPT2(shape, tp, deferred=True)
    if shape.memory_centric_tiled_linear:
        tile_linears(model.blocks, shape.tile_factor, shape.hidden_size, deferred=True)
    return model


def set_parameter(model: nn.Module, name: str, value: Tensor) -> None:
    path, _, last = name.rpartition(".")
    setattr(model.get_submodule(path), last, nn.Parameter(value, requires_grad=False))


def read_finite(read: ReadRange, where: str, out: Tensor) -> None:
    """Reads a tensor in blocks; raises CheckpointError if it is not finite in its dtype."""
    flat = out.view(-1)
    block = torch.empty(min(READ_ELEMENTS, len(flat)))
    for start in range(0, len(flat), READ_ELEMENTS):
        part = block[: min(READ_ELEMENTS, len(flat) - start)]
        read(start, part)
        place = flat[start : start + len(part)].copy_(part)
        if not bool(place.isfinite().all()):
            raise CheckpointError(f"{where} is not finite in {str(out.dtype).removeprefix('torch.')}; ask for another "
                                  "--dtype")


def _row_maxima(opened: OpenedModel, matrices: Mapping[str, Tensor], groups: Groups) -> dict[str, Tensor]:
    """Row maxima of the matrices whose rows are sharded, from one all-reduce after each rank has read its columns. A
    rank reads these matrices twice, but never the columns of others. Ranks that read nothing get {}. Collective."""
    sharded = {name: matrix for name, matrix in matrices.items() if groups.dp.rank == 0 and not groups.tp.is_solo
               and (partition := partition_of(matrix)) is not None and partition.dim == 1}
    own = all_succeed_or_raise(lambda: [row_maxima(opened.reader(name, matrix, groups.tp), matrix.shape)
                                        for name, matrix in sharded.items()], groups.world)
    if not sharded:
        return {}
    flat = torch.cat(own)
    all_reduce_into(flat, groups.tp, "max").wait()
    return dict(zip(sharded, flat.split([len(matrix) for matrix in sharded.values()]), strict=True))
