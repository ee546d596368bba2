"""LAMBADA: the last word of a passage. Right where every token of it is the likeliest one.

    megatron   the last token; with `strict` the whole last word, with a space before it
    openai     the last token, as the published accuracy was found
    lm-eval    the whole last word, tokenized with what is before it
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from data.storage import DataError
from data.tokenizer_base import Tokenizer
from megatron.evaluate import reading
from megatron.evaluate.task import Outcome, Subject
from megatron.evaluate.pieces import Piece, Score, continuation
from megatron.evaluate.request import Asked

Pair = tuple[list[int], list[int]]
"""What is read, and what is to come."""


@final
@dataclass(frozen=True)
class Lambada:
    pieces: Sequence[Piece]
    bytes: int
    stride: None = None

    @property
    def truncated(self) -> int:
        return sum(piece.is_cut for piece in self.pieces)

    def outcome(self, scores: Sequence[Score]) -> Outcome:
        correct = sum(score.greedy for score in scores)
        return Outcome(logprob=math.fsum(score.logprob for score in scores),
                       tokens=sum(len(piece.tokens) - piece.first for piece in self.pieces), words=len(self.pieces),
                       bytes=self.bytes, examples=len(self.pieces),
                       rates={"acc": correct / len(scores), "correct": correct})


def prepare(asked: Asked, subject: Subject) -> Lambada:
    pieces, size, tokenizer = [], 0, subject.tokenizer
    for line in reading.lines(asked.data):
        text = line.text("text")
        if not text.strip():
            raise DataError(f"{line.where}: 'text': expected a passage, found nothing but white space")
        if asked.protocol == "lm-eval":
            context, targets = pair_of(*last_word(text), tokenizer)
        else:
            context, targets = _strict(text, tokenizer) if asked.strict else _last_token(text, tokenizer)
        pieces.append(continuation(context or [tokenizer.eod], targets, subject.length, line.where))
        size += len(tokenizer.decode(targets).encode())
    return Lambada(pieces, size)


def _last_token(text: str, tokenizer: Tokenizer) -> Pair:
    ids = tokenizer.encode(text)
    return ids[:-1], ids[-1:]


def _strict(text: str, tokenizer: Tokenizer) -> Pair:
    word = text.split()[-1]
    return tokenizer.encode(text[: text.rfind(word)].strip()), tokenizer.encode(f" {word}")


def last_word(text: str) -> tuple[str, str]:
    """lm-eval's: what is before the last space, and the space with what is after it."""
    context, _, word = text.rpartition(" ")
    return context, f" {word}"


def pair_of(context: str, target: str, tokenizer: Tokenizer) -> Pair:
    """lm-eval's: spaces at the end of the context belong to the target, and the target is what is left of the tokens
    of both once as many are taken away as the context has."""
    before = tokenizer.encode(context.rstrip())
    return before or [tokenizer.eod], tokenizer.encode(context + target)[len(before):]
