"""Tokenizers: text to ids and back. `build` makes the one that the command line asks for.

    GPT2BPETokenizer         byte-level BPE with GPT-2's 50257 tokens, or any vocab.json + merges.txt of that form
    SentencePieceTokenizer   a SentencePiece model file (`train_sentencepiece` trains one)
    ByteLevelTokenizer       256 bytes and the end of a document; needs no file
    CharacterLevelTokenizer  the characters of a text file

`eod` is the id that ends a document; `encode` never returns it. `decode` accepts any ids: unknown ids and invalid UTF-8
become U+FFFD. `fingerprint` is equal exactly if two tokenizers give equal ids for equal text; a corpus records it.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import final

import numpy as np
from numpy.typing import NDArray

from data.gpt2_bpe import (END_OF_TEXT, GPT2_MERGES_SHA256, TiktokenEngine, byte_alphabet, fastest_engine,
                           parse_merges, read_merges_and_vocabulary)
from data.indexed import TokenizerFacts
from data.storage import (DataError, UsageError, check_flag_file, content_digest, read_flag_file, read_flag_text,
                          staged_file)

REPLACEMENT_CHARACTER = "\ufffd"
# Texts that a lossy model changes: start of text, white space, characters with a plain form.
LOSSLESS_PROBES = ("a", " a  b \n", "\ufb01\u2460\u2581")


class Tokenizer(ABC):
    """Maps text to ids and back."""

    name: str
    # Ids are 0 to vocab_size - 1, `eod` included; the model adds padding for tensor parallelism.
    vocab_size: int
    eod: int
    fingerprint: str
    # White space characters before which, after a non-space, a text can be split without changing its ids.
    safe_split_characters: str = ""

    @property
    def facts(self) -> TokenizerFacts:
        """What a corpus records of its tokenizer."""
        return TokenizerFacts(self.name, self.fingerprint, self.vocab_size, self.eod)

    @abstractmethod
    def encode_array(self, text: str) -> NDArray[np.uint32]:
        """The ids of a text; lone surrogates are replaced, everything else is restored by `decode`."""

    def encode(self, text: str) -> list[int]:
        """The same as a list."""
        ids: list[int] = self.encode_array(text).tolist()
        return ids

    def byte_lengths(self) -> NDArray[np.int64] | None:
        """[vocab_size]: bytes of text per id, 0 for end of document and unknown. None if they do not add up."""
        return None

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """The text of any sequence of ids."""


class ByteTableTokenizer(Tokenizer):
    """A tokenizer whose ids each stand for fixed bytes, with white space only at their start."""

    safe_split_characters = " \n"
    # Of all ids but unknown ones; that of `eod` is what `decode` writes for it.
    _bytes_of_token: dict[int, bytes]

    def byte_lengths(self) -> NDArray[np.int64]:
        found = np.zeros(self.vocab_size, np.int64)
        for token, spelled in self._bytes_of_token.items():
            found[token] = len(spelled)
        found[self.eod] = 0
        return found

    def decode(self, ids: Iterable[int]) -> str:
        spelling, unknown = self._bytes_of_token, REPLACEMENT_CHARACTER.encode()
        return b"".join(spelling.get(i, unknown) for i in ids).decode("utf-8", "replace")


@final
class GPT2BPETokenizer(ByteTableTokenizer):
    """Byte-level BPE with a vocabulary and merges. `engine` overrides the fastest one, for tests and benchmarks."""

    name = "GPT2BPETokenizer"

    def __init__(self, vocab_file: str | None = None, merge_file: str | None = None,
                 engine: Callable[[Sequence[bytes]], TiktokenEngine] | None = None) -> None:
        merges, vocabulary = read_merges_and_vocabulary(vocab_file, merge_file)
        tokens = parse_merges(merges, merge_file or vocab_file or "vocab.bpe")
        alphabet = byte_alphabet()
        token_bytes = [bytes(alphabet[character] for character in token) for token in tokens]
        ids = list(range(len(tokens) + 1))  # of each token, then of the end of text
        if vocabulary is not None:
            try:
                ids = [vocabulary[token] for token in (*tokens, END_OF_TEXT)]
            except TypeError as error:
                raise DataError(f"--vocab-file {vocab_file}: not a JSON object of token: id ({error})") from error
            except KeyError as error:
                raise DataError(f"--vocab-file {vocab_file}: token {error} of the merge file is missing") from error
            if not all(type(i) is int and i >= 0 for i in ids) or len(set(ids)) != len(ids):
                raise DataError(f"--vocab-file {vocab_file}: ids must be distinct integers from 0")
        self.eod = ids.pop()
        self.vocab_size = max(*ids, self.eod) + 1
        # Engines return ranks; a vocabulary file may number tokens differently.
        self._id_of_rank = None if ids == list(range(len(ids))) else np.array(ids, np.uint32)
        is_gpt2 = hashlib.sha256(merges.encode()).hexdigest() == GPT2_MERGES_SHA256
        self._engine = engine(token_bytes) if engine else fastest_engine(token_bytes, is_gpt2=is_gpt2)
        self._bytes_of_token = dict(zip(ids, token_bytes)) | {self.eod: END_OF_TEXT.encode()}
        self.fingerprint = content_digest(["\n".join(tokens).encode(), json.dumps([*ids, self.eod]).encode()],
                                          self.name)

    def encode_array(self, text: str) -> NDArray[np.uint32]:
        ranks = self._engine.encode_to_ranks(text)
        return ranks if self._id_of_rank is None else self._id_of_rank[ranks]


@final
class ByteLevelTokenizer(ByteTableTokenizer):
    """The 256 bytes of UTF-8, and id 256 for the end of a document."""

    name = "ByteLevelTokenizer"
    vocab_size = 257
    eod = 256

    def __init__(self) -> None:
        self._bytes_of_token = {byte: bytes([byte]) for byte in range(256)} | {self.eod: END_OF_TEXT.encode()}
        self.fingerprint = content_digest([], self.name)

    def encode_array(self, text: str) -> NDArray[np.uint32]:
        return np.frombuffer(text.encode("utf-8", "replace"), np.uint8).astype(np.uint32)


@final
class CharacterLevelTokenizer(ByteTableTokenizer):
    """The distinct characters of a text file in code point order, then one id for all others, then end of document."""

    name = "CharacterLevelTokenizer"

    def __init__(self, vocab_file: str) -> None:
        characters = sorted(set(read_flag_text(vocab_file, "--vocab-file")))
        self._ids = {character: i for i, character in enumerate(characters)}
        self._unknown = len(characters)
        self.eod, self.vocab_size = self._unknown + 1, self._unknown + 2
        self._bytes_of_token = {i: character.encode() for i, character in enumerate(characters)}
        self._bytes_of_token[self.eod] = END_OF_TEXT.encode()
        self.fingerprint = content_digest(["".join(characters).encode()], self.name)

    def encode_array(self, text: str) -> NDArray[np.uint32]:
        return np.array([self._ids.get(character, self._unknown) for character in text], np.uint32)


@final
class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model. Models of `train_sentencepiece` are lossless."""

    name = "SentencePieceTokenizer"

    # Stands for a space inside the model, which also reads this character as a space unless it is encoded as bytes.
    SPACE = "\u2581"

    def __init__(self, model_file: str, flag: str = "--tokenizer-path") -> None:
        import sentencepiece

        model = read_flag_file(model_file, flag)
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise DataError(f"{flag} {model_file}: not a SentencePiece model") from error
        self._num_pieces = int(self._model.vocab_size())
        end = int(self._model.eos_id())
        self.eod = end if end >= 0 else self._num_pieces
        self.vocab_size = max(self._num_pieces, self.eod + 1)
        spelled = [int(self._model.piece_to_id(f"<0x{byte:02X}>")) for byte in self.SPACE.encode()]
        self._space_symbol_ids = spelled if self._model.unk_id() not in spelled else None
        self.fingerprint = content_digest([model], self.name)
        # Spaces are safe to split at if no piece spans the start of a run of them, and no prefix is added to a text.
        pieces = map(self._model.id_to_piece, range(self._num_pieces))
        is_safe = not any(self.SPACE in piece.lstrip(self.SPACE) for piece in pieces) and all(
            self.encode(f"a{rest}") == self.encode("a") + self.encode(rest) for rest in (" b", "  b", " \n", " "))
        self.safe_split_characters = " " if is_safe else ""

    def encode_array(self, text: str) -> NDArray[np.uint32]:
        text = text.encode("utf-8", "replace").decode("utf-8")
        if self._space_symbol_ids is None or self.SPACE not in text:
            return np.array(self._model.encode(text), np.uint32)
        first, *rest = text.split(self.SPACE)
        ids = list(self._model.encode(first))
        for part in rest:
            ids += self._space_symbol_ids + self._model.encode(part)
        return np.array(ids, np.uint32)

    def byte_lengths(self) -> NDArray[np.int64] | None:
        """None for a lossy model: changes to the text are not in the ids."""
        model, found = self._model, np.zeros(self.vocab_size, np.int64)
        for token in range(self._num_pieces):
            if model.is_byte(token):
                found[token] = 1
            elif not (model.is_control(token) or model.is_unknown(token) or model.is_unused(token)):
                found[token] = len(model.id_to_piece(token).replace(self.SPACE, " ").encode())
        return found if all(found[self.encode(text)].sum() == len(text.encode()) for text in LOSSLESS_PROBES) else None

    def decode(self, ids: Iterable[int]) -> str:
        def kind_of(token: int) -> str:
            if token == self.eod:
                return END_OF_TEXT
            return "piece" if 0 <= token < self._num_pieces else REPLACEMENT_CHARACTER

        groups = ((kind, list(tokens)) for kind, tokens in groupby(map(int, ids), kind_of))
        return "".join(str(self._model.decode(tokens)) if kind == "piece" else kind * len(tokens)
                       for kind, tokens in groups)


