"""A trained model, whatever wrote it: this rank's part of the weights, in the precision that is asked for.

A parameter is made when its turn comes and read a block at a time, so that no more than a block beside the part itself
is ever in memory: int8 weights are quantised while they are read. Of data parallel ranks, which hold the same part, the
first one reads it and sends it on, a parameter at a time. The tokenizer is the one of the checkpoint, unless flags name
its files elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import gcd
from pathlib import Path
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn

import data.tokenizer
from data.default_corpus import DEFAULT_FOLDER
from data.facts import TokenizerFacts
from data.tokenizer_base import Tokenizer
from megatron.checkpoint.agree import all_succeed_or_raise
from megatron.checkpoint.choice import find_tag_of_step, parse_checkpoint_path
from megatron.checkpoint.int8 import INT8_KIND, SCALE_KIND, ReadRange, is_quantised, quantise_into, row_maxima
from megatron.checkpoint.interchange.foreign import assert_same_weights
from megatron.checkpoint.interchange.huggingface import open_huggingface
from megatron.checkpoint.interchange.recorded import read_recorded_model
from megatron.checkpoint.reader import open_checkpoint
from megatron.config.hf_shape import read_model_fields, read_tokenizer_fields
from megatron.config.tree import ModelConfig, require
from megatron.errors import CheckpointError
from megatron.inference.int8 import Int8, Room, activations_on
from megatron.inference.rounded import rounded_weights
from megatron.inference.source import TOKENIZER_FLAGS, Source
from megatron.model.gpt2 import GPT2
from megatron.zero.tiling import tile_linears
from mpu import groups as mpu_groups
from mpu.collectives import all_reduce_into, broadcast_into
from mpu.groups import Group, Groups
from mpu.partition import partition_of
from mpu.split import Partition

BLOCK = 1 << 18
"""Numbers read at a time."""

SENT = 1 << 24
"""Numbers sent at a time."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8}


class Weights(Protocol):
    """Of a checkpoint, ours or another program's."""

    def read(self, kind: str, name: str, *, shape: tuple[int, ...], partition: Partition | None, tp_rank: int,
             tp_size: int, offset: int, out: Tensor) -> None:        ...


@dataclass(frozen=True)
class Found:
    """What a folder holds."""

    weights: Weights
    shape: ModelConfig
    data: Mapping[str, Any]
    """The section of its configuration that says the tokenizer."""
    precision: str
    """A key of DTYPES."""
    name: str
    trained_with: TokenizerFacts | None = None
    """None: it does not say."""
    has_own_levels: Callable[[str], bool] | None = None
    """Whether a matrix was quantised in training, to levels that are int8's."""

    @property
    def assumes_tokenizer(self) -> bool:
        """Nothing says which it is: GPT-2's is taken."""
        return not any(self.data.get(name) for name in TOKENIZER_FLAGS)

    def has_levels(self, name: str) -> bool:
        """It need not be quantised now."""
        return self.is_int8 or self.has_own_levels is not None and self.has_own_levels(name)

    @property
    def is_int8(self) -> bool:
        """It was quantised before it was written."""
        return self.precision == "int8"


@dataclass(frozen=True)
class Loaded:
    model: GPT2
    tokenizer: Tokenizer
    described: str
    """In a line."""


def groups_of(source: Source, ranks: int, module: str) -> Groups:
    """All ranks share the layers of one model."""
    size = source.model_parallel_size
    require(ranks == size or size > 1, f"there are {ranks} ranks and one model, whose layers they have to share: add "
            f"--model-parallel-size {ranks}, or start one rank")
    require(ranks == size, f"--model-parallel-size {size} needs as many ranks, and there are {ranks}: start them with "
            f"python -m megatron.launch --nproc-per-node {size} -m {module.removeprefix('python -m ')} ...")
    return mpu_groups.build(size)


def open_source(source: Source, groups: Groups) -> Found:
    """What it names. Collective."""
    is_hf = source.load_hf is not None
    found = open_hf(source.load_hf, groups) if source.load_hf else \
        open_trained(source.load or "", groups, source.step)
    _check_split(found, groups.tp.size)
    return replace(found, data=source.tokenizer if is_hf and source.tokenizer else {**found.data, **source.tokenizer})


def load(source: Source, groups: Groups, device: torch.device) -> Loaded:
    """Model and tokenizer. Collective."""
    found = open_source(source, groups)
    check_shape(found, source.shape)
    tokenizer = all_succeed_or_raise(lambda: tokenizer_of(found, source.tokenizer), groups.world)
    dtype = source.dtype or found.precision
    model = build(found, groups, DTYPES[dtype], device)
    return Loaded(model, tokenizer, described(found, dtype, tokenizer))


def described(found: Found, dtype: str, tokenizer: Tokenizer) -> str:
    """In a line."""
    doubt = " (assumed: nothing beside the weights says which it is)" if found.assumes_tokenizer else ""
    return f"{found.name}: {found.shape.parameters():,} parameters in {dtype}, {tokenizer.facts.description}{doubt}"


