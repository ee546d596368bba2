"""LAMBADA: predicts the last word of a passage; correct if every target token is the argmax.

    megatron   the last token; with `strict` the last word, with a space before it
    openai     the last token, as in the published accuracy
    lm-eval    the last word, tokenized together with its context
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from data.storage import DataError
from data.tokenizer_base import Tokenizer
from megatron.evaluate import task_files
from megatron.evaluate.eval_args import EvalRequest
from megatron.evaluate.scoring import ScoringRequest, TargetScore, continuation_request
from megatron.evaluate.task import EvalModelInfo, EvalResult


@final
@dataclass(frozen=True)
class LambadaTask:
    requests: Sequence[ScoringRequest]
    bytes: int
    stride: None = None

    @property
    def num_truncated(self) -> int:
        return sum(request.is_truncated for request in self.requests)

    def result(self, scores: Sequence[TargetScore]) -> EvalResult:
        correct = sum(score.is_greedy for score in scores)
        return EvalResult(logprob=math.fsum(score.logprob for score in scores),
                          tokens=sum(request.num_targets for request in self.requests),
                          words=len(self.requests), bytes=self.bytes, examples=len(self.requests),
                          accuracies={"acc": correct / len(scores), "correct": correct})


def prepare(request: EvalRequest, model_info: EvalModelInfo) -> LambadaTask:
    requests, size, tokenizer = [], 0, model_info.tokenizer
    for line in task_files.read_json_lines(request.data):
        text = line.get_text("text")
        if not text.strip():
            raise DataError(f"{line.location}: 'text': expected a passage, found nothing but white space")
        if request.protocol == "lm-eval":  # splits at the last space
            before, _, word = text.rpartition(" ")
            context, targets = encode_pair(before, f" {word}", tokenizer)
        elif request.strict:
            word = text.split()[-1]
            context, targets = tokenizer.encode(text[: text.rfind(word)].strip()), tokenizer.encode(f" {word}")
        else:
            ids = tokenizer.encode(text)
            context, targets = ids[:-1], ids[-1:]
        requests.append(
            continuation_request(context or [tokenizer.eod], targets, model_info.max_positions, line.location))
        size += len(tokenizer.decode(targets).encode())
    return LambadaTask(requests, size)


def encode_pair(context: str, target: str, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """By lm-eval's rules: spaces at the end of the context belong to the target, and the target is the tokens of both
    texts together without as many as the context alone has."""
    before = tokenizer.encode(context.rstrip())
    return before or [tokenizer.eod], tokenizer.encode(context + target)[len(before):]
