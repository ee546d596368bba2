"""nanoGPT's ckpt.pt: {"model": state dict, "model_args": its shape, ...}, read by torch's restricted loader.

Its names are those of Hugging Face with matrices [out, in] as ours; `_orig_mod.` before each comes from torch.compile.
With bias=False, layers have no biases: ours are zero, which computes the same. It trains with the exact GELU where ours
is the tanh form (GPT-2's own): hidden states differ by about 1e-3 until training has gone over them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.interchange.foreign import ExternalCheckpoint, build_model_config, parameter_shapes
from megatron.checkpoint.interchange.huggingface import check_output_layer
from megatron.checkpoint.interchange.names import NANOGPT
from megatron.errors import CheckpointError

NANOGPT_FILE = "ckpt.pt"
NANOGPT_FIELDS = {"n_layer": "num_layers", "n_embd": "hidden_size", "n_head": "num_attention_heads",
                  "block_size": "max_position_embeddings", "vocab_size": "vocab_size"}


def open_nanogpt(saved: Any, path: Path, vocab_size: int | None = None) -> ExternalCheckpoint:
    """`vocab_size` cuts off the rows that pad the token table (nanoGPT calls 50304 what GPT-2 calls 50257)."""
    if not isinstance(saved, dict) or not isinstance(saved.get("model"), dict) \
            or not isinstance(args := saved.get("model_args"), dict) or not NANOGPT_FIELDS.keys() <= args.keys():
        raise CheckpointError(f"{path}: expected nanoGPT's `model` and `model_args` with {', '.join(NANOGPT_FIELDS)}")
    fields: dict[str, Any] = {ours: args[theirs] for theirs, ours in NANOGPT_FIELDS.items()}
    rows = fields["vocab_size"]
    if vocab_size is not None and vocab_size > rows:
        raise CheckpointError(f"{path}: --vocab-size {vocab_size} is more than its {rows} rows")
    dropout = args.get("dropout", 0.0)
    model = build_model_config(str(path), **{**fields, "vocab_size": vocab_size or rows}, attention_dropout=dropout,
                               hidden_dropout=dropout)
    tensors = {key: value for key, value in saved["model"].items() if isinstance(value, Tensor)}
    found = NANOGPT.rename_tensors(tensors.items(), str(path))
    check_output_layer(tensors, found, str(path))
    if "wte.weight" in found:
        found["wte.weight"] = found["wte.weight"][:model.known_vocab_size]
    if not args.get("bias", True):
        found = {name: torch.zeros(shape)
                 for name, shape in parameter_shapes(model).items() if name.endswith(".bias")} | found
    foreign = ExternalCheckpoint(str(path), model, {name: tensor.detach for name, tensor in found.items()},
                                 ("it was trained with the exact GELU, this program's is the tanh form",))
    foreign.check()
    return foreign
