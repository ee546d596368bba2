"""Write a Hugging Face GPT-2 folder: weights, config.json, and the run's tokenizer as files that transformers'
AutoTokenizer loads, or the reason why that is not possible.

    GPT-2's BPE      vocab.json and merges.txt
    bytes            tokenizer.json: byte-level BPE without merges
    characters       tokenizer.json: word level, one character per word
    SentencePiece    tokenizer.model and, if it does not change the text, tokenizer.json: BPE with byte fallback

Encoding and decoding match ours; `<|endoftext|>` in a text is text. Exception: U+2581 is read as a space.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

from data.default_corpus import DEFAULT_FOLDER
from data.gpt2_bpe import END_OF_TEXT, byte_alphabet, parse_merges, read_merges_and_vocabulary
from data.indexed import TokenizerFacts
from data.storage import (DataError, make_folder, read_flag_file, read_flag_text, staged_file,
                          write_json_atomic)
from data.tokenizer import REPLACEMENT_CHARACTER, build
from megatron.checkpoint.commit import explain_disk_errors
from megatron.checkpoint.convert.external_checkpoint import parameter_shapes
from megatron.checkpoint.convert.importers import HUGGING_FACE, REQUIRED_CONFIG, SAFETENSORS_FILE, SUPPORTED_GELU
from megatron.checkpoint.reader import Checkpoint, read_logical, read_recorded_model
from megatron.checkpoint.zero_to_fp32 import OutputTensor, write_output
from megatron.config.hf_config import HF_CONFIG_FILE, HF_FIELDS
from megatron.config.tree import ModelConfig
from megatron.errors import CheckpointError, ConfigError

SHARD_BYTES = 5 * 10**9


def export_huggingface(checkpoint: Checkpoint, output: Path, shard_bytes: int = SHARD_BYTES) -> list[Path]:
    """Write a folder that transformers loads, weights first and config.json last; returns the files. Holds one tensor
    in memory at a time. Prints the reason if no tokenizer files are written."""
    recorded = read_recorded_model(checkpoint)
    model, holds = recorded.shape, {name: checkpoint.shape("weight", name) for name in checkpoint.names("weight")}
    if unlike := model.flags_unlike_gpt2():
        raise ConfigError(f"tag {checkpoint.tag}: Hugging Face's GPT-2 has no {', '.join(unlike)}, with which this "
                          "model was trained; use it with this program, or write its weights with zero_to_fp32.py")
    if holds != parameter_shapes(model):
        raise CheckpointError(f"tag {checkpoint.tag}: its weights are not those of this program's GPT-2 of "
                              f"{model.num_layers} layers (another model, or --memory-centric-tiled-linear); "
                              "zero_to_fp32.py writes any model")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"--output {output}: is not an empty folder; choose another, or remove it")
    entries = [OutputTensor(HUGGING_FACE.to_their_name(name, "transformer."),
                            shape[::-1] if HUGGING_FACE.is_transposed(name) else shape, "F32",
                            partial(_load_weight, checkpoint, name, shape), name)
               for name, shape in parameter_shapes(model).items()]
    tokenizer = build_tokenizer_files(recorded.data, model, recorded.tokenizer)
    if tokenizer.note is not None:
        print(f"note: {tokenizer.note}")
    elif not recorded.data["tokenizer_type"]:
        print("note: GPT-2's tokenizer is assumed: the checkpoint does not record which it was trained with")
    with explain_disk_errors(output, sum(entry.nbytes for entry in entries), "--output"):
        make_folder(output)
        files = write_output(entries, output / SAFETENSORS_FILE, shard_bytes)
        for name, content in tokenizer.files.items():
            with staged_file(output / name) as file:
                file.write(content)
        write_json_atomic(output / HF_CONFIG_FILE, {
            **REQUIRED_CONFIG, "architectures": ["GPT2LMHeadModel"], "activation_function": SUPPORTED_GELU[0],
            **{theirs: getattr(model, ours) for theirs, (ours, _) in HF_FIELDS.items()},
            "n_ctx": model.max_position_embeddings, "attn_pdrop": model.attention_dropout,
            "resid_pdrop": model.hidden_dropout, "embd_pdrop": model.hidden_dropout,
            "initializer_range": model.init_method_std, "bos_token_id": tokenizer.eod, "eos_token_id": tokenizer.eod,
            "torch_dtype": "float32"})
    return [*files, *(output / name for name in tokenizer.files), output / HF_CONFIG_FILE]


def _load_weight(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> Any:
    whole = read_logical(checkpoint, "weight", name, 0, prod(shape)).numpy().reshape(shape)
    return whole.T if HUGGING_FACE.is_transposed(name) else whole


# ---- the tokenizer --------------------------------------------------------------------------------------------------

DEFAULT_TOKENIZER_TYPE = "GPT2BPETokenizer"
SPACE = "\u2581"


@dataclass(frozen=True)
class TokenizerFiles:
    files: Mapping[str, bytes] = field(default_factory=dict)
    eod: int | None = None
    note: str | None = None  # why AutoTokenizer cannot load the files


def build_tokenizer_files(section: Mapping[str, Any], model: ModelConfig, known: TokenizerFacts | None = None
                          ) -> TokenizerFiles:
    """`section` is the saved data configuration; `known` is the tokenizer that the checkpoint records, if any."""
    kind = section["tokenizer_type"] or DEFAULT_TOKENIZER_TYPE
    path = section["tokenizer_path"] or section["vocab_file"]
    if kind == "SentencePieceTokenizer" and path is None and "default" in section["train_data"]:
        path = str(DEFAULT_FOLDER / "tokenizer.model")
    try:
        ours = build(kind, section["vocab_file"], section["merge_file"], path)
        if ours.vocab_size > model.known_vocab_size:
            return TokenizerFiles(note=f"no tokenizer files: {ours.name} has {ours.vocab_size} tokens, and the model "
                                       f"{model.known_vocab_size}: it was trained with another one")
        if known is not None and known != ours.facts:
            return TokenizerFiles(note=f"no tokenizer files: the model was trained with {known.description}, and its "
                                       f"files make {ours.facts.description}")
        return FILE_BUILDERS[ours.name](section, path, ours.eod, model.max_position_embeddings)
    except (DataError, ImportError) as error:
        return TokenizerFiles(note=f"no tokenizer files: {error}; copy the tokenizer beside the model yourself")


def _gpt2_files(section: Mapping[str, Any], path: str | None, eod: int, length: int) -> TokenizerFiles:
    merges, vocabulary = read_merges_and_vocabulary(section["vocab_file"], section["merge_file"])
    if vocabulary is None:
        vocabulary = {token: i for i, token in enumerate([*parse_merges(merges, "vocab.bpe"), END_OF_TEXT])}
    return TokenizerFiles({"vocab.json": json.dumps(vocabulary).encode(), "merges.txt": merges.encode(),
                           **_tokenizer_config("GPT2Tokenizer", length)}, eod)


def _byte_level_files(section: Mapping[str, Any], path: str | None, eod: int, length: int) -> TokenizerFiles:
    vocabulary = byte_alphabet()
    step = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return _fast_tokenizer_files({"type": "BPE", "vocab": vocabulary, "merges": []}, eod, length, pre_tokenizer=step,
                                 decoder=step)


def _character_files(section: Mapping[str, Any], path: str | None, eod: int, length: int) -> TokenizerFiles:
    characters = sorted(set(read_flag_text(section["vocab_file"], "--vocab-file")))
    if REPLACEMENT_CHARACTER in characters:  # it would mean two tokens
        return TokenizerFiles(eod=eod, note="no tokenizer files: the vocabulary holds U+FFFD, which also stands for "
                                            "every unknown character")
    vocabulary = {character: i for i, character in enumerate([*characters, REPLACEMENT_CHARACTER])}
    return _fast_tokenizer_files({"type": "WordLevel", "vocab": vocabulary, "unk_token": REPLACEMENT_CHARACTER},
                                 eod, length, pre_tokenizer={"type": "Split", "pattern": {"Regex": r"[\s\S]"},
                                                             "behavior": "Isolated", "invert": False},
                                 decoder={"type": "Fuse"})


def _sentencepiece_files(section: Mapping[str, Any], path: str | None, eod: int, length: int) -> TokenizerFiles:
    schema: Any = import_module("sentencepiece.sentencepiece_model_pb2")
    proto = read_flag_file(str(path), "--tokenizer-path")  # `build` has loaded it
    model, kinds = schema.ModelProto.FromString(proto), schema.ModelProto.SentencePiece
    trainer, normalizer, pieces = model.trainer_spec, model.normalizer_spec, model.pieces
    is_plain = (trainer.model_type == schema.TrainerSpec.BPE and trainer.byte_fallback and normalizer.name == "identity"
                and not normalizer.add_dummy_prefix and not normalizer.remove_extra_whitespaces
                and not trainer.treat_whitespace_as_suffix
                and not {kinds.USER_DEFINED, kinds.UNUSED} & {piece.type for piece in pieces})
    if not is_plain:
        return TokenizerFiles({"tokenizer.model": proto}, eod,
                              "tokenizer.model is copied as it is (a SentencePiece model that changes the text or "
                              "is not BPE with byte fallback): load it with the sentencepiece package")
    names = [piece.piece for piece in pieces]
    vocabulary = {name: i for i, name in enumerate(names)}
    scores = {piece.piece: piece.score for piece in pieces if piece.type == kinds.NORMAL}
    fast = _fast_tokenizer_files(
        {"type": "BPE", "vocab": vocabulary, "merges": _merges(vocabulary, scores),
         "byte_fallback": True, "unk_token": names[0], "fuse_unk": False}, eod, length,
        normalizer={"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
        decoder={"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
                                                  {"type": "ByteFallback"}, {"type": "Fuse"}]})
    return replace(fast, files={**fast.files, "tokenizer.model": proto})  # which --load-hf reads


def _merges(vocabulary: Mapping[str, int], scores: Mapping[str, float]) -> list[list[str]]:
    """Merge pairs in SentencePiece's order, by the score of the result. `scores` are of the learned pieces: bytes,
    `<unk>` and end-of-document are neither results nor parts of a merge."""
    merges = [(-score, vocabulary[piece[:cut]], vocabulary[piece[cut:]], piece[:cut], piece[cut:])
              for piece, score in scores.items() for cut in range(1, len(piece))
              if piece[:cut] in scores and piece[cut:] in scores]
    return [[left, right] for *_, left, right in sorted(merges)]


def _fast_tokenizer_files(model: Mapping[str, Any], eod: int, length: int, **parts: Any) -> TokenizerFiles:
    end = {"id": eod, "content": END_OF_TEXT, "single_word": False, "lstrip": False, "rstrip": False,
           "normalized": False, "special": True}
    whole = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [end], "normalizer": None,
             "pre_tokenizer": None, "post_processor": None, "decoder": None, **parts, "model": model}
    return TokenizerFiles({"tokenizer.json": json.dumps(whole, ensure_ascii=False).encode(),
                           **_tokenizer_config("PreTrainedTokenizerFast", length)}, eod)


def _tokenizer_config(kind: str, length: int) -> dict[str, bytes]:
    """tokenizer_config.json. `split_special_tokens`: the text "<|endoftext|>" does not end a document."""
    settings = {"tokenizer_class": kind, "model_max_length": length, "add_prefix_space": False,
                "clean_up_tokenization_spaces": False, "split_special_tokens": True,
                **{f"{role}_token": END_OF_TEXT for role in ("bos", "eos", "unk")}}
    return {"tokenizer_config.json": json.dumps(settings, indent=1).encode()}


FILE_BUILDERS: Mapping[str, Callable[[Mapping[str, Any], str | None, int, int], TokenizerFiles]] = {
    "GPT2BPETokenizer": _gpt2_files, "ByteLevelTokenizer": _byte_level_files,
    "CharacterLevelTokenizer": _character_files, "SentencePieceTokenizer": _sentencepiece_files}