def open_trained(folder: str, groups: Groups, step: int | None = None) -> Found:
    """Of a run: `DIR`, `DIR:TAG` or the folder of a tag; the latest, or that of iteration `step`. Every byte is checked
    first. Collective."""
    root, tag = parse_checkpoint_path(folder)
    if step is not None:
        require(tag is None, f"--load {folder} names a tag already: leave out --ckpt-step {step}")
        tag, _ = all_succeed_or_raise(lambda: find_tag_of_step(root, step), groups.world)
    found = open_checkpoint(root, tag, world=groups.world, int8=True)
    recorded = all_succeed_or_raise(lambda: read_recorded_model(found), groups.world)
    precision = "int8" if found.has(INT8_KIND) else recorded.precision
    rounded = None if precision == "int8" else all_succeed_or_raise(lambda: rounded_weights(found, DTYPES[precision]),
                                                                    groups.world)
    return Found(rounded or found, recorded.shape, recorded.data, precision, f"{found.tag} of {root}",
                 recorded.tokenizer, has_own_levels=None if rounded is None else rounded.has_levels)


def open_hf(folder: str, groups: Groups) -> Found:
    """Of a Hugging Face folder. Collective."""
    all_succeed_or_raise(lambda: read_model_fields(folder), groups.world)  # or what is wrong with the folder
    found = all_succeed_or_raise(lambda: open_huggingface(Path(folder)), groups.world)
    assert_same_weights(found, groups.world)
    said = all_succeed_or_raise(lambda: read_tokenizer_fields(folder), groups.world)
    return Found(found, found.model, said, "fp32", folder)


def check_shape(found: Found, said: Mapping[str, float]) -> None:
    its = {**asdict(found.shape), "intermediate_size": found.shape.ffn_size}
    differing = [f"--{name.replace('_', '-')} {value}, and its own is {its[name]}" for name, value in said.items()
                 if value != its[name]]
    require(not differing, f"{found.name} is another model: {'; '.join(differing)}; leave the flags of its shape out, "
            "or name another --load")


def tokenizer_of(found: Found, flags: Mapping[str, str]) -> Tokenizer:
    """Its tokenizer, with files where `flags` say they are."""
    said = {**found.data, **flags}
    kind, path = said.get("tokenizer_type") or "GPT2BPETokenizer", said.get("tokenizer_path")
    if path is None and kind == "SentencePieceTokenizer" and "default" in said.get("train_data", ()):
        path = str(DEFAULT_FOLDER / "tokenizer.model")
    _check_remembered(found, data.tokenizer.canonical_kind(kind), flags)
    made = data.tokenizer.build(kind, vocab_file=said.get("vocab_file"), merge_file=said.get("merge_file"),
                                tokenizer_path=path)
    require(
        made.vocab_size <= found.shape.known_vocab_size,
        f"{found.name} has {found.shape.known_vocab_size} tokens, fewer than the {made.vocab_size} of {made.name}: give the "
        "tokenizer it was trained with, --tokenizer-type with its files (--tokenizer-path or --vocab-file)")
    if (known := found.trained_with) is not None:
        require(known == made.facts, f"{found.name} was trained with {known.description}, and this is "
                f"{made.facts.description}: give its own, --tokenizer-type with its files (--tokenizer-path or "
                "--vocab-file)")
    return made


def _check_remembered(found: Found, kind: str, flags: Mapping[str, str]) -> None:
    """Refuse files that have moved since, all at once."""
    used = {"GPT2BPETokenizer": ("vocab_file", "merge_file"), "CharacterLevelTokenizer": ("vocab_file",),
            "SentencePieceTokenizer": ("tokenizer_path",)}.get(kind, ())
    gone = {f"--{name.replace('_', '-')}": path for name in used if name not in flags
            and (path := found.data.get(name)) is not None and not Path(path).is_file()}
    require(not gone, f"{found.name} remembers the files of its {kind}, and {' and '.join(map(str, gone.values()))} "
            f"{'are' if len(gone) > 1 else 'is'} not there: say where now, with "
            f"{' '.join(f'{flag} FILE' for flag in gone)}")


def _check_split(found: Found, tp: int) -> None:
    shape = found.shape
    widths = shape.num_attention_heads, shape.hidden_size, shape.ffn_size
    *most, last = [str(size) for size in range(1, gcd(*widths) + 1) if gcd(*widths) % size == 0]
    allowed = f"{', '.join(most)} and {last}" if most else last
    require(gcd(*widths) % tp == 0, f"--model-parallel-size {tp} does not divide {found.name}, which has {widths[0]} "
            f"attention heads, hidden size {widths[1]} and MLP width {widths[2]}: it can be {allowed}")


