"""The format of a corpus on disk: Megatron-LM's MMIDIDX index, byte for byte, and the facts in `PREFIX.json`.

`PREFIX.bin` holds the token ids of all sequences, little endian, without header or padding. `PREFIX.idx` is

    0            9 bytes     MMIDIDX\\0\\0              26           uint64      D, documents + 1
    9            uint64      version, 1              34           int32[S]    tokens of each sequence
    17           uint8       code of the token dtype 34+4S        int64[S]    byte offset of each sequence in .bin
    18           uint64      S, number of sequences  34+12S       int64[D]    first sequence of each document, then S

then, in multimodal corpora only, int8[S] modes. We write one sequence per document. `PREFIX.json` is optional.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from data.storage import DataError

T = TypeVar("T")

INDEX_MAGIC = b"MMIDIDX\0\0"
INDEX_VERSION = 1
INDEX_HEADER = struct.Struct("<9sQBQQ")

DTYPE_OF_CODE: dict[int, np.dtype[Any]] = {1: np.dtype("<u1"), 2: np.dtype("<i1"), 3: np.dtype("<i2"),
                                           4: np.dtype("<i4"), 5: np.dtype("<i8"), 6: np.dtype("<f8"),
                                           7: np.dtype("<f4"), 8: np.dtype("<u2")}
CODE_OF_DTYPE = {dtype: code for code, dtype in DTYPE_OF_CODE.items()}

UINT16_VOCABULARY = 65_500
"""Below this size Megatron stores ids as uint16. Part of the format: files are compared byte for byte."""


@dataclass(frozen=True)
class TokenizerFacts:
    name: str
    fingerprint: str
    vocab_size: int
    eod: int

    @property
    def description(self) -> str:
        return f"{self.name} {self.fingerprint} ({self.vocab_size} ids)"


@dataclass(frozen=True)
class CorpusFacts:
    """Counts, checksum and origin of the tokens: the content of PREFIX.json."""

    documents: int
    tokens: int
    crc32: str
    """CRC-32 of the whole .bin, 8 hexadecimal digits."""
    max_token: int
    tokenizer: TokenizerFacts | None
    """None: unknown."""
    identity: str
    """Identity of .idx and .bin (`corpus_identity`)."""


def read_corpus_facts(path: str) -> CorpusFacts | None:
    """The facts in a file; None if it does not exist."""
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
        origin = value["tokenizer"]
        return CorpusFacts(_typed_value(value, "documents", int), _typed_value(value, "tokens", int),
                           _typed_value(value, "crc32", str), _typed_value(value, "max_token", int),
                           origin and _tokenizer_facts(origin), _typed_value(value, "identity", str))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"{path}: cannot read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path}: not the facts of a corpus ({error}); remove it or preprocess again") from error


def tokenizer_facts_of_state(state: Mapping[str, Any]) -> TokenizerFacts | None:
    """The tokenizer recorded in a saved state; None if there is none, or it is not ours."""
    try:
        return _tokenizer_facts(state["tokenizer"])
    except (KeyError, TypeError):
        return None


def _tokenizer_facts(value: dict[str, object]) -> TokenizerFacts:
    return TokenizerFacts(_typed_value(value, "name", str), _typed_value(value, "fingerprint", str),
                          _typed_value(value, "vocab_size", int), _typed_value(value, "eod", int))


def _typed_value(value: dict[str, object], key: str, kind: type[T]) -> T:
    found = value[key]
    if type(found) is not kind:
        raise TypeError(f"{key}: expected {kind.__name__}, found {found!r}")
    return found


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The dtype Megatron chooses for a vocabulary: uint16 while it is safely small, else int32."""
    return np.dtype("<u2") if vocab_size < UINT16_VOCABULARY else np.dtype("<i4")


@dataclass(frozen=True)
class IndexHeader:
    """The first 34 bytes of an index, and the offsets of its arrays."""

    dtype: np.dtype[Any]
    sequences: int
    boundaries: int
    """Documents + 1."""

    @property
    def pointers_offset(self) -> int:
        return INDEX_HEADER.size + 4 * self.sequences

    @property
    def documents_offset(self) -> int:
        return INDEX_HEADER.size + 12 * self.sequences

    @property
    def size(self) -> int:
        """Bytes of the index, without the modes of multimodal corpora."""
        return INDEX_HEADER.size + 12 * self.sequences + 8 * self.boundaries

    def pack(self) -> bytes:
        return INDEX_HEADER.pack(INDEX_MAGIC, INDEX_VERSION, CODE_OF_DTYPE[self.dtype], self.sequences, self.boundaries)


def parse_index_header(start: bytes, file_size: int, name: str) -> IndexHeader:
    """Check the first bytes of an index of `file_size` bytes, before anything is allocated. Raises DataError."""
    if start.startswith(b"TNTIDX"):
        raise DataError(f"{name}: magic: the old TNTIDX format (not memory-mapped); preprocess the text again")
    if len(start) < INDEX_HEADER.size:
        raise DataError(f"{name}: header: expected {INDEX_HEADER.size} bytes, found {len(start)}")
    magic, version, code, sequences, boundaries = INDEX_HEADER.unpack_from(start)
    if magic != INDEX_MAGIC:
        raise DataError(f"{name}: magic: expected {INDEX_MAGIC!r}, found {magic!r}; is this a corpus index?")
    if version != INDEX_VERSION:
        raise DataError(f"{name}: version: expected {INDEX_VERSION}, found {version}")
    if code not in DTYPE_OF_CODE:
        raise DataError(f"{name}: dtype code: expected one of {sorted(DTYPE_OF_CODE)}, found {code}")
    dtype = DTYPE_OF_CODE[code]
    if dtype.kind == "f":
        raise DataError(f"{name}: dtype code: {code} ({dtype.name}) cannot hold token ids; expected an integer type")
    header = IndexHeader(dtype, sequences, boundaries)
    # Python integers do not wrap: counts near 2**64 give a large number here.
    if file_size not in (header.size, header.size + sequences):
        raise DataError(f"{name}: size: {sequences} sequences and {boundaries} document boundaries "
                        f"need {header.size} bytes, found {file_size}")
    if sequences < 1 or boundaries < 2:
        raise DataError(f"{name}: counts: the corpus is empty ({sequences} sequences, {boundaries} boundaries)")
    return header
