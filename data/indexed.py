"""`IndexedCorpus`: a read-only corpus on disk, checked against its index when opened; and the format of its files.

A corpus has Megatron-LM's MMIDIDX layout, byte for byte. `PREFIX.bin` holds the token ids of all sequences, little
endian, without header or padding. `PREFIX.idx` is

    0            9 bytes     MMIDIDX\\0\\0              26           uint64      D, documents + 1
    9            uint64      version, 1              34           int32[S]    tokens of each sequence
    17           uint8       code of the token dtype 34+4S        int64[S]    byte offset of each sequence in .bin
    18           uint64      S, number of sequences  34+12S       int64[D]    first sequence of each document, then S

then, in multimodal corpora only, int8[S] modes. We write one sequence per document. `PREFIX.json` holds facts of ours
and is optional. Opening compares every number of the index with the files, and the identity in `PREFIX.json` with index
and tokens. Token values are checked when they are read, or by `data.verify`.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import weakref
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar, final, get_type_hints

import numpy as np
from numpy.typing import NDArray

from data.storage import READ_BYTES, DataError, check_is_rereadable, crc32, is_still_at

T = TypeVar("T")

INDEX_MAGIC = b"MMIDIDX\0\0"
INDEX_VERSION = 1
INDEX_HEADER = struct.Struct("<9sQBQQ")

DTYPE_OF_CODE: dict[int, np.dtype[Any]] = {1: np.dtype("<u1"), 2: np.dtype("<i1"), 3: np.dtype("<i2"),
                                           4: np.dtype("<i4"), 5: np.dtype("<i8"), 6: np.dtype("<f8"),
                                           7: np.dtype("<f4"), 8: np.dtype("<u2")}
CODE_OF_DTYPE = {dtype: code for code, dtype in DTYPE_OF_CODE.items()}

# Below this size Megatron stores ids as uint16. Part of the format: files are compared byte for byte.
UINT16_VOCABULARY = 65_500


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
    crc32: str  # CRC-32 of the whole .bin, 8 hexadecimal digits
    max_token: int
    tokenizer: TokenizerFacts | None  # None: unknown
    identity: str  # identity of .idx and .bin (`corpus_identity`)


def read_corpus_facts(path: str) -> CorpusFacts | None:
    """The facts in a file; None if it does not exist."""
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
        tokenizer = value["tokenizer"] and _from_json(TokenizerFacts, value["tokenizer"])
        return _from_json(CorpusFacts, {**value, "tokenizer": tokenizer})
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"{path}: cannot read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path}: not the facts of a corpus ({error}); remove it or preprocess again") from error


def tokenizer_facts_of_state(state: Mapping[str, Any]) -> TokenizerFacts | None:
    """The tokenizer recorded in a saved state; None if there is none, or it is not ours."""
    try:
        return _from_json(TokenizerFacts, state["tokenizer"])
    except (KeyError, TypeError):
        return None


def _from_json(kind: type[T], value: Mapping[str, Any]) -> T:
    """A dataclass of these values; KeyError or TypeError if one is missing or has another type."""
    types = get_type_hints(kind)
    for name, expected in types.items():
        if not isinstance(value[name], expected):
            raise TypeError(f"{name}: expected {getattr(expected, '__name__', expected)}, found {value[name]!r}")
    return kind(**{name: value[name] for name in types})


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The dtype Megatron chooses for a vocabulary: uint16 while it is safely small, else int32."""
    return np.dtype("<u2") if vocab_size < UINT16_VOCABULARY else np.dtype("<i4")


def parse_index_header(start: bytes, file_size: int, name: str) -> tuple[np.dtype[Any], int, int]:
    """(dtype, sequences, documents + 1) from the first bytes of an index of `file_size` bytes; DataError if they are
    wrong, before anything is allocated."""
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
    # Without the modes of multimodal corpora. Python integers do not wrap: counts near 2**64 give a large number here.
    size = INDEX_HEADER.size + 12 * sequences + 8 * boundaries
    if file_size not in (size, size + sequences):
        raise DataError(f"{name}: size: {sequences} sequences and {boundaries} document boundaries "
                        f"need {size} bytes, found {file_size}")
    if sequences < 1 or boundaries < 2:
        raise DataError(f"{name}: counts: the corpus is empty ({sequences} sequences, {boundaries} boundaries)")
    return dtype, sequences, boundaries


