"""`dedup`: remove exact and near duplicates; the first document in corpus order stays.

*Exact*: equal text up to white space. *Near*: Jaccard similarity at or above the threshold to an earlier kept document;
candidates share a MinHash band and are compared by their texts, at most `MAX_PAIRS_PER_BAND` per document and band. The
result depends only on the documents and their order. Memory: one bit per document plus about `memory` bytes.
`dropped.jsonl` lists dropped documents, the reason, and the document kept instead.
"""

from __future__ import annotations

import heapq
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from data.parallel import ordered_map
from data.storage import make_folder, staged_file, write_errors_for
from data.webtext.documents import ReportCounts, copy_undropped_lines, machine_share, parse_shard_line, shard_name
from data.webtext.external_sort import Rows, RowSorter, iterate_rows, pairs_with_equal_keys
from data.webtext.minhash import (BAND_COLUMNS, DIGEST_COLUMNS, SIZE_COLUMN, Banding, SignatureFiles,
                                  jaccard_similarity, shingle_hashes, write_signatures)
from data.webtext.ngram_hashes import HashArray

MAX_PAIRS_PER_BAND = 32
PAIRS_PER_BATCH = 64
"""Pairs per worker task."""
SIMILARITY_SCALE = 1_000_000
"""Similarities in rows are in millionths."""

REASONS = ("exact copy", "near copy")
EXACT, NEAR = 0, 1

LineLocation = tuple[int, int, int]
"""(shard, offset, size) of a line."""
CandidatePair = tuple[tuple[int, LineLocation], tuple[int, LineLocation]]
"""Two (document, location), the later document first."""