def train_sentencepiece(texts: Iterable[str], model_path: str | Path, vocab_size: int) -> None:
    """Train a lossless model of exactly `vocab_size` ids, end of document included. Equal texts give equal files: BPE
    training counts integers, so threads do not matter."""
    import sentencepiece

    with staged_file(model_path) as file:
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(texts), model_writer=file, model_type="bpe", vocab_size=vocab_size,
                byte_fallback=True, normalization_rule_name="identity", add_dummy_prefix=False,
                remove_extra_whitespaces=False, allow_whitespace_only_pieces=True, split_digits=True,
                character_coverage=0.9999, max_sentence_length=1 << 20, num_threads=2, minloglevel=2,
                unk_id=0, eos_id=1, bos_id=-1, pad_id=-1, eos_piece=END_OF_TEXT, unk_surface=REPLACEMENT_CHARACTER)
        except RuntimeError as error:
            raise DataError(f"{model_path}: cannot train a SentencePiece model of {vocab_size} ids: {error}") from error


KINDS = {kind.name: kind for kind in (GPT2BPETokenizer, SentencePieceTokenizer, ByteLevelTokenizer,
                                      CharacterLevelTokenizer)}
# Endings of a name that may be left out: `gpt2`, `bytelevel`, `byte`.
OPTIONAL_SUFFIXES = ("", "tokenizer", "bpetokenizer", "leveltokenizer")