MAX_READ_BYTES = 1 << 30  # bytes per read call; the kernel's limit is 2 GiB


@final
class StableFile:
    """A file read by position that must not change while open: a change of size or mtime is a DataError. It is not
    memory-mapped, since a mapped file that is truncated kills the process."""

    def __init__(self, path: str) -> None:
        """Raises OSError if it cannot be opened."""
        self._path = path
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # stays readable after rename or deletion
        weakref.finalize(self, os.close, self.descriptor)
        status = os.fstat(self.descriptor)
        self.size, self._mtime_ns = status.st_size, status.st_mtime_ns

    def read(self, offset: int, count: int, dtype: np.dtype[Any] | str) -> NDArray[Any]:
        """`count` values from byte `offset` on; DataError if the file has changed."""
        found = np.empty(count, dtype)
        left = found.data.cast("B") if count else memoryview(b"")
        try:
            while left:
                got = os.preadv(self.descriptor, [left[:MAX_READ_BYTES]], offset)
                if not got:
                    break
                left, offset = left[got:], offset + got
            status = os.fstat(self.descriptor)
        except OSError as error:
            raise DataError(f"{self._path}: cannot read: {error.strerror or error}") from error
        if status.st_size != self.size:
            raise DataError(f"{self._path}: size: {self.size} bytes when it was opened, {status.st_size} now; "
                            "put the whole file there again, under another name while a program reads this one")
        if left or status.st_mtime_ns != self._mtime_ns:
            raise DataError(f"{self._path}: was written to while it was read; give each corpus a name of its own")
        return found

    def checksum(self) -> int:
        """CRC-32 of the whole file."""
        crc = 0
        for at in range(0, self.size, READ_BYTES):
            crc = crc32(self.read(at, min(READ_BYTES, self.size - at), "u1").data, crc)
        return crc


SAMPLED_PLACES = 32
SAMPLED_BYTES = 1 << 12

BLOCK_ENTRIES = 1 << 20  # tokens processed at a time in a full scan, to bound memory

# A corpus without facts is scanned for its largest id when opened, up to this many tokens (about 0.2 s).
SCAN_LIMIT_TOKENS = 1 << 28


