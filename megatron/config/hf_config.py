"""Model shape and tokenizer fields from a Hugging Face GPT-2 folder; used by `--load-hf` before torch is imported."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data.storage import parse_error_text
from megatron.errors import CheckpointError, ConfigError

HF_CONFIG_FILE = "config.json"
TOKENIZER_FILES = ("vocab.json", "merges.txt", "tokenizer.model", "tokenizer.json")

# Their key -> (our field, default of an absent key).
HF_FIELDS: Mapping[str, tuple[str, Any]] = {
    "n_layer": ("num_layers", None), "n_embd": ("hidden_size", None), "n_head": ("num_attention_heads", None),
    "n_inner": ("intermediate_size", None), "vocab_size": ("vocab_size", None),
    "n_positions": ("max_position_embeddings", 1024), "layer_norm_epsilon": ("layernorm_epsilon", 1e-5)}


def model_fields_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Our fields of a config.json, without those it neither sets nor implies."""
    values = {ours: config.get(theirs, implied) for theirs, (ours, implied) in HF_FIELDS.items()}
    return {name: value for name, value in values.items() if value is not None}


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; CheckpointError if it is none."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON ({parse_error_text(error)})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected an object, found {type(value).__name__}")
    return value


def read_tokenizer_fields(folder: str) -> dict[str, Any]:
    """Fields of the tokenizer beside the weights: GPT-2's two files, bytes, a SentencePiece model, or a tokenizer.json
    that must equal GPT-2's two files (others are refused when it is built). {} without such a file: GPT-2's own is
    assumed."""
    vocabulary, merges, model, fast = (Path(folder) / name for name in TOKENIZER_FILES)
    if vocabulary.is_file() and merges.is_file():
        return {"tokenizer_type": "GPT2BPETokenizer", "vocab_file": str(vocabulary), "merge_file": str(merges)}
    if fast.is_file() and _is_byte_level(read_json_object(fast).get("model")):
        return {"tokenizer_type": "ByteLevelTokenizer"}
    if model.is_file():
        return {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_path": str(model)}
    return {"tokenizer_type": "GPT2BPETokenizer", "vocab_file": str(fast)} if fast.is_file() else {}


def _is_byte_level(model: Any) -> bool:
    """Whether tokens are the 256 bytes in order, as `convert` writes them: byte-level BPE without merges."""
    if not isinstance(model, dict) or model.get("type") != "BPE" or model.get("merges"):
        return False
    table = model.get("vocab")
    return (isinstance(table, dict) and len(table) in (256, 257)
            and all(table.get(chr(byte)) == byte for byte in range(ord("!"), ord("~") + 1)))


def read_model_fields(folder: str) -> dict[str, Any]:
    """Model fields that `--load-hf` fills in; ConfigError if the folder is unusable."""
    if not (Path(folder) / HF_CONFIG_FILE).is_file():
        what = "has no config.json" if Path(folder).is_dir() else "is not a folder"
        raise ConfigError(f"--load-hf {folder}: {what}; give a local folder that holds a Hugging Face GPT-2 "
                          "(config.json and model.safetensors or pytorch_model.bin): nothing is downloaded")
    return model_fields_of(read_json_object(Path(folder) / HF_CONFIG_FILE))
