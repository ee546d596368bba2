"""Between checkpoints of ours and of other programs: what a folder is decides which way it goes.

    ours (a save root, or one tag)        -> a Hugging Face GPT-2 folder
    Hugging Face folder, nanoGPT's        -> a save root of ours with the one tag `global_step0`, which holds weights
    ckpt.pt, Megatron-LM's mp_rank_XX,       alone: a run starts from it with `--load DIR --finetune`
    one state dict of a Megatron GPT-2
"""

from __future__ import annotations

import secrets
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.commit import probe
from megatron.checkpoint.interchange import huggingface, megatron_lm, nanogpt
from megatron.checkpoint.interchange.foreign import Foreign, load_torch
from megatron.checkpoint.lock import locked
from megatron.checkpoint.manifest import step_tag
from megatron.checkpoint.piece import Deferred, Piece
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
    if tag_names(root):
        raise ConfigError(f"--output {root}: holds checkpoints already; choose another folder")
    pieces = [Piece(name, "weight", shape, None, 0, 1, 0,
                    Deferred(prod(shape), torch.float32, partial(_fp32, found, name)))
              for name, shape in found.shapes.items()]
    run_id = secrets.token_hex(8)
    shared: dict[str, Any] = {"run_id": run_id, "engine": {}, "optimizer": None, "lr_scheduler": None, "buffers": {},
                              "client_state": {}}
    config = Config(model=found.model)
    probe(root, "--output")
    with locked(root):
        return save(root, step_tag(0), pieces=pieces, rank_state={}, shared_state=shared, config=config.as_dict(),
                    layout={"tp": 1, "dp": 1, "zero_stage": 0}, world=SOLO, run_id=run_id, iteration=0)


def _fp32(found: Foreign, name: str) -> torch.Tensor:
    return found.flat(name).float()
