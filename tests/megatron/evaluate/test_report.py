"""What is printed where a metric is too large, or is none."""

from __future__ import annotations

import json
import math

import numpy as np

from megatron.evaluate.cli import format_json, format_table
from megatron.evaluate.scoring import ScoringRequest, TargetScore
from megatron.evaluate.tasks import EvalTask

TOKENIZER = {"tokenizer": {"name": "Bytes", "fingerprint": "0123", "ids": 257}, "seconds": 1.25}


def metrics(logprob: float, tokens: int, words: int, size: int) -> dict[str, object]:
    task = EvalTask(requests=[ScoringRequest(np.zeros(tokens + 1, np.uint8), 1)], words=words, bytes=size)
    return dict(task.metrics([TargetScore(logprob, False)]))


def test_what_is_too_large_for_a_number_is_null_in_json() -> None:
    found = metrics(-1e6, 100, 10, 50) | TOKENIZER
    values = json.loads(format_json(found), parse_constant=refuse)
    assert (values["loss"], values["perplexity"], values["adjusted_perplexity"]) == (1e4, None, None)
    assert values["bits_per_byte"] == 1e6 / math.log(2) / 50
    assert "\nperplexity           inf\n" in format_table(found)


def refuse(word: str) -> float:
    raise AssertionError(f"{word} is no JSON")


def test_without_words_or_bytes_there_is_nothing_to_divide_by() -> None:
    found = metrics(-3.0, 2, 0, 0) | TOKENIZER
    assert found["adjusted_perplexity"] is None and found["bits_per_byte"] is None
    assert "\nadjusted perplexity  -\nbits per byte        -\n" in format_table(found)
    assert format_table(found).endswith("\ntokenizer            Bytes 0123 (257 ids)\nseconds              1.2")
