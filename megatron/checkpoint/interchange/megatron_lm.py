"""Megatron-LM's GPT-2 checkpoints: <folder>/mp_rank_<XX>/model_optim_rng.pt, one file a tensor parallel rank.

    word_embeddings.weight                             wte.weight           rows split
    position_embeddings.weight                         wpe.weight
    layers.N.attention.query_key_value.weight          attn.qkv.weight      rows split, ordered by version (below)
    layers.N.attention.dense.weight                    attn.proj.weight     columns split
    layers.N.mlp.dense_h_to_4h / dense_4h_to_h         mlp.fc / mlp.proj    rows / columns split
    layers.N.input_layernorm, post_attention_layernorm, final_layernorm     ln_1, ln_2, ln_f

around which each release puts other prefixes (`language_model.embedding.`, `transformer.` or `encoder.`). The rows of
the fused projection stand, in each rank's file,

    checkpoint_version 0 (or none)   [q k v, head, width]     as ours
    checkpoint_version 1             [head, width, q k v]
    checkpoint_version 2, 3          [head, q k v, width]

One file per rank is read by torch's restricted loader; a tensor is joined when it is asked for. Pipeline parallel files
(mp_rank_00_000) and the names of Megatron-core are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron.checkpoint.interchange.foreign import Foreign, load_torch, model_config
from megatron.errors import CheckpointError
from mpu.partition import join_slices
from mpu.split import Partition

FILE, TRACKER = "model_optim_rng.pt", "latest_checkpointed_iteration.txt"

RENAMED = {"input_layernorm": "ln_1", "attention.query_key_value": "attn.qkv", "attention.dense": "attn.proj",
           "self_attention.query_key_value": "attn.qkv", "self_attention.dense": "attn.proj",
           "post_attention_layernorm": "ln_2", "mlp.dense_h_to_4h": "mlp.fc", "mlp.dense_4h_to_h": "mlp.proj"}
WHOLE = {"word_embeddings.weight": "wte.weight", "position_embeddings.weight": "wpe.weight",
         "final_layernorm.weight": "ln_f.weight", "final_layernorm.bias": "ln_f.bias"}
CUTS = {"wte.weight": Partition(0), "qkv.weight": Partition(0, 3), "qkv.bias": Partition(0, 3),
        "attn.proj.weight": Partition(1), "fc.weight": Partition(0), "fc.bias": Partition(0),
        "mlp.proj.weight": Partition(1)}
"""How a tensor is split, by the end of our name; the others are whole in every file."""


def find_folder(folder: Path) -> Path | None:
    """The folder of the mp_rank_XX, if there is one: this, or the iteration that the tracker of a save folder names."""
    tracker = folder / TRACKER
    if tracker.is_file():
        word = tracker.read_bytes()[:32].decode("ascii", "replace").strip()
        folder = folder / ("release" if word == "release" else f"iter_{int(word):07d}" if word.isdecimal() else "")
    return folder if (folder / "mp_rank_00" / FILE).is_file() else None


def open_folder(folder: Path, vocab_size: int | None = None, heads: int | None = None) -> Foreign:
    """`vocab_size` cuts off the rows that pad the token table; `heads` is for files that hold no arguments."""
    ranks = _ranks(folder)
    saved = [load_torch(folder / name / FILE) for name in ranks]
    parts = [dict(_named(one.get("model"), folder / name)) if isinstance(one, dict) else {}
             for one, name in zip(saved, ranks)]
    for name, part in zip(ranks, parts):
        if not part or part.keys() != parts[0].keys():
            raise CheckpointError(f"{folder / name / FILE}: holds other tensors than those of mp_rank_00, or none")
    args = getattr(saved[0].get("args"), "__dict__", {})
    heads = args.get("num_attention_heads", heads)
    if heads is None:
        raise CheckpointError(f"{folder}: its files say nothing of the number of heads: give --num-attention-heads")
    shape = _shape(parts[0], len(ranks), str(folder), heads)
    if vocab_size is not None and vocab_size > shape["vocab_size"]:
        raise CheckpointError(f"{folder}: --vocab-size {vocab_size} is more than its {shape['vocab_size']} rows")
    model = model_config(str(folder), **{**shape, "vocab_size": vocab_size or shape["vocab_size"]},
                         layernorm_epsilon=args.get("layernorm_epsilon", 1e-5))
    version = float(saved[0].get("checkpoint_version", 0))
    loads = {name: partial(_joined, name, [part[name] for part in parts], version, heads, model.tokens)
             for name in parts[0]}
    return Foreign(str(folder), model, loads)


def _ranks(folder: Path) -> list[str]:
    names = sorted(path.name for path in folder.iterdir() if path.name.startswith("mp_rank_"))
    expected = [f"mp_rank_{rank:02d}" for rank in range(len(names))]
    if names != expected:
        raise CheckpointError(f"{folder}: expected {', '.join(expected)}, found {', '.join(names)}; pipeline parallel "
                              "checkpoints have to be merged by the program that wrote them")
    return names


def _named(value: object, where: Path) -> Iterator[tuple[str, Tensor]]:
    """The weights of one file by our names, out of however nested a state dict."""
    for path, tensor in _flattened(value, ""):
        name = re.sub(r"^(module\.|model\.|language_model\.|embedding\.|transformer\.|encoder\.)+", "", path)
        block = re.fullmatch(r"layers\.(\d+)\.(.+)\.(weight|bias)", name)
        if name in WHOLE:
            yield WHOLE[name], tensor
        elif block and block[2] in RENAMED:
            yield f"blocks.{block[1]}.{RENAMED[block[2]]}.{block[3]}", tensor
        elif not re.fullmatch(r"word_embeddings_for_head\..*|.*\._extra_state|layers\.\d+\..*\.(masked_)?bias", name):
            raise CheckpointError(f"{where / FILE}: {path} belongs to no GPT-2 of Megatron-LM that this program knows")


def _flattened(value: object, path: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Mapping):
        for key, child in value.items():
            yield from _flattened(child, f"{path}.{key}" if path else str(key))
    elif isinstance(value, Tensor):
        yield path, value


def _shape(part: Mapping[str, Tensor], tp: int, where: str, heads: int) -> dict[str, Any]:
    """What the tensors themselves say."""
    try:
        rows, hidden = part["wte.weight"].shape
        return {"num_layers": 1 + max(int(name.split(".")[1]) for name in part if name.startswith("blocks.")),
                "hidden_size": hidden, "num_attention_heads": heads, "vocab_size": rows * tp,
                "intermediate_size": part["blocks.0.mlp.fc.weight"].shape[0] * tp,
                "max_position_embeddings": part["wpe.weight"].shape[0]}
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"{where}: no GPT-2 of Megatron-LM: {error} is missing or of another shape") from error


def _joined(name: str, pieces: list[Tensor], version: float, heads: int, tokens: int) -> Tensor:
    """The whole tensor of the parts of all ranks."""
    cut = next((cut for end, cut in CUTS.items() if name.endswith(end)), None)
    if cut is None:
        return pieces[0]
    if ".qkv." in name:
        pieces = [_in_our_order(piece, version, heads // len(pieces)) for piece in pieces]
    whole = pieces[0] if len(pieces) == 1 else join_slices(pieces, cut)
    return whole[:tokens] if name == "wte.weight" else whole


def _in_our_order(piece: Tensor, version: float, heads: int) -> Tensor:
    """Rows of one rank's fused projection -> [q k v, head, width]."""
    if version >= 2:
        piece = piece.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)
    elif version >= 1:
        piece = piece.unflatten(0, (heads, -1, 3)).movedim(2, 0).flatten(0, 2)
    return piece
