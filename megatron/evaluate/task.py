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
    """Sum over all targets."""
    tokens: int
    """Scored tokens."""
    words: int
    """Of the original text, before any preparation."""
    bytes: int
    """Of the original text in UTF-8."""
    words_scored: int | None = None
    """Divisor of the adjusted perplexity, where it is not `words`."""
    max_loss: float = math.inf
    """Perplexities are capped at exp of this."""
    examples: int | None = None
    accuracies: Mapping[str, float] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        return -self.logprob / self.tokens

    @property
    def perplexity(self) -> float:
        return self._exp(self.loss)

    @property
    def adjusted_perplexity(self) -> float | None:
        """None if the text has no words."""
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
        """By name, in the order of the report."""
        examples = {} if self.examples is None else {"examples": self.examples}
        return {**self.accuracies, **examples, "tokens": self.tokens, "original_words": self.words,
                "original_bytes": self.bytes, "loss": self.loss, "perplexity": self.perplexity,
                "adjusted_perplexity": self.adjusted_perplexity, "bits_per_byte": self.bits_per_byte}


class EvalTask(Protocol):
    @property
    def requests(self) -> Sequence[ScoringRequest]: ...

    @property
    def stride(self) -> int | None:
        """Tokens between the starts of windows; None: the task has no overlapping windows."""

    @property
    def num_truncated(self) -> int | None:
        """Examples whose beginning is not read; None: the text continues from window to window."""

    def result(self, scores: Sequence[TargetScore]) -> EvalResult: ...


@dataclass(frozen=True)
class EvalModelInfo:
    tokenizer: Tokenizer
    max_positions: int
    split: str | None = None
    """--split of the training run."""
    split_data_files: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Parts with separate data files in training, and these files."""
    text_reading: TextReadOptions = TextReadOptions()
    """How training turned files into documents."""
    cache_path: str | None = None
    """Folder of the tokenized corpora; None: beside the text files."""

    def encode(self, text: str) -> TokenIds:
        """Token ids in the smallest integer type, because all data is in memory."""
        return self.tokenizer.encode_array(text).astype(np.min_scalar_type(self.tokenizer.vocab_size - 1))


@final
@dataclass(frozen=True)
class TextTask:
    """Perplexity of running text. `words` and `bytes` are those of the original text."""

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
                          tokens=sum(request.num_targets for request in self.requests),
                          words=self.words, bytes=self.bytes, words_scored=self.words_scored, max_loss=self.max_loss,
                          examples=self.examples)


def sequence_requests(tokens: TokenIds, model_info: EvalModelInfo, stride: int, location: str) -> list[ScoringRequest]:
    if len(tokens) < 2:
        raise DataError(f"{location}: {len(tokens)} token: the first one is not scored; expected two or more")
    return window_requests(tokens, overlapping_windows(len(tokens), model_info.max_positions, stride))


def document_requests(documents: Iterable[TokenIds], model_info: EvalModelInfo) -> list[ScoringRequest]:
    """lm-eval's: each document separately, after an end-of-document token."""
    return [request for ids in documents for request in window_requests(
        prepend_eod(ids, model_info), rolling_windows(len(ids) + 1, model_info.max_positions))]


def prepend_eod(ids: TokenIds, model_info: EvalModelInfo) -> TokenIds:
    return np.concatenate([eod_array(model_info, ids), ids])


def eod_array(model_info: EvalModelInfo, ids: TokenIds) -> TokenIds:
    """The end-of-document token, in the type of `ids` where it fits."""
    eod = model_info.tokenizer.eod
    return np.array([eod], np.promote_types(ids.dtype, np.min_scalar_type(eod)))
