"""Read Megatron-LM GPT-2 checkpoints: mp_rank_<XX>/model_optim_rng.pt, one file per tensor-parallel rank, or one state
dict.

    checkpoint_version 0 (or none)   query_key_value rows [q k v, head, width], as ours
    checkpoint_version 1             [head, width, q k v]
    checkpoint_version 2, 3          [head, q k v, width]

A tensor is joined when it is read. Pipeline-parallel files and Megatron-core's names are refused. A single state dict
has no arguments: the number of heads and the version must be given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron.checkpoint.convert.external_checkpoint import (MEGATRON_LM, ExternalCheckpoint, build_model_config,
                                                             load_torch_file)
from megatron.errors import CheckpointError
from mpu.partition import join_local_slices
from mpu.split import Partition

RANK_FILE, TRACKER_FILE = "model_optim_rng.pt", "latest_checkpointed_iteration.txt"

PARTITIONS = {"wte.weight": Partition(0), "qkv.weight": Partition(0, 3), "qkv.bias": Partition(0, 3),
              "attn.proj.weight": Partition(1), "fc.weight": Partition(0), "fc.bias": Partition(0),
              "mlp.proj.weight": Partition(1)}
"""Suffix of our name -> how the tensor is split; others are replicated in every file."""


def find_folder(folder: Path) -> Path | None:
    """The folder with mp_rank_XX: `folder`, or the iteration that the tracker file names; None if there is none."""
    tracker = folder / TRACKER_FILE
    if tracker.is_file():
        word = tracker.read_bytes()[:32].decode("ascii", "replace").strip()
        folder = folder / ("release" if word == "release" else f"iter_{int(word):07d}" if word.isdecimal() else "")
    return folder if (folder / "mp_rank_00" / RANK_FILE).is_file() else None


def open_rank_folders(folder: Path, vocab_size: int | None = None, heads: int | None = None) -> ExternalCheckpoint:
    """Open one checkpoint of mp_rank_XX files. `vocab_size` removes padding rows of the token table; `heads` is needed
    if the files hold no arguments."""
    ranks = sorted(path.name for path in folder.iterdir() if path.name.startswith("mp_rank_"))
    expected = [f"mp_rank_{rank:02d}" for rank in range(len(ranks))]
    if ranks != expected:
        raise CheckpointError(f"{folder}: expected {', '.join(expected)}, found {', '.join(ranks)}; pipeline parallel "
                              "checkpoints have to be merged by the program that wrote them")
    saved = [load_torch_file(folder / name / RANK_FILE) for name in ranks]
    parts = [MEGATRON_LM.rename_tensors(_flatten_state_dict(one.get("model"), ""), str(folder / name / RANK_FILE))
             if isinstance(one, dict) else {} for one, name in zip(saved, ranks)]
    for name, part in zip(ranks, parts):
        if not part or part.keys() != parts[0].keys():
            raise CheckpointError(f"{folder / name / RANK_FILE}: holds other tensors than those of mp_rank_00, or none")
    args = getattr(saved[0].get("args"), "__dict__", {})
    version = float(saved[0].get("checkpoint_version", 0))
    return _join_ranks(str(folder), parts, vocab_size, args.get("num_attention_heads", heads), version,
                       args.get("layernorm_epsilon", 1e-5))


def is_state_dict(saved: Any) -> bool:
    """Whether the content of a file is a state dict of a Megatron GPT-2."""
    return any(".query_key_value." in name for name, _ in _flatten_state_dict(saved, ""))


def open_state_dict(saved: Any, path: Path, vocab_size: int | None, heads: int | None,
                    version: float | None) -> ExternalCheckpoint:
    """Open a full model in one state dict."""
    if version is None:
        raise CheckpointError(f"{path}: a state dict does not say in which order the rows of query_key_value are: give "
                              "--checkpoint-version 0 (q k v, head, width: Megatron-LM 1, DeepSpeedExamples) or 2 "
                              "(head, q k v, width: Megatron-LM 2 and 3, Megatron-DeepSpeed)")
    part = MEGATRON_LM.rename_tensors(_flatten_state_dict(saved, ""), str(path))
    return _join_ranks(str(path), [part], vocab_size, heads, version, 1e-5)


def _join_ranks(where: str, parts: list[dict[str, Tensor]], vocab_size: int | None, heads: int | None, version: float,
                epsilon: float) -> ExternalCheckpoint:
    if heads is None:
        raise CheckpointError(f"{where}: it does not say how many heads there are: give --num-attention-heads")
    part, tp = parts[0], len(parts)
    try:
        rows, hidden = part["wte.weight"].shape
        layers = 1 + max(int(name.split(".")[1]) for name in part if name.startswith("blocks."))
        ffn, positions = part["blocks.0.mlp.fc.weight"].shape[0] * tp, part["wpe.weight"].shape[0]
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"{where}: no GPT-2 of Megatron-LM: {error} is missing or of another shape") from error
    if vocab_size is not None and vocab_size > rows * tp:
        raise CheckpointError(f"{where}: --vocab-size {vocab_size} is more than its {rows * tp} rows")
    model = build_model_config(where, num_layers=layers, hidden_size=hidden, num_attention_heads=heads,
                               vocab_size=vocab_size or rows * tp, intermediate_size=ffn,
                               max_position_embeddings=positions, layernorm_epsilon=epsilon)
    loads = {name: partial(_join_tensor, name, [part[name] for part in parts], version, heads, model.known_vocab_size)
             for name in part}
    return ExternalCheckpoint(where, model, loads)


def _flatten_state_dict(value: object, path: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Mapping):
        for key, child in value.items():
            yield from _flatten_state_dict(child, f"{path}.{key}" if path else str(key))
    elif isinstance(value, Tensor):
        yield path, value


def _join_tensor(name: str, pieces: list[Tensor], version: float, heads: int, tokens: int) -> Tensor:
    """Join the slices of all tensor-parallel ranks."""
    partition = next((cut for end, cut in PARTITIONS.items() if name.endswith(end)), None)
    if partition is None:
        return pieces[0]
    if ".qkv." in name and version >= 2:
        # rows [head, qkv, width] -> [qkv, head, width]
        pieces = [piece.unflatten(0, (heads // len(pieces), 3, -1)).transpose(0, 1).flatten(0, 2) for piece in pieces]
    elif ".qkv." in name and version >= 1:
        # rows [head, width, qkv] -> [qkv, head, width]
        pieces = [piece.unflatten(0, (heads // len(pieces), -1, 3)).movedim(2, 0).flatten(0, 2) for piece in pieces]
    whole = pieces[0] if len(pieces) == 1 else join_local_slices(pieces, partition)
    return whole[:tokens] if name == "wte.weight" else whole
