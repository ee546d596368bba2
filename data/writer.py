"""Writing a corpus in one pass: `CorpusWriter`. Where its files are meanwhile: `draft`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from operator import index
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from data.draft import CorpusDraft
from data.facts import CorpusFacts, TokenizerFacts
from data.format import INDEX_HEADER, IndexHeader, token_dtype
from data.held import StableFile
from data.identity import corpus_identity
from data.indexed import BLOCK_ENTRIES
from data.storage import DataError, write_errors_for

MAX_DOCUMENT_TOKENS = 2**31 - 1
"""Tokens of one document: its length is an int32 in the index."""


class CorpusWriter:
    """Writes a corpus in one pass and bounded memory; nothing appears under its names unless the block ends well.

    With a `key`, a process can take up what another one, killed or interrupted, had marked under the same key.
    """

    def __init__(self, prefix: str | os.PathLike[str], *, tokenizer: TokenizerFacts | None = None,
                 vocab_size: int | None = None, dtype: np.dtype[Any] | None = None, key: str | None = None) -> None:
        if tokenizer is not None:
            vocab_size = tokenizer.vocab_size
        if dtype is None and vocab_size is None:
            raise TypeError("a tokenizer, a vocabulary size or a dtype is needed")
        self.prefix = os.fspath(prefix)
        self.dtype = token_dtype(vocab_size or 0) if dtype is None else np.dtype(dtype)
        self._tokenizer = tokenizer
        self._id_limit = int(np.iinfo(self.dtype).max) + 1 if vocab_size is None else vocab_size
        self.documents = self.tokens = 0
        self._max_token, self._tokens_of_documents = -1, 0
        self._draft = CorpusDraft(self.prefix, key, _parse_resume_state)
        self.resumed_state: Any = None
        """What the caller had marked, where this goes on from there."""

    def __enter__(self) -> CorpusWriter:
        with ExitStack() as stack:
            state = stack.enter_context(self._draft).state
            if state is None:
                self._draft.idx.write(bytes(
                    INDEX_HEADER.size))  # which needs the number of lengths; they follow as they come
            else:
                (self.documents, self.tokens, self._max_token, self._tokens_of_documents), self.resumed_state = state
            stack.pop_all()  # `__exit__` leaves the draft
        return self

    def save_resume_point(self, state: Any) -> None:
        """Another process may go on from here; `state` is what it has to be told."""
        written = (self.documents, self.tokens, self._max_token, self._tokens_of_documents)
        self._draft.save_resume_point({"written": written, "caller": state})

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
            if lowest < 0 or highest >= self._id_limit:
                raise DataError(f"{self.prefix}: token id {lowest if lowest < 0 else highest} at document "
                                f"{self.documents} or after: expected 0 to {self._id_limit - 1}")
            self._max_token = max(self._max_token, highest)
            raw = np.ascontiguousarray(ids, self.dtype).data
            self._draft.bin.write(raw)
            self.tokens += len(ids)

    def savepoint(self) -> tuple[int, ...]:
        """For `rollback_to`, before tokens of a document are added that may have to be taken back."""
        return (self.tokens, self._max_token, self._draft.bin.crc)

    def rollback_to(self, savepoint: Sequence[int]) -> None:
        """The tokens that were added since are none."""
        self.tokens, self._max_token, crc = savepoint
        self._draft.bin.truncate(self.tokens * self.dtype.itemsize, crc)

    def add_sizes(self, sizes: ArrayLike) -> None:
        """The tokens of each of the next documents."""
        lengths = np.asarray(sizes, np.int64)
        if len(lengths) and int(lengths.max()) > MAX_DOCUMENT_TOKENS:
            raise DataError(f"{self.prefix}: a document has {lengths.max()} tokens; an index counts "
                            f"to {MAX_DOCUMENT_TOKENS}: cut it (a .txt file: --document-separator)")
        self._draft.idx.write(lengths.astype("<i4").data)
        self.documents += len(lengths)
        self._tokens_of_documents += int(lengths.sum())

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        if error is not None:
            self._draft.__exit__(kind, error, traceback)
        else:
            with ExitStack() as stack:
                stack.push(self._draft)
                self._publish()

    def _publish(self) -> None:
        if not self.tokens:
            raise DataError(f"{self.prefix}: no tokens: the input holds {self.documents} documents and no text")
        assert self.tokens == self._tokens_of_documents
        with write_errors_for(self.prefix):
            self._finish_index(IndexHeader(self.dtype, self.documents, self.documents + 1))
            files = (StableFile(path) for path in self._draft.paths())
        self._draft.publish(
            asdict(
                CorpusFacts(self.documents, self.tokens, f"{self._draft.bin.crc:08x}", self._max_token, self._tokenizer,
                            corpus_identity(*files))))

    def _finish_index(self, header: IndexHeader) -> None:
        """What follows from the lengths, which are read back: pointers and boundaries; then the header."""
        index, first = self._draft.idx.file, 0
        with open(self._draft.paths()[0], "rb") as written:
            written.seek(header.lengths_offset)
            for at in range(0, header.sequences, BLOCK_ENTRIES):
                lengths = np.fromfile(written, "<i4", min(BLOCK_ENTRIES, header.sequences - at))
                ends = first + np.cumsum(lengths, dtype="<i8")
                index.write(((ends - lengths) * self.dtype.itemsize).data)
                first = int(ends[-1])
        for at in range(0, header.boundaries, BLOCK_ENTRIES):
            index.write(np.arange(at, min(at + BLOCK_ENTRIES, header.boundaries), dtype="<i8").data)
        index.seek(0)
        index.write(header.pack())


def _parse_resume_state(state: Any) -> tuple[tuple[int, int, int, int], Any]:
    """What `mark` wrote; an error where it did not."""
    documents, tokens, max_token, tokens_of_documents = map(index, state["written"])
    return (documents, tokens, max_token, tokens_of_documents), state["caller"]
