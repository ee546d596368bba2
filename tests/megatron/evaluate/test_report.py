"""What is printed where a figure is too large, or is none."""

from __future__ import annotations

import json
import math

from data.format import TokenizerFacts
from megatron.evaluate.eval_args import EvalRequest
from megatron.evaluate.eval_report import EvalReport
from megatron.evaluate.task import EvalResult


def report(outcome: EvalResult) -> EvalReport:
    return EvalReport(request=EvalRequest(task="perplexity", protocol="megatron", data="a.txt"), result=outcome,
                      model="m", dtype="bf16", tokenizer=TokenizerFacts("Bytes", "0123", 257, 256), ranks=2,
                      model_parallel_size=1, window=8, stride=8, truncated=None, seconds=1.25)


def test_what_is_too_large_for_a_number_is_null_in_json() -> None:
    found = report(EvalResult(logprob=-1e6, tokens=100, words=10, bytes=50))
    values = json.loads(found.as_json(), parse_constant=refuse)
    assert (values["loss"], values["perplexity"], values["adjusted_perplexity"]) == (1e4, None, None)
    assert values["bits_per_byte"] == 1e6 / math.log(2) / 50
    assert "\nperplexity           inf\n" in found.as_text()


def refuse(word: str) -> float:
    raise AssertionError(f"{word} is no JSON")


def test_without_words_or_bytes_there_is_nothing_to_divide_by() -> None:
    found = report(EvalResult(logprob=-3.0, tokens=2, words=0, bytes=0))
    assert found.as_dict()["adjusted_perplexity"] is None and found.as_dict()["bits_per_byte"] is None
    assert "\nadjusted perplexity  -\nbits per byte        -\n" in found.as_text()
    assert found.as_text().endswith("\nseconds              1.2")


def test_table_and_json_have_the_same_names_and_say_how_it_was_found() -> None:
    found = report(EvalResult(logprob=-3.0, tokens=2, words=2, bytes=2, accuracies={"acc_norm": 0.5}, examples=3))
    values, table = json.loads(found.as_json()), found.as_text().splitlines()
    assert [line[:20].strip().replace(" ", "_") for line in table] == list(values)
    assert "tokenizer            Bytes 0123 (257 ids)" in table and "dtype                bf16" in table
    assert values["tokenizer"] == {"name": "Bytes", "fingerprint": "0123", "ids": 257}
    assert (values["dtype"], values["ranks"], values["model_parallel_size"]) == ("bf16", 2, 1)
