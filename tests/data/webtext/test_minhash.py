"""Signatures estimate the Jaccard index as theory says; bands find what they promise."""

from __future__ import annotations

import numpy as np
import pytest

from data.storage import DataError
from data.webtext.minhash import (NUM_HASHES, RECALL_AT_THRESHOLD, Banding, jaccard_similarity, minhash_signatures,
                                  shingle_hashes)
from data.webtext.minhash import HashArray


def pair_of_sets(rng: np.random.Generator, alike: float, size: int = 400) -> tuple[HashArray, HashArray]:
    """Two sets of `size` with about that Jaccard index."""
    shared = round(2 * size * alike / (1 + alike))
    numbers = rng.integers(0, 1 << 64, 2 * size - shared, dtype=np.uint64)
    return np.sort(numbers[:size]), np.sort(numbers[size - shared:])


def agreement(left: HashArray, right: HashArray) -> float:
    first, second = minhash_signatures([left, right])
    return float((first == second).mean())


@pytest.mark.parametrize("alike", [0.1, 0.5, 0.8, 0.9])
def test_signatures_agree_as_often_as_sets_are_alike(alike: float) -> None:
    rng = np.random.default_rng(1)
    shares = []
    for _ in range(100):
        left, right = pair_of_sets(rng, alike)
        shares.append(agreement(left, right) - jaccard_similarity(left, right))
    deviation = (alike * (1 - alike) / NUM_HASHES) ** 0.5  # of one estimate, if the hashes were perfectly random
    assert abs(np.mean(shares)) < 4 * deviation / 10  # the mean of 100
    assert 0.75 * deviation < np.std(shares) < 1.3 * deviation


@pytest.mark.parametrize("threshold", [0.5, 0.8, 0.95])
def test_bands_find_pairs_with_the_probability_promised(threshold: float) -> None:
    rng, banding = np.random.default_rng(2), Banding.for_threshold(threshold)
    assert banding.recall(threshold) >= RECALL_AT_THRESHOLD
    assert Banding(NUM_HASHES // (banding.rows + 1), banding.rows + 1).recall(threshold) < RECALL_AT_THRESHOLD
    for alike in (threshold, threshold - 0.2, (1 + threshold) / 2):
        found, expected = 0, 0.0
        for _ in range(200):
            left, right = pair_of_sets(rng, alike)
            bands = banding.bands_of(minhash_signatures([left, right]))
            found += bool((bands[0] == bands[1]).any())
            expected += banding.recall(jaccard_similarity(left, right))
        assert abs(found - expected) <= 4 * (200 * 0.25) ** 0.5  # four deviations of a fair coin at most


def test_a_signature_depends_on_the_set_of_shingles_alone() -> None:
    rng = np.random.default_rng(3)
    sets = [rng.integers(0, 1 << 64, size, dtype=np.uint64) for size in (1, 70_000, 3, 2, 30_000, 10, 100_000, 1)]
    together = minhash_signatures(sets)
    for shingles, found in zip(sets, together):
        assert (minhash_signatures([np.concatenate([shingles, shingles[::-1]])])[0] == found).all()


def test_a_band_changes_with_each_of_its_places_and_no_other() -> None:
    banding = Banding(16, 7)
    plain = np.random.default_rng(4).integers(0, 1 << 32, (1, NUM_HASHES), dtype=np.uint32)
    for place in range(NUM_HASHES):
        for bit in (0, 13, 31):
            changed = plain.copy()
            changed[0, place] ^= np.uint32(1 << bit)
            differ = np.flatnonzero(banding.bands_of(changed)[0] != banding.bands_of(plain)[0])
            assert differ.tolist() == [place // 7] * (place < 16 * 7)


def test_a_text_of_less_than_five_words_has_no_shingle() -> None:
    assert len(shingle_hashes("one two three, four!")) == 0
    assert len(shingle_hashes("one two three, four: five")) == 1


@pytest.mark.parametrize("threshold", [0, 0.29, 1.01, float("nan")])
def test_a_threshold_that_makes_no_sense_is_refused(threshold: float) -> None:
    with pytest.raises(DataError, match="expected a similarity from 0.3"):
        Banding.for_threshold(threshold)