def corpus_identity(index_crc: int, tokens: StableFile) -> str:
    """8 hexadecimal digits for the index, and 8 for the tokens."""
    # The tokens may be large: evenly spaced samples, including both ends.
    length = min(SAMPLED_BYTES, tokens.size)
    crc = crc32(tokens.size.to_bytes(8, "little"))
    for at in sorted({(tokens.size - length) * place // (SAMPLED_PLACES - 1) for place in range(SAMPLED_PLACES)}):
        crc = crc32(tokens.read(at, length, "u1").data, crc)
    return f"{index_crc:08x}{crc:08x}"


class IndexedCorpus:
    """A read-only corpus. Opening it reads the index once and checks everything but the token values. Its memory does
    not depend on the number of documents."""

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        self.prefix = os.fspath(prefix)
        self._index, self._name = self._open(".idx"), f"{self.prefix}.idx"
        first = self._index.read(0, min(INDEX_HEADER.size, self._index.size), "u1").tobytes()
        self.dtype, self._num_sequences, boundaries = parse_index_header(first, self._index.size, self._name)
        self._bin = self._open(".bin")
        self.num_tokens, self.num_documents = self._bin.size // self.dtype.itemsize, boundaries - 1
        self._pointers_at = INDEX_HEADER.size + 4 * self._num_sequences
        self._documents_at = self._pointers_at + 8 * self._num_sequences
        self._identity = corpus_identity(self._check_index(), self._bin)
        self.facts = read_corpus_facts(f"{self.prefix}.json")
        self.tokenizer = self.facts.tokenizer if self.facts else None
        # A writer removes the old index before it changes the tokens.
        if not is_still_at(self._index.descriptor, self._name):
            raise DataError(f"{self._name}: was replaced while the corpus was opened; start again")
        if self.facts and (found := self._identity) != (identity := self.facts.identity):
            suffix = ".idx" if found[:8] != identity[:8] else ".bin"
            raise DataError(f"{self.prefix}{suffix}: not the one that {self.prefix}.json was written with (identity: "
                            f"expected {identity}, found {found}): damaged, or of another corpus; copy all three files "
                            "again, or make the corpus again")

    def __reduce__(self) -> tuple[type[IndexedCorpus], tuple[str]]:
        return IndexedCorpus, (self.prefix,)  # a worker process opens the files itself

    def _open(self, suffix: str) -> StableFile:
        path = self.prefix + suffix
        if not os.path.lexists(path):
            check_is_rereadable(self.prefix)
        try:
            file = StableFile(path)
        except OSError as error:
            raise DataError(f"{path}: cannot read: {error.strerror or error}; a corpus is {self.prefix}.bin and "
                            f"{self.prefix}.idx (python -m data.preprocess builds one)") from error
        if file.size == 0:
            raise DataError(f"{path}: size: the file is empty")
        return file

    def _index_blocks(self, offset: int, count: int, dtype: str) -> Iterator[tuple[int, NDArray[Any]]]:
        """(number of the first value, block) over `count` values of the index from byte `offset` on."""
        size = np.dtype(dtype).itemsize
        for at in range(0, count, BLOCK_ENTRIES):
            yield at, self._index.read(offset + size * at, min(BLOCK_ENTRIES, count - at), dtype)

    def _check_index(self) -> int:
        """Compare all numbers of the index with each other and with .bin; returns the CRC-32 of the index."""
        sequences, boundaries, itemsize = self._num_sequences, self.num_documents + 1, self.dtype.itemsize
        crc, expected = crc32(self._index.read(0, INDEX_HEADER.size, "u1").data), 0
        for at, lengths in self._index_blocks(INDEX_HEADER.size, sequences, "<i4"):
            crc = crc32(lengths.data, crc)
            if lengths.min() < 0:
                where = int((lengths < 0).argmax())
                raise DataError(f"{self._name}: lengths[{at + where}]: expected 0 or more, found {lengths[where]}")
            expected += int(lengths.sum(dtype=np.int64)) * itemsize
        if self._bin.size != expected:
            raise DataError(f"{self.prefix}.bin: size: the index says {expected} bytes, found {self._bin.size}")
        end = 0
        for at, pointers in self._index_blocks(self._pointers_at, sequences, "<i8"):
            crc = crc32(pointers.data, crc)
            sizes = self._index.read(INDEX_HEADER.size + 4 * at, len(pointers), "<i4").astype(np.int64) * itemsize
            ends = end + np.cumsum(sizes)
            wrong = pointers != ends - sizes
            if wrong.any():
                where = int(wrong.argmax())
                raise DataError(f"{self._name}: pointers[{at + where}]: expected {ends[where] - sizes[where]} (the "
                                f"lengths before it), found {pointers[where]}")
            end = int(ends[-1])
        first, last = (int(self._index.read(self._documents_at + 8 * number, 1, "<i8")[0])
                       for number in (0, self.num_documents))
        if first != 0 or last != sequences:
            raise DataError(f"{self._name}: documents: expected 0 to {sequences}, found {first} to {last}")
        for at, documents in self._index_blocks(self._documents_at, boundaries, "<i8"):
            crc = crc32(documents.data, crc)
            before = np.concatenate([[first], documents[:-1]])
            if (documents < before).any():
                where = int((documents < before).argmax())
                raise DataError(f"{self._name}: documents[{at + where}]: expected at least {before[where]}, "
                                f"found {documents[where]}")
            first = int(documents[-1])
        modes_at = self._documents_at + 8 * boundaries
        for _, modes in self._index_blocks(modes_at, self._index.size - modes_at, "u1"):
            crc = crc32(modes.data, crc)
        return crc

    def first_tokens(self, first: int, last: int) -> NDArray[np.int64]:
        """[last - first + 1]: first token of each document from `first` to `last`; the number of tokens stands for the
        document after the last one."""
        sequences = self._index.read(self._documents_at + 8 * first, last - first + 1, "<i8")
        low, high = int(sequences[0]), int(sequences[-1])
        pointers = self._index.read(self._pointers_at + 8 * low, min(high + 1, self._num_sequences) - low, "<i8")
        found: NDArray[np.int64] = np.append(pointers, self._bin.size)[sequences - low] // self.dtype.itemsize
        return found

    def first_token(self, number: int) -> int:
        """First token of a document; of one after the last, the end."""
        return int(self.first_tokens(number, number)[0])

    def document(self, number: int, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        """Ids [start, stop) of one document, clipped to it like a slice."""
        if not 0 <= number < self.num_documents:
            raise IndexError(f"document {number} of {self.num_documents}")
        first, end = map(int, self.first_tokens(number, number + 1))
        chosen = range(first, end)[start:stop]
        return self.read_tokens(chosen.start, chosen.stop)

    def read_tokens(self, first: int, stop: int) -> NDArray[Any]:
        """Tokens [first, stop) of the corpus, with slice semantics."""
        first, stop, _ = slice(first, stop).indices(self.num_tokens)
        return self._bin.read(first * self.dtype.itemsize, max(0, stop - first), self.dtype)

    @cached_property
    def fingerprint(self) -> str:
        """Equal on every rank that opened the same corpus: a digest of the index, both ends and samples of the tokens,
        and their checksum if recorded."""
        digest = hashlib.sha256(self._identity.encode())
        digest.update(self.read_tokens(0, BLOCK_ENTRIES).data)
        digest.update(self.read_tokens(-min(BLOCK_ENTRIES, self.num_tokens), self.num_tokens).data)
        digest.update(self.facts.crc32.encode() if self.facts else b"")
        return digest.hexdigest()[:16]

    def token_blocks(self) -> Iterator[tuple[int, NDArray[Any]]]:
        """(number of the first token, block) over the whole corpus."""
        for at in range(0, self.num_tokens, BLOCK_ENTRIES):
            yield at, self.read_tokens(at, at + BLOCK_ENTRIES)

    def scan_id_range(self) -> tuple[int, int]:
        """(smallest id, largest id), from the whole file."""
        lowest, highest = 0, -1
        for _, block in self.token_blocks():
            lowest, highest = min(lowest, int(block.min())), max(highest, int(block.max()))
        return lowest, highest

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise for ids outside 0..vocab_size-1, naming the first. Reads no tokens if facts are recorded. A very large
        corpus without facts passes: readers of its tokens check again."""
        if self.facts:
            lowest, highest = 0, self.facts.max_token
        else:
            lowest, highest = self.scan_id_range() if self.num_tokens < SCAN_LIMIT_TOKENS else (0, -1)
        if lowest < 0 or highest >= vocab_size:
            self.raise_for_invalid_token(vocab_size)

    def raise_for_invalid_token(self, vocab_size: int) -> None:
        """Raise for the first id outside the vocabulary, if there is one."""
        for at, block in self.token_blocks():
            bad = (block >= vocab_size) | (block < 0)
            if bad.any():
                where = at + int(bad.argmax())
                number = bisect_right(range(self.num_documents), where, key=self.first_token) - 1
                raise DataError(f"{self.prefix}.bin: document {number}, offset {where - self.first_token(number)}: "
                                f"token id {block[bad.argmax()]} is outside the vocabulary of {vocab_size}; "
                                "was the corpus made with another tokenizer?")
