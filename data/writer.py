"""`CorpusWriter`: writes a corpus in one pass and bounded memory, and can resume an interrupted write.

The files have hidden names (`CorpusDraft`) until all are complete; the index is renamed last. A *resume point* records
how far both files are on disk and the caller's state; a later process with the same key continues from it.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from operator import index
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
from numpy.typing import ArrayLike

from data.format import INDEX_HEADER, CorpusFacts, IndexHeader, TokenizerFacts, token_dtype
from data.indexed import BLOCK_ENTRIES, corpus_identity
from data.stable_file import StableFile
from data.storage import (DISK_ERRORS, DataError, ResumableError, StorageFault, crc32, crc32_file, fsync_directory,
                          hold_writer_lock, remove_stale_files, stale_temporary_files, write_errors_for,
                          write_json_atomic)

CORPUS_SUFFIXES = (".bin", ".json", ".idx")
"""In the order in which they are renamed: the index completes the corpus."""

MAX_DOCUMENT_TOKENS = 2**31 - 1
"""Longest document: its length is an int32 in the index."""


def corpus_files(prefix: str | os.PathLike[str]) -> list[str]:
    return [os.fspath(prefix) + suffix for suffix in CORPUS_SUFFIXES]


class AppendFile:
    """A file that is written sequentially, with its CRC-32."""

    def __init__(self, file: IO[bytes], crc: int = 0) -> None:
        self.file, self.crc = file, crc

    def write(self, raw: bytes | memoryview) -> None:
        self.crc = crc32(raw, self.crc)
        self.file.write(raw)

    def truncate(self, size: int, crc: int) -> None:
        """Truncate to `size` bytes, whose checksum was `crc`."""
        self.crc = crc
        self.file.seek(size)
        self.file.truncate()

    def sync(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())


class CorpusDraft:
    """A context in which `bin` and `idx` are written under hidden names; `publish` renames all files. Otherwise nothing
    is left but a resume point after an interruption."""

    bin: AppendFile
    idx: AppendFile
    state: tuple[tuple[int, int, int, int], Any] | None
    """Counts and caller's state of the resume point that this continues; None without one."""

    def __init__(self, prefix: str, key: str | None) -> None:
        """Only a process with the same `key` resumes; None: never resumable."""
        self._prefix, self._key = prefix, key
        self._targets = {suffix: Path(os.path.realpath(prefix + suffix)) for suffix in CORPUS_SUFFIXES}
        self._resume_file = Path(prefix).with_name(f".{Path(prefix).name}.mark.tmp")
        self.state = None

    def __enter__(self) -> CorpusDraft:
        with ExitStack() as stack, write_errors_for(self._prefix):
            # The index with links resolved, as a writer without a link names it.
            target = str(self._targets[".idx"]).removesuffix(".idx")
            is_locked = stack.enter_context(hold_writer_lock(target, self._prefix))
            unique = "" if is_locked else f".{os.getpid()}.{secrets.token_hex(4)}"
            self._drafts = {suffix: target.with_name(f".{target.name}{unique}.tmp")
                            for suffix, target in self._targets.items()}
            self._is_resumable = is_locked and self._key is not None
            if is_locked:
                self._resume()
                stale = [path for target in (*self._targets.values(), self._resume_file)
                         for path in stale_temporary_files(target)]
                stale += [self._resume_file] if self._resume_file.exists() else []
                used = () if self.state is None else (*self._drafts.values(), self._resume_file)
                stale = [path for path in stale if path not in used]
                why = ", which has other inputs or settings" if self._key and self._resume_file in stale else ""
                remove_stale_files(self._prefix, stale, why)
            mode = "xb" if self.state is None else "r+b"
            self.bin, self.idx = (AppendFile(stack.enter_context(open(self._drafts[suffix], mode)), crc)
                                  for suffix, crc in zip((".bin", ".idx"), self._crcs))
            for file in (self.bin, self.idx):
                file.file.seek(0, os.SEEK_END)
            self._stack = stack.pop_all()
        return self

    _crcs: tuple[int, ...] = (0, 0)

    def _resume(self) -> None:
        """Continue from a resume point with this key if both files contain what it says; truncate them to it."""
        try:
            found = json.loads(self._resume_file.read_bytes())
            if not self._is_resumable or found["key"] != self._key:
                return
            sizes, crcs = zip(*(found["files"][suffix] for suffix in (".bin", ".idx")))
            for suffix, size, crc in zip((".bin", ".idx"), sizes, crcs):
                draft = self._drafts[suffix]
                if draft.stat().st_size < size:
                    return
                os.truncate(draft, size)
                if crc32_file(draft) != f"{crc:08x}":
                    return
            documents, tokens, max_token, tokens_of_documents = map(index, found["state"]["written"])
            state = (documents, tokens, max_token, tokens_of_documents), found["state"]["caller"]
            self._crcs, self.state = crcs, state
        except (OSError, ValueError, KeyError, TypeError):  # none, or incomplete: start from scratch
            return

    def save_resume_point(self, counts: tuple[int, int, int, int], caller: Any) -> None:
        """Save a point from which another process can continue."""
        if self._is_resumable:
            with write_errors_for(self._prefix):
                self.bin.sync()
                self.idx.sync()
            files = {suffix: (growing.file.tell(), growing.crc)
                     for suffix, growing in ((".bin", self.bin), (".idx", self.idx))}
            write_json_atomic(self._resume_file, {
                "key": self._key, "files": files, "state": {"written": counts, "caller": caller}})

    def paths(self) -> tuple[str, str]:
        """(current path of the index, of the tokens), flushed."""
        self.bin.file.flush()
        self.idx.file.flush()
        return str(self._drafts[".idx"]), str(self._drafts[".bin"])

    def publish(self, facts: dict[str, Any]) -> None:
        """Rename all files. From the first step to the last there is no index, and so no corpus."""
        with write_errors_for(self._prefix):
            with open(self._drafts[".json"], "w", encoding="utf-8") as file:
                json.dump(facts, file, indent=1)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            self.bin.sync()  # a full disk fails here, while the old corpus is complete
            self.idx.sync()
            # Remove the old index first: beside new tokens it would be a wrong corpus after a crash between two
            # renames.
            for suffix in (".idx", ".json"):
                self._targets[suffix].unlink(missing_ok=True)
            fsync_directory(self._targets[".idx"].parent)
            for suffix in CORPUS_SUFFIXES:
                os.replace(self._drafts[suffix], self._targets[suffix])
                fsync_directory(self._targets[suffix].parent)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        with self._stack:
            for growing in (self.bin, self.idx):
                with suppress(OSError):  # a full disk fails again when the buffer is flushed
                    growing.file.close()
            if not (isinstance(error, KeyboardInterrupt | ResumableError) and self._is_resumable
                    and self._resume_file.exists()):
                for path in (*self._drafts.values(), *([self._resume_file] if self._is_resumable else [])):
                    with suppress(OSError):
                        path.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in DISK_ERRORS and not isinstance(error, StorageFault):
            raise StorageFault(f"{self._prefix}: cannot write: {os.strerror(error.errno or errno.EIO)}") from error


