"""HellaSwag: which of four endings goes on from a text. lm-eval's rules, the only ones in use for models like this.

`acc` takes the ending with the largest log-probability, `acc_norm` the one with the largest per character. Where two
are equal it is the first.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import final

from megatron.evaluate import reading
from megatron.evaluate.lambada import pair_of
from megatron.evaluate.task import Outcome, Subject
from megatron.evaluate.pieces import Piece, Score, continuation
from megatron.evaluate.request import Asked


@dataclass(frozen=True)
class Question:
    query: str
    endings: tuple[str, ...]
    right: int
    where: str


@final
@dataclass(frozen=True)
class HellaSwag:
    questions: Sequence[Question]
    pieces: Sequence[Piece]
    """Of each ending of each question, in turn."""
    stride: None = None

    @property
    def truncated(self) -> int:
        """With one of the endings, or with more of them."""
        ends = list(accumulate(len(question.endings) for question in self.questions))
        return sum(any(piece.is_cut for piece in self.pieces[start:end]) for start, end in zip([0, *ends], ends))

    def outcome(self, scores: Sequence[Score]) -> Outcome:
        """Loss, words and bytes are those of the right endings."""
        acc = acc_norm = tokens = words = size = 0
        logprobs, at = [], 0
        for question in self.questions:
            found = [score.logprob for score in scores[at : at + len(question.endings)]]
            acc += _largest(found) == question.right
            acc_norm += _largest([value / len(ending) if ending else -math.inf
                                  for value, ending in zip(found, question.endings)]) == question.right
            right, ending = self.pieces[at + question.right], question.endings[question.right]
            logprobs.append(found[question.right])
            tokens += len(right.tokens) - right.first
            words += len(ending.split())
            size += len(f" {ending}".encode())
            at += len(question.endings)
        count = len(self.questions)
        return Outcome(logprob=math.fsum(logprobs), tokens=tokens, words=words, bytes=size, examples=count,
                       rates={"acc": acc / count, "acc_norm": acc_norm / count})


def _largest(values: Sequence[float]) -> int:
    return max(range(len(values)), key=lambda place: values[place])


def prepare(asked: Asked, subject: Subject) -> HellaSwag:
    questions = [_question(line) for line in reading.lines(asked.data)]
    pieces = [continuation(*pair_of(question.query, f" {ending}", subject.tokenizer), subject.length, question.where)
              for question in questions for ending in question.endings]
    return HellaSwag(questions, pieces)


def _question(line: reading.Line) -> Question:
    endings = tuple(_cleaned(ending) for ending in line.texts("endings"))
    text = f"{line.text('activity_label')}: {line.text('ctx_a')} {line.text('ctx_b').capitalize()}"
    return Question(_cleaned(text), endings, line.number("label", len(endings)), line.where)


def _cleaned(text: str) -> str:
    """Without the marks of how-to articles."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")
