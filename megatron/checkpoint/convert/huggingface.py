"""Read and write Hugging Face GPT-2 folders (config.json beside model.safetensors or pytorch_model.bin), and read
nanoGPT's ckpt.pt.

Hugging Face matrices are [in, out] ("Conv1D"), nanoGPT's [out, in] under the same names. `lm_head.weight` must be the
token table. Models that compute something else than ours are refused. nanoGPT trains with the exact GELU, ours is the
tanh form: hidden states differ by about 1e-3 until training has adapted.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from data.storage import make_folder, staged_file, write_json_atomic
from megatron.checkpoint.commit import explain_disk_errors
from megatron.checkpoint.convert.external_checkpoint import (HUGGING_FACE, NANOGPT, ExternalCheckpoint,
                                                             build_model_config, load_torch_file, parameter_shapes)
from megatron.checkpoint.convert.tokenizer_files import build_tokenizer_files
from megatron.checkpoint.manifest import check_safe_name
from megatron.checkpoint.reader import Checkpoint, read_logical, read_recorded_model
from megatron.checkpoint.tags import PrintLine, print_to_stderr
from megatron.checkpoint.zero_to_fp32 import OutputTensor, write_output
from megatron.config.hf_config import HF_CONFIG_FILE, model_fields_of, read_hf_config, read_json_object
from megatron.config.tree import ModelConfig
from megatron.errors import CheckpointError, ConfigError

SAFETENSORS_FILE, TORCH_FILE = "model.safetensors", "pytorch_model.bin"
SHARD_BYTES = 5 * 10**9

SUPPORTED_GELU = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")
REQUIRED_CONFIG: Mapping[str, object] = {"model_type": "gpt2", "tie_word_embeddings": True, "scale_attn_weights": True,
                                         "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
"""Settings under which their model equals ours; also the default of an absent key."""


def open_huggingface(folder: Path) -> ExternalCheckpoint:
    """Open a Hugging Face folder; its tensors are views of mapped files."""
    model = model_config_of(read_hf_config(folder), str(folder / HF_CONFIG_FILE))
    tensors = _load_tensors(folder)
    found = HUGGING_FACE.rename_tensors(tensors.items(), str(folder))
    check_output_layer(tensors, found, str(folder))
    loads = {name: tensor.t if HUGGING_FACE.is_transposed(name) and tensor.dim() == 2 else tensor.detach
             for name, tensor in found.items()}
    checkpoint = ExternalCheckpoint(str(folder), model, loads)
    checkpoint.check()
    return checkpoint


def check_output_layer(their_tensors: Mapping[str, Tensor], our_tensors: Mapping[str, Tensor], where: str) -> None:
    """Raise if the output layer is not tied to the token table."""
    heads = [tensor for name, tensor in their_tensors.items() if name.endswith("lm_head.weight")]
    table = our_tensors.get("wte.weight")
    if heads and table is not None and not torch.equal(heads[0], table):
        raise CheckpointError(f"{where}: lm_head.weight differs from wte.weight: an output layer of its own, which "
                              "this program's GPT-2 does not have")


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


def export_huggingface(checkpoint: Checkpoint, output: Path, shard_bytes: int = SHARD_BYTES,
                       print_line: PrintLine = print_to_stderr) -> list[Path]:
    """Write a folder that transformers loads, weights first and config.json last; returns the files. Holds one tensor
    in memory at a time. `print_line` gets the reason if no tokenizer files are written."""
    recorded = read_recorded_model(checkpoint)
    model, holds = recorded.shape, {name: checkpoint.shape("weight", name) for name in checkpoint.names("weight")}
    if holds != parameter_shapes(model):
        raise CheckpointError(f"tag {checkpoint.tag}: its weights are not those of this program's GPT-2 of "
                              f"{model.num_layers} layers (another model, or --memory-centric-tiled-linear); "
                              "zero_to_fp32.py writes any model")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"--output {output}: is not an empty folder; choose another, or remove it")
    entries = [_output_tensor(checkpoint, name, shape) for name, shape in parameter_shapes(model).items()]
    tokenizer = build_tokenizer_files(recorded.data, model, recorded.tokenizer)
    if tokenizer.note is not None:
        print_line(tokenizer.note)
    elif not recorded.data["tokenizer_type"]:
        print_line("GPT-2's tokenizer is assumed: the checkpoint does not record which it was trained with")
    with explain_disk_errors(output, sum(entry.nbytes for entry in entries), "--output"):
        make_folder(output)
        files = write_output(entries, output / SAFETENSORS_FILE, shard_bytes)
        for name, content in tokenizer.files.items():
            with staged_file(output / name) as file:
                file.write(content)
        write_json_atomic(output / HF_CONFIG_FILE, {
            **REQUIRED_CONFIG, "architectures": ["GPT2LMHeadModel"], "activation_function": SUPPORTED_GELU[0],
            "n_layer": model.num_layers, "n_embd": model.hidden_size, "n_head": model.num_attention_heads,
            "n_inner": model.intermediate_size, "n_positions": model.max_position_embeddings,
            "n_ctx": model.max_position_embeddings, "vocab_size": model.known_vocab_size,
            "attn_pdrop": model.attention_dropout, "resid_pdrop": model.hidden_dropout,
            "embd_pdrop": model.hidden_dropout, "layer_norm_epsilon": model.layernorm_epsilon,
            "initializer_range": model.init_method_std, "bos_token_id": tokenizer.eod, "eos_token_id": tokenizer.eod,
            "torch_dtype": "float32"})
    return [*files, *(output / name for name in tokenizer.files), output / HF_CONFIG_FILE]


def _output_tensor(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> OutputTensor:
    is_transposed = HUGGING_FACE.is_transposed(name)

    def load() -> Any:
        whole = read_logical(checkpoint, "weight", name, 0, prod(shape)).numpy().reshape(shape)
        return whole.T if is_transposed else whole

    their_shape = shape[::-1] if is_transposed else shape
    return OutputTensor(HUGGING_FACE.to_their_name(name, "transformer."), their_shape, "F32", load, name)


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
    found = NANOGPT.rename_tensors(tensors.items(), str(path))
    check_output_layer(tensors, found, str(path))
    if "wte.weight" in found:
        found["wte.weight"] = found["wte.weight"][:model.known_vocab_size]
    if not args.get("bias", True):
        found = {name: torch.zeros(shape)
                 for name, shape in parameter_shapes(model).items() if name.endswith(".bias")} | found
    checkpoint = ExternalCheckpoint(str(path), model, {name: tensor.detach for name, tensor in found.items()},
                                    ("it was trained with the exact GELU, this program's is the tanh form",))
    checkpoint.check()
    return checkpoint
