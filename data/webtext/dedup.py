"""`dedup`: remove exact and near duplicates; `unique`: repeated addresses. The first document in corpus order stays.

*Exact*: equal text up to white space. *Near*: Jaccard similarity at or above the threshold to an earlier kept document;
candidates share a MinHash band and are compared by their texts, at most `MAX_PAIRS_PER_BAND` per document and band. The
result depends only on the documents and their order. Memory: one byte per document plus about `memory` bytes.
`dropped.jsonl` lists the documents that `dedup` dropped, the reason, and the document kept instead.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data.parallel import ordered_map
from data.storage import make_folder, staged_file, write_errors_for
from data.webtext.documents import DocumentCounts, copy_undropped_lines, parse_shard_line, shard_name
from data.webtext.filters import normalized_url
from data.webtext.minhash import (BAND_COLUMNS, DIGEST_COLUMNS, Banding, HashArray, Rows, SignatureFiles,
                                  jaccard_similarity, shingle_hashes, signature_file, write_signature_file)

MAX_PAIRS_PER_BAND = 32
PAIRS_PER_BATCH = 64  # pairs per worker task
SIMILARITY_SCALE = 1_000_000  # similarities in rows are in millionths

REASONS = ("exact copy", "near copy")
EXACT, NEAR = 0, 1


class RowSorter:
    """Takes rows in any order and returns them sorted. Merge sort: each full buffer becomes a sorted run in a file.
    Merging holds a block of every run, and emits all rows up to the smallest last row of these blocks. Memory does not
    depend on the distribution of rows, such as many equal ones."""

    def __init__(self, folder: Path, width: int, memory: int) -> None:
        self._folder, self._width = folder, width
        self._capacity = max(1, memory // (32 * width))  # rows; sorting needs twice as much again
        self._buffered: list[Rows] = []
        self._buffered_rows = 0
        self._runs: list[tuple[int, int]] = []  # (first row, end row) in the file
        with write_errors_for(folder):
            self._file = tempfile.TemporaryFile(dir=folder)
        weakref.finalize(self, self._file.close)

    def add(self, rows: Rows) -> None:
        for start in range(0, len(rows), self._capacity):
            part = rows[start:start + self._capacity]
            if self._buffered_rows + len(part) > self._capacity:
                self._spill()
            self._buffered.append(part)
            self._buffered_rows += len(part)

    def sorted(self) -> Iterator[Rows]:
        """All rows in order, in blocks."""
        if not self._runs:
            if self._buffered:
                yield _sort(np.concatenate(self._buffered))
            return
        self._spill()
        rows_per_run = max(1, self._capacity // len(self._runs))
        cursors = [first for first, _ in self._runs]
        buffered = [np.empty((0, self._width), np.uint64) for _ in self._runs]
        while True:
            # Refill every block each time; otherwise the emptiest one slows down all.
            for number, (_, stop) in enumerate(self._runs):
                count = min(rows_per_run - len(buffered[number]), stop - cursors[number])
                if count > 0:
                    self._file.seek(cursors[number] * self._width * 8)
                    rows = np.frombuffer(self._file.read(count * self._width * 8), np.uint64).reshape(count, -1)
                    buffered[number] = np.concatenate([buffered[number], rows])
                    cursors[number] += count
            # Rows still in the file come after the last buffered row of their run.
            lasts = [tuple(block[-1]) for block, at, (_, stop) in zip(buffered, cursors, self._runs) if at < stop]
            if not lasts:
                break
            bound = min(lasts)
            cuts = [_rows_up_to(block, bound) for block in buffered]
            yield _sort(np.concatenate([block[:cut] for block, cut in zip(buffered, cuts)]))
            buffered = [block[cut:] for block, cut in zip(buffered, cuts)]
        yield _sort(np.concatenate(buffered))

    def _spill(self) -> None:
        first = self._runs[-1][1] if self._runs else 0
        self._runs.append((first, first + self._buffered_rows))
        with write_errors_for(self._folder):
            self._file.seek(first * self._width * 8)
            self._file.write(_sort(np.concatenate(self._buffered)).data)
        self._buffered, self._buffered_rows = [], 0


def iterate_rows(blocks: Iterable[Rows]) -> Iterator[list[int]]:
    """Rows one by one as Python integers, which need ten times the memory, so not all at once."""
    for block in blocks:
        for start in range(0, len(block), 1024):
            yield from block[start:start + 1024].tolist()


def pairs_with_equal_keys(blocks: Iterable[Rows], max_earlier: int) -> Iterator[Rows]:
    """Sorted rows (key ..., document) -> pairs (document, one of the first `max_earlier` documents with its key)."""
    head: Rows | None = None  # first rows of the last key so far
    for block in blocks:
        old = 0 if head is None else len(head)
        rows = block if head is None else np.concatenate([head, block])
        starts = np.flatnonzero(np.append(True, (rows[1:, :-1] != rows[:-1, :-1]).any(axis=1)))
        start = np.repeat(starts, np.diff(starts, append=len(rows)))
        later = np.arange(old, len(rows))
        for place in range(max_earlier):
            later = later[later - start[later] > place]
            if not len(later):
                break
            yield np.stack([rows[later, -1], rows[start[later] + place, -1]], axis=1)
        head = rows[starts[-1]:starts[-1] + max_earlier]


def _sort(rows: Rows) -> Rows:
    return rows[np.lexsort(rows.T[::-1])]


def _rows_up_to(rows: Rows, last: tuple[np.uint64, ...]) -> int:
    """Number of sorted rows that are not after `last`."""
    low, high = 0, len(rows)  # rows before low are smaller; rows from low to high are equal in the columns so far
    for column, number in zip(np.ascontiguousarray(rows.T), last):
        column = column[low:high]
        low, high = (low + int(np.searchsorted(column, number, side)) for side in ("left", "right"))
    return high


def run_dedup(inputs: Sequence[Path], output: Path, workers: int, *, threshold: float = 0.8, near: bool = True,
              memory: int = 1 << 30) -> Iterator[DocumentCounts]:
    """Write the kept documents of each input shard. Existing signature files are reused."""
    work, banding, memory = make_folder(output / ".work"), Banding.for_threshold(threshold), memory // 4
    missing = [(path, target) for number, path in enumerate(inputs)
               if not (target := signature_file(work, number)).exists()]
    for _ in ordered_map(partial(write_signature_file, banding=banding), missing, min(workers, len(missing))):
        pass
    signatures = SignatureFiles(work, len(inputs), banding)
    dropped = np.zeros(signatures.first_documents[-1], bool)
    # Rows (digest as two numbers, document) give rows (first document, its copy).
    digests, copies, near_rows = RowSorter(work, 3, memory), RowSorter(work, 2, memory), RowSorter(work, 3, memory)
    for documents, rows in signatures.blocks(memory // 4):
        digests.add(np.column_stack([rows[:, DIGEST_COLUMNS], documents]))
    for pairs in pairs_with_equal_keys(digests.sorted(), max_earlier=1):
        dropped[pairs[:, 0]] = True
        copies.add(pairs[:, ::-1])
    del digests  # free its file and memory
    if near:
        near_rows = drop_near_duplicates(inputs, signatures, dropped, threshold, work, 2 * memory, workers)
    drops = RowSorter(work, 4, memory)
    reasons = _drops_with_reasons(iterate_rows(copies.sorted()), iterate_rows(near_rows.sorted()))
    while part := list(islice(reasons, 1024)):
        drops.add(np.array(part, np.uint64))

    def line_of(document: int) -> dict[str, object]:
        shard, line = signatures.line_number(document)
        return {"shard": shard_name(shard), "line": line + 1}

    with staged_file(output / "dropped.jsonl") as log:
        def logged_drops() -> Iterator[tuple[int, str]]:
            for document, reason, kept, similarity in iterate_rows(drops.sorted()):
                entry = {**line_of(document), "reason": REASONS[reason], "similarity": similarity / SIMILARITY_SCALE,
                         "kept": line_of(kept)}
                log.write(json.dumps(entry).encode() + b"\n")
                yield document, REASONS[reason]

        tasks = _copy_tasks(inputs, output, signatures.first_documents, logged_drops())
        yield from ordered_map(copy_undropped_lines, tasks, workers)
    shutil.rmtree(work)


def drop_near_duplicates(shards: Sequence[Path], signatures: SignatureFiles, dropped: NDArray[np.bool_],
                         threshold: float, folder: Path, memory: int, workers: int) -> RowSorter:
    """Mark near duplicates in `dropped`; returns rows (document, kept document, similarity in millionths)."""
    bands, pairs, near = (RowSorter(folder, width, memory // 4) for width in (2, 2, 3))
    for documents, rows in signatures.blocks(memory // 32):
        of_band = rows[:, BAND_COLUMNS]
        used = ~dropped[documents] & of_band.any(axis=1)
        bands.add(np.column_stack([of_band[used].ravel(), np.repeat(documents[used], of_band.shape[1])]))
    # Candidates are pairs (later document, earlier document) with an equal band, once per equal band.
    for block in pairs_with_equal_keys(bands.sorted(), MAX_PAIRS_PER_BAND):
        pairs.add(block)
    del bands  # free its file and memory
    batches = _undecided_batches(pairs.sorted(), dropped)
    for compared in ordered_map(partial(compare_pairs, shards=shards, signatures=signatures), batches, workers):
        for later, earlier, similarity in compared:  # in order: a dropped document drops no other
            if similarity >= threshold and not dropped[later] and not dropped[earlier]:
                dropped[later] = True
                near.add(np.array([[later, earlier, round(similarity * SIMILARITY_SCALE)]], np.uint64))
    return near


def _undecided_batches(blocks: Iterable[Rows], dropped: NDArray[np.bool_]) -> Iterator[Rows]:
    """Batches of the sorted pairs, without repetitions and pairs with a document dropped so far."""
    last = np.empty((0, 2), np.uint64)
    for block in blocks:
        pairs = np.concatenate([last, block])
        again = np.append(False, (pairs[1:] == pairs[:-1]).all(axis=1))[len(last):]
        last = block[-1:]
        for start in range(0, len(block), PAIRS_PER_BATCH):
            part = block[start:start + PAIRS_PER_BATCH][~again[start:start + PAIRS_PER_BATCH]]
            part = part[~dropped[part].any(axis=1)]
            if len(part):
                yield part


def compare_pairs(batch: Rows, shards: Sequence[Path], signatures: SignatureFiles) -> list[tuple[int, int, float]]:
    """(document, earlier document, similarity) of each pair."""
    def shingle_set(document: int) -> HashArray:
        shard, offset, size = signatures.location(document)
        with open(shards[shard], "rb") as file:
            file.seek(offset)
            return np.unique(shingle_hashes(parse_shard_line(file.read(size), str(shards[shard])).text))

    compared = []
    cached: dict[int, HashArray] = {}  # those of the last pair: neighbouring pairs share a document
    for pair in batch.tolist():
        cached = {document: cached[document] if document in cached else shingle_set(document) for document in pair}
        compared.append((*pair, jaccard_similarity(*map(cached.__getitem__, pair))))
    return compared


def _drops_with_reasons(copies: Iterable[list[int]], near: Iterable[list[int]]) -> Iterator[tuple[int, int, int, int]]:
    """(dropped document, reason, kept document, similarity in millionths). If the first of several exact copies is
    itself a near copy, the document it resembles was kept in place of all of them."""
    events = heapq.merge(((later, NEAR, kept, similarity) for later, kept, similarity in near),
                         ((first, NEAR + 1, copy, SIMILARITY_SCALE) for first, copy in copies))
    instead: tuple[int, int, int] | None = None
    for document, kind, other, similarity in events:
        if kind == NEAR:
            instead = document, other, similarity
            yield document, NEAR, other, similarity
        elif instead and instead[0] == document:
            yield other, EXACT, instead[1], instead[2]
        else:
            yield other, EXACT, document, similarity


def _copy_tasks(inputs: Sequence[Path], output: Path, first_documents: Sequence[int],
                drops: Iterator[tuple[int, str]]) -> Iterator[tuple[Path, Path, Mapping[int, str]]]:
    """(shard, target, line -> reason of its drop) for each shard, from (document, reason) in order."""
    drop = next(drops, None)
    for number, path in enumerate(inputs):
        reasons = {}
        while drop is not None and drop[0] < first_documents[number + 1]:
            reasons[drop[0] - first_documents[number]] = drop[1]
            drop = next(drops, None)
        yield path, output / shard_name(number), reasons


def run_unique(inputs: Sequence[Path], output: Path, workers: int, *, memory: int) -> Iterator[DocumentCounts]:
    """Keep the first document of each address."""
    first_documents = [0]
    seen, repeated = RowSorter(output, 3, memory // 2), RowSorter(output, 1, memory // 2)
    for documents, rows in ordered_map(url_hash_rows, inputs, workers):
        rows[:, 2] += np.uint64(first_documents[-1])
        seen.add(rows)
        first_documents.append(first_documents[-1] + documents)
    for pairs in pairs_with_equal_keys(seen.sorted(), max_earlier=1):
        repeated.add(pairs[:, :1])
    drops = ((document, "duplicate URL") for document, in iterate_rows(repeated.sorted()))
    yield from ordered_map(copy_undropped_lines, _copy_tasks(inputs, output, first_documents, drops), workers)


def url_hash_rows(shard: Path) -> tuple[int, Rows]:
    """(number of documents, rows of those with an address: its 128-bit hash as two numbers, line)."""
    rows, documents = [], 0
    with open(shard, "rb") as lines:
        for documents, line in enumerate(lines, start=1):
            url = parse_shard_line(line, str(shard)).url
            if url is not None:
                digest = hashlib.blake2b(normalized_url(url).encode(), digest_size=16).digest()
                rows.append([*np.frombuffer(digest, "<u8").tolist(), documents - 1])
    return documents, np.array(rows, np.uint64).reshape(-1, 3)
