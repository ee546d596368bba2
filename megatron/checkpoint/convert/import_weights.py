"""Convert between checkpoints of ours and of other programs; the content of the source folder decides the direction.

    ours (a save root, or one tag)          -> a Hugging Face GPT-2 folder
    Hugging Face, nanoGPT, Megatron-LM      -> a save root of ours with tag `global_step0`, weights only
    any of these, asked for in int8         -> a save root of ours with one int8 tag, for inference only
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.commit import check_save_root_is_writable, lock_save_root
from megatron.checkpoint.convert import huggingface, megatron_lm
from megatron.checkpoint.convert.detect_format import describe_format
from megatron.checkpoint.convert.external_checkpoint import ExternalCheckpoint, load_torch_file
from megatron.checkpoint.int8_weights import (INT8_KIND, SCALE_KIND, is_quantised, quantise_matrix, row_maxima,
                                              scales_from_maxima)
from megatron.checkpoint.manifest import tag_of_iteration
from megatron.checkpoint.pieces import LazyData, TensorPiece
from megatron.checkpoint.reader import Checkpoint, read_recorded_model
from megatron.checkpoint.tags import tag_names
from megatron.checkpoint.writer import SaveReport, save
from megatron.config.hf_config import HF_CONFIG_FILE
from megatron.config.tree import Config
from megatron.errors import CheckpointError, ConfigError
from mpu.groups import SOLO


def open_external_checkpoint(source: Path, vocab_size: int | None = None, heads: int | None = None,
                             version: float | None = None) -> ExternalCheckpoint:
    """Open another program's checkpoint; the content of `source` decides which."""
    if (source / HF_CONFIG_FILE).is_file():
        return huggingface.open_huggingface(source)
    if source.is_file() or (source / huggingface.NANOGPT_FILE).is_file():
        path = source if source.is_file() else source / huggingface.NANOGPT_FILE
        saved = load_torch_file(path)
        if megatron_lm.is_state_dict(saved):
            return megatron_lm.open_state_dict(saved, path, vocab_size, heads, version)
        return huggingface.open_nanogpt(saved, path, vocab_size)
    if (folder := megatron_lm.find_folder(source)) is not None:
        return megatron_lm.open_rank_folders(folder, vocab_size, heads)
    raise CheckpointError(
        f"{source}: neither a checkpoint of this program, nor one that `convert` reads: a Hugging "
        f"Face folder ({HF_CONFIG_FILE}), nanoGPT's {huggingface.NANOGPT_FILE}, Megatron-LM's mp_rank_00"
        f"{describe_format(source)}")


def import_weights(source: ExternalCheckpoint, root: Path) -> SaveReport:
    """Save the weights as a checkpoint of ours, with one tensor in memory at a time."""
    return _save_tag(root, source, source.shapes, tag_of_iteration(0), Config(model=source.model).as_dict(), 0)


def quantise_weights(source: Checkpoint | ExternalCheckpoint, root: Path) -> SaveReport:
    """Save the weights with int8 matrices (int8_weights.py), with one tensor in memory at a time. A run's tag keeps its
    name."""
    if isinstance(source, ExternalCheckpoint):
        return _save_tag(root, source, source.shapes, tag_of_iteration(0), Config(model=source.model).as_dict(), 0,
                         quantise=True)
    read_recorded_model(source)  # raises if it is no GPT-2
    shapes = {name: source.shape("weight", name) for name in source.names("weight")}
    if "wte.weight" not in shapes:
        raise CheckpointError(f"tag {source.tag} is not of this program's GPT-2, which is what int8 is for")
    state = {name: value for name, value in source.shared_state["client_state"].items() if name == "tokenizer"}
    return _save_tag(root, source, shapes, source.tag, source.config, source.iteration, state, quantise=True)


def _save_tag(root: Path, source: Checkpoint | ExternalCheckpoint, shapes: Mapping[str, tuple[int, ...]], tag: str,
              config: Mapping[str, Any], iteration: int, client_state: Mapping[str, Any] = {},
              quantise: bool = False) -> SaveReport:
    if tag_names(root):
        raise ConfigError(f"--output {root}: holds checkpoints already; choose another folder")
    run_id = secrets.token_hex(8)
    shared: dict[str, Any] = {"run_id": run_id, "engine": {}, "optimizer": None, "lr_scheduler": None, "buffers": {},
                              "client_state": dict(client_state)}
    pieces = [piece for name, shape in shapes.items() for piece in _lazy_pieces(source, name, shape, quantise)]
    check_save_root_is_writable(root, "--output")
    with lock_save_root(root):
        return save(root, tag, pieces=pieces, rank_state={}, shared_state=shared, config=config,
                    layout={"tp": 1, "dp": 1, "zero_stage": 0}, world=SOLO, run_id=run_id, iteration=iteration)


def _lazy_pieces(source: Checkpoint | ExternalCheckpoint, name: str, shape: tuple[int, ...],
                 quantise: bool) -> list[TensorPiece]:
    """One weight as fp32, or as int8 levels and scales. The matrix is then read twice, since the two are written to
    different places of the file."""
    def read(start: int, out: Tensor) -> None:
        source.read("weight", name, shape=shape, partition=None, tp_rank=0, tp_size=1, offset=start, out=out)

    def load_whole() -> Tensor:
        read(0, whole := torch.empty(prod(shape)))
        return whole

    def piece(kind: str, shape: tuple[int, ...], dtype: torch.dtype, load: Callable[[], Tensor]) -> TensorPiece:
        return TensorPiece(name, kind, shape, None, 0, 1, 0, LazyData(prod(shape), dtype, load))

    if not quantise or not is_quantised(name, shape):
        return [piece("weight", shape, torch.float32, load_whole)]
    where = f"weight {name!r}"
    return [piece(INT8_KIND, shape, torch.int8, lambda: quantise_matrix(read, shape, where)[0].view(-1)),
            piece(SCALE_KIND, shape[:1], torch.float32, lambda: scales_from_maxima(row_maxima(read, shape), where))]
