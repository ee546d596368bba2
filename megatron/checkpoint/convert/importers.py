"""Open checkpoints of other programs: Hugging Face GPT-2 folders, nanoGPT's ckpt.pt, Megatron-LM's GPT-2.

A `NameTable` per program maps `<prefixes><layers>.<i>.<module>.weight` to `blocks.<i>.<module>.weight`. Hugging Face
matrices are [in, out] ("Conv1D"), those of the others [out, in], as ours. `lm_head.weight` must be the token table.
Models that compute something else than ours are refused, but for nanoGPT's exact GELU: ours is the tanh form, hidden
states differ by about 1e-3 until training has adapted.

Megatron-LM writes mp_rank_<XX>/model_optim_rng.pt, one file per tensor-parallel rank; a tensor is joined when it is
read. Pipeline-parallel files and Megatron-core's names are refused. One state dict has no arguments: the number of
heads and the version must be given.

    checkpoint_version 0 (or none)   query_key_value rows [q k v, head, width], as ours
    checkpoint_version 1             [head, width, q k v]
    checkpoint_version 2, 3          [head, q k v, width]
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from megatron.checkpoint.convert.external_checkpoint import (ExternalCheckpoint, build_model_config, load_torch_file,
                                                             parameter_partitions, parameter_shapes)
from megatron.checkpoint.manifest import check_safe_name
from megatron.checkpoint.tags import describe_format
from megatron.config.hf_config import HF_CONFIG_FILE, model_fields_of, read_json_object
from megatron.config.tree import ModelConfig
from megatron.errors import CheckpointError
from mpu.partition import join_local_slices
from mpu.split import Partition


def open_external_checkpoint(source: Path, vocab_size: int | None = None, heads: int | None = None,
                             version: float | None = None) -> ExternalCheckpoint:
    """Open another program's checkpoint; the content of `source` decides which."""
    if (source / HF_CONFIG_FILE).is_file():
        return open_huggingface(source)
    if source.is_file() or (source / NANOGPT_FILE).is_file():
        path = source if source.is_file() else source / NANOGPT_FILE
        saved = load_torch_file(path)
        tensors = list(_flatten_state_dict(saved, ""))
        if not any(".query_key_value." in name for name, _ in tensors):
            return open_nanogpt(saved, path, vocab_size)
        if version is None:
            raise CheckpointError(
                f"{path}: a state dict does not say in which order the rows of query_key_value are: give "
                "--checkpoint-version 0 (q k v, head, width: Megatron-LM 1, DeepSpeedExamples) or 2 (head, q k v, "
                "width: Megatron-LM 2 and 3, Megatron-DeepSpeed)")
        part = MEGATRON_LM.rename_tensors(tensors, str(path))
        return _join_ranks(str(path), [part], vocab_size, heads, version, 1e-5)
    if (folder := find_folder(source)) is not None:
        return open_rank_folders(folder, vocab_size, heads)
    raise CheckpointError(
        f"{source}: neither a checkpoint of this program, nor one that `convert` reads: a Hugging "
        f"Face folder ({HF_CONFIG_FILE}), nanoGPT's {NANOGPT_FILE}, Megatron-LM's mp_rank_00"
        f"{describe_format(source)}")


