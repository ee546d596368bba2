"""Between checkpoints of ours and of other programs: what a folder is decides which way it goes.

    ours (a save root, or one tag)        -> a Hugging Face GPT-2 folder
    Hugging Face folder, nanoGPT's        -> a save root of ours with the one tag `global_step0`, which holds weights
    ckpt.pt, Megatron-LM's mp_rank_XX,       alone: a run starts from it with `--load DIR --finetune`
    one state dict of a Megatron GPT-2
    any of these, asked for in int8       -> a save root of ours with one tag, for inference alone
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.commit import locked, probe
from megatron.checkpoint.int8 import SCALE, LEVELS, Read, is_quantised, quantised, row_maxima, scale_of
from megatron.checkpoint.interchange import huggingface, megatron_lm, nanogpt
from megatron.checkpoint.interchange.foreign import Foreign, load_torch
from megatron.checkpoint.interchange.recorded import recorded_model
from megatron.checkpoint.manifest import step_tag
from megatron.checkpoint.piece import Deferred, Piece
from megatron.checkpoint.reader import Checkpoint
from megatron.checkpoint.recognise import recognise
from megatron.checkpoint.tags import tag_names
from megatron.checkpoint.writer import SaveReport, save
from megatron.config.hf_shape import CONFIG
from megatron.config.tree import Config
from megatron.errors import CheckpointError, ConfigError
from mpu.groups import SOLO


def open_foreign(source: Path, vocab_size: int | None = None, heads: int | None = None,
                 version: float | None = None) -> Foreign:
    """Another program's checkpoint, whichever it is."""
    if (source / CONFIG).is_file():
        return huggingface.open_folder(source)
    if source.is_file() or (source / nanogpt.FILE).is_file():
        path = source if source.is_file() else source / nanogpt.FILE
        saved = load_torch(path)
        if megatron_lm.is_state_dict(saved):
            return megatron_lm.open_state_dict(saved, path, vocab_size, heads, version)
        return nanogpt.open_saved(saved, path, vocab_size)
    if (folder := megatron_lm.find_folder(source)) is not None:
        return megatron_lm.open_folder(folder, vocab_size, heads)
    raise CheckpointError(f"{source}: neither a checkpoint of this program, nor one that `convert` reads: a Hugging "
                          f"Face folder ({CONFIG}), nanoGPT's {nanogpt.FILE}, Megatron-LM's mp_rank_00"
                          f"{recognise(source)}")


def import_weights(found: Foreign, root: Path) -> SaveReport:
    """Write the weights as a checkpoint of ours, one tensor in memory at a time."""
    pieces = [_weight(found, name, shape) for name, shape in found.shapes.items()]
    return _save(root, step_tag(0), pieces, Config(model=found.model).as_dict(), 0)


def quantise_weights(found: Checkpoint | Foreign, root: Path) -> SaveReport:
    """Write the weights with matrices of int8 (int8.py), one tensor in memory at a time; of a run the tag
    stays."""
    if isinstance(found, Foreign):
        pieces = _quantised(found, found.shapes)
        return _save(root, step_tag(0), pieces, Config(model=found.model).as_dict(), 0)
    recorded_model(found)  # or why it is no GPT-2 that could be loaded
    shapes = {name: found.shape("weight", name) for name in found.names("weight")}
    if "wte.weight" not in shapes:
        raise CheckpointError(f"tag {found.tag} is not of this program's GPT-2, which is what int8 is for")
    state = {name: value for name, value in found.shared_state["client_state"].items() if name == "tokenizer"}
    return _save(root, found.tag, _quantised(found, shapes), found.config, found.iteration, state)


def _quantised(found: Checkpoint | Foreign, shapes: Mapping[str, tuple[int, ...]]) -> list[Piece]:
    return [piece for name, shape in shapes.items() for piece in
            (_int8(found, name, shape) if is_quantised(name, shape) else [_weight(found, name, shape)])]


def _save(root: Path, tag: str, pieces: Sequence[Piece], config: Mapping[str, Any], iteration: int,
          client_state: Mapping[str, Any] = {}) -> SaveReport:
    if tag_names(root):
        raise ConfigError(f"--output {root}: holds checkpoints already; choose another folder")
    run_id = secrets.token_hex(8)
    shared: dict[str, Any] = {"run_id": run_id, "engine": {}, "optimizer": None, "lr_scheduler": None, "buffers": {},
                              "client_state": dict(client_state)}
    probe(root, "--output")
    with locked(root):
        return save(root, tag, pieces=pieces, rank_state={}, shared_state=shared, config=config,
                    layout={"tp": 1, "dp": 1, "zero_stage": 0}, world=SOLO, run_id=run_id, iteration=iteration)


def _weight(found: Checkpoint | Foreign, name: str, shape: tuple[int, ...]) -> Piece:
    def load() -> Tensor:
        whole = torch.empty(prod(shape))
        _reader(found, name, shape)(0, whole)
        return whole
    return _piece(name, "weight", shape, torch.float32, load)


def _int8(found: Checkpoint | Foreign, name: str, shape: tuple[int, ...]) -> list[Piece]:
    """Values and scales; the matrix is read twice, as they go to different places of the file."""
    read, where = _reader(found, name, shape), f"weight {name!r}"
    return [_piece(name, LEVELS, shape, torch.int8, lambda: quantised(read, shape, where)[0].view(-1)),
            _piece(name, SCALE, shape[:1], torch.float32, lambda: scale_of(row_maxima(read, shape), where))]


def _piece(name: str, kind: str, shape: tuple[int, ...], dtype: torch.dtype, load: Callable[[], Tensor]) -> Piece:
    return Piece(name, kind, shape, None, 0, 1, 0, Deferred(prod(shape), dtype, load))


def _reader(found: Checkpoint | Foreign, name: str, shape: tuple[int, ...]) -> Read:
    def read(start: int, out: Tensor) -> None:
        found.read("weight", name, shape=shape, partition=None, tp_rank=0, tp_size=1, offset=start, out=out)
    return read
