"""Hugging Face's GPT-2 folders, read and written: config.json beside model.safetensors (or pytorch_model.bin).

The names are in names.py. Their matrices are [in, out] ("Conv1D"); `lm_head.weight` is the token table, and often
absent. What would compute something else than our model does is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from data.storage import make_folder, staged_file, write_json_atomic
from megatron.checkpoint.commit import storing
from megatron.checkpoint.export import logical
from megatron.checkpoint.interchange.foreign import Foreign, load_torch, model_config, shapes_of
from megatron.checkpoint.interchange.names import HUGGING_FACE
from megatron.checkpoint.interchange.recorded import recorded_model
from megatron.checkpoint.interchange.tokenizers import tokenizer_files
from megatron.checkpoint.interchange.zero_to_fp32 import Entry, write
from megatron.checkpoint.manifest import safe_name
from megatron.checkpoint.reader import Checkpoint
from megatron.checkpoint.tags import Say, say_stderr
from megatron.config.hf_shape import CONFIG, read_config, read_object, shape_of
from megatron.config.tree import ModelConfig
from megatron.errors import CheckpointError, ConfigError

SAFETENSORS, TORCH = "model.safetensors", "pytorch_model.bin"
SHARD_BYTES = 5 * 10**9

SAME_GELU = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")
NEEDED: Mapping[str, object] = {"model_type": "gpt2", "tie_word_embeddings": True, "scale_attn_weights": True,
                                "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
"""Settings under which their model is ours; each is also what an absent one means."""


# ---- reading --------------------------------------------------------------------------------------------------------

def open_folder(folder: Path) -> Foreign:
    """A folder of theirs; its tensors are views of mapped files."""
    model = our_shape(read_config(folder), str(folder / CONFIG))
    tensors = _tensors(folder)
    found = HUGGING_FACE.translate(tensors.items(), str(folder))
    check_head(tensors, found, str(folder))
    foreign = Foreign(str(folder), model, {name: partial(_ours, name, tensor) for name, tensor in found.items()})
    foreign.check()
    return foreign


def _ours(name: str, tensor: Tensor) -> Tensor:
    return tensor.t() if HUGGING_FACE.turned(name) and tensor.dim() == 2 else tensor


def check_head(theirs: Mapping[str, Tensor], found: Mapping[str, Tensor], where: str) -> None:
    """An output layer of its own is refused."""
    heads = [tensor for name, tensor in theirs.items() if name.endswith("lm_head.weight")]
    table = found.get("wte.weight")
    if heads and table is not None and not torch.equal(heads[0], table):
        raise CheckpointError(f"{where}: lm_head.weight differs from wte.weight: an output layer of its own, which "
                              "this program's GPT-2 does not have")


def our_shape(config: Mapping[str, Any], where: str) -> ModelConfig:
    """Of a config.json of theirs, if our model computes the same."""
    wrong = [f"{key} is {config[key]!r}, {needed!r} expected" for key, needed in NEEDED.items()
             if config.get(key, needed) != needed]
    if (gelu := config.get("activation_function", SAME_GELU[0])) not in SAME_GELU:
        wrong.append(f"activation_function is {gelu!r}, one of {', '.join(SAME_GELU)} expected")
    shape = shape_of(config)
    if missing := [key for key in ("n_layer", "n_embd", "n_head", "vocab_size") if key not in config]:
        wrong.append(f"{missing[0]} is missing")
    if wrong:
        raise CheckpointError(f"{where}: {'; '.join(wrong)}: not this program's GPT-2")
    return model_config(where, **shape, attention_dropout=config.get("attn_pdrop", 0.1),
                        hidden_dropout=config.get("resid_pdrop", 0.1),
                        init_method_std=config.get("initializer_range", 0.02))


def _tensors(folder: Path) -> dict[str, Tensor]:
    """Everything in the weight files, whatever is in them."""
    for name, load in ((SAFETENSORS, _safetensors), (TORCH, _torch)):
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            return load(folder / name)
        if index.is_file():
            listed = read_object(index).get("weight_map")
            files = sorted({str(file) for file in listed.values()}) if isinstance(listed, dict) else []
            if not files:
                raise CheckpointError(f"{index}: names no files")
            return {key: tensor for file in files
                    for key, tensor in load(folder / safe_name(file, f"{index}: file")).items()}
    raise CheckpointError(f"{folder}: expected {SAFETENSORS} or {TORCH} (or the index of several) beside {CONFIG}")


def _safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error


def _torch(path: Path) -> dict[str, Tensor]:
    found = load_torch(path)
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: expected a state dict, found {type(found).__name__}")
    return {str(key): tensor for key, tensor in found.items() if isinstance(tensor, Tensor)}


# ---- writing --------------------------------------------------------------------------------------------------------

def export(found: Checkpoint, output: Path, shard_bytes: int = SHARD_BYTES, say: Say = say_stderr) -> list[Path]:
    """Write a folder that transformers loads: weights first, config.json last; the files. One tensor at a time is in
    memory. `say` prints why there are no tokenizer files, where there are none."""
    recorded = recorded_model(found)
    model, holds = recorded.shape, {name: found.shape("weight", name) for name in found.names("weight")}
    if holds != shapes_of(model):
        raise CheckpointError(f"tag {found.tag}: its weights are not those of this program's GPT-2 of "
                              f"{model.num_layers} layers (another model, or --memory-centric-tiled-linear); "
                              "zero_to_fp32.py writes any model")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"--output {output}: is not an empty folder; choose another, or remove it")
    entries = [_entry(found, name, shape) for name, shape in shapes_of(model).items()]
    tokenizer = tokenizer_files(recorded.data, model, recorded.tokenizer)
    if tokenizer.note is not None:
        say(tokenizer.note)
    elif not recorded.data["tokenizer_type"]:
        say("GPT-2's tokenizer is assumed: the checkpoint does not record which it was trained with")
    with storing(output, sum(entry.nbytes for entry in entries), "--output"):
        make_folder(output)
        files = write(entries, output / SAFETENSORS, shard_bytes)
        for name, content in tokenizer.files.items():
            with staged_file(output / name) as file:
                file.write(content)
        write_json_atomic(output / CONFIG, _config(model, tokenizer.eod))
    return [*files, *(output / name for name in tokenizer.files), output / CONFIG]


def _entry(found: Checkpoint, name: str, shape: tuple[int, ...]) -> Entry:
    turned = HUGGING_FACE.turned(name)

    def load() -> Any:
        whole = logical(found, "weight", name, 0, prod(shape)).numpy().reshape(shape)
        return whole.T if turned else whole

    return Entry(HUGGING_FACE.theirs(name, "transformer."), shape[::-1] if turned else shape, "<f4", load,
                 name)


def _config(model: ModelConfig, eod: int | None) -> dict[str, object]:
    return {**NEEDED, "architectures": ["GPT2LMHeadModel"], "activation_function": SAME_GELU[0],
            "n_layer": model.num_layers, "n_embd": model.hidden_size, "n_head": model.num_attention_heads,
            "n_inner": model.intermediate_size, "n_positions": model.max_position_embeddings,
            "n_ctx": model.max_position_embeddings, "vocab_size": model.tokens, "attn_pdrop": model.attention_dropout,
            "resid_pdrop": model.hidden_dropout, "embd_pdrop": model.hidden_dropout,
            "layer_norm_epsilon": model.layernorm_epsilon, "initializer_range": model.init_method_std,
            "bos_token_id": eod, "eos_token_id": eod, "torch_dtype": "float32"}
