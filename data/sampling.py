"""The order of samples: pure functions of (seed, epoch, index). No files, no state.

A *split* divides the documents of a corpus into train, validation and test ranges. A *permutation* shuffles blocks,
documents or samples of one epoch. A *blend* draws from several datasets in fixed proportions. All use exact integer
arithmetic, so every rank, layout and resumed run computes the same order.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from fractions import Fraction
from hashlib import sha256
from heapq import heapify, heappop, heappush
from math import gcd, lcm
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from data.storage import UsageError

PARTS = ("train", "valid", "test")  # the parts of a split, in order

# Weights with a longer common period are rounded to multiples of 1 / MAX_BLEND_PERIOD.
MAX_BLEND_PERIOD = 1 << 16

IntArray = NDArray[np.int64]


def parse_number(text: str) -> Fraction | None:
    """A finite decimal number as an exact fraction; None for anything else."""
    try:
        return Fraction(text.strip()) if "/" not in text else None
    except ValueError:
        return None


def parse_split(split: str) -> tuple[Fraction, Fraction, Fraction]:
    """Train, validation and test shares of `949,50,1` or `949/50/1`, scaled to sum to one. If shares sum to less than
    one, they are fractions and the next share is the rest (`0.9` is `0.9,0.1`; `0.9,0.05` is `0.9,0.05,0.05`); other
    missing shares are zero. Raises UsageError."""
    shares = [parse_number(part) for part in split.replace("/", ",").split(",")]
    known = [share for share in shares if share is not None and share >= 0]
    total = sum(known, Fraction(0))
    if len(known) < len(shares) or len(shares) > 3 or total == 0:
        raise UsageError(f"--split {split!r}: expected up to three numbers that are not negative, such as 949,50,1")
    if len(known) < 3 and total < 1:
        known.append(1 - total)
        total = Fraction(1)
    train, valid, test = (share / total for share in known + [Fraction(0)] * (3 - len(known)))
    return train, valid, test


def split_documents(shares: Sequence[Fraction], documents: int) -> list[range]:
    """Consecutive ranges of documents, one per share; every document is in exactly one."""
    total = sum(shares)
    bounds = [round(documents * sum(shares[:k]) / total) for k in range(len(shares) + 1)]
    return [range(start, stop) for start, stop in zip(bounds, bounds[1:])]


Index = TypeVar("Index", int, NDArray[Any])

# Eight rounds, the words of one SHA-256: four leave traces in the orders of a few elements.
ROUND_KEYS = struct.Struct("<8I")


class Permutation:
    """A random order of 0..n-1 without a table: a keyed cipher of the numbers below the next power of 4, applied again
    to results that are not below n. Equal on every machine and version of numpy: a resumed run must see the same."""

    def __init__(self, n: int, *key: int | str) -> None:
        """Different keys give independent orders."""
        self.n, self._keys = n, ROUND_KEYS.unpack(sha256(repr(key).encode()).digest())
        self._half_bits = ((n - 1).bit_length() + 1) // 2

    def __getitem__(self, index: int) -> int:
        index = self._encipher(index)
        while index >= self.n:
            index = self._encipher(index)
        return index

    def to_array(self) -> IntArray:
        """All elements, of at most 2**32."""
        order = self._encipher(np.arange(self.n, dtype=np.uint32))
        while len(outside := np.flatnonzero(order >= self.n)):
            order[outside] = self._encipher(order[outside])
        return order.astype(np.int64)

    def _encipher(self, index: Index) -> Index:
        """A balanced Feistel network. Its round function is MurmurHash3's of 32 bits, in which arrays overflow alike.
        """
        bits, mask = self._half_bits, (1 << self._half_bits) - 1
        left, right = index >> bits, index & mask
        for key in self._keys:
            mixed = (right ^ key) * 0x85EBCA6B & 0xFFFFFFFF
            mixed = (mixed ^ mixed >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
            left, right = right, left ^ (mixed ^ mixed >> 16) & mask
        return left << bits | right


class Blend:
    """Draws from datasets in proportion to weights: sample index -> (dataset, index within it), from a table of one
    period. After any n samples each dataset is within one sample of n times its share. Weights are above 0."""

    def __init__(self, weights: Sequence[Fraction | int]) -> None:
        self.counts = np.array(integer_weights(weights), np.int64)
        self.period = int(self.counts.sum())
        self._dataset = evenly_spread_order(self.counts.tolist())
        order = np.argsort(self._dataset, kind="stable")
        firsts = np.cumsum(self.counts) - self.counts
        self._within = np.empty(self.period, np.int64)
        self._within[order] = np.arange(self.period) - np.repeat(firsts, self.counts)

    def locate(self, index: IntArray | int) -> tuple[IntArray, IntArray]:
        """(dataset of each sample, index within that dataset)."""
        periods, phase = np.divmod(np.asarray(index, np.int64), self.period)
        dataset = self._dataset[phase]
        return dataset, periods * self.counts[dataset] + self._within[phase]


def integer_weights(weights: Sequence[Fraction | int]) -> list[int]:
    """The smallest integers in proportion to the weights, rounded if their sum exceeds MAX_BLEND_PERIOD."""
    fractions = [Fraction(weight) for weight in weights]
    scale = lcm(*(weight.denominator for weight in fractions))
    counts = [int(weight * scale) for weight in fractions]
    divisor = gcd(*counts)
    counts = [count // divisor for count in counts]
    total = sum(counts)
    return counts if total <= MAX_BLEND_PERIOD else [max(1, round(MAX_BLEND_PERIOD * count / total))
                                                     for count in counts]


def evenly_spread_order(counts: Sequence[int]) -> IntArray:
    """One period in which dataset k appears counts[k] times, as evenly as possible. Draw j (from 0) of dataset k with
    share w must fall into steps floor(j/w) .. ceil((j+1)/w) - 1, or it would be a full sample early or late. These are
    unit jobs with release times and deadlines on one fully loaded machine: earliest deadline first meets them all."""
    period = sum(counts)
    order = np.empty(period, np.int64)
    waiting = [(0, k, 0) for k in range(len(counts))]  # (release, dataset, draw)
    heapify(waiting)
    released: list[tuple[int, int, int]] = []  # (deadline, dataset, draw)
    for step in range(period):
        while waiting and waiting[0][0] <= step:
            _, k, draw = heappop(waiting)
            heappush(released, (-(-(draw + 1) * period // counts[k]), k, draw))
        deadline, k, draw = heappop(released)
        assert step < deadline
        order[step] = k
        if draw + 1 < counts[k]:
            heappush(waiting, ((draw + 1) * period // counts[k], k, draw + 1))
    return order
