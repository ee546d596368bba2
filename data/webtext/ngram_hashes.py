"""Words and word n-grams of a text as 64-bit hashes (numpy).

A *word* is a run of letters, digits and marks in lower case; in scripts without spaces every character is one. Case,
punctuation and white space do not change the words. Hashes depend only on Python's Unicode tables.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

HashArray = NDArray[np.uint64]

SINGLE_CHARACTER_WORD = 1 << 31
"""Bit in the table below: the character is a word by itself."""
UNSPACED_SCRIPTS = ((0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x2E80, 0xA4CF), (0xF900, 0xFAFF),
                    (0xFF66, 0xFF9F), (0x20000, 0x3FFFF))
"""Thai, Lao, Burmese, Khmer; Chinese, Japanese and Yi characters."""

BLOCK_CHARACTERS = 1 << 18
"""Characters processed together, to bound memory."""

FACTOR = 0x9E3779B97F4A7C15
SHIFT = np.uint64(32)


@dataclass(frozen=True)
class HashedWords:
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
    pieces = list(_hashed_blocks(text))
    if len(pieces) == 1:
        return pieces[0]
    columns = zip(*((piece.hashes, piece.starts, piece.stops) for piece in pieces))
    return HashedWords(*map(np.concatenate, columns))


def word_hashes(text: str) -> HashArray:
    """The word hashes without positions, with less memory."""
    return np.concatenate([piece.hashes for piece in _hashed_blocks(text)])


def ngram_hashes(hashes: HashArray, n: int) -> HashArray:
    """The hash of every run of n words, in order; none for fewer words."""
    count = max(0, len(hashes) - n + 1)
    run = np.zeros(count, np.uint64)
    for first in range(n):
        run += hashes[first:first + count]
        run *= np.uint64(FACTOR)
        run ^= run >> SHIFT  # makes the hash depend on order
    return run


def _hashed_blocks(text: str) -> Iterator[HashedWords]:
    """Consecutive blocks of a text that split no word, unless it is longer than a quarter block."""
    start = 0
    while True:
        stop = min(start + BLOCK_CHARACTERS, len(text))
        if stop < len(text):
            # Cut after the last non-word character of the block, if it is near the end.
            tail = _character_classes()[_code_points(text[stop - BLOCK_CHARACTERS // 4:stop])]
            breaks = np.flatnonzero(tail == 0)
            stop -= len(tail) - int(breaks[-1]) if breaks.size else 0
        yield _hash_block(text[start:stop], start)
        if stop == len(text):
            return
        start = stop


def _hash_block(text: str, offset: int) -> HashedWords:
    folded = _character_classes()[_code_points(text)]
    inside = folded != 0
    edge = np.ones(len(folded) + 1, bool)  # between characters: True where a word starts or stops
    np.not_equal(inside[1:], inside[:-1], out=edge[1:-1])
    alone = folded >= SINGLE_CHARACTER_WORD
    if alone.any():
        edge[:-1] |= alone
        edge[1:] |= alone
    edges = np.flatnonzero(edge)
    is_word = inside[edges[:-1]]
    starts, stops = edges[:-1][is_word], edges[1:][is_word]
    # A word's hash is a polynomial in FACTOR: a difference of prefix sums, shifted to the same exponent.
    powers, inverse = _powers()
    prefix = np.zeros(len(folded) + 1, np.uint64)
    np.cumsum(folded * powers[:len(folded)], out=prefix[1:])
    return HashedWords(splitmix64((prefix[stops] - prefix[starts]) * inverse[starts]), starts + offset, stops + offset)


def _code_points(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")


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
def _powers() -> tuple[HashArray, HashArray]:
    """FACTOR to the power of 1, 2, ..., and inverses modulo 2^64."""
    inverse = pow(FACTOR, -1, 1 << 64)
    return (np.multiply.accumulate(np.full(BLOCK_CHARACTERS, FACTOR, np.uint64)),
            np.multiply.accumulate(np.full(BLOCK_CHARACTERS + 1, inverse, np.uint64)))
