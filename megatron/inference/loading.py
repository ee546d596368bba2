"""A trained model, whatever wrote it: this rank's part of the weights, in the precision that is asked for.

A parameter is made when its turn comes and read a block at a time, so that no more than a block beside the part itself
is ever in memory. The tokenizer is the one of the checkpoint, unless flags name its files elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import data.tokenizer
from data.default_corpus import DEFAULT_FOLDER
from data.facts import TokenizerFacts, tokenizer_facts_in
from data.tokenizer_base import Tokenizer
from megatron.checkpoint.agree import agree
from megatron.checkpoint.choice import locate, tag_of_step
from megatron.checkpoint.interchange.huggingface import open_folder
from megatron.checkpoint.reader import open_checkpoint
from megatron.config.hf_shape import shape_in, tokenizer_in
from megatron.config.tree import ModelConfig, require
from megatron.errors import CheckpointError
from megatron.inference.source import Source
from megatron.model.gpt2 import GPT2
from megatron.zero.tiling import tile_linears
from mpu import groups as mpu_groups
from mpu.groups import Groups
from mpu.partition import partition_of
from mpu.split import Partition

BLOCK = 1 << 18
"""Numbers read at a time."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Weights(Protocol):
    """Of a checkpoint, ours or another program's."""

    def read(self, kind: str, name: str, *, shape: tuple[int, ...], partition: Partition | None, tp_rank: int,
             tp_size: int, offset: int, out: Tensor) -> None: ...


@dataclass(frozen=True)
class Found:
    """What a folder holds."""

    weights: Weights
    shape: ModelConfig
    data: Mapping[str, Any]
    """The section of its configuration that says the tokenizer."""
    precision: str
    name: str
    trained_with: TokenizerFacts | None = None
    """None: it does not say."""


@dataclass(frozen=True)
class Loaded:
    model: GPT2
    tokenizer: Tokenizer
    described: str
    """In a line."""


def groups_of(source: Source, ranks: int, module: str) -> Groups:
    """All ranks share the layers of one model."""
    size = source.model_parallel_size
    require(ranks == size, f"--model-parallel-size {size} needs as many ranks, and there are {ranks}: start them with "
            f"python -m megatron.launch --nproc-per-node {size} -m {module.removeprefix('python -m ')} ...")
    return mpu_groups.build(size)


def open_source(source: Source, groups: Groups) -> Found:
    """What it names. Collective."""
    return open_hf(source.load_hf, groups) if source.load_hf else open_trained(source.load or "", groups, source.step)


def load(source: Source, groups: Groups, device: torch.device) -> Loaded:
    """Model and tokenizer. Collective."""
    found = open_source(source, groups)
    tokenizer = tokenizer_of(found, source.tokenizer)
    dtype = source.dtype or found.precision
    model = build(found, groups, DTYPES[dtype], device)
    return Loaded(model, tokenizer, f"{found.name}: {found.shape.parameters():,} parameters in {dtype}, "
                                    f"{tokenizer.facts.described}")


def open_trained(folder: str, groups: Groups, step: int | None = None) -> Found:
    """Of a run: `DIR`, `DIR:TAG` or the folder of a tag; the latest, or that of iteration `step`. Every byte is checked
    first. Collective."""
    root, tag = locate(folder)
    if step is not None:
        require(tag is None, f"--load {folder} names a tag already: leave out --ckpt-step {step}")
        tag, _ = agree(lambda: tag_of_step(root, step), groups.world)
    found = open_checkpoint(root, tag, world=groups.world)
    precision = next((name for name in ("bf16", "fp16") if found.config["precision"][name]), "fp32")
    return Found(found, ModelConfig(**found.config["model"]), found.config["data"], precision,
                 f"{found.tag} of {root}", tokenizer_facts_in(found.shared_state["client_state"]))


def open_hf(folder: str, groups: Groups) -> Found:
    """Of a Hugging Face folder. Collective."""
    agree(lambda: shape_in(folder), groups.world)  # or what is wrong with the folder
    found = agree(lambda: open_folder(Path(folder)), groups.world)
    return Found(found, found.model, tokenizer_in(folder), "fp32", folder)


def tokenizer_of(found: Found, flags: Mapping[str, str]) -> Tokenizer:
    """Its tokenizer, with files where `flags` say they are."""
    said = {**found.data, **flags}
    kind, path = said.get("tokenizer_type") or "GPT2BPETokenizer", said.get("tokenizer_path")
    if path is None and kind == "SentencePieceTokenizer" and "default" in said.get("train_data", ()):
        path = str(DEFAULT_FOLDER / "tokenizer.model")
    made = data.tokenizer.build(kind, vocab_file=said.get("vocab_file"), merge_file=said.get("merge_file"),
                                tokenizer_path=path)
    require(made.vocab_size <= found.shape.tokens,
            f"{found.name} has {found.shape.tokens} tokens, fewer than the {made.vocab_size} of {made.name}: give the "
            "tokenizer it was trained with, --tokenizer-type with its files (--tokenizer-path or --vocab-file)")
    if (known := found.trained_with) is not None:
        require(known == made.facts, f"{found.name} was trained with {known.described}, and this is "
                f"{made.facts.described}: give its own, --tokenizer-type with its files (--tokenizer-path or "
                "--vocab-file)")
    return made


@torch.no_grad()
def build(found: Found, groups: Groups, dtype: torch.dtype, device: torch.device) -> GPT2:
    """This rank's part of the model. Collective: what one rank cannot read is an error of all."""
    tiled = found.shape.memory_centric_tiled_linear
    model = GPT2(found.shape, groups.tp, deferred=not tiled)
    if tiled:
        tile_linears(model.blocks, found.shape.tile_factor, found.shape.hidden_size)
    agree(lambda: _fill(model, found, groups, dtype, device), groups.world)
    return model.eval().requires_grad_(False)


def _fill(model: GPT2, found: Found, groups: Groups, dtype: torch.dtype, device: torch.device) -> None:
    for name, parameter in model.named_parameters():
        flat = torch.empty(parameter.numel(), dtype=dtype, device=device)
        block = torch.empty(min(BLOCK, len(flat)))
        shape, partition = tuple(parameter.shape), partition_of(parameter)
        for start in range(0, len(flat), BLOCK):
            part = block[: min(BLOCK, len(flat) - start)]
            found.weights.read("weight", name, shape=shape, partition=partition, tp_rank=groups.tp.rank,
                               tp_size=groups.tp.size, offset=start, out=part)
            place = flat[start : start + len(part)].copy_(part)
            if not bool(place.isfinite().all()):
                raise CheckpointError(f"{found.name}: {name} is not finite in {str(dtype).removeprefix('torch.')}; ask "
                                      "for another --dtype")
        _put(model, name, flat.view(shape))


def _put(model: nn.Module, name: str, value: Tensor) -> None:
    """In place of a parameter without room."""
    path, _, last = name.rpartition(".")
    module = model.get_submodule(path)
    setattr(module, last, nn.Parameter(value, requires_grad=False))
