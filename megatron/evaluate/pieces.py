"""What is scored: a few tokens, the last of which are the targets; and how a sequence that is longer than the position
table becomes such pieces.

A *window* reads tokens [start, stop - 1) and scores tokens [first, stop), each from all that the window reads before
it. Token 0 is never scored: nothing is before it. Every other token is scored exactly once. `length` is the most
tokens that a window may read.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.storage import DataError


@dataclass(frozen=True)
class Window:
    start: int
    first: int
    stop: int


def overlapping(tokens: int, length: int, stride: int) -> Iterator[Window]:
    """Megatron's: a window begins every `stride` tokens. The first scores all it can, each later one its last `stride`
    tokens, so that a token has at least `length - stride` tokens before it. With `stride` = `length` none overlap."""
    assert 1 <= stride <= length
    start, first = 0, 1
    while first < tokens:
        stop = min(start + length + 1, tokens)
        yield Window(start, first, stop)
        start, first = start + stride, stop


def rolling(tokens: int, length: int) -> Iterator[Window]:
    """lm-eval's: each window scores `length` tokens; the last one, which has fewer, reads `length` all the same."""
    first = 1
    while first < tokens:
        stop = min(first + length, tokens)
        yield Window(max(0, stop - 1 - length), first, stop)
        first = stop


Ids = NDArray[np.integer[Any]]


@dataclass(frozen=True, eq=False)
class Piece:
    tokens: Ids
    first: int
    """Tokens from here on are targets; the model reads all tokens but the last."""
    is_cut: bool = False
    """The beginning of what is before the targets is not read: there is no room for it."""


@dataclass(frozen=True)
class Score:
    logprob: float
    """Of all targets together."""
    greedy: bool
    """Each target is the likeliest token."""


def windows_of(tokens: Ids, windows: Iterable[Window]) -> list[Piece]:
    """Views of one sequence."""
    return [Piece(tokens[window.start : window.stop], window.first - window.start) for window in windows]


def continuation(context: Sequence[int], targets: Sequence[int], length: int, where: str) -> Piece:
    """The targets after as much of the end of the context as a model of `length` positions reads."""
    if not 0 < len(targets) <= length:
        found = "no token" if not targets else f"{len(targets)} tokens"
        raise DataError(f"{where}: {found} to score, and the model has {length} positions: expected 1 to {length}")
    whole = np.array([*context, *targets])
    tokens = whole[-(length + 1):]
    return Piece(tokens, len(tokens) - len(targets), is_cut=len(tokens) < len(whole))


def digest(pieces: Sequence[Piece]) -> int:
    """Equal on two ranks that will score the same."""
    found = len(pieces)
    for piece in pieces:
        found = zlib.crc32(piece.tokens.tobytes(), found + piece.first)
    return found
