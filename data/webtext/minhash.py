"""MinHash signatures with LSH bands, and the files that hold them: one row per document, one file per shard.

A *shingle* is a run of five words; similarity is the Jaccard index of shingle sets. A signature holds the minimum of
each of 128 hashes. A *band* combines `rows` of them; documents with an equal band are candidates, with probability
1 - (1 - s^rows)^bands at similarity s. A row holds the line's size, a 128-bit digest of the text, and the bands.
Files are named after the shard's state, so an interrupted run continues.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data.parallel import ordered_map
from data.storage import DataError, make_folder, staged_file
from data.webtext.documents import LineRange, parse_shard_line, read_lines, split_into_ranges
from data.webtext.external_sort import Rows
from data.webtext.ngram_hashes import HashArray, ngram_hashes, splitmix64, word_hashes

SHINGLE_WORDS = 5
NUM_HASHES = 128
RECALL_AT_THRESHOLD = 0.9
"""Minimum fraction of pairs at the threshold that become candidates; more similar pairs do more often."""
SHINGLES_PER_BATCH = 1 << 15
"""Shingles hashed together: large enough to amortize a call, small enough for a core's cache."""
HASH_FACTORS, HASH_OFFSETS = splitmix64(np.arange(2 * NUM_HASHES, dtype=np.uint64)).astype(np.uint32).reshape(2, -1)
HASH_FACTORS |= np.uint32(1)  # an odd factor maps distinct shingles to distinct values
"""Fixed constants of the hashes, shingle * factor + offset modulo 2^32."""


