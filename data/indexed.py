"""A corpus on disk: reading it memory-mapped, writing it in one pass.

A *corpus* is `PREFIX.bin` and `PREFIX.idx` (see `format`) and, when we wrote it, `PREFIX.json`: its *facts*, which
say what the two cannot (tokenizer, checksum, largest id). Corpora written by Megatron-LM have no facts and work
too. A corpus is trusted only after `IndexedCorpus(prefix)` compared every number of the index with the files.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import ExitStack
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from data.facts import Facts, TokenizerFacts, read_facts
from data.format import HEADER, Header, read_header, token_dtype
from data.sampling import index_dtype
from data.storage import DataError, crc32, staged_file, writing

BLOCK = 1 << 20
"""Entries looked at together when a whole file is scanned: bounds the memory, not the corpus."""

MAX_LENGTH = 2**31 - 1
"""Tokens of one document: its length is an int32 in the index."""

SCAN_LIMIT = 1 << 28
"""A corpus without facts is scanned for its largest id when opened, up to this many tokens (about 0.2 s)."""


class IndexedCorpus:
    """A read-only, memory-mapped corpus. Opening it checks everything but the token values."""

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        self.prefix = os.fspath(prefix)
        index, self._name = self._map(".idx"), f"{self.prefix}.idx"
        header = read_header(index[:HEADER.size].tobytes(), len(index), self._name)
        self.dtype = header.dtype
        tokens = self._map(".bin")
        self._check_bin_size(header, index, len(tokens))
        self._tokens: NDArray[Any] = tokens.view(header.dtype)
        self.num_tokens = len(self._tokens)
        self.num_documents = header.boundaries - 1
        self._starts = self._check_index(header, index)
        self._index = index
        self.facts = read_facts(f"{self.prefix}.json")
        if self.facts and (self.facts.documents, self.facts.tokens) != (self.num_documents, self.num_tokens):
            raise DataError(f"{self.prefix}.json: expected {self.num_documents} documents and {self.num_tokens} tokens "
                            f"(the index), found {self.facts.documents} and {self.facts.tokens}")

    def __reduce__(self) -> tuple[type[IndexedCorpus], tuple[str]]:
        return IndexedCorpus, (self.prefix,)  # a worker process maps the files again instead of receiving them

    def _map(self, suffix: str) -> NDArray[np.uint8]:
        path = self.prefix + suffix
        try:
            size = os.path.getsize(path)
            if size == 0:
                raise DataError(f"{path}: size: the file is empty")
            return np.memmap(path, dtype=np.uint8, mode="r")
        except OSError as error:
            raise DataError(f"{path}: cannot read: {error.strerror or error}; a corpus is {self.prefix}.bin and "
                            f"{self.prefix}.idx (python -m data.preprocess builds one)") from error

    def _check_bin_size(self, header: Header, index: NDArray[np.uint8], found: int) -> None:
        lengths = np.frombuffer(index, "<i4", header.sequences, header.lengths_at)
        if (lengths < 0).any():
            where = int((lengths < 0).argmax())
            raise DataError(f"{self._name}: lengths[{where}]: expected 0 or more, found {lengths[where]}")
        expected = int(lengths.sum(dtype=np.int64)) * header.dtype.itemsize
        if found != expected:
            raise DataError(f"{self.prefix}.bin: size: the index says {expected} bytes, found {found}")

    def _check_index(self, header: Header, index: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Compare pointers and boundaries with the lengths; return the first token of each document, then the end."""
        lengths = np.frombuffer(index, "<i4", header.sequences, header.lengths_at)
        pointers = np.frombuffer(index, "<i8", header.sequences, header.pointers_at)
        documents = np.frombuffer(index, "<i8", header.boundaries, header.documents_at)
        starts = np.zeros(header.sequences + 1, np.int64)
        np.cumsum(lengths, dtype=np.int64, out=starts[1:])
        wrong = pointers != starts[:-1] * self.dtype.itemsize
        if wrong.any():
            where = int(wrong.argmax())
            raise DataError(f"{self._name}: pointers[{where}]: expected {starts[where] * self.dtype.itemsize} "
                            f"(the lengths before it), found {pointers[where]}")
        if documents[0] != 0 or documents[-1] != header.sequences:
            raise DataError(f"{self._name}: documents: expected 0 to {header.sequences}, "
                            f"found {documents[0]} to {documents[-1]}")
        if (documents[1:] < documents[:-1]).any():
            where = int((documents[1:] < documents[:-1]).argmax())
            raise DataError(f"{self._name}: documents[{where + 1}]: expected at least {documents[where]}, "
                            f"found {documents[where + 1]}")
        return starts if header.boundaries == header.sequences + 1 and _is_range(documents) else starts[documents]

    @cached_property
    def sizes(self) -> NDArray[np.integer]:
        """Tokens of each document."""
        sizes = np.diff(self._starts)
        return sizes.astype(index_dtype(int(sizes.max())))

    def document(self, number: int) -> NDArray[Any]:
        """The ids of one document, a view of the file."""
        return self.read(number)

    def read(self, number: int, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        """Ids `start` to `stop` of one document, as a slice would: never beyond the document."""
        if not 0 <= number < self.num_documents:
            raise IndexError(f"document {number} of {self.num_documents}")
        first, end = int(self._starts[number]), int(self._starts[number + 1])
        return self._tokens[first:end][start:stop]

    def tokens_of(self, first: int, stop: int) -> NDArray[Any]:
        """The ids of the neighbouring documents `first` to `stop`, a view of the file."""
        return self._tokens[int(self._starts[first]):int(self._starts[stop])]

    @cached_property
    def fingerprint(self) -> str:
        """The same on every rank that opened the same corpus: the index and both ends of the tokens."""
        digest = hashlib.sha256(crc32(self._index.data).to_bytes(4, "little"))
        digest.update(self._tokens[:BLOCK].tobytes())
        digest.update(self._tokens[-BLOCK:].tobytes())
        return digest.hexdigest()[:16]

    def scan_range(self) -> tuple[int, int]:
        """The smallest and the largest id, read from the whole file."""
        lowest, highest = 0, -1
        for at in range(0, self.num_tokens, BLOCK):
            block = self._tokens[at:at + BLOCK]
            lowest, highest = min(lowest, int(block.min())), max(highest, int(block.max()))
        return lowest, highest

    @cached_property
    def _known_range(self) -> tuple[int, int] | None:
        if self.facts:
            return 0, self.facts.max_token
        return self.scan_range() if self.num_tokens < SCAN_LIMIT else None

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse a corpus with ids outside 0..vocab_size-1, naming the first. Nothing is read where facts are recorded.

        A very large corpus without facts passes here; whoever reads its tokens checks them again.
        """
        known = self._known_range
        if known is not None and (known[0] < 0 or known[1] >= vocab_size):
            self.refuse_token(vocab_size)

    def refuse_token(self, vocab_size: int) -> None:
        """Raise for the first id outside the vocabulary, if there is one."""
        for at in range(0, self.num_tokens, BLOCK):
            block = self._tokens[at:at + BLOCK]
            bad = (block >= vocab_size) | (block < 0)
            if bad.any():
                where = at + int(bad.argmax())
                number = int(np.searchsorted(self._starts, where, side="right")) - 1
                raise DataError(f"{self.prefix}.bin: document {number}, offset {where - self._starts[number]}: "
                                f"token id {self._tokens[where]} is outside the vocabulary of {vocab_size}; "
                                "was the corpus made with another tokenizer?")


def _is_range(values: NDArray[np.int64]) -> bool:
    return all(np.array_equal(values[at:at + BLOCK], np.arange(at, min(at + BLOCK, len(values))))
               for at in range(0, len(values), BLOCK))


class CorpusWriter:
    """Writes a corpus in one pass and bounded memory; nothing appears under its names unless the block ends well.

    The index is renamed last: it is what makes a corpus exist.
    """

    def __init__(self, prefix: str | os.PathLike[str], *, tokenizer: TokenizerFacts | None = None,
                 vocab_size: int | None = None, dtype: np.dtype[Any] | None = None) -> None:
        if tokenizer is not None:
            vocab_size = tokenizer.vocab_size
        if dtype is None and vocab_size is None:
            raise TypeError("a tokenizer, a vocabulary size or a dtype is needed")
        self.prefix = os.fspath(prefix)
        self.dtype = token_dtype(vocab_size or 0) if dtype is None else np.dtype(dtype)
        self._tokenizer = tokenizer
        self._limit = int(np.iinfo(self.dtype).max) + 1 if vocab_size is None else vocab_size
        self.documents = self.tokens = 0
        self._max_token, self._crc, self._tokens_of_documents = -1, 0, 0

    def __enter__(self) -> CorpusWriter:
        with ExitStack() as stack:  # left in reverse order: .bin is renamed first, .idx last
            self._idx = stack.enter_context(staged_file(self.prefix + ".idx"))
            self._json = stack.enter_context(staged_file(self.prefix + ".json", "w"))
            self._bin = stack.enter_context(staged_file(self.prefix + ".bin"))
            self._stack = stack.pop_all()
        self._idx.seek(HEADER.size)  # lengths go there as they come; the header needs their number
        return self

    def add_document(self, tokens: ArrayLike) -> None:
        ids = np.asarray(tokens)
        self.add_documents(ids, [len(ids)])

    def add_documents(self, tokens: ArrayLike, sizes: ArrayLike) -> None:
        """Several documents, joined, and how many tokens each has."""
        self.add_tokens(tokens)
        self.add_sizes(sizes)

    def add_tokens(self, tokens: ArrayLike) -> None:
        """The next tokens of the corpus; `add_sizes` says, before or after, to which documents they belong."""
        ids = np.asarray(tokens)
        if len(ids):
            lowest, highest = int(ids.min()), int(ids.max())
            if lowest < 0 or highest >= self._limit:
                raise DataError(f"{self.prefix}: token id {lowest if lowest < 0 else highest} at document "
                                f"{self.documents} or after: expected 0 to {self._limit - 1}")
            self._max_token = max(self._max_token, highest)
            raw = np.ascontiguousarray(ids, self.dtype).data
            self._crc = crc32(raw, self._crc)
            self._bin.write(raw)
            self.tokens += len(ids)

    def add_sizes(self, sizes: ArrayLike) -> None:
        """The tokens of each of the next documents."""
        lengths = np.asarray(sizes, np.int64)
        if len(lengths) and int(lengths.max()) > MAX_LENGTH:
            raise DataError(f"{self.prefix}: a document has {lengths.max()} tokens; an index counts "
                            f"to {MAX_LENGTH}: cut it (a .txt file: --document-separator)")
        self._idx.write(lengths.astype("<i4").data)
        self.documents += len(lengths)
        self._tokens_of_documents += int(lengths.sum())

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        if error is not None:
            self._stack.__exit__(kind, error, traceback)
        else:
            with self._stack:
                self._finish()

    def _finish(self) -> None:
        if not self.tokens:
            raise DataError(f"{self.prefix}: no tokens: the input holds {self.documents} documents and no text")
        assert self.tokens == self._tokens_of_documents
        json.dump(asdict(self._facts()), self._json, indent=1)
        self._json.write("\n")
        with writing(self.prefix):
            self._finish_index(Header(self.dtype, self.documents, self.documents + 1))
            for file in (self._bin, self._json, self._idx):  # a full disk shows here, while the old corpus is whole
                file.flush()
                os.fsync(file.fileno())
            # The old index beside the new tokens would be a corpus, and a wrong one, if we died between two renames.
            for suffix in (".idx", ".json"):
                Path(self.prefix + suffix).unlink(missing_ok=True)

    def _finish_index(self, header: Header) -> None:
        """What follows from the lengths, which are read back: pointers and boundaries; then the header."""
        self._idx.flush()
        first = 0
        with open(self._idx.name, "rb") as written:
            written.seek(header.lengths_at)
            for at in range(0, header.sequences, BLOCK):
                lengths = np.fromfile(written, "<i4", min(BLOCK, header.sequences - at))
                ends = first + np.cumsum(lengths, dtype="<i8")
                self._idx.write(((ends - lengths) * self.dtype.itemsize).data)
                first = int(ends[-1])
        for at in range(0, header.boundaries, BLOCK):
            self._idx.write(np.arange(at, min(at + BLOCK, header.boundaries), dtype="<i8").data)
        self._idx.seek(0)
        self._idx.write(header.pack())

    def _facts(self) -> Facts:
        return Facts(self.documents, self.tokens, f"{self._crc:08x}", self._max_token, self._tokenizer)
