"""Near copies among documents: candidates by equal bands, each compared on the two texts, decided on in order.

Nothing is dropped on an estimate: a document goes if its similarity (`minhash`) to an earlier one that stays is at
least the threshold. Where A is like B and B like C, B goes and C stays unless it is like A too, so a chain of small
changes does not drop what has little in common. Only documents with an equal band are compared, each with the first
`CROWD` of them: a page that a template made a million times costs a million comparisons, not their square.
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
from data.storage import writing
from data.webtext.external import Rows, RowSorter, pairs_of_equals
from data.webtext.minhash import shingles_of, similarity
from data.webtext.shards import document_at
from data.webtext.signatures import BANDS, SIZE, Signatures
from data.webtext.words import Numbers

CROWD = 32
BATCH = 64
"""Pairs that a worker compares at a time."""
WHOLE = 1_000_000
"""Similarities in rows are in millionths."""

Place = tuple[int, int, int]
"""Of a line: shard, offset, size."""
Pair = tuple[tuple[int, Place], tuple[int, Place]]
"""(document, place) of two documents, the later one first."""


class Flags:
    """One bit per document."""

    def __init__(self, documents: int) -> None:
        self._bits = np.zeros((documents + 7) // 8, np.uint8)

    def set(self, documents: NDArray[np.integer[Any]]) -> None:
        np.bitwise_or.at(self._bits, documents >> 3, np.left_shift(1, documents & 7).astype(np.uint8))

    def of(self, documents: NDArray[np.integer[Any]]) -> NDArray[np.bool_]:
        held: NDArray[np.bool_] = self._bits[documents >> 3] & np.left_shift(1, documents & 7) != 0
        return held


def drop_near_copies(shards: Sequence[Path], signatures: Signatures, dropped: Flags, threshold: float, folder: Path,
                     memory: int, workers: int) -> RowSorter:
    """Flags them too. Rows (document, the kept one it is like, their similarity in millionths)."""
    near, pairs = RowSorter(folder, 3, memory // 4), _candidates(signatures, dropped, folder, memory // 4)
    with _places(signatures, folder) as place_of:
        batches = _undecided(pairs.sorted(), dropped, place_of)
        for compared in ordered_map(partial(compare, paths=list(map(str, shards))), batches, workers):
            near.add_each(_decide(compared, threshold, dropped))
    return near


def _candidates(signatures: Signatures, dropped: Flags, folder: Path, memory: int) -> RowSorter:
    """Pairs (later document, earlier one) with an equal band, as often as they have one."""
    bands, pairs = RowSorter(folder, 2, memory), RowSorter(folder, 2, memory)
    for _, first, rows in signatures.blocks(memory // 8):
        documents = np.arange(first, first + len(rows))
        used = ~dropped.of(documents) & rows[:, BANDS].any(axis=1)
        of_band = np.repeat(documents[used], rows.shape[1] - 3).astype(np.uint64)
        bands.add(np.column_stack([rows[used, BANDS].ravel(), of_band]))
    for found in pairs_of_equals(bands.sorted(), CROWD):
        pairs.add(found)
    return pairs


@contextmanager
def _places(signatures: Signatures, folder: Path) -> Iterator[Callable[[int], Place]]:
    """Document -> place, by a table that is a file."""
    with tempfile.TemporaryFile(dir=folder) as table:
        offset, last = 0, 0
        for shard, _, rows in signatures.blocks(1 << 22):
            sizes = rows[:, SIZE].astype(np.int64)
            ends = np.cumsum(sizes) + (offset if shard == last else 0)
            with writing(folder):
                table.write(np.column_stack([np.full_like(ends, shard), ends - sizes, sizes]).data)
            offset, last = int(ends[-1]), shard
        table.flush()

        def place_of(document: int) -> Place:
            shard, start, size = struct.unpack("=3q", os.pread(table.fileno(), 24, 24 * document))
            return shard, start, size

        yield place_of


def _undecided(blocks: Iterable[Rows], dropped: Flags, place_of: Callable[[int], Place]) -> Iterator[list[Pair]]:
    """Batches of the sorted pairs, each pair once, without those of which one is known to be dropped by now."""
    last = np.empty((0, 2), np.uint64)
    for block in blocks:
        pairs = np.concatenate([last, block])
        again = np.append(False, (pairs[1:] == pairs[:-1]).all(axis=1))[len(last):]
        last = block[-1:]
        for start in range(0, len(block), BATCH):
            part = block[start:start + BATCH][~again[start:start + BATCH]].astype(np.int64)
            part = part[~dropped.of(part).any(axis=1)]
            if len(part):
                yield [((later, place_of(later)), (earlier, place_of(earlier))) for later, earlier in part.tolist()]


def compare(batch: Sequence[Pair], paths: Sequence[str]) -> list[tuple[int, int, float]]:
    """(document, earlier document, their similarity) of each pair."""
    compared = []
    held: dict[Place, Numbers] = {}
    for (later, place), (earlier, other) in batch:
        held = {p: held[p] if p in held else _shingle_set(paths, p) for p in (place, other)}
        compared.append((later, earlier, similarity(held[place], held[other])))
    return compared


def _shingle_set(paths: Sequence[str], place: Place) -> Numbers:
    shard, offset, size = place
    with open(paths[shard], "rb") as file:
        file.seek(offset)
        return np.unique(shingles_of(document_at(paths[shard], offset, file.read(size)).text))


def _decide(compared: Iterable[tuple[int, int, float]], threshold: float, dropped: Flags) -> Iterator[list[int]]:
    """Drop the later document of each pair that is alike, if the earlier one is kept. Pairs come in order."""
    for later, earlier, alike in compared:
        pair = np.array([later, earlier])
        if alike >= threshold and not dropped.of(pair).any():
            dropped.set(pair[:1])
            yield [later, earlier, round(alike * WHOLE)]
