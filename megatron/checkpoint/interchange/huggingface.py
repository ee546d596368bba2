"""Hugging Face's GPT-2 folders, read and written: config.json beside model.safetensors (or pytorch_model.bin).

    theirs                              ours
    transformer.h.0.attn.c_attn.weight  blocks.0.attn.qkv.weight    both q, k, v one after the other, heads inside
    [in, out] ("Conv1D")                [out, in]
    lm_head.weight (tied, often absent) wte.weight, without the rows that pad it

The prefix `transformer.` is missing in files of the bare GPT2Model and in the first released ones; masks saved as
buffers (`attn.bias`) are skipped. What would compute something else than our model does is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.gpt2_bpe import GPT2BPETokenizer, packaged_merges, parse_merges
from data.storage import make_folder, staged_file, write_json_atomic
from data.tokenizer_base import END_OF_TEXT
from megatron.checkpoint.commit import storing
from megatron.checkpoint.export import logical
from megatron.checkpoint.interchange.foreign import Foreign, load_torch, model_config, shapes_of
from megatron.checkpoint.interchange.zero_to_fp32 import Entry, write
from megatron.checkpoint.manifest import safe_name
from megatron.checkpoint.reader import Checkpoint
from megatron.checkpoint.strict import parse_json, read_bytes
from megatron.checkpoint.tensorfile import TensorFile
from megatron.config.tree import ModelConfig
from megatron.errors import CheckpointError

CONFIG = "config.json"
SAFETENSORS, TORCH = "model.safetensors", "pytorch_model.bin"
SHARD_BYTES = 5 * 10**9

RENAMED = {"ln_1": "ln_1", "attn.c_attn": "attn.qkv", "attn.c_proj": "attn.proj", "ln_2": "ln_2", "mlp.c_fc": "mlp.fc",
           "mlp.c_proj": "mlp.proj"}
THEIRS = {ours: theirs for theirs, ours in RENAMED.items()}
CONV1D = re.compile(r"blocks\.\d+\.(attn|mlp)\.\w+\.weight")
"""Our matrices that they keep as [in, out]."""

SAME_GELU = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")
NEEDED: Mapping[str, object] = {"model_type": "gpt2", "tie_word_embeddings": True, "scale_attn_weights": True,
                                "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
"""Settings under which their model is ours; each is also what an absent one means."""


# ---- names ----------------------------------------------------------------------------------------------------------

def our_name(theirs: str) -> str | None:
    """None for what holds no weight of its own: masks, and the output layer, which is the token table."""
    name = re.sub(r"^(_orig_mod\.|module\.)*(transformer\.)?", "", theirs)
    if name == "lm_head.weight" or re.fullmatch(r"h\.\d+\.attn\.(masked_)?bias", name):
        return None
    block = re.fullmatch(r"h\.(\d+)\.(.+)\.(weight|bias)", name)
    return f"blocks.{block[1]}.{RENAMED.get(block[2], block[2])}.{block[3]}" if block else name


def their_name(ours: str) -> str:
    block = re.fullmatch(r"blocks\.(\d+)\.(.+)\.(weight|bias)", ours)
    return f"transformer.h.{block[1]}.{THEIRS[block[2]]}.{block[3]}" if block else f"transformer.{ours}"


def under_our_names(found: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    """The tensors of a state dict by our names; an output layer of its own is refused."""
    renamed: dict[str, Tensor] = {}
    for theirs, tensor in found.items():
        if (name := our_name(theirs)) is not None:
            if name in renamed:
                raise CheckpointError(f"{where}: {theirs} is there twice, with and without a prefix")
            renamed[name] = tensor
    heads = [tensor for name, tensor in found.items() if name.endswith("lm_head.weight")]
    table = renamed.get("wte.weight")
    if heads and table is not None and not torch.equal(heads[0], table):
        raise CheckpointError(f"{where}: lm_head.weight differs from wte.weight: an output layer of its own, which "
                              "this program's GPT-2 does not have")
    return renamed


# ---- reading --------------------------------------------------------------------------------------------------------

def open_folder(folder: Path) -> Foreign:
    """A folder of theirs; its tensors are views of mapped files."""
    model = _model(_object(folder / CONFIG), str(folder / CONFIG))
    found = under_our_names(_tensors(folder), str(folder))
    loads = {name: partial(_ours, name, tensor) for name, tensor in found.items()}
    foreign = Foreign(str(folder), model, loads)
    foreign.check()
    return foreign


def _ours(name: str, tensor: Tensor) -> Tensor:
    return tensor.t() if CONV1D.fullmatch(name) and tensor.dim() == 2 else tensor


def _model(config: Mapping[str, Any], where: str) -> ModelConfig:
    wrong = [f"{key} is {config[key]!r}, {needed!r} expected" for key, needed in NEEDED.items()
             if config.get(key, needed) != needed]
    if (gelu := config.get("activation_function", SAME_GELU[0])) not in SAME_GELU:
        wrong.append(f"activation_function is {gelu!r}, one of {', '.join(SAME_GELU)} expected")
    if missing := [key for key in ("n_layer", "n_embd", "n_head", "vocab_size") if key not in config]:
        wrong.append(f"{missing[0]} is missing")
    if wrong:
        raise CheckpointError(f"{where}: {'; '.join(wrong)}: not this program's GPT-2")
    return model_config(
        where, num_layers=config["n_layer"], hidden_size=config["n_embd"], num_attention_heads=config["n_head"],
        intermediate_size=config.get("n_inner"), vocab_size=config["vocab_size"],
        max_position_embeddings=config.get("n_positions", 1024), attention_dropout=config.get("attn_pdrop", 0.1),
        hidden_dropout=config.get("resid_pdrop", 0.1), layernorm_epsilon=config.get("layer_norm_epsilon", 1e-5),
        init_method_std=config.get("initializer_range", 0.02))


def _tensors(folder: Path) -> dict[str, Tensor]:
    """Everything in the weight files, whatever is in them."""
    for name, load in ((SAFETENSORS, _safetensors), (TORCH, _torch)):
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            return load(folder / name)
        if index.is_file():
            listed = _object(index).get("weight_map")
            files = sorted({str(file) for file in listed.values()}) if isinstance(listed, dict) else []
            if not files:
                raise CheckpointError(f"{index}: names no files")
            return {key: tensor for file in files
                    for key, tensor in load(folder / safe_name(file, f"{index}: file")).items()}
    raise CheckpointError(f"{folder}: expected {SAFETENSORS} or {TORCH} (or the index of several) beside {CONFIG}")


def _safetensors(path: Path) -> dict[str, Tensor]:
    try:
        file = TensorFile(path, str(path))
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    return {key: file.tensor(key) for key in file.entries}


def _torch(path: Path) -> dict[str, Tensor]:
    found = load_torch(path)
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: expected a state dict, found {type(found).__name__}")
    return {str(key): tensor for key, tensor in found.items() if isinstance(tensor, Tensor)}


def _object(path: Path) -> dict[str, Any]:
    value = parse_json(read_bytes(path, str(path)), str(path))
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected an object, found {type(value).__name__}")
    return value


# ---- writing --------------------------------------------------------------------------------------------------------

def export(found: Checkpoint, output: Path, shard_bytes: int = SHARD_BYTES) -> list[Path]:
    """Write a folder that transformers loads: weights first, config.json last; the files. One tensor at a time is in
    memory."""
    model = _model_of(found)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise CheckpointError(f"{output}: is not an empty folder; choose another, or remove it")
    entries = [_entry(found, name, shape) for name, shape in shapes_of(model).items()]
    with storing(output, sum(entry.nbytes for entry in entries)):
        make_folder(output)
        files = write(entries, output / SAFETENSORS, shard_bytes)
        tokenizer = _write_tokenizer(found.config["data"], model, output)
        write_json_atomic(output / CONFIG, _config(model, eod=model.tokens - 1 if tokenizer else None))
    return [*files, *tokenizer, output / CONFIG]


def _model_of(found: Checkpoint) -> ModelConfig:
    """What the checkpoint says of its model; its weights have to be exactly those of this program's GPT-2."""
    model = model_config(f"tag {found.tag}", **found.config["model"])
    holds = {name: found.shape("weight", name) for name in found.names("weight")}
    if model.vocab_size is None or holds != shapes_of(model):
        raise CheckpointError(f"tag {found.tag}: its weights are not those of this program's GPT-2 of "
                              f"{model.num_layers} layers (another model, or --memory-centric-tiled-linear); "
                              "zero_to_fp32.py writes any model")
    return model


