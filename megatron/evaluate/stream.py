"""Running text: its tokens in windows, and the sum of their log-probabilities. What `wikitext` and `perplexity` are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from data.storage import DataError
from megatron.evaluate.pieces import (ScoringRequest, TargetScore, TokenIds, overlapping_windows, rolling_windows,
                                      window_requests)
from megatron.evaluate.task import EvalModelInfo, EvalResult


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
    return [
        piece for ids in documents for piece in window_requests(prepend_eod(ids, model_info),
                                                                rolling_windows(len(ids) + 1, model_info.max_positions))
    ]


def prepend_eod(ids: TokenIds, model_info: EvalModelInfo) -> TokenIds:
    """What ends a document, and so comes before the first token of the next, is before these."""
    return np.concatenate([eod_array(model_info, ids), ids])


def eod_array(model_info: EvalModelInfo, ids: TokenIds) -> TokenIds:
    """What ends a document, in the type of these where it fits."""
    eod = model_info.tokenizer.eod
    return np.array([eod], np.promote_types(ids.dtype, np.min_scalar_type(eod)))
