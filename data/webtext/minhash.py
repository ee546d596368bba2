"""Which texts are likely to be alike: MinHash signatures and locality-sensitive bands. Arithmetic only.

The *shingles* of a text are its runs of five words, as a set; the *similarity* of two texts is the Jaccard index of
their sets (shared shingles by all shingles). Five words: changing one word in a hundred leaves a similarity of 0.91,
while two texts about one matter share next to nothing; with single words or runs of characters unrelated English texts
are already alike, and each of them would have to be compared.

A *signature* holds the smallest value of each of `NUM_HASHES` random orders of the shingles: two signatures agree at one
place with a probability that is the similarity s. A *band* is a number that stands for `rows` places; two texts are a
*candidate pair* if any of their bands is equal, which happens with probability 1 - (1 - s^rows)^bands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from data.storage import DataError
from data.webtext.words import HashArray, ngram_hashes, splitmix64, word_hashes

SHINGLE_WORDS = 5
"""Words."""
NUM_HASHES = 128
RECALL_AT_THRESHOLD = 0.9
"""The least share of pairs with exactly the threshold's similarity that become candidates; more alike, more of them."""
SHINGLES_PER_BATCH = 1 << 15
"""Shingles that are hashed together: enough to hide the cost of a call, few enough for a core's cache."""


@dataclass(frozen=True)
class Banding:
    """How signatures are cut into bands."""

    bands: int
    rows: int

    @classmethod
    def for_threshold(cls, threshold: float) -> Banding:
        """The longest bands (fewest useless candidates) with which recall at the threshold is still as promised."""
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
        """(texts, bands) of the signatures of some texts, (texts, NUM_HASHES). Equal bands at different places differ."""
        rows = signatures[:, :self.bands * self.rows].reshape(-1, self.bands, self.rows)
        band = np.tile(np.arange(self.bands, dtype=np.uint64), (len(rows), 1))
        for row in range(self.rows):
            band = splitmix64(band ^ rows[:, :, row])
        return band


def shingle_hashes(text: str) -> HashArray:
    """The shingles of a text, in order and as often as they occur. A text of fewer words has none."""
    return ngram_hashes(word_hashes(text), SHINGLE_WORDS)


def minhash_signatures(texts: Sequence[HashArray]) -> NDArray[np.uint32]:
    """(texts, NUM_HASHES): the smallest value of each hash over the shingles of each text, of which there must be one."""
    smallest = np.empty((len(texts), NUM_HASHES), np.uint32)
    ends = np.cumsum([len(shingles) for shingles in texts])
    groups = np.flatnonzero(np.diff(ends // SHINGLES_PER_BATCH, prepend=-1))  # the first text of each
    for first, stop in zip(groups.tolist(), [*groups[1:].tolist(), len(texts)]):
        starts = np.cumsum([0, *map(len, texts[first:stop - 1])])
        shingles = (np.concatenate(texts[first:stop]) >> np.uint64(32)).astype(np.uint32)
        hashed = np.empty_like(shingles)
        for number, (factor, offset) in enumerate(_hash_coefficients()):
            np.multiply(shingles, factor, out=hashed)  # modulo 2^32
            np.add(hashed, offset, out=hashed)
            smallest[first:stop, number] = np.minimum.reduceat(hashed, starts)
    return smallest


def jaccard_similarity(left: HashArray, right: HashArray) -> float:
    """The Jaccard index of two sets (sorted, distinct, not both empty), exactly."""
    shared = len(np.intersect1d(left, right, assume_unique=True))
    return shared / (len(left) + len(right) - shared)


@cache
def _hash_coefficients() -> list[tuple[np.uint32, np.uint32]]:
    """Factor (odd, so that no two shingles meet) and offset of each hash, fixed for ever."""
    factors, offsets = splitmix64(np.arange(2 * NUM_HASHES, dtype=np.uint64)).astype(np.uint32).reshape(2, NUM_HASHES)
    return list(zip(factors | np.uint32(1), offsets))
