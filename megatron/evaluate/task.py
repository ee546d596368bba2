"""What every task is: pieces to score, and what their scores mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from data.preprocess import Reading
from data.tokenizer_base import Tokenizer
from megatron.evaluate.outcome import Outcome
from megatron.evaluate.pieces import Ids, Piece, Score


class Task(Protocol):
    @property
    def pieces(self) -> Sequence[Piece]: ...

    @property
    def stride(self) -> int | None:
        """Between windows that may overlap; None: it has no such windows."""

    @property
    def truncated(self) -> int | None:
        """Examples whose beginning the model does not see; None: text runs on from window to window."""

    def outcome(self, scores: Sequence[Score]) -> Outcome: ...


@dataclass(frozen=True)
class Subject:
    """What a task needs to know of the model."""

    tokenizer: Tokenizer
    length: int
    """Positions."""
    split: str | None = None
    """Of the documents it was trained with."""
    apart: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Parts that had data of their own."""
    reading: Reading = Reading()
    """How files became documents there."""
    cache_path: str | None = None
    """The folder of the corpora that were made of them; None: beside them."""

    def encode(self, text: str) -> Ids:
        """In the smallest type that holds its tokens: all data is in memory as these."""
        return self.tokenizer.encode_array(text).astype(np.min_scalar_type(self.tokenizer.vocab_size - 1))
