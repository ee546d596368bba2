"""Near copies among documents: candidates by equal bands, each compared on the two texts, decided on in order.

Nothing is dropped on an estimate: a document goes if its similarity (`minhash`) to an earlier one that stays is at
least the threshold. Where A is like B and B like C, B goes and C stays unless it is like A too, so a chain of small
changes does not drop what has little in common. Only documents with an equal band are compared, each with the first
`MAX_PAIRS_PER_BAND` of them: a page that a template made a million times costs a million comparisons, not their square.
"""

from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.parallel import ordered_map
from data.storage import write_errors_for
from data.webtext.external import Rows, RowSorter, pairs_with_equal_keys
from data.webtext.minhash import jaccard_similarity, shingle_hashes
from data.webtext.shards import parse_document_at
from data.webtext.signatures import BAND_COLUMNS, SIZE_COLUMN, SignatureFiles
from data.webtext.words import HashArray

MAX_PAIRS_PER_BAND = 32
PAIRS_PER_BATCH = 64
"""Pairs that a worker compares at a time."""
SIMILARITY_SCALE = 1_000_000
"""Similarities in rows are in millionths."""

LineLocation = tuple[int, int, int]
"""Of a line: shard, offset, size."""
CandidatePair = tuple[tuple[int, LineLocation], tuple[int, LineLocation]]
"""(document, place) of two documents, the later one first."""


class BitSet:
    """One bit per document."""

    def __init__(self, documents: int) -> None:
        self._bits = np.zeros((documents + 7) // 8, np.uint8)

    def add(self, documents: NDArray[np.integer[Any]]) -> None:
        np.bitwise_or.at(self._bits, documents >> 3, np.left_shift(1, documents & 7).astype(np.uint8))

    def contains(self, documents: NDArray[np.integer[Any]]) -> NDArray[np.bool_]:
        held: NDArray[np.bool_] = self._bits[documents >> 3] & np.left_shift(1, documents & 7) != 0
        return held


def drop_near_duplicates(shards: Sequence[Path], signatures: SignatureFiles, dropped: BitSet, threshold: float,
                         folder: Path, memory: int, workers: int) -> RowSorter:
    """Flags them too. Rows (document, the kept one it is like, their similarity in millionths)."""
    near, pairs = RowSorter(folder, 3, memory // 4), _candidate_pairs(signatures, dropped, folder, memory // 4)
    with _line_locations(signatures, folder) as place_of:
        batches = _undecided_batches(pairs.sorted(), dropped, place_of)
        for compared in ordered_map(partial(compare_pairs, paths=list(map(str, shards))), batches, workers):
            near.add_each(_drop_similar(compared, threshold, dropped))
    return near


def _candidate_pairs(signatures: SignatureFiles, dropped: BitSet, folder: Path, memory: int) -> RowSorter:
    """Pairs (later document, earlier one) with an equal band, as often as they have one."""
    bands, pairs = RowSorter(folder, 2, memory), RowSorter(folder, 2, memory)
    for _, first, rows in signatures.blocks(memory // 8):
        documents = np.arange(first, first + len(rows))
        used = ~dropped.contains(documents) & rows[:, BAND_COLUMNS].any(axis=1)
        of_band = np.repeat(documents[used], rows.shape[1] - 3).astype(np.uint64)
        bands.add(np.column_stack([rows[used, BAND_COLUMNS].ravel(), of_band]))
    for found in pairs_with_equal_keys(bands.sorted(), MAX_PAIRS_PER_BAND):
        pairs.add(found)
    return pairs


@contextmanager
def _line_locations(signatures: SignatureFiles, folder: Path) -> Iterator[Callable[[int], LineLocation]]:
    """Document -> place, by a table that is a file."""
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
    """Batches of the sorted pairs, each pair once, without those of which one is known to be dropped by now."""
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
    """(document, earlier document, their similarity) of each pair."""
    compared = []
    held: dict[LineLocation, HashArray] = {}
    for (later, place), (earlier, other) in batch:
        held = {p: held[p] if p in held else _shingle_set(paths, p) for p in (place, other)}
        compared.append((later, earlier, jaccard_similarity(held[place], held[other])))
    return compared


def _shingle_set(paths: Sequence[str], location: LineLocation) -> HashArray:
    shard, offset, size = location
    with open(paths[shard], "rb") as file:
        file.seek(offset)
        return np.unique(shingle_hashes(parse_document_at(paths[shard], offset, file.read(size)).text))


def _drop_similar(compared: Iterable[tuple[int, int, float]], threshold: float, dropped: BitSet) -> Iterator[list[int]]:
    """Drop the later document of each pair that is alike, if the earlier one is kept. Pairs come in order."""
    for later, earlier, alike in compared:
        pair = np.array([later, earlier])
        if alike >= threshold and not dropped.contains(pair).any():
            dropped.add(pair[:1])
            yield [later, earlier, round(alike * SIMILARITY_SCALE)]