@dataclass(frozen=True)
class NameTable:
    """Parameter names of one program. If several of its names map to one of ours, the first is used for writing."""

    title: str
    prefixes: tuple[str, ...]  # prefixes added by releases and wrappers, in any order and number
    layers: str
    modules: Mapping[str, str]  # module names inside a layer: theirs -> ours
    top_level: Mapping[str, str]  # module names outside layers: theirs -> ours
    skipped: str  # pattern of names to skip: masks, and output layers tied to the token table
    transposes_matrices: bool = False  # matrices in layers are stored [in, out]

    def to_their_name(self, ours: str, prefix: str) -> str:
        module, _, kind = ours.rpartition(".")
        layer = re.fullmatch(r"blocks\.(\d+)\.(.+)", module)
        table = self.modules if layer else self.top_level
        found = next(their for their, our in table.items() if our == (layer[2] if layer else module))
        return f"{prefix}{self.layers}.{layer[1]}.{found}.{kind}" if layer else f"{prefix}{found}.{kind}"

    def is_transposed(self, ours: str) -> bool:
        """Whether their tensor is the transpose of ours."""
        return self.transposes_matrices and re.fullmatch(r"blocks\.\d+\.(attn|mlp)\.\w+\.weight", ours) is not None

    def rename_tensors(self, tensors: Iterable[tuple[str, Tensor]], where: str) -> dict[str, Tensor]:
        """Tensors by our names; CheckpointError for an unknown or duplicate name."""
        renamed: dict[str, Tensor] = {}
        for name, tensor in tensors:
            bare = re.sub(f"^({'|'.join(map(re.escape, self.prefixes))})+", "", name)
            module, _, kind = bare.rpartition(".")
            layer = re.fullmatch(rf"{self.layers}\.(\d+)\.(.+)", module)
            known = self.modules.get(layer[2]) if layer else self.top_level.get(module)
            if known is None or kind not in ("weight", "bias"):
                if re.fullmatch(self.skipped, bare):
                    continue
                raise CheckpointError(f"{where}: {name} belongs to no GPT-2 of {self.title} that this program knows")
            ours = f"blocks.{layer[1]}.{known}.{kind}" if layer else f"{known}.{kind}"
            if ours in renamed:
                raise CheckpointError(f"{where}: {name} is there twice, with and without a prefix")
            renamed[ours] = tensor
        return renamed

    def open_tensors(self, where: str, model: ModelConfig, tensors: Mapping[str, Tensor], notes: tuple[str, ...] = (),
                     tokens: int | None = None) -> ExternalCheckpoint:
        """The checkpoint of whole tensors by their names, whose output layer is tied to the token table. Rows of the
        table beyond `tokens` are padding."""
        found = self.rename_tensors(tensors.items(), where)
        heads = [tensor for name, tensor in tensors.items() if name.endswith("lm_head.weight")]
        table = found.get("wte.weight")
        if heads and table is not None and not torch.equal(heads[0], table):
            raise CheckpointError(f"{where}: lm_head.weight differs from wte.weight: an output layer of its own, which "
                                  "this program's GPT-2 does not have")
        if table is not None:
            found["wte.weight"] = table[:tokens]
        checkpoint = ExternalCheckpoint(where, model, {
            name: tensor.t if self.is_transposed(name) and tensor.dim() == 2 else tensor.detach
            for name, tensor in found.items()}, notes)
        for name in checkpoint.shapes:
            checkpoint.tensor(name)  # checks its shape, before any parameter is changed
        return checkpoint


HUGGING_FACE = NameTable(
    "Hugging Face", prefixes=("_orig_mod.", "module.", "transformer."), layers="h", transposes_matrices=True,
    modules={"ln_1": "ln_1", "attn.c_attn": "attn.qkv", "attn.c_proj": "attn.proj", "ln_2": "ln_2",
             "mlp.c_fc": "mlp.fc", "mlp.c_proj": "mlp.proj"}, top_level={"wte": "wte", "wpe": "wpe", "ln_f": "ln_f"},
    skipped=r"lm_head\.weight|h\.\d+\.attn\.(masked_)?bias")

NANOGPT = replace(HUGGING_FACE, title="nanoGPT", transposes_matrices=False)

MEGATRON_LM = NameTable(
    "Megatron-LM", prefixes=("module.", "model.", "language_model.", "embedding.", "transformer.", "encoder."),
    layers="layers",
    modules={"input_layernorm": "ln_1", "attention.query_key_value": "attn.qkv", "attention.dense": "attn.proj",
             "self_attention.query_key_value": "attn.qkv", "self_attention.dense": "attn.proj",
             "post_attention_layernorm": "ln_2", "mlp.dense_h_to_4h": "mlp.fc", "mlp.dense_4h_to_h": "mlp.proj"},
    top_level={"word_embeddings": "wte", "position_embeddings": "wpe", "final_layernorm": "ln_f"},
    skipped=r"word_embeddings_for_head\..*|.*\._extra_state|layers\.\d+\..*\.(masked_)?bias")


# ---- Hugging Face ---------------------------------------------------------------------------------------------------

SAFETENSORS_FILE, TORCH_FILE = "model.safetensors", "pytorch_model.bin"

