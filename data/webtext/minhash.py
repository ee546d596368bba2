"""Words of a text as hashes, MinHash signatures with LSH bands, and the files that hold them: one row per document.

A *word* is a run of letters, digits and marks in lower case; in scripts without spaces every character is one. Case,
punctuation and white space do not change the words. A *shingle* is a run of five words; similarity is the Jaccard index
of shingle sets. A signature holds the minimum of each of 128 hashes. A *band* combines `rows` of them; documents with
an equal band are candidates, with probability 1 - (1 - s^rows)^bands at similarity s. A row holds the place of the
line in its shard, a 128-bit digest of the text, and the bands.
"""

from __future__ import annotations

import hashlib
import os
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from data.storage import DataError, staged_file
from data.webtext.documents import parse_shard_line
from data.webtext.exchange import LINE_BITS, LINE_MASK, Rows

HashArray = NDArray[np.uint64]

SINGLE_CHARACTER_WORD = 1 << 31  # bit in the table below: the character is a word by itself
# Thai, Lao, Burmese, Khmer; Chinese, Japanese and Yi characters.
UNSPACED_SCRIPTS = ((0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x2E80, 0xA4CF), (0xF900, 0xFAFF),
                    (0xFF66, 0xFF9F), (0x20000, 0x3FFFF))

MIN_POWERS = 1 << 18  # of the hash's factor: texts up to this length share a table

FACTOR = 0x9E3779B97F4A7C15


class HashedWords(NamedTuple):
    """The words of a text in order: hashes, and start and stop in characters."""

    hashes: HashArray
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]


