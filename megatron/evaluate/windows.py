"""Which tokens are read and which are scored: the windows of a sequence that is longer than the position table.

A *window* reads tokens [start, stop - 1) and scores tokens [first, stop), each from all that the window reads before
it. Token 0 is never scored: nothing is before it. Every other token is scored exactly once. `length` is the most
tokens that a window may read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


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
