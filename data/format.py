"""The MMIDIDX layout of Megatron-LM, byte for byte. Pure: bytes in, records out; no file is opened here.

`PREFIX.bin` holds the token ids of all sequences, one after another, little endian, without header or padding.
`PREFIX.idx` says where they are, little endian and unaligned:

    0            9 bytes     MMIDIDX\\0\\0
    9            uint64      version, 1
    17           uint8       code of the token dtype
    18           uint64      S, number of sequences
    26           uint64      D, number of document boundaries = documents + 1
    34           int32[S]    tokens of each sequence
    34+4S        int64[S]    byte offset of each sequence in .bin
    34+12S       int64[D]    first sequence of each document, then S
    34+12S+8D    int8[S]     mode of each sequence, in multimodal corpora only

A *sequence* is what the file counts; a *document* is a run of sequences (we write one sequence per document).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from data.storage import DataError

INDEX_MAGIC = b"MMIDIDX\0\0"
INDEX_VERSION = 1
INDEX_HEADER = struct.Struct("<9sQBQQ")

DTYPE_OF_CODE: dict[int, np.dtype[Any]] = {
    1: np.dtype("<u1"), 2: np.dtype("<i1"), 3: np.dtype("<i2"), 4: np.dtype("<i4"),
    5: np.dtype("<i8"), 6: np.dtype("<f8"), 7: np.dtype("<f4"), 8: np.dtype("<u2"),
}
CODE_OF_DTYPE = {dtype: code for code, dtype in DTYPE_OF_CODE.items()}

UINT16_VOCABULARY = 65_500
"""Below this Megatron stores ids as uint16; part of the format, as readers compare files byte for byte."""


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The dtype Megatron chooses for a vocabulary: uint16 while it is safely small, else int32."""
    return np.dtype("<u2") if vocab_size < UINT16_VOCABULARY else np.dtype("<i4")


@dataclass(frozen=True)
class IndexHeader:
    """The first 34 bytes of an index, and where its arrays begin."""

    dtype: np.dtype[Any]
    sequences: int
    boundaries: int
    """Documents + 1."""

    @property
    def lengths_offset(self) -> int:
        return INDEX_HEADER.size

    @property
    def pointers_offset(self) -> int:
        return INDEX_HEADER.size + 4 * self.sequences

    @property
    def documents_offset(self) -> int:
        return INDEX_HEADER.size + 12 * self.sequences

    @property
    def size(self) -> int:
        """Bytes of the whole index (without the modes of multimodal corpora)."""
        return INDEX_HEADER.size + 12 * self.sequences + 8 * self.boundaries

    def pack(self) -> bytes:
        return INDEX_HEADER.pack(INDEX_MAGIC, INDEX_VERSION, CODE_OF_DTYPE[self.dtype], self.sequences, self.boundaries)


def parse_index_header(start: bytes, file_size: int, name: str) -> IndexHeader:
    """Check the first bytes of an index of `file_size` bytes called `name`. Nothing is allocated before this passed."""
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
    # Python integers: counts near 2**64 give a large number here, never a wrapped one.
    if file_size not in (header.size, header.size + sequences):
        raise DataError(f"{name}: size: {sequences} sequences and {boundaries} document boundaries "
                        f"need {header.size} bytes, found {file_size}")
    if sequences < 1 or boundaries < 2:
        raise DataError(f"{name}: counts: the corpus is empty ({sequences} sequences, {boundaries} boundaries)")
    return header