def splitmix64(values: HashArray) -> HashArray:
    """The finalizer of splitmix64: a bijection of 64-bit integers with pseudo-random output."""
    mixed = values + np.uint64(FACTOR)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def hash_words(text: str) -> HashedWords:
    folded = _character_classes()[np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")]
    inside = folded != 0
    edge = np.ones(len(folded) + 1, bool)  # between characters: True where a word starts or stops
    np.not_equal(inside[1:], inside[:-1], out=edge[1:-1])
    alone = folded >= SINGLE_CHARACTER_WORD
    if alone.any():
        edge[:-1] |= alone
        edge[1:] |= alone
    edges = np.flatnonzero(edge)
    is_word = inside[edges[:-1]]
    firsts, ends = edges[:-1][is_word], edges[1:][is_word]
    # A word's hash is a polynomial in FACTOR: a difference of prefix sums, shifted to the same exponent.
    powers, inverse = _powers(max(MIN_POWERS, 1 << len(folded).bit_length()))
    prefix = np.zeros(len(folded) + 1, np.uint64)
    np.cumsum(folded * powers[:len(folded)], out=prefix[1:])
    return HashedWords(splitmix64((prefix[ends] - prefix[firsts]) * inverse[firsts]), firsts, ends)


def ngram_hashes(hashes: HashArray, n: int) -> HashArray:
    """The hash of every run of n words, in order; none for fewer words."""
    count = max(0, len(hashes) - n + 1)
    run = np.zeros(count, np.uint64)
    for first in range(n):
        run += hashes[first:first + count]
        run *= np.uint64(FACTOR)
        run ^= run >> np.uint64(32)  # makes the hash depend on order
    return run


@cache
def _character_classes() -> NDArray[np.uint32]:
    """Code point -> 0 outside words, else the lower-case code point, SINGLE_CHARACTER_WORD set if it is a word."""
    def fold(character: str) -> int:
        if not character.isalnum() and not unicodedata.category(character).startswith("M"):
            return 0
        lower = character.lower()
        return ord(lower) if len(lower) == 1 else ord(character)

    table = np.zeros(0x110000, np.uint32)
    table[:0x20000] = [fold(chr(code)) for code in range(0x20000)]
    table[0x20000:0x40000] = range(0x20000, 0x40000)  # all of them Chinese characters
    for first, last in UNSPACED_SCRIPTS:
        part = table[first:last + 1]
        part[part != 0] |= np.uint32(SINGLE_CHARACTER_WORD)
    return table


@cache
def _powers(count: int) -> tuple[HashArray, HashArray]:
    """FACTOR to the power of 1, 2, ..., and inverses modulo 2^64."""
    return (np.multiply.accumulate(np.full(count, FACTOR, np.uint64)),
            np.multiply.accumulate(np.full(count, pow(FACTOR, -1, 1 << 64), np.uint64)))


SHINGLE_WORDS = 5
NUM_HASHES = 128
# Minimum fraction of pairs at the threshold that become candidates; more similar pairs do more often.
RECALL_AT_THRESHOLD = 0.9
# Shingles hashed together: large enough to amortize a call, small enough for a core's cache.
SHINGLES_PER_BATCH = 1 << 15
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
    return ngram_hashes(hash_words(text).hashes, SHINGLE_WORDS)


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


# Columns of a row; the place of a line is its offset and size.
PLACE_COLUMNS, DIGEST_COLUMNS, BAND_COLUMNS = slice(0, 2), slice(2, 4), slice(4, None)
BATCH_BYTES = 1 << 20  # lines of a shard that are in memory at a time


def signature_file(folder: Path, number: int) -> Path:
    """The folder belongs to one stage and the content of its inputs, so an existing file is not stale."""
    return folder / f"{number:05d}.rows"


def write_signature_file(task: tuple[Path, Path], banding: Banding) -> None:
    """Write the rows of a shard, given as (shard, target)."""
    shard, target = task
    offset = 0
    with open(shard, "rb") as file, staged_file(target) as rows:
        while lines := file.readlines(BATCH_BYTES):
            rows.write(signature_rows(lines, offset, str(shard), banding).data)
            offset += sum(map(len, lines))


def signature_rows(lines: Sequence[bytes], offset: int, location: str, banding: Banding) -> Rows:
    """The rows of consecutive lines, the first of them at `offset`."""
    rows = np.zeros((len(lines), 4 + banding.bands), np.uint64)
    shingles = []
    for row, line in zip(rows, lines):
        text = parse_shard_line(line, location).text
        digest = hashlib.blake2b(" ".join(text.split()).encode(), digest_size=16).digest()
        row[PLACE_COLUMNS] = offset, len(line)
        row[DIGEST_COLUMNS] = np.frombuffer(digest, "<u8")
        shingles.append(shingle_hashes(text))
        offset += len(line)
    long_enough = np.array(list(map(len, shingles)), bool)
    rows[long_enough, BAND_COLUMNS] = banding.bands_of(minhash_signatures([some for some in shingles if len(some)]))
    return rows


@dataclass(frozen=True)
class SignatureFiles:
    """The rows of all documents, a file per shard."""

    folder: Path
    banding: Banding

    @property
    def row_bytes(self) -> int:
        return 8 * (4 + self.banding.bands)

    def blocks(self, shard: int, memory: int) -> Iterator[tuple[NDArray[np.uint64], Rows]]:
        """(documents, their rows) in blocks of about `memory` bytes."""
        first = shard << LINE_BITS
        with open(signature_file(self.folder, shard), "rb") as file:
            while raw := file.read(max(1, memory // self.row_bytes) * self.row_bytes):
                rows = np.frombuffer(raw, np.uint64).reshape(-1, self.row_bytes // 8)
                yield np.arange(first, first + len(rows), dtype=np.uint64), rows
                first += len(rows)

    def location(self, document: int) -> tuple[int, int, int]:
        """(shard, offset, size) of its line."""
        shard, line = document >> LINE_BITS, document & LINE_MASK
        with open(signature_file(self.folder, shard), "rb") as file:
            offset, size = np.frombuffer(os.pread(file.fileno(), 16, line * self.row_bytes), np.uint64).tolist()
        return shard, offset, size
