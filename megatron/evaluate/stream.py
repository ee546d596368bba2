"""Running text: its tokens in windows, and the sum of their log-probabilities. What `wikitext` and `perplexity` are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from data.storage import DataError
from megatron.evaluate.task import Outcome, Subject
from megatron.evaluate.pieces import Ids, Piece, Score, overlapping, rolling, windows_of


@dataclass(frozen=True)
class Text:
    """A document."""

    ids: Ids
    words: int
    bytes: int


@final
@dataclass(frozen=True)
class Stream:
    """A task: pieces of text, and the words and bytes it had before it was made pieces of."""

    pieces: Sequence[Piece]
    words: int
    bytes: int
    stride: int | None = None
    examples: int | None = None
    words_scored: int | None = None
    most: float = math.inf
    truncated: None = None

    def outcome(self, scores: Sequence[Score]) -> Outcome:
        return Outcome(logprob=math.fsum(score.logprob for score in scores),
                       tokens=sum(len(piece.tokens) - piece.first for piece in self.pieces),
                       words=self.words, bytes=self.bytes, words_scored=self.words_scored, most=self.most,
                       examples=self.examples)


def in_a_row(tokens: Ids, subject: Subject, stride: int, where: str) -> list[Piece]:
    """One sequence, in windows that may overlap."""
    if len(tokens) < 2:
        raise DataError(f"{where}: {len(tokens)} token: the first one is not scored; expected two or more")
    return windows_of(tokens, overlapping(len(tokens), subject.length, stride))


def one_by_one(documents: Iterable[Ids], subject: Subject) -> list[Piece]:
    """lm-eval's: each document for itself, after the end of another."""
    return [piece for ids in documents
            for piece in windows_of(with_start(ids, subject), rolling(len(ids) + 1, subject.length))]


def with_start(ids: Ids, subject: Subject) -> Ids:
    """What ends a document, and so comes before the first token of the next, is before these."""
    return np.concatenate([ending(subject, ids), ids])


def ending(subject: Subject, ids: Ids) -> Ids:
    """What ends a document, in the type of these where it fits."""
    eod = subject.tokenizer.eod
    return np.array([eod], np.promote_types(ids.dtype, np.min_scalar_type(eod)))
