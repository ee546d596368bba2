"""A tokenizer.json of the tokenizers library that says the same as GPT-2's two files: its merges and its vocabulary.

Byte-level BPE with GPT-2's pattern, and one special token, the end of a document. Anything else is refused by its name:
its ids would be others than those of the model's training, and nothing would show it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from data.storage import DataError
from data.tokenizer_base import END_OF_TEXT

MERGES_HEADER = "#version: 0.2\n"
"""The first line of a merges file."""

TOKENIZER_HINT = (
    "give the tokenizer of the model, --tokenizer-type with its files (--tokenizer-path, or --vocab-file and "
    "--merge-file)")

UNSUPPORTED_BPE_SETTINGS = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback",
                            "ignore_merges")
"""Settings of BPE that GPT-2's has not."""


def is_tokenizer_json(value: Any) -> bool:
    """Whether a JSON value is a tokenizer.json, and no vocabulary."""
    return isinstance(value, dict) and isinstance(value.get("model"), dict)


def convert_tokenizer_json(tokenizer_json: Mapping[str, Any], path: str,
                           alphabet: Collection[str]) -> tuple[str, dict[str, Any]]:
    """The text of a merges file, and the id of each token, the end of a document included."""
    try:
        differences = list(_differences_from_gpt2(tokenizer_json, alphabet))
        merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in tokenizer_json["model"]["merges"]]
        vocabulary = {
            **tokenizer_json["model"]["vocab"],
            **{one["content"]: one["id"]
               for one in tokenizer_json.get("added_tokens") or ()}
        }
    except (AttributeError, KeyError, TypeError) as error:
        raise DataError(f"{path}: not a tokenizer.json that can be read ({error!r}); {TOKENIZER_HINT}") from error
    made = {*alphabet, *("".join(pair.split(" ")) for pair in merges), END_OF_TEXT}
    others = [token for token in vocabulary if token not in made]
    if others:
        differences.append(f"{len(others)} tokens that no merge makes, {others[0]!r} for one")
    if differences:
        raise DataError(f"{path} is not GPT-2's kind of byte-level BPE: {'; '.join(differences)}; {TOKENIZER_HINT}")
    return MERGES_HEADER + "".join(f"{pair}\n" for pair in merges), vocabulary


def _differences_from_gpt2(tokenizer_json: Mapping[str, Any], alphabet: Collection[str]) -> Iterator[str]:
    model, before = tokenizer_json["model"], tokenizer_json.get("pre_tokenizer") or {}
    if model.get("type") != "BPE":
        yield f"its model is {model.get('type')}"
        return
    yield from (f"{name} {model[name]!r}" for name in UNSUPPORTED_BPE_SETTINGS if model.get(name))
    missing = sum(letter not in model["vocab"] for letter in alphabet)
    if missing:
        yield f"{missing} of the 256 bytes are not in its vocabulary"
    if tokenizer_json.get("normalizer"):
        yield f"a normalizer, {tokenizer_json['normalizer'].get('type')}"
    if before.get("type") != "ByteLevel":
        yield f"its pre_tokenizer is {before.get('type')}"
    elif before.get("add_prefix_space", True) or not before.get("use_regex", True):
        yield "its ByteLevel has add_prefix_space, or not GPT-2's pattern (use_regex)"
    if (tokenizer_json.get("post_processor") or {}).get("type", "ByteLevel") != "ByteLevel":
        yield f"a post_processor, {tokenizer_json['post_processor']['type']}"
    special = [one["content"] for one in tokenizer_json.get("added_tokens") or ()]
    if END_OF_TEXT not in (*special, *model["vocab"]):
        yield f"no {END_OF_TEXT}"
    yield from (f"a token {text!r} beside the merges" for text in special if text != END_OF_TEXT)