class CorpusWriter:
    """Writes a corpus in one pass and bounded memory; its files appear only if the block succeeds. With a `key`, a
    later process can resume an interrupted write."""

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
        self._draft = CorpusDraft(self.prefix, key)
        self.resumed_state: Any = None
        """The caller's state at the resume point that this continues."""

    def __enter__(self) -> CorpusWriter:
        with ExitStack() as stack:
            state = stack.enter_context(self._draft).state
            if state is None:  # a placeholder: the header needs the number of lengths, which follow
                self._draft.idx.write(bytes(INDEX_HEADER.size))
            else:
                (self.documents, self.tokens, self._max_token, self._tokens_of_documents), self.resumed_state = state
            stack.pop_all()  # `__exit__` closes the draft
        return self

    def save_resume_point(self, state: Any) -> None:
        """Save a resume point with the caller's `state`."""
        counts = (self.documents, self.tokens, self._max_token, self._tokens_of_documents)
        self._draft.save_resume_point(counts, state)

    def add_document(self, tokens: ArrayLike) -> None:
        ids = np.asarray(tokens)
        self.add_documents(ids, [len(ids)])

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
            self._draft.bin.write(np.ascontiguousarray(ids, self.dtype).data)
            self.tokens += len(ids)

    def savepoint(self) -> tuple[int, ...]:
        """State for `rollback_to`, taken before tokens that may have to be dropped."""
        return (self.tokens, self._max_token, self._draft.bin.crc)

    def rollback_to(self, savepoint: Sequence[int]) -> None:
        """Drop the tokens added since the savepoint."""
        self.tokens, self._max_token, crc = savepoint
        self._draft.bin.truncate(self.tokens * self.dtype.itemsize, crc)

    def add_sizes(self, sizes: ArrayLike) -> None:
        """Add the sizes, in tokens, of the next documents."""
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
        header, index_file, first = IndexHeader(self.dtype, self.documents, self.documents + 1), self._draft.idx.file, 0
        with write_errors_for(self.prefix):
            with open(self._draft.paths()[0], "rb") as written:
                written.seek(INDEX_HEADER.size)
                for at in range(0, header.sequences, BLOCK_ENTRIES):  # pointers, from the lengths read back
                    lengths = np.fromfile(written, "<i4", min(BLOCK_ENTRIES, header.sequences - at))
                    ends = first + np.cumsum(lengths, dtype="<i8")
                    index_file.write(((ends - lengths) * self.dtype.itemsize).data)
                    first = int(ends[-1])
            for at in range(0, header.boundaries, BLOCK_ENTRIES):
                index_file.write(np.arange(at, min(at + BLOCK_ENTRIES, header.boundaries), dtype="<i8").data)
            index_file.seek(0)
            index_file.write(header.pack())
            files = (StableFile(path) for path in self._draft.paths())
        self._draft.publish(asdict(CorpusFacts(self.documents, self.tokens, f"{self._draft.bin.crc:08x}",
                                               self._max_token, self._tokenizer, corpus_identity(*files))))
