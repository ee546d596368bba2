"""`CorpusWriter`: writes a corpus in one pass and bounded memory.

The files have hidden names (drafts) until all are complete; the index is renamed last.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
from numpy.typing import ArrayLike

from data.indexed import (BLOCK_ENTRIES, CODE_OF_DTYPE, INDEX_HEADER, INDEX_MAGIC, INDEX_VERSION, CorpusFacts,
                          StableFile, TokenizerFacts, corpus_identity, token_dtype)
from data.storage import (DISK_ERRORS, DataError, StorageFault, crc32, fsync_directory, hold_writer_lock,
                          write_errors_for)

# In the order in which they are renamed: the index completes the corpus.
CORPUS_SUFFIXES = (".bin", ".json", ".idx")

MAX_DOCUMENT_TOKENS = 2**31 - 1  # longest document: its length is an int32 in the index


def corpus_files(prefix: str | os.PathLike[str]) -> list[str]:
    return [os.fspath(prefix) + suffix for suffix in CORPUS_SUFFIXES]


class CorpusWriter:
    """Writes a corpus in one pass and bounded memory; its files appear only if the block succeeds."""

    def __init__(self, prefix: str | os.PathLike[str], *, tokenizer: TokenizerFacts | None = None,
                 vocab_size: int | None = None, dtype: np.dtype[Any] | None = None) -> None:
        if tokenizer is not None:
            vocab_size = tokenizer.vocab_size
        self.prefix = os.fspath(prefix)
        self.dtype = token_dtype(vocab_size or 0) if dtype is None else np.dtype(dtype)
        self._tokenizer = tokenizer
        self._id_limit = int(np.iinfo(self.dtype).max) + 1 if vocab_size is None else vocab_size
        self.documents, self.tokens, self._max_token, self._crc = 0, 0, -1, 0
        self.complete_tokens = 0  # tokens of the documents whose sizes are known
        self._after_document = (0, -1, 0)  # tokens, largest id and checksum after the last complete document
        self._targets = {suffix: Path(os.path.realpath(self.prefix + suffix)) for suffix in CORPUS_SUFFIXES}

    def __enter__(self) -> CorpusWriter:
        with ExitStack() as stack, write_errors_for(self.prefix):
            # The index with links resolved, as a writer without a link names it.
            target = str(self._targets[".idx"]).removesuffix(".idx")
            is_locked = stack.enter_context(hold_writer_lock(target, self.prefix))
            # The lock holder's names are fixed, so that it overwrites what a killed writer left.
            unique = "" if is_locked else f".{os.getpid()}.{secrets.token_hex(4)}"
            self._drafts = {suffix: target.with_name(f".{target.name}{unique}.tmp")
                            for suffix, target in self._targets.items()}
            self._bin: IO[bytes]
            self._bin, self._idx = (stack.enter_context(open(self._drafts[suffix], "wb"))
                                    for suffix in (".bin", ".idx"))
            self._idx.write(bytes(INDEX_HEADER.size))  # completed at the end: it holds the number of lengths
            self._stack = stack.pop_all()
        return self

    def add_documents(self, tokens: ArrayLike, sizes: ArrayLike) -> None:
        """Add several documents: their concatenated tokens, and the size of each."""
        self.add_tokens(tokens)
        self.add_sizes(sizes)

    def add_tokens(self, tokens: ArrayLike) -> None:
        """Add tokens; `add_sizes` assigns them to documents, before or after."""
        ids = np.asarray(tokens)
        if len(ids):
            lowest, highest = int(ids.min()), int(ids.max())
            if lowest < 0 or highest >= self._id_limit:
                raise DataError(f"{self.prefix}: token id {lowest if lowest < 0 else highest} at document "
                                f"{self.documents} or after: expected 0 to {self._id_limit - 1}")
            self._max_token = max(self._max_token, highest)
            raw = np.ascontiguousarray(ids, self.dtype).data
            self._crc = crc32(raw, self._crc)
            self._bin.write(raw)
            self.tokens += len(ids)

    def drop_unfinished_document(self) -> None:
        """Drop the tokens after the last document."""
        self.tokens, self._max_token, self._crc = self._after_document
        self._bin.seek(self.tokens * self.dtype.itemsize)
        self._bin.truncate()

    def add_sizes(self, sizes: ArrayLike) -> None:
        """Add the sizes, in tokens, of the next documents."""
        lengths = np.asarray(sizes, np.int64)
        if len(lengths) and int(lengths.max()) > MAX_DOCUMENT_TOKENS:
            raise DataError(f"{self.prefix}: a document has {lengths.max()} tokens; an index counts "
                            f"to {MAX_DOCUMENT_TOKENS}: cut it (a .txt file: --document-separator)")
        self._idx.write(lengths.astype("<i4").data)
        self.documents += len(lengths)
        self.complete_tokens += int(lengths.sum())
        if self.complete_tokens == self.tokens:
            self._after_document = self.tokens, self._max_token, self._crc

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        try:
            if error is None:
                self._publish()
        except BaseException as failure:
            error = failure
            raise
        finally:  # close and remove the drafts, and release the name
            with self._stack:
                for growing in (self._bin, self._idx):
                    with suppress(OSError):  # a full disk fails again when the buffer is flushed
                        growing.close()
                for path in self._drafts.values():
                    with suppress(OSError):
                        path.unlink(missing_ok=True)
            if isinstance(error, OSError) and error.errno in DISK_ERRORS and not isinstance(error, StorageFault):
                raise StorageFault(f"{self.prefix}: cannot write: {os.strerror(error.errno or errno.EIO)}") from error

    def _publish(self) -> None:
        """Complete the index and rename all files. From the first removal to the last renaming there is no index, and
        so no corpus."""
        if not self.tokens:
            raise DataError(f"{self.prefix}: no tokens: the input holds {self.documents} documents and no text")
        boundaries, index_file = self.documents + 1, self._idx
        assert self.complete_tokens == self.tokens, "the sizes of documents do not add up to the tokens"
        with write_errors_for(self.prefix):
            index_file.flush()
            end = 0
            for at in range(0, self.documents, BLOCK_ENTRIES):
                lengths = np.fromfile(self._drafts[".idx"], "<i4", min(BLOCK_ENTRIES, self.documents - at),
                                      offset=INDEX_HEADER.size + 4 * at)
                ends = end + np.cumsum(lengths, dtype="<i8")
                index_file.write(((ends - lengths) * self.dtype.itemsize).data)
                end = int(ends[-1])
            for at in range(0, boundaries, BLOCK_ENTRIES):
                index_file.write(np.arange(at, min(at + BLOCK_ENTRIES, boundaries), dtype="<i8").data)
            index_file.seek(0)
            index_file.write(INDEX_HEADER.pack(INDEX_MAGIC, INDEX_VERSION, CODE_OF_DTYPE[self.dtype], self.documents,
                                               boundaries))
            for growing in (self._bin, self._idx):  # a full disk fails here, while the old corpus is complete
                growing.flush()
                os.fsync(growing.fileno())
            index, tokens = (StableFile(str(self._drafts[suffix])) for suffix in (".idx", ".bin"))
            identity = corpus_identity(index.checksum(), tokens)
            facts = CorpusFacts(self.documents, self.tokens, f"{self._crc:08x}", self._max_token, self._tokenizer,
                                identity)
            with open(self._drafts[".json"], "w", encoding="utf-8") as file:
                json.dump(asdict(facts), file, indent=1)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            # Remove the old index first: beside new tokens it would be a wrong corpus after a crash between two
            # renames.
            for suffix in (".idx", ".json"):
                self._targets[suffix].unlink(missing_ok=True)
            fsync_directory(self._targets[".idx"].parent)
            for suffix in CORPUS_SUFFIXES:
                os.replace(self._drafts[suffix], self._targets[suffix])
                fsync_directory(self._targets[suffix].parent)