class BitSet:
    """One bit per document."""

    def __init__(self, documents: int) -> None:
        self._bits = np.zeros((documents + 7) // 8, np.uint8)

    def add(self, documents: NDArray[np.integer[Any]]) -> None:
        np.bitwise_or.at(self._bits, documents >> 3, np.left_shift(1, documents & 7).astype(np.uint8))

    def contains(self, documents: NDArray[np.integer[Any]]) -> NDArray[np.bool_]:
        are_set: NDArray[np.bool_] = self._bits[documents >> 3] & np.left_shift(1, documents & 7) != 0
        return are_set


def drop_near_duplicates(shards: Sequence[Path], signatures: SignatureFiles, dropped: BitSet, threshold: float,
                         folder: Path, memory: int, workers: int) -> RowSorter:
    """Mark near duplicates in `dropped`; returns rows (document, kept document, similarity in millionths)."""
    bands, pairs, near = (RowSorter(folder, width, memory // 4) for width in (2, 2, 3))
    for _, first, rows in signatures.blocks(memory // 32):
        documents = np.arange(first, first + len(rows))
        used = ~dropped.contains(documents) & rows[:, BAND_COLUMNS].any(axis=1)
        of_band = np.repeat(documents[used], rows.shape[1] - 3).astype(np.uint64)
        bands.add(np.column_stack([rows[used, BAND_COLUMNS].ravel(), of_band]))
    # Candidates are pairs (later document, earlier document) with an equal band, once per equal band.
    for block in pairs_with_equal_keys(bands.sorted(), MAX_PAIRS_PER_BAND):
        pairs.add(block)
    del bands  # free its file and memory
    with _line_locations(signatures, folder) as place_of:
        batches = _undecided_batches(pairs.sorted(), dropped, place_of)
        for compared in ordered_map(partial(compare_pairs, paths=list(map(str, shards))), batches, workers):
            similar = []
            for later, earlier, similarity in compared:  # in order: a dropped document drops no other
                pair = np.array([later, earlier])
                if similarity >= threshold and not dropped.contains(pair).any():
                    dropped.add(pair[:1])
                    similar.append((later, earlier, round(similarity * SIMILARITY_SCALE)))
            near.add_each(similar)
    return near


@contextmanager
def _line_locations(signatures: SignatureFiles, folder: Path) -> Iterator[Callable[[int], LineLocation]]:
    """A function document -> location, backed by a temporary file."""
    with tempfile.TemporaryFile(dir=folder) as table:
        offset, last = 0, 0
        for shard, _, rows in signatures.blocks(1 << 22):
            sizes = rows[:, SIZE_COLUMN].astype(np.int64)
            ends = np.cumsum(sizes) + (offset if shard == last else 0)
            with write_errors_for(folder):
                table.write(np.column_stack([np.full_like(ends, shard), ends - sizes, sizes]).data)
            offset, last = int(ends[-1]), shard
        table.flush()

        def location_of(document: int) -> LineLocation:
            shard, start, size = struct.unpack("=3q", os.pread(table.fileno(), 24, 24 * document))
            return shard, start, size

        yield location_of


def _undecided_batches(blocks: Iterable[Rows], dropped: BitSet,
                       location_of: Callable[[int], LineLocation]) -> Iterator[list[CandidatePair]]:
    """Batches of the sorted pairs, without repetitions and pairs with a document dropped so far."""
    last = np.empty((0, 2), np.uint64)
    for block in blocks:
        pairs = np.concatenate([last, block])
        again = np.append(False, (pairs[1:] == pairs[:-1]).all(axis=1))[len(last):]
        last = block[-1:]
        for start in range(0, len(block), PAIRS_PER_BATCH):
            part = block[start:start + PAIRS_PER_BATCH][~again[start:start + PAIRS_PER_BATCH]].astype(np.int64)
            part = part[~dropped.contains(part).any(axis=1)]
            if len(part):
                yield [((later, location_of(later)), (earlier, location_of(earlier)))
                       for later, earlier in part.tolist()]


def compare_pairs(batch: Sequence[CandidatePair], paths: Sequence[str]) -> list[tuple[int, int, float]]:
    """(document, earlier document, similarity) of each pair."""
    def shingle_set(location: LineLocation) -> HashArray:
        shard, offset, size = location
        with open(paths[shard], "rb") as file:
            file.seek(offset)
            return np.unique(shingle_hashes(parse_shard_line(file.read(size), f"{paths[shard]} (byte {offset})").text))

    compared = []
    cached: dict[LineLocation, HashArray] = {}  # those of the last pair: neighbouring pairs share a document
    for (later, place), (earlier, other) in batch:
        cached = {p: cached[p] if p in cached else shingle_set(p) for p in (place, other)}
        compared.append((later, earlier, jaccard_similarity(cached[place], cached[other])))
    return compared


@dataclass(frozen=True)
class DedupOptions:
    threshold: float = 0.8
    near: bool = True
    memory: int = 1 << 30


def run_dedup(inputs: Sequence[Path], output: Path, options: DedupOptions, workers: int, report: ReportCounts) -> None:
    """Write the kept documents of each input shard. Existing signature files are reused."""
    work, banding, memory = make_folder(output / ".work"), Banding.for_threshold(options.threshold), options.memory // 4
    write_signatures(inputs, range(len(inputs)), work, banding, workers)
    signatures = SignatureFiles(inputs, work, banding)
    dropped = BitSet(int(signatures.first_documents[-1]))
    # Rows (digest as two numbers, document) give rows (first document, its copy).
    digests, copies, near = RowSorter(work, 3, memory), RowSorter(work, 2, memory), RowSorter(work, 3, memory)
    for _, first, rows in signatures.blocks(memory // 4):
        digests.add(np.column_stack([rows[:, DIGEST_COLUMNS], np.arange(first, first + len(rows), dtype=np.uint64)]))
    for pairs in pairs_with_equal_keys(digests.sorted(), max_earlier=1):
        dropped.add(pairs[:, 0].astype(np.int64))
        copies.add(pairs[:, ::-1])
    del digests  # free its file and memory
    if options.near:
        near = drop_near_duplicates(inputs, signatures, dropped, options.threshold, work, 2 * memory, workers)
    drops = RowSorter(work, 4, memory)
    drops.add_each(_drops_with_reasons(iterate_rows(copies.sorted()), iterate_rows(near.sorted())))
    with staged_file(output / "dropped.jsonl") as log:
        tasks = _shards_and_drops(inputs, output, signatures, iterate_rows(drops.sorted()), log)
        for counts in ordered_map(copy_undropped_lines, tasks, workers):
            report(counts)
    shutil.rmtree(work)


def write_signature_share(inputs: Sequence[Path], output: Path, options: DedupOptions, workers: int, index: int,
                          count: int) -> None:
    """The slow part of `run_dedup` for machine `index` of `count`; `run_dedup` does the rest."""
    write_signatures(inputs, machine_share(len(inputs), index, count), output / ".work",
                     Banding.for_threshold(options.threshold), workers)


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


def _shards_and_drops(inputs: Sequence[Path], output: Path, signatures: SignatureFiles, drops: Iterator[list[int]],
                      log: IO[bytes]) -> Iterator[tuple[Path, Path, dict[int, str]]]:
    """(input, output, line -> reason of its drop) for each shard; logs the drops."""
    def line_of(document: int) -> dict[str, object]:
        shard = int(np.searchsorted(signatures.first_documents, document, "right")) - 1
        return {"shard": shard_name(shard), "line": document - int(signatures.first_documents[shard]) + 1}

    drop = next(drops, None)
    for number, (path, first, stop) in enumerate(zip(inputs, signatures.first_documents[:-1],
                                                     signatures.first_documents[1:])):
        reasons = {}
        while drop is not None and drop[0] < stop:
            document, reason, kept, similarity = drop
            log.write(json.dumps({**line_of(document), "reason": REASONS[reason],
                                  "similarity": similarity / SIMILARITY_SCALE, "kept": line_of(kept)}).encode() + b"\n")
            reasons[document - int(first)] = REASONS[reason]
            drop = next(drops, None)
        yield path, output / shard_name(number), reasons
