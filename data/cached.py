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

from data.cli import format_count
from data.importers import import_tokens, inspect_token_file, order_warnings
from data.indexed import IndexedCorpus
from data.inputs import CACHE_SUFFIX, FoundFiles, find_text_files, kind_of
from data.preprocess import TextReadOptions, build_corpus
from data.recorded import checksum_in_threads
from data.sample_index import content_digest
from data.storage import (DataError, StorageFault, check_is_file, crc32_file, escape_to_one_line, make_folder,
                          wait_for_lock, write_json_atomic)
from data.tokenizer import Tokenizer

TOKENS_SUFFIX = ".bin"
CHECKSUMS_FILE = ".sums.json"
ANNOUNCED_BYTES = 1 << 26
"""Bytes of source from which the building is announced: it takes more than a moment."""


def cached_corpus(source: str, tokenizer: Tokenizer, options: TextReadOptions, cache_path: str | None
                  ) -> tuple[str, list[str]]:
    """The prefix of the corpus of a file or folder, and lines that say what was made of it, and what is odd."""
    found = find_text_files([source])
    verb, past_verb = ("copying", "copied") if _are_token_files(found.files) else ("tokenizing", "tokenized")
    beside = os.path.abspath(source)
    folder = make_folder(cache_path or beside + CACHE_SUFFIX)
    contents, size = _content_keys(found.files, ChecksumCache(folder))
    key = content_digest(map(str.encode, (*contents, tokenizer.fingerprint, *options.digest_parts)))
    prefix = folder / f"{Path(beside).name.split('.')[0] or 'text'}-{key}"
    start = time.monotonic()
    with wait_for_lock(folder / f".{prefix.name}.lock"):
        is_new = not prefix.with_name(prefix.name + ".idx").exists()
        if is_new:
            if size >= ANNOUNCED_BYTES:
                print(escape_to_one_line(f"{source}: {verb} {size / 1e9:.2f} GB into {prefix} (once)"), file=sys.stderr,
                      flush=True)
            _build_cached(found.files, prefix, tokenizer, options)
            if _content_keys(found.files, ChecksumCache(None))[0] != contents:
                prefix.with_name(prefix.name + ".idx").unlink()
                raise DataError(f"{source}: changed while it was read; start again when it is complete")
    outcome = f"{past_verb} in {time.monotonic() - start:.1f} s" if is_new else "found in the cache"
    warnings = order_warnings([inspect_token_file(path)
                               for path in found.files], tokenizer.eod) if _are_token_files(found.files) else []
    return str(prefix), [
        _describe_cached(source, found, IndexedCorpus(prefix), outcome), *(f"warning: {line}" for line in warnings)
    ]


def _content_keys(files: Sequence[str], checksums: ChecksumCache) -> tuple[list[str], int]:
    """What decides the text of each file, and the bytes of all."""
    for path in files:
        check_is_file(path)
    try:
        sizes = [os.path.getsize(path) for path in files]
        with checksums:
            found = list(checksum_in_threads(checksums.checksum_of, files, _checksum_threads()))
    except StorageFault:  # the folder of the checksums
        raise
    except OSError as error:
        raise DataError(f"{error.filename}: cannot read: {error.strerror}") from error
    return [f"{kind_of(path)}-{size}-{crc}" for path, size, crc in zip(files, sizes, found)], sum(sizes)


def _checksum_threads() -> int:
    """Threads for checksums: all other ranks of the machine wait for this one."""
    return len(os.sched_getaffinity(0))


MTIME_SETTLED_NS = 2_000_000_000
"""A file that changed this short a time before its checksum was taken may change again within one tick of its clock."""


class ChecksumCache:
    """Checksums of files, each taken once as long as the file is the same one with the same times: the processes that
    share a folder find them there. Without a folder they are taken afresh."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._known: dict[str, Any] = {}
        self._has_new_entries = False
        self._lock = ExitStack()

    def __enter__(self) -> None:
        if self._folder is not None:
            self._lock.enter_context(wait_for_lock(self._folder / ".sums.lock"))
            with suppress(OSError, ValueError):
                found = json.loads((self._folder / CHECKSUMS_FILE).read_bytes())
                self._known = found if isinstance(found, dict) else {}

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            if self._has_new_entries and self._folder is not None:
                write_json_atomic(self._folder / CHECKSUMS_FILE, self._known)

    def checksum_of(self, path: str) -> str:
        status = os.stat(path)
        stamp = [status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
        name, known = os.path.abspath(path), self._known.get(os.path.abspath(path))
        if isinstance(known, dict) and known.get("mark") == stamp and isinstance(known.get("crc32"), str):
            return str(known["crc32"])
        now_ns = time.time_ns()
        crc = crc32_file(path)
        if max(status.st_mtime_ns, status.st_ctime_ns) + MTIME_SETTLED_NS < now_ns:
            self._known[name], self._has_new_entries = {"mark": stamp, "crc32": crc}, True
        return crc


def _are_token_files(files: Sequence[str]) -> bool:
    """A token file of nanoGPT or llm.c, which is a source by itself: what is in it was tokenized elsewhere."""
    return files[0].endswith(TOKENS_SUFFIX)


def _build_cached(files: Sequence[str], prefix: Path, tokenizer: Tokenizer, options: TextReadOptions) -> None:
    if _are_token_files(files):
        import_tokens(files, prefix, tokenizer, warn=lambda line: None)  # told at every start, not at the first only
    else:
        build_corpus(files, prefix, tokenizer, options, checksum_threads=_checksum_threads())


def _describe_cached(source: str, found: FoundFiles, corpus: IndexedCorpus, outcome: str) -> str:
    empty = sum(os.path.getsize(path) == 0 for path in found.files)
    kind = "file of tokens" if _are_token_files(found.files) else "file"
    parts = (format_count(len(found.files), kind) + (f" ({empty} empty)" if empty else ""),
             format_count(corpus.num_documents,
                          "document"), f"{corpus.num_tokens:,} tokens", f"{outcome}: {corpus.prefix}")
    return f"{source}: {', '.join(parts)}" + (f"; {found.left_out}" if found.left_out else "")