def canonical_kind(kind: str) -> str:
    """The full name of a tokenizer kind; accepts any case and short names."""
    known = {name.lower().removesuffix(suffix): name for name in KINDS for suffix in OPTIONAL_SUFFIXES}
    if kind.lower() not in known:
        nearest = difflib.get_close_matches(kind.lower(), known, n=1, cutoff=0.0)
        raise UsageError(f"--tokenizer-type {kind}: unknown; did you mean {known[nearest[0]]}? "
                         f"Known: {', '.join(KINDS)}")
    return known[kind.lower()]


def build(kind: str, vocab_file: str | None = None, merge_file: str | None = None,
          tokenizer_path: str | None = None) -> Tokenizer:
    """The tokenizer that `--tokenizer-type`, `--vocab-file`, `--merge-file` and `--tokenizer-path` describe."""
    name = canonical_kind(kind)
    if name == GPT2BPETokenizer.name:
        return GPT2BPETokenizer(vocab_file, merge_file)
    if name == ByteLevelTokenizer.name:
        return ByteLevelTokenizer()
    check_tokenizer_files(name, vocab_file, merge_file, tokenizer_path)
    if name == CharacterLevelTokenizer.name:
        return CharacterLevelTokenizer(str(vocab_file))
    return (SentencePieceTokenizer(str(vocab_file), "--vocab-file") if tokenizer_path is None else
            SentencePieceTokenizer(tokenizer_path))


def check_tokenizer_files(name: str, vocab_file: str | None, merge_file: str | None,
                          tokenizer_path: str | None) -> None:
    """Raise if a tokenizer's files are not given or do not exist."""
    if name == CharacterLevelTokenizer.name and vocab_file is None:
        raise UsageError(f"{name} needs --vocab-file: a text file that holds every character of the vocabulary")
    if name == SentencePieceTokenizer.name and tokenizer_path is None and vocab_file is None:
        raise UsageError(f"{name} needs --tokenizer-path FILE, a SentencePiece model: add it, or --tokenizer-type "
                         f"{ByteLevelTokenizer.name}, which needs no file (or {GPT2BPETokenizer.name})")
    if name == ByteLevelTokenizer.name:
        return
    used = {"--tokenizer-path": tokenizer_path} if name == SentencePieceTokenizer.name and tokenizer_path else {
        "--vocab-file": vocab_file, "--merge-file": merge_file if name == GPT2BPETokenizer.name else None}
    for flag, path in used.items():
        if path is not None:
            check_flag_file(path, flag)