@dataclass(frozen=True)
class Banding:
    """How signatures are split into bands."""

    bands: int
    rows: int

    @classmethod
    def for_threshold(cls, threshold: float) -> Banding:
        """The longest bands (fewest useless candidates) that keep RECALL_AT_THRESHOLD."""
        if not 0.3 <= threshold <= 1:
            raise DataError(f"--threshold {threshold}: expected a similarity from 0.3 (below, nearly every pair would "
                            "have to be compared) to 1")
        fitting = [banding for rows in range(1, NUM_HASHES + 1)
                   if (banding := cls(NUM_HASHES // rows, rows)).recall(threshold) >= RECALL_AT_THRESHOLD]
        return fitting[-1]

    def recall(self, similarity: float) -> float:
        """The probability that a pair becomes a candidate."""
        return float(1 - (1 - similarity ** self.rows) ** self.bands)

    def bands_of(self, signatures: NDArray[np.uint32]) -> HashArray:
        """[texts, NUM_HASHES] signatures -> [texts, bands]. Equal rows in different bands give different values."""
        rows = signatures[:, :self.bands * self.rows].reshape(-1, self.bands, self.rows)
        band = np.tile(np.arange(self.bands, dtype=np.uint64), (len(rows), 1))
        for row in range(self.rows):
            band = splitmix64(band ^ rows[:, :, row])
        return band


def shingle_hashes(text: str) -> HashArray:
    """All shingles of a text in order, with repetitions; none for a text of fewer words."""
    return ngram_hashes(word_hashes(text), SHINGLE_WORDS)


def minhash_signatures(texts: Sequence[HashArray]) -> NDArray[np.uint32]:
    """[texts, NUM_HASHES]: the minimum of each hash over the shingles of each text, which must have one."""
    smallest = np.empty((len(texts), NUM_HASHES), np.uint32)
    ends = np.cumsum([len(shingles) for shingles in texts])
    groups = np.flatnonzero(np.diff(ends // SHINGLES_PER_BATCH, prepend=-1))  # first text of each group
    for first, stop in pairwise([*groups.tolist(), len(texts)]):
        starts = np.cumsum([0, *map(len, texts[first:stop - 1])])
        shingles = (np.concatenate(texts[first:stop]) >> np.uint64(32)).astype(np.uint32)
        hashed = np.empty_like(shingles)
        for number, (factor, offset) in enumerate(zip(HASH_FACTORS, HASH_OFFSETS)):
            np.multiply(shingles, factor, out=hashed)
            np.add(hashed, offset, out=hashed)
            smallest[first:stop, number] = np.minimum.reduceat(hashed, starts)
    return smallest


def jaccard_similarity(left: HashArray, right: HashArray) -> float:
    """The exact Jaccard index of two sorted, distinct arrays, not both empty."""
    shared = len(np.intersect1d(left, right, assume_unique=True))
    return shared / (len(left) + len(right) - shared)


SIZE_COLUMN, DIGEST_COLUMNS, BAND_COLUMNS = 0, slice(1, 3), slice(3, None)
"""Columns of a row."""
WHITE_SPACE = re.compile(r"\s")
DIGEST_BLOCK_CHARACTERS = 1 << 18
"""Characters split into words together, to bound memory for long texts."""
SIGNATURE_VERSION = 1
"""Part of the file names; increment it when the same text would get other rows."""


def write_signatures(shards: Sequence[Path], shard_numbers: range, folder: Path, banding: Banding,
                     workers: int) -> None:
    """Write the missing signature files of these shards."""
    make_folder(folder)
    missing = [(shards[number], target) for number in shard_numbers
               if not (target := _signature_file(folder, number, shards[number], banding)).exists()]
    ranges = [split_into_ranges(shard) for shard, _ in missing]
    rows = ordered_map(partial(signature_rows, banding=banding), (piece for pieces in ranges for piece in pieces),
                       workers)
    for (_, target), line_ranges in zip(missing, ranges):
        with staged_file(target) as file:
            for _ in line_ranges:
                file.write(next(rows).data)


def signature_rows(line_range: LineRange, banding: Banding) -> Rows:
    """The rows of consecutive documents."""
    found = list(read_lines(line_range))
    rows = np.zeros((len(found), 3 + banding.bands), np.uint64)
    shingles = []
    for row, (offset, line) in zip(rows, found):
        text = parse_shard_line(line, f"{line_range.path} (byte {offset})").text
        row[SIZE_COLUMN] = len(line)
        row[DIGEST_COLUMNS] = np.frombuffer(text_digest(text), "<u8")
        shingles.append(shingle_hashes(text))
    long_enough = np.array(list(map(len, shingles)), bool)
    rows[long_enough, BAND_COLUMNS] = banding.bands_of(minhash_signatures([some for some in shingles if len(some)]))
    return rows


def text_digest(text: str) -> bytes:
    """A 128-bit digest of the text with white space normalized."""
    state, start = hashlib.blake2b(digest_size=16), 0
    while start < len(text):
        space = WHITE_SPACE.search(text, start + DIGEST_BLOCK_CHARACTERS)
        stop = space.start() if space else len(text)
        if words := text[start:stop].split():
            state.update(f"{' '.join(words)} ".encode())
        start = stop
    return state.digest()


class SignatureFiles:
    """The rows of all documents."""

    def __init__(self, shards: Sequence[Path], folder: Path, banding: Banding) -> None:
        self._files = [_signature_file(folder, number, shard, banding) for number, shard in enumerate(shards)]
        self._width = 3 + banding.bands
        counts = [file.stat().st_size // (8 * self._width) for file in self._files]
        self.first_documents = np.cumsum([0, *counts], dtype=np.int64)
        """[shards + 1]: number of the first document of each shard, then the number of documents."""

    def blocks(self, memory: int) -> Iterator[tuple[int, int, Rows]]:
        """(shard, number of the first document, rows) in blocks of about `memory` bytes."""
        size = max(1, memory // (8 * self._width)) * 8 * self._width
        for shard, path in enumerate(self._files):
            first = int(self.first_documents[shard])
            with open(path, "rb") as file:
                while raw := file.read(size):
                    rows = np.frombuffer(raw, np.uint64).reshape(-1, self._width)
                    yield shard, first, rows
                    first += len(rows)


def _signature_file(folder: Path, number: int, shard: Path, banding: Banding) -> Path:
    """The name contains everything that the rows depend on, except the content itself."""
    try:
        status = os.stat(shard)
    except OSError as error:
        raise DataError(f"{shard}: cannot read: {error.strerror}") from error
    facts = repr((SIGNATURE_VERSION, shard.name, status.st_size, status.st_mtime_ns, banding))
    return folder / f"{number:05d}-{hashlib.blake2b(facts.encode(), digest_size=8).hexdigest()}.rows"
