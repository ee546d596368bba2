"""What every task is: pieces to score, and what their scores mean, in the figures that people compare.

    loss                  natural logarithms, per token that was scored
    perplexity            exp(loss): depends on the tokenizer
    adjusted perplexity   exp(loss x tokens / words): per word of the original text, whatever the tokenizer
    bits per byte         of the original text, whatever the tokenizer and whatever a word is
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from data.preprocess import TextReadOptions
from data.tokenizer_base import Tokenizer
from megatron.evaluate.pieces import Ids, Piece, Score


@dataclass(frozen=True, kw_only=True)
class Outcome:
    logprob: float
    """Of all targets together."""
    tokens: int
    """Scored."""
    words: int
    """Of the original text, before anything was done to it."""
    bytes: int
    """Of the original text in UTF-8."""
    words_scored: int | None = None
    """What the adjusted perplexity divides by, where that is not `words`."""
    most: float = math.inf
    """Perplexities are of at most this loss."""
    examples: int | None = None
    rates: Mapping[str, float] = field(default_factory=dict)
    """Accuracies."""

    @property
    def loss(self) -> float:
        return -self.logprob / self.tokens

    @property
    def perplexity(self) -> float:
        return self._exp(self.loss)

    @property
    def adjusted_perplexity(self) -> float | None:
        """None where there is no word to divide by."""
        words = self.words if self.words_scored is None else self.words_scored
        return self._exp(-self.logprob / words) if words else None

    @property
    def bits_per_byte(self) -> float | None:
        return -self.logprob / math.log(2) / self.bytes if self.bytes else None

    def _exp(self, loss: float) -> float:
        try:
            return math.exp(min(loss, self.most))
        except OverflowError:
            return math.inf

    def figures(self) -> dict[str, float | int | None]:
        """By name, in the order in which they are printed."""
        found: dict[str, float | int | None] = {**self.rates}
        if self.examples is not None:
            found["examples"] = self.examples
        return found | {"tokens": self.tokens, "original_words": self.words, "original_bytes": self.bytes,
                        "loss": self.loss, "perplexity": self.perplexity,
                        "adjusted_perplexity": self.adjusted_perplexity,
                        "bits_per_byte": self.bits_per_byte}


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
    reading: TextReadOptions = TextReadOptions()
    """How files became documents there."""
    cache_path: str | None = None
    """The folder of the corpora that were made of them; None: beside them."""

    def encode(self, text: str) -> Ids:
        """In the smallest type that holds its tokens: all data is in memory as these."""
        return self.tokenizer.encode_array(text).astype(np.min_scalar_type(self.tokenizer.vocab_size - 1))
