"""`IndexedCorpus`: a read-only corpus on disk, checked against its index when opened.

A corpus is `PREFIX.bin`, `PREFIX.idx` (see `format`) and, if we wrote it, `PREFIX.json`. Opening compares every number
of the index with the files, and the identity in `PREFIX.json` with index and tokens; corpora of Megatron-LM, without
that file, work too. Token values are checked when they are read, or by `data.verify`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.format import INDEX_HEADER, IndexHeader, parse_index_header, read_corpus_facts
from data.sampling import index_dtype
from data.stable_file import StableFile
from data.storage import DataError, check_is_rereadable, crc32

SAMPLED_PLACES = 32
SAMPLED_BYTES = 1 << 12

BLOCK_ENTRIES = 1 << 20
"""Entries processed at a time in a full scan, to bound memory."""

SCAN_LIMIT_TOKENS = 1 << 28
"""A corpus without facts is scanned for its largest id when opened, up to this many tokens (about 0.2 s)."""


def corpus_identity(index: StableFile, tokens: StableFile) -> str:
    """8 hexadecimal digits for the index, and 8 for the tokens."""
    # The tokens may be large: evenly spaced samples, including both ends.
    length = min(SAMPLED_BYTES, tokens.size)
    crc = crc32(tokens.size.to_bytes(8, "little"))
    for at in sorted({(tokens.size - length) * place // (SAMPLED_PLACES - 1) for place in range(SAMPLED_PLACES)}):
        crc = crc32(tokens.read(at, length, "u1").data, crc)
    return f"{index.checksum():08x}{crc:08x}"


class IndexedCorpus:
    """A read-only corpus. Opening it checks everything but the token values."""

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        self.prefix = os.fspath(prefix)
        self._index, self._name = self._open(".idx"), f"{self.prefix}.idx"
        first = self._index.read(0, min(INDEX_HEADER.size, self._index.size), "u1").tobytes()
        header = parse_index_header(first, self._index.size, self._name)
        self.dtype = header.dtype
        self._bin = self._open(".bin")
        self._starts = self._read_index(header)
        self.num_tokens = int(self._starts[-1])
        self.num_documents = header.boundaries - 1
        self.facts = read_corpus_facts(f"{self.prefix}.json")
        if not self._index.is_still_at_path():  # a writer removes the old index before it changes the tokens
            raise DataError(f"{self._name}: was replaced while the corpus was opened; start again")
        if self.facts and (found := corpus_identity(self._index, self._bin)) != (identity := self.facts.identity):
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

    def _read_index(self, header: IndexHeader) -> NDArray[np.int64]:
        """[documents + 1]: first token of each document, then the end. Compares all numbers with the files."""
        starts = np.zeros(header.sequences + 1, np.int64)
        for at, lengths in self._index_blocks(INDEX_HEADER.size, header.sequences, "<i4"):
            if (lengths < 0).any():
                where = int((lengths < 0).argmax())
                raise DataError(f"{self._name}: lengths[{at + where}]: expected 0 or more, found {lengths[where]}")
            np.cumsum(lengths, dtype=np.int64, out=starts[at + 1:at + 1 + len(lengths)])
            starts[at + 1:at + 1 + len(lengths)] += starts[at]
        expected = int(starts[-1]) * header.dtype.itemsize
        if self._bin.size != expected:
            raise DataError(f"{self.prefix}.bin: size: the index says {expected} bytes, found {self._bin.size}")
        for at, pointers in self._index_blocks(header.pointers_offset, header.sequences, "<i8"):
            offsets = starts[at:at + len(pointers)] * self.dtype.itemsize
            if (pointers != offsets).any():
                where = int((pointers != offsets).argmax())
                raise DataError(f"{self._name}: pointers[{at + where}]: expected {offsets[where]} "
                                f"(the lengths before it), found {pointers[where]}")
        documents = np.empty(header.boundaries, np.int64)
        for at, some in self._index_blocks(header.documents_offset, header.boundaries, "<i8"):
            documents[at:at + len(some)] = some
        if documents[0] != 0 or documents[-1] != header.sequences:
            raise DataError(f"{self._name}: documents: expected 0 to {header.sequences}, "
                            f"found {documents[0]} to {documents[-1]}")
        if (documents[1:] < documents[:-1]).any():
            where = int((documents[1:] < documents[:-1]).argmax())
            raise DataError(f"{self._name}: documents[{where + 1}]: expected at least {documents[where]}, "
                            f"found {documents[where + 1]}")
        one_sequence_each = header.boundaries == header.sequences + 1 and all(  # as we write them: no second array
            np.array_equal(documents[at:at + BLOCK_ENTRIES], np.arange(at, min(at + BLOCK_ENTRIES, len(documents))))
            for at in range(0, len(documents), BLOCK_ENTRIES))
        return starts if one_sequence_each else starts[documents]

    def _index_blocks(self, offset: int, count: int, dtype: str) -> Iterator[tuple[int, NDArray[Any]]]:
        """(position, block) over an array of the index."""
        for at in range(0, count, BLOCK_ENTRIES):
            yield at, self._index.read(offset + at * np.dtype(dtype).itemsize, min(BLOCK_ENTRIES, count - at), dtype)

    @cached_property
    def sizes(self) -> NDArray[np.integer]:
        """[documents]: tokens of each document."""
        sizes = np.diff(self._starts)
        return sizes.astype(index_dtype(int(sizes.max())))

    def document(self, number: int) -> NDArray[Any]:
        return self.read(number)

    def read(self, number: int, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        """Ids [start, stop) of one document, clipped to it like a slice."""
        if not 0 <= number < self.num_documents:
            raise IndexError(f"document {number} of {self.num_documents}")
        first, end = int(self._starts[number]), int(self._starts[number + 1])
        chosen = range(first, end)[start:stop]
        return self._read_tokens(chosen.start, chosen.stop)

    def read_documents(self, first: int, stop: int) -> NDArray[Any]:
        """The ids of documents [first, stop)."""
        return self._read_tokens(int(self._starts[first]), int(self._starts[stop]))

    def _read_tokens(self, first: int, stop: int) -> NDArray[Any]:
        """Tokens [first, stop) of the corpus, with slice semantics."""
        first, stop, _ = slice(first, stop).indices(self.num_tokens)
        return self._bin.read(first * self.dtype.itemsize, max(0, stop - first), self.dtype)

    @cached_property
    def fingerprint(self) -> str:
        """Equal on every rank that opened the same corpus: a digest of the index, both ends and samples of the tokens,
        and their checksum if recorded."""
        digest = hashlib.sha256(corpus_identity(self._index, self._bin).encode())
        digest.update(self._read_tokens(0, BLOCK_ENTRIES).data)
        digest.update(self._read_tokens(-min(BLOCK_ENTRIES, self.num_tokens), self.num_tokens).data)
        digest.update(self.facts.crc32.encode() if self.facts else b"")
        return digest.hexdigest()[:16]

    def token_blocks(self) -> Iterator[tuple[int, NDArray[Any]]]:
        """(number of the first token, block) over the whole corpus."""
        for at in range(0, self.num_tokens, BLOCK_ENTRIES):
            yield at, self._read_tokens(at, at + BLOCK_ENTRIES)

    def scan_id_range(self) -> tuple[int, int]:
        """(smallest id, largest id), from the whole file."""
        lowest, highest = 0, -1
        for _, block in self.token_blocks():
            lowest, highest = min(lowest, int(block.min())), max(highest, int(block.max()))
        return lowest, highest

    @cached_property
    def _known_id_range(self) -> tuple[int, int] | None:
        if self.facts:
            return 0, self.facts.max_token
        return self.scan_id_range() if self.num_tokens < SCAN_LIMIT_TOKENS else None

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise for ids outside 0..vocab_size-1, naming the first. Reads no tokens if facts are recorded. A very large
        corpus without facts passes: readers of its tokens check again."""
        known = self._known_id_range
        if known is not None and (known[0] < 0 or known[1] >= vocab_size):
            self.raise_for_invalid_token(vocab_size)

    def raise_for_invalid_token(self, vocab_size: int) -> None:
        """Raise for the first id outside the vocabulary, if there is one."""
        for at, block in self.token_blocks():
            bad = (block >= vocab_size) | (block < 0)
            if bad.any():
                where = at + int(bad.argmax())
                number = int(np.searchsorted(self._starts, where, side="right")) - 1
                raise DataError(f"{self.prefix}.bin: document {number}, offset {where - self._starts[number]}: "
                                f"token id {block[bad.argmax()]} is outside the vocabulary of {vocab_size}; "
                                "was the corpus made with another tokenizer?")
