"""The interface of an evaluation task, its metrics, and the task of running text (wikitext, perplexity).

    loss                  nats per scored token
    perplexity            exp(loss): depends on the tokenizer
    adjusted perplexity   exp(loss x tokens / words): per word of the original text, comparable across tokenizers
    bits per byte         of the original text in UTF-8, independent of tokenizer and word definition
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, final

import numpy as np

from data.preprocess import TextReadOptions
from data.storage import DataError
from data.tokenizer_base import Tokenizer
from megatron.evaluate.scoring import (ScoringRequest, TargetScore, TokenIds, overlapping_windows, rolling_windows,
                                       window_requests)


@dataclass(frozen=True, kw_only=True)
class EvalResult:
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
    max_loss: float = math.inf
    """Perplexities are of at most this loss."""
    examples: int | None = None
    accuracies: Mapping[str, float] = field(default_factory=dict)
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
            return math.exp(min(loss, self.max_loss))
        except OverflowError:
            return math.inf

    def metrics(self) -> dict[str, float | int | None]:
        """By name, in the order in which they are printed."""
        found: dict[str, float | int | None] = {**self.accuracies}
        if self.examples is not None:
            found["examples"] = self.examples
        return found | {"tokens": self.tokens, "original_words": self.words, "original_bytes": self.bytes,
                        "loss": self.loss, "perplexity": self.perplexity,
                        "adjusted_perplexity": self.adjusted_perplexity,
                        "bits_per_byte": self.bits_per_byte}


class EvalTask(Protocol):
    @property
    def requests(self) -> Sequence[ScoringRequest]: ...

    @property
    def stride(self) -> int | None:
        """Between windows that may overlap; None: it has no such windows."""

    @property
    def num_truncated(self) -> int | None:
        """Examples whose beginning the model does not see; None: text runs on from window to window."""

    def result(self, scores: Sequence[TargetScore]) -> EvalResult: ...


@dataclass(frozen=True)
class EvalModelInfo:
    """What a task needs to know of the model."""

    tokenizer: Tokenizer
    max_positions: int
    """Positions."""
    split: str | None = None
    """Of the documents it was trained with."""
    split_data_files: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Parts that had data of their own."""
    text_reading: TextReadOptions = TextReadOptions()
    """How files became documents there."""
    cache_path: str | None = None
    """The folder of the corpora that were made of them; None: beside them."""

    def encode(self, text: str) -> TokenIds:
        """In the smallest type that holds its tokens: all data is in memory as these."""
        return self.tokenizer.encode_array(text).astype(np.min_scalar_type(self.tokenizer.vocab_size - 1))


@dataclass(frozen=True)
class EvalDocument:
    """A document."""

    ids: TokenIds
    words: int
    bytes: int


@final
@dataclass(frozen=True)
class TextTask:
    """A task: pieces of text, and the words and bytes it had before it was made pieces of."""

    requests: Sequence[ScoringRequest]
    words: int
    bytes: int
    stride: int | None = None
    examples: int | None = None
    words_scored: int | None = None
    max_loss: float = math.inf
    num_truncated: None = None

    def result(self, scores: Sequence[TargetScore]) -> EvalResult:
        return EvalResult(logprob=math.fsum(score.logprob for score in scores),
                          tokens=sum(len(piece.tokens) - piece.first_target for piece in self.requests),
                          words=self.words, bytes=self.bytes, words_scored=self.words_scored, max_loss=self.max_loss,
                          examples=self.examples)


def sequence_requests(tokens: TokenIds, model_info: EvalModelInfo, stride: int, location: str) -> list[ScoringRequest]:
    """One sequence, in windows that may overlap."""
    if len(tokens) < 2:
        raise DataError(f"{location}: {len(tokens)} token: the first one is not scored; expected two or more")
    return window_requests(tokens, overlapping_windows(len(tokens), model_info.max_positions, stride))


def document_requests(documents: Iterable[TokenIds], model_info: EvalModelInfo) -> list[ScoringRequest]:
    """lm-eval's: each document for itself, after the end of another."""
    return [piece for ids in documents for piece in window_requests(
        prepend_eod(ids, model_info), rolling_windows(len(ids) + 1, model_info.max_positions))]


def prepend_eod(ids: TokenIds, model_info: EvalModelInfo) -> TokenIds:
    """What ends a document, and so comes before the first token of the next, is before these."""
    return np.concatenate([eod_array(model_info, ids), ids])


def eod_array(model_info: EvalModelInfo, ids: TokenIds) -> TokenIds:
    """What ends a document, in the type of these where it fits."""
    eod = model_info.tokenizer.eod
    return np.array([eod], np.promote_types(ids.dtype, np.min_scalar_type(eod)))
