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
class TokenWindow:
    start: int
    first: int
    stop: int


def overlapping_windows(tokens: int, length: int, stride: int) -> Iterator[TokenWindow]:
    """Megatron's: a window begins every `stride` tokens. The first scores all it can, each later one its last `stride`
    tokens, so that a token has at least `length - stride` tokens before it. With `stride` = `length` none overlap."""
    assert 1 <= stride <= length
    start, first = 0, 1
    while first < tokens:
        stop = min(start + length + 1, tokens)
        yield TokenWindow(start, first, stop)
        start, first = start + stride, stop


def rolling_windows(tokens: int, length: int) -> Iterator[TokenWindow]:
    """lm-eval's: each window scores `length` tokens; the last one, which has fewer, reads `length` all the same."""
    first = 1
    while first < tokens:
        stop = min(first + length, tokens)
        yield TokenWindow(max(0, stop - 1 - length), first, stop)
        first = stop


TokenIds = NDArray[np.integer[Any]]


@dataclass(frozen=True, eq=False)
class ScoringRequest:
    tokens: TokenIds
    first_target: int
    """Tokens from here on are targets; the model reads all tokens but the last."""
    is_truncated: bool = False
    """The beginning of what is before the targets is not read: there is no room for it."""


@dataclass(frozen=True)
class TargetScore:
    logprob: float
    """Of all targets together."""
    is_greedy: bool
    """Each target is the likeliest token."""


def window_requests(tokens: TokenIds, windows: Iterable[TokenWindow]) -> list[ScoringRequest]:
    """Views of one sequence."""
    return [ScoringRequest(tokens[window.start : window.stop], window.first - window.start) for window in windows]


def continuation_request(context: Sequence[int], targets: Sequence[int], length: int, location: str) -> ScoringRequest:
    """The targets after as much of the end of the context as a model of `length` positions reads."""
    if not 0 < len(targets) <= length:
        found = "no token" if not targets else f"{len(targets)} tokens"
        raise DataError(f"{location}: {found} to score, and the model has {length} positions: expected 1 to {length}")
    whole = np.array([*context, *targets])
    tokens = whole[-(length + 1):]
    return ScoringRequest(tokens, len(tokens) - len(targets), is_truncated=len(tokens) < len(whole))


def requests_digest(requests: Sequence[ScoringRequest]) -> int:
    """Equal on two ranks that will score the same."""
    found = len(requests)
    for request in requests:
        found = zlib.crc32(request.tokens.tobytes(), found + request.first_target)
    return found