@torch.no_grad()
def build(found: Found, groups: Groups, dtype: torch.dtype, device: torch.device,
          activations: torch.dtype | None = None) -> GPT2:
    """This rank's part of the model. Of `torch.int8` are the matrices, and `activations` say the rest's precision; left
    out, the device does. Collective: what one rank cannot read is an error of all."""
    require(dtype == torch.int8 or not found.is_int8,
            f"{found.name} holds int8 weights: give --dtype int8, or the checkpoint they were made from")
    model = empty(found.shape, groups.tp)
    parts = [_Part(found, name, parameter, groups.tp) for name, parameter in model.named_parameters()]
    rest = dtype if dtype != torch.int8 else activations_on(device) if activations is None else activations
    matrices = {part.name for part in parts if dtype == torch.int8 and is_quantised(part.name, part.shape)}
    levelled = all_succeed_or_raise(lambda: {name for name in sorted(matrices) if found.has_levels(name)}, groups.world)
    maxima = _maxima_of_rows([part for part in parts if part.name in matrices - levelled], groups)

    def fill() -> None:
        room = Room([part.shape for part in parts if part.name in matrices], device)
        for part in parts:
            if part.name in matrices:
                levels, scale = room.take(part.shape), torch.empty(part.shape[0], dtype=rest, device=device)
                read = partial(part.stored, levels, scale) if part.name in levelled else \
                    partial(part.int8, levels, scale, maxima.get(part.name))
                _share(read, (levels, scale), groups.dp)
                put(model, part.name, Int8(levels, scale))
            else:
                numbers = torch.empty(part.shape, dtype=rest, device=device)
                _share(partial(part.numbers, numbers), (numbers,), groups.dp)
                put(model, part.name, numbers)

    all_succeed_or_raise(fill, groups.world)
    return model.eval().requires_grad_(False)


def empty(shape: ModelConfig, tp: Group) -> GPT2:
    """Without room for its parameters, which `put` gives their values."""
    model = GPT2(shape, tp, deferred=True)
    if shape.memory_centric_tiled_linear:
        tile_linears(model.blocks, shape.tile_factor, shape.hidden_size, deferred=True)
    return model


def _share(read: Callable[[], None], made: Sequence[Tensor], dp: Group) -> None:
    """`read` fills these tensors on the first of the ranks, and is an error of all where it fails; the others are sent
    them. Collective."""
    all_succeed_or_raise(read if dp.rank == 0 else _nothing, dp)
    for part in (part for tensor in made for part in tensor.view(-1).split(SENT)):
        broadcast_into(part, 0, dp).wait()


def _nothing() -> None:
    """What is left to do for a rank that is sent what another reads."""


def _maxima_of_rows(parts: Sequence[_Part], groups: Groups) -> dict[str, Tensor]:
    """Of the matrices whose rows are cut: the ranks ask each other once, after each has read its own columns. A rank
    then reads these matrices twice, and never the columns of others. Those that read nothing ask for nothing.
    Collective."""
    cut = [part for part in parts if part.has_cut_rows and groups.dp.rank == 0]
    own = all_succeed_or_raise(lambda: [row_maxima(part.reader("weight"), part.shape) for part in cut], groups.world)
    if not cut:
        return {}
    flat = torch.cat(own)
    all_reduce_into(flat, groups.tp, "max").wait()
    return dict(zip((part.name for part in cut), flat.split([part.shape[0] for part in cut]), strict=True))


@final
class _Part:
    """This rank's part of a parameter, not yet read."""

    def __init__(self, found: Found, name: str, parameter: Tensor, tp: Group) -> None:
        self._found, self.name, self._tp = found, name, tp
        self.shape, self._partition = tuple(parameter.shape), partition_of(parameter)

    @property
    def has_cut_rows(self) -> bool:
        return self._partition is not None and self._partition.dim == 1 and not self._tp.is_solo

    def reader(self, kind: str) -> ReadRange:
        return partial(self._read, kind, self.shape, self._partition)

    def _read(self, kind: str, shape: tuple[int, ...], partition: Partition | None, start: int, out: Tensor) -> None:
        self._found.weights.read(kind, self.name, shape=shape, partition=partition, tp_rank=self._tp.rank,
                                 tp_size=self._tp.size, offset=start, out=out)

    def numbers(self, out: Tensor) -> None:
        flat = out.view(-1)
        block, read = torch.empty(min(BLOCK, len(flat))), self.reader("weight")
        for start in range(0, len(flat), BLOCK):
            part = block[: min(BLOCK, len(flat) - start)]
            read(start, part)
            place = flat[start : start + len(part)].copy_(part)
            if not bool(place.isfinite().all()):
                raise CheckpointError(f"{self._found.name}: {self.name} is not finite in "
                                      f"{str(out.dtype).removeprefix('torch.')}; ask for another --dtype")

    def int8(self, levels: Tensor, scale: Tensor, maxima: Tensor | None) -> None:
        where = f"{self._found.name}: {self.name}"
        scale.copy_(quantise_into(levels, self.reader("weight"), where, maxima))

    def stored(self, levels: Tensor, scale: Tensor) -> None:
        """As it is int8 already."""
        self.reader(INT8_KIND)(0, levels.view(-1))
        stored = torch.empty(len(levels))
        cut = self._partition if self._partition is not None and self._partition.dim == 0 else None
        self._read(SCALE_KIND, tuple(stored.shape), cut, 0, stored)
        scale.copy_(stored)


def put(model: nn.Module, name: str, value: Tensor) -> None:
    """In place of a parameter without room."""
    path, _, last = name.rpartition(".")
    module = model.get_submodule(path)
    setattr(module, last, nn.Parameter(value, requires_grad=False))
