"""A source that is not a corpus yet, made into one at its first use and found again later: `cached_corpus`.

The corpus is kept in the folder of `--data-cache-path`, or beside the source in `SOURCE.cache/`. Its name ends in a
digest of all that decides its content: the files in order, their kinds, sizes and checksums, the tokenizer, and how
text is read. Of several processes, on one machine or on a shared disk, one takes the checksums, one builds the corpus,
and the others wait. Checksums are written down with the times of the files, and taken again where a time has changed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from data.cli import counted
from data.importers import doubts, import_tokens, token_file
from data.indexed import IndexedCorpus
from data.inputs import CACHE_SUFFIX, Found, find, kind_of
from data.preprocess import Reading, build_corpus
from data.recorded import threaded
from data.sample_index import digest
from data.storage import (DataError, StorageFault, check_is_file, crc32_file, exclusive, make_folder, one_line,
                          write_json_atomic)
from data.tokenizer import Tokenizer

TOKENS_SUFFIX = ".bin"
SUMS = ".sums.json"
LARGE = 1 << 26
"""Bytes of source from which the building is announced: it takes more than a moment."""


def cached_corpus(source: str, tokenizer: Tokenizer, reading: Reading, cache_path: str | None
                  ) -> tuple[str, list[str]]:
    """The prefix of the corpus of a file or folder, and lines that say what was made of it, and what is odd."""
    found = find([source])
    doing, done = ("copying", "copied") if _holds_tokens(found.files) else ("tokenizing", "tokenized")
    beside = os.path.abspath(source)
    folder = make_folder(cache_path or beside + CACHE_SUFFIX)
    contents, size = _contents(found.files, Sums(folder))
    key = digest(map(str.encode, (*contents, tokenizer.fingerprint, *reading.words)))
    prefix = folder / f"{Path(beside).name.split('.')[0] or 'text'}-{key}"
    start = time.monotonic()
    with exclusive(folder / f".{prefix.name}.lock"):
        is_new = not prefix.with_name(prefix.name + ".idx").exists()
        if is_new:
            if size >= LARGE:
                print(one_line(f"{source}: {doing} {size / 1e9:.2f} GB into {prefix} (once)"), file=sys.stderr,
                      flush=True)
            _build(found.files, prefix, tokenizer, reading)
            if _contents(found.files, Sums(None))[0] != contents:
                prefix.with_name(prefix.name + ".idx").unlink()
                raise DataError(f"{source}: changed while it was read; start again when it is complete")
    how = f"{done} in {time.monotonic() - start:.1f} s" if is_new else "found in the cache"
    told = doubts([token_file(path) for path in found.files], tokenizer.eod) if _holds_tokens(found.files) else []
    return str(prefix), [_report(source, found, IndexedCorpus(prefix), how), *(f"warning: {line}" for line in told)]


def _contents(files: Sequence[str], sums: Sums) -> tuple[list[str], int]:
    """What decides the text of each file, and the bytes of all."""
    for path in files:
        check_is_file(path)
    try:
        sizes = [os.path.getsize(path) for path in files]
        with sums:
            found = list(threaded(sums.of, files, _readers()))
    except StorageFault:  # the folder of the checksums
        raise
    except OSError as error:
        raise DataError(f"{error.filename}: cannot read: {error.strerror}") from error
    return [f"{kind_of(path)}-{size}-{crc}" for path, size, crc in zip(files, sizes, found)], sum(sizes)


def _readers() -> int:
    """Threads for checksums: all other ranks of the machine wait for this one."""
    return len(os.sched_getaffinity(0))


SETTLED_NS = 2_000_000_000
"""A file that changed this short a time before its checksum was taken may change again within one tick of its clock."""


class Sums:
    """Checksums of files, each taken once as long as the file is the same one with the same times: the processes that
    share a folder find them there. Without a folder they are taken afresh."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._known: dict[str, Any] = {}
        self._is_new = False
        self._lock = ExitStack()

    def __enter__(self) -> None:
        if self._folder is not None:
            self._lock.enter_context(exclusive(self._folder / ".sums.lock"))
            with suppress(OSError, ValueError):
                found = json.loads((self._folder / SUMS).read_bytes())
                self._known = found if isinstance(found, dict) else {}

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            if self._is_new and self._folder is not None:
                write_json_atomic(self._folder / SUMS, self._known)

    def of(self, path: str) -> str:
        facts = os.stat(path)
        mark = [facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns]
        name, known = os.path.abspath(path), self._known.get(os.path.abspath(path))
        if isinstance(known, dict) and known.get("mark") == mark and isinstance(known.get("crc32"), str):
            return str(known["crc32"])
        taken = time.time_ns()
        crc = crc32_file(path)
        if max(facts.st_mtime_ns, facts.st_ctime_ns) + SETTLED_NS < taken:
            self._known[name], self._is_new = {"mark": mark, "crc32": crc}, True
        return crc


def _holds_tokens(files: Sequence[str]) -> bool:
    """A token file of nanoGPT or llm.c, which is a source by itself: what is in it was tokenized elsewhere."""
    return files[0].endswith(TOKENS_SUFFIX)


def _build(files: Sequence[str], prefix: Path, tokenizer: Tokenizer, reading: Reading) -> None:
    if _holds_tokens(files):
        import_tokens(files, prefix, tokenizer, say=lambda line: None)  # told at every start, not at the first only
    else:
        build_corpus(files, prefix, tokenizer, reading, readers=_readers())


def _report(source: str, found: Found, corpus: IndexedCorpus, how: str) -> str:
    empty = sum(os.path.getsize(path) == 0 for path in found.files)
    kind = "file of tokens" if _holds_tokens(found.files) else "file"
    parts = (counted(len(found.files), kind) + (f" ({empty} empty)" if empty else ""),
             counted(corpus.num_documents, "document"), f"{corpus.num_tokens:,} tokens", f"{how}: {corpus.prefix}")
    return f"{source}: {', '.join(parts)}" + (f"; {found.left_out}" if found.left_out else "")