SUPPORTED_GELU = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")
# Settings under which their model equals ours; also the default of an absent key.
REQUIRED_CONFIG: Mapping[str, object] = {"model_type": "gpt2", "tie_word_embeddings": True, "scale_attn_weights": True,
                                         "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}


def open_huggingface(folder: Path) -> ExternalCheckpoint:
    """Open a Hugging Face folder; its tensors are views of mapped files."""
    model = model_config_of(read_json_object(folder / HF_CONFIG_FILE), str(folder / HF_CONFIG_FILE))
    return HUGGING_FACE.open_tensors(str(folder), model, _load_tensors(folder))


def model_config_of(config: Mapping[str, Any], where: str) -> ModelConfig:
    """The ModelConfig of their config.json; CheckpointError if our model computes something else."""
    wrong = [f"{key} is {config[key]!r}, {needed!r} expected" for key, needed in REQUIRED_CONFIG.items()
             if config.get(key, needed) != needed]
    if (gelu := config.get("activation_function", SUPPORTED_GELU[0])) not in SUPPORTED_GELU:
        wrong.append(f"activation_function is {gelu!r}, one of {', '.join(SUPPORTED_GELU)} expected")
    shape = model_fields_of(config)
    if missing := [key for key in ("n_layer", "n_embd", "n_head", "vocab_size") if key not in config]:
        wrong.append(f"{missing[0]} is missing")
    if wrong:
        raise CheckpointError(f"{where}: {'; '.join(wrong)}: not this program's GPT-2")
    return build_model_config(where, **shape, attention_dropout=config.get("attn_pdrop", 0.1),
                              hidden_dropout=config.get("resid_pdrop", 0.1),
                              init_method_std=config.get("initializer_range", 0.02))


def _load_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of the weight files, by their names."""
    for name in (SAFETENSORS_FILE, TORCH_FILE):
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            files = [name]
        elif index.is_file():
            listed = read_json_object(index).get("weight_map")
            files = sorted({str(file) for file in listed.values()}) if isinstance(listed, dict) else []
            if not files:
                raise CheckpointError(f"{index}: names no files")
        else:
            continue
        tensors: dict[str, Tensor] = {}
        for file in files:
            path = folder / check_safe_name(file, f"{index}: file")
            if name == TORCH_FILE:
                content = load_torch_file(path)
                if not isinstance(content, dict):
                    raise CheckpointError(f"{path}: expected a state dict, found {type(content).__name__}")
                tensors |= {str(key): tensor for key, tensor in content.items() if isinstance(tensor, Tensor)}
            else:
                try:
                    tensors |= load_file(path)
                except (OSError, SafetensorError) as error:
                    raise CheckpointError(f"{path}: cannot be read ({error})") from error
        return tensors
    raise CheckpointError(
        f"{folder}: expected {SAFETENSORS_FILE} or {TORCH_FILE} (or the index of several) beside {HF_CONFIG_FILE}")


# ---- nanoGPT --------------------------------------------------------------------------------------------------------

NANOGPT_FILE = "ckpt.pt"
NANOGPT_FIELDS = {"n_layer": "num_layers", "n_embd": "hidden_size", "n_head": "num_attention_heads",
                  "block_size": "max_position_embeddings", "vocab_size": "vocab_size"}


def open_nanogpt(saved: Any, path: Path, vocab_size: int | None = None) -> ExternalCheckpoint:
    """Open nanoGPT's ckpt.pt. `vocab_size` removes padding rows of the token table (nanoGPT pads 50257 to 50304)."""
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
    if not args.get("bias", True):  # zeros in the place of those that it does not have
        tensors = {NANOGPT.to_their_name(name, "transformer."): torch.zeros(shape)
                   for name, shape in parameter_shapes(model).items() if name.endswith(".bias")} | tensors
    return NANOGPT.open_tensors(str(path), model, tensors, tokens=model.known_vocab_size,
                                notes=("it was trained with the exact GELU, this program's is the tanh form",))


# ---- Megatron-LM ----------------------------------------------------------------------------------------------------

RANK_FILE, TRACKER_FILE = "model_optim_rng.pt", "latest_checkpointed_iteration.txt"


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
    loads = {name: partial(_join_tensor, name, [part[name] for part in parts], partition, version, heads,
                           model.known_vocab_size)
             for name, (_, partition) in parameter_partitions(model).items() if name in part}
    return ExternalCheckpoint(where, model, loads)


def _flatten_state_dict(value: object, path: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Mapping):
        for key, child in value.items():
            yield from _flatten_state_dict(child, f"{path}.{key}" if path else str(key))
    elif isinstance(value, Tensor):
        yield path, value


def _join_tensor(name: str, pieces: list[Tensor], partition: Partition | None, version: float, heads: int,
                 tokens: int) -> Tensor:
    """Join the slices of all tensor-parallel ranks."""
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
