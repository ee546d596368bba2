"""Splits, permutations and blends against their definitions."""

from __future__ import annotations

import random
from fractions import Fraction

import numpy as np
import pytest

from data.sampling import MAX_BLEND_PERIOD, Blend, epoch_permutation, integer_weights, parse_split, split_documents
from data.storage import DataError


@pytest.mark.parametrize(("split", "expected"), [
    ("949,50,1", ("0.949", "0.05", "0.001")), ("949/50/1", ("0.949", "0.05", "0.001")), ("100", ("1", "0", "0")),
    ("8,2", ("0.8", "0.2", "0")), ("0.9,0.05", ("0.9", "0.05", "0.05")), ("0.9", ("0.9", "0.1", "0")),
    (" .5, .25, .25", ("0.5", "0.25", "0.25")), ("0,0,1", ("0", "0", "1")), ("0.1,0.1,0.1", ("1/3", "1/3", "1/3")),
])
def test_splits_mean_their_proportions(split: str, expected: tuple[str, str, str]) -> None:
    assert parse_split(split) == tuple(map(Fraction, expected))


@pytest.mark.parametrize("split", ["", "a,b", "1,2,3,4", "-1,2", "0,0,0", "nan", "inf,1", "1,,2", "1e400,inf"])
def test_senseless_splits_are_refused(split: str) -> None:
    with pytest.raises(DataError, match="--split"):
        parse_split(split)


@pytest.mark.parametrize("documents", [0, 1, 2, 10, 999, 1000, 8_013_769])
def test_every_document_is_in_one_part(documents: int) -> None:
    shares = parse_split("949,50,1")
    parts = split_documents(shares, documents)
    assert parts[0].start == 0 and parts[-1].stop == documents
    assert all(a.stop == b.start for a, b in zip(parts, parts[1:]))
    assert all(abs(len(part) - documents * share) <= 1 for part, share in zip(parts, shares))


def test_parts_are_rounded_not_cut_off() -> None:
    shares = [Fraction(1, 2), Fraction(1, 4), Fraction(1, 4)]
    assert [len(part) for part in split_documents(shares, 7)] == [4, 1, 2]


def test_permutations_are_permutations_and_depend_on_all_arguments() -> None:
    seen = set()
    for seed in (0, 1):
        for epoch in (0, 1):
            for stream in (0, 1):
                order = epoch_permutation(50, seed, epoch, stream)
                assert sorted(order) == list(range(50))
                assert order.tolist() == epoch_permutation(50, seed, epoch, stream).tolist()
                seen.add(tuple(order))
    assert len(seen) == 8


def test_permutations_never_change() -> None:
    """A resumed run must see the order it left: these numbers may not depend on the version of numpy."""
    assert epoch_permutation(8, seed=1234, epoch=0).tolist() == GOLDEN_PERMUTATION
    assert len(epoch_permutation(0, 1, 1)) == 0


GOLDEN_PERMUTATION = [5, 6, 3, 7, 4, 1, 2, 0]


def test_blends_hold_their_proportions_after_every_sample() -> None:
    draw = random.Random(0)
    for _ in range(100):
        weights = [draw.randint(1, draw.choice([3, 40, 500])) for _ in range(draw.randint(1, 8))]
        blend = Blend(weights)
        n = 2 * blend.period + 3
        dataset, within = blend.locate(np.arange(n))
        drawn = np.cumsum(np.eye(len(weights), dtype=int)[dataset], axis=0)
        ideal = np.arange(1, n + 1)[:, None] * np.array(weights) / sum(weights)
        assert np.abs(drawn - ideal).max() < 1
        # Each dataset is read from its beginning, in order, without a gap.
        assert (within == drawn[np.arange(n), dataset] - 1).all()


def test_any_weights_have_a_bounded_period() -> None:
    assert integer_weights([Fraction("0.3"), Fraction("0.7")]) == [3, 7]
    assert integer_weights([10, 20, 30]) == [1, 2, 3]
    blend = Blend([Fraction("123456.789"), 987_654_321, 1])
    assert blend.period <= MAX_BLEND_PERIOD + 1 and blend.counts.min() >= 1
    dataset, within = blend.locate(10**15)
    assert 0 <= int(dataset) < 3 and int(within) < 10**15


@pytest.mark.parametrize("weights", [[], [0], [1, -1]])
def test_weights_must_be_positive(weights: list[int]) -> None:
    with pytest.raises(DataError, match="blend weights"):
        Blend(weights)