def _entry(found: Checkpoint, name: str, shape: tuple[int, ...]) -> Entry:
    turned = CONV1D.fullmatch(name) is not None

    def load() -> Any:
        whole = logical(found, "weight", name, 0, prod(shape)).numpy().reshape(shape)
        return whole.T if turned else whole

    return Entry(their_name(name), shape[::-1] if turned else shape, "<f4", load)


def _config(model: ModelConfig, eod: int | None) -> dict[str, object]:
    return {**NEEDED, "architectures": ["GPT2LMHeadModel"], "activation_function": SAME_GELU[0],
            "n_layer": model.num_layers, "n_embd": model.hidden_size, "n_head": model.num_attention_heads,
            "n_inner": model.intermediate_size, "n_positions": model.max_position_embeddings,
            "n_ctx": model.max_position_embeddings, "vocab_size": model.tokens, "attn_pdrop": model.attention_dropout,
            "resid_pdrop": model.hidden_dropout, "embd_pdrop": model.hidden_dropout,
            "layer_norm_epsilon": model.layernorm_epsilon, "initializer_range": model.init_method_std,
            "bos_token_id": eod, "eos_token_id": eod, "torch_dtype": "float32"}


def _write_tokenizer(data: Mapping[str, Any], model: ModelConfig, output: Path) -> list[Path]:
    """GPT-2's own vocabulary in their files; another, or one of other files than the packaged, is the user's to add."""
    if data["tokenizer_type"] not in (None, GPT2BPETokenizer.name) or data["merge_file"] or data["vocab_file"]:
        return []
    merges = packaged_merges()
    tokens = [*parse_merges(merges, "vocab.bpe"), END_OF_TEXT]
    if len(tokens) != model.tokens:
        return []
    settings = {"tokenizer_class": "GPT2Tokenizer", "model_max_length": model.max_position_embeddings,
                "add_prefix_space": False, **{f"{role}_token": END_OF_TEXT for role in ("bos", "eos", "unk")}}
    files = {"vocab.json": json.dumps({token: i for i, token in enumerate(tokens)}), "merges.txt": merges,
             "tokenizer_config.json": json.dumps(settings, indent=1)}
    for name, text in files.items():
        with staged_file(output / name, "w") as file:
            file.write(text)
    return [output / name for name in files]
