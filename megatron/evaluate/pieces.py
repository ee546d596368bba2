"""What is scored, and what comes of it: a few tokens, the last of which are the targets."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.storage import DataError
from megatron.evaluate.windows import Window

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
