"""HellaSwag: which of four endings continues a text, by lm-eval's rules.

`acc` takes the ending with the largest log-likelihood, `acc_norm` the one with the largest log-likelihood per
character; ties go to the first.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import final

from megatron.evaluate import task_files
from megatron.evaluate.eval_args import EvalRequest
from megatron.evaluate.lambada import encode_pair
from megatron.evaluate.scoring import ScoringRequest, TargetScore, continuation_request
from megatron.evaluate.task import EvalModelInfo, EvalResult


@dataclass(frozen=True)
class HellaSwagQuestion:
    query: str
    endings: tuple[str, ...]
    label: int
    location: str


@final
@dataclass(frozen=True)
class HellaSwagTask:
    questions: Sequence[HellaSwagQuestion]
    requests: Sequence[ScoringRequest]
    """One for each ending of each question, in order."""
    stride: None = None

    @property
    def num_truncated(self) -> int:
        """Questions with at least one truncated request."""
        ends = list(accumulate(len(question.endings) for question in self.questions))
        return sum(any(request.is_truncated for request in self.requests[start:end])
                   for start, end in zip([0, *ends], ends))

    def result(self, scores: Sequence[TargetScore]) -> EvalResult:
        """Loss, words and bytes are those of the right endings."""
        acc = acc_norm = tokens = words = size = 0
        logprobs, at = [], 0
        for question in self.questions:
            of_endings = [score.logprob for score in scores[at : at + len(question.endings)]]
            acc += _argmax(of_endings) == question.label
            acc_norm += _argmax([value / len(ending) if ending else -math.inf
                                 for value, ending in zip(of_endings, question.endings)]) == question.label
            right, ending = self.requests[at + question.label], question.endings[question.label]
            logprobs.append(of_endings[question.label])
            tokens += right.num_targets
            words += len(ending.split())
            size += len(f" {ending}".encode())
            at += len(question.endings)
        count = len(self.questions)
        return EvalResult(logprob=math.fsum(logprobs), tokens=tokens, words=words, bytes=size, examples=count,
                          accuracies={"acc": acc / count, "acc_norm": acc_norm / count})


def _argmax(values: Sequence[float]) -> int:
    return max(range(len(values)), key=lambda place: values[place])


def prepare(request: EvalRequest, model_info: EvalModelInfo) -> HellaSwagTask:
    questions = []
    for line in task_files.read_json_lines(request.data):
        endings = tuple(_clean(ending) for ending in line.get_texts("endings"))
        text = f"{line.get_text('activity_label')}: {line.get_text('ctx_a')} {line.get_text('ctx_b').capitalize()}"
        questions.append(HellaSwagQuestion(_clean(text), endings, line.get_index("label", len(endings)), line.location))
    requests = [continuation_request(*encode_pair(question.query, f" {ending}", model_info.tokenizer),
                                     model_info.max_positions, question.location) for question in questions
                for ending in question.endings]
    return HellaSwagTask(questions, requests)


def _clean(text: str) -> str:
    """Removes the markup of WikiHow articles."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")
