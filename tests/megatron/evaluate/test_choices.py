"""LAMBADA and HellaSwag: right where the answer was planted, wrong where it was not; the rules of each protocol."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from data.gpt2_bpe import GPT2BPETokenizer
from data.storage import DataError
from megatron.evaluate import hellaswag, lambada
from megatron.evaluate.eval_args import EvalRequest
from megatron.evaluate.task import EvalModelInfo
from megatron.model.gpt2 import GPT2
from tests.megatron.evaluate.models import BYTES, LENGTH, SHAPE, SUBJECT, chain, logprob, outcome, write_lines

WORDS = chain(b" abc")
"""abc follows abc."""

RULES = [("megatron", False), ("megatron", True), ("openai", False), ("lm-eval", False)]


@pytest.mark.parametrize(("protocol", "strict"), RULES)
def test_planted_last_words_are_found_and_others_are_not(tmp_path: Path, protocol: str, strict: bool) -> None:
    right = [{"text": "abc " * count + "abc"} for count in range(1, 12)]
    wrong = [{"text": "abc " * count + "abd"} for count in range(1, 12)]
    for lines, share in ((right, 1.0), (wrong, 0.0), ([*right, *wrong[:1]], 11 / 12)):
        found = outcome(WORDS, task="lambada", protocol=protocol, strict=strict,
                        data=write_lines(tmp_path / "a.jsonl", lines))
        assert found.accuracies == {"acc": share, "correct": round(share * len(lines))}
        assert found.examples == found.words == len(lines)


def test_the_last_token_may_be_right_where_the_word_is_not(tmp_path: Path) -> None:
    data = write_lines(tmp_path / "a.jsonl", [{"text": "abc abc bbc"}])
    assert outcome(WORDS, task="lambada", protocol="megatron", data=data).accuracies["acc"] == 1
    assert outcome(WORDS, task="lambada", protocol="megatron", strict=True, data=data).accuracies["acc"] == 0
    assert outcome(WORDS, task="lambada", protocol="lm-eval", data=data).accuracies["acc"] == 0


@pytest.mark.parametrize(("protocol", "strict"), RULES)
def test_loss_is_that_of_what_is_to_come_after_the_end_of_what_is_before(tmp_path: Path, protocol: str,
                                                                         strict: bool) -> None:
    """A passage that is longer than the position table loses its beginning."""
    model, total, count = GPT2(SHAPE), 0.0, 0
    texts = ["a short one", "a passage, one that is longer than all the positions there are"]
    for text in texts:
        first = text.rindex(" ") if strict or protocol == "lm-eval" else len(text) - 1
        for place in range(first, len(text)):
            total += logprob(model, list(text.encode())[max(0, len(text) - 1 - LENGTH) : place], text.encode()[place])
            count += 1
    found = outcome(model, task="lambada", protocol=protocol, strict=strict,
                    data=write_lines(tmp_path / "a.jsonl", [{"text": text} for text in texts]))
    assert found.tokens == found.bytes == count
    assert found.logprob == pytest.approx(total, rel=1e-5)
    assert found.adjusted_perplexity == pytest.approx(math.exp(-total / 2), rel=1e-3)


def test_words_are_cut_off_by_the_rule_of_each_protocol(tmp_path: Path) -> None:
    """Of a passage with a line end before its last word, and a space behind it."""
    data = write_lines(tmp_path / "a.jsonl", [{"text": "He said\n no \n  way "}])

    def parts(protocol: str, strict: bool = False) -> tuple[str, str]:
        (piece,) = lambada.prepare(EvalRequest(task="lambada", protocol=protocol, data=str(data), strict=strict),
                                   SUBJECT).requests
        return (BYTES.decode(piece.tokens[: piece.first_target].tolist()),
                BYTES.decode(piece.tokens[piece.first_target :].tolist()))

    assert parts("megatron") == parts("openai") == ("He said\n no \n  way", " ")
    assert parts("megatron", strict=True) == ("He said\n no", " way")
    assert parts("lm-eval") == ("He said\n no \n  way", " ")


def test_a_target_is_tokenized_with_what_is_before_it() -> None:
    gpt2 = GPT2BPETokenizer()
    for context, target in (("I do", " not"), ("I do ", "not"), ("", " word"), ("a\n", " b")):
        before, targets = lambada.encode_pair(context, target, gpt2)
        assert before == (gpt2.encode(context.rstrip()) or [gpt2.eod])
        assert gpt2.decode([*before, *targets]).removeprefix("<|endoftext|>") == context + target


QUESTION = {"activity_label": "abc", "ctx_a": "abc abc", "ctx_b": "Abc abc", "label": 2,
            "endings": ["abd", "aaaa", "abc abc", "cab cab"]}


def test_planted_endings_are_found_and_others_are_not(tmp_path: Path) -> None:
    for label, share in (("2", 1.0), (2, 1.0), (0, 0.0), (3, 0.0)):
        data = write_lines(tmp_path / "a.jsonl", [{**QUESTION, "label": label}] * 3)
        found = outcome(WORDS, task="hellaswag", protocol="lm-eval", data=data)
        assert found.accuracies == {"acc": share, "acc_norm": share} and found.examples == 3


def logprobs_of(model: GPT2, text: bytes, endings: Sequence[str]) -> list[float]:
    found = []
    for ending in endings:
        ids = [*text, *f" {ending}".encode()]
        begin = max(0, len(ids) - 1 - LENGTH)
        found.append(sum(logprob(model, ids[begin:place], ids[place]) for place in range(len(text), len(ids))))
    return found


def test_acc_takes_the_likeliest_ending_and_acc_norm_the_likeliest_per_character(tmp_path: Path) -> None:
    """Not per byte: among the questions are some where each way of choosing takes another ending."""
    model, rng, met = GPT2(SHAPE), random.Random(2), list[list[int]]()
    for _ in range(12):
        endings = rng.sample(["x", "zz", "öß", "üüü", "文文", "some of it", "to the end", "éé ü", "a", "ab é"], 4)
        logprobs = logprobs_of(model, b"Do: so And", endings)
        ways = [max(range(4), key=lambda place: logprobs[place] / length(endings[place]))
                for length in (lambda ending: 1, len, lambda ending: len(ending.encode()))]
        met.append(ways)
        for label in range(4):
            data = write_lines(tmp_path / "a.jsonl", [{"activity_label": "Do", "ctx_a": "so", "ctx_b": "AND",
                                                       "endings": endings, "label": label}])
            found = outcome(model, task="hellaswag", protocol="lm-eval", data=data)
            assert found.accuracies == {"acc": label == ways[0], "acc_norm": label == ways[1]}
            assert found.logprob == pytest.approx(logprobs[label], rel=1e-5)
            assert (found.words, found.bytes) == (len(endings[label].split()), len(f" {endings[label]}".encode()))
    assert any(ways[0] != ways[1] for ways in met) and any(ways[1] != ways[2] for ways in met)


def test_the_marks_of_how_to_articles_are_taken_out(tmp_path: Path) -> None:
    data = write_lines(tmp_path / "a.jsonl", [
        {"activity_label": "Home", "ctx_a": "[header] How to [title] Do it", "ctx_b": "then WE", "label": 0,
         "endings": [" [step] Go on.  So ", "b"]}])
    task = hellaswag.prepare(EvalRequest(task="hellaswag", protocol="lm-eval", data=str(data)),
                             EvalModelInfo(BYTES, 99))
    (question,) = task.questions
    assert (question.query, question.endings) == ("Home: How to. Do it Then we", (" Go on. So", "b"))
    assert BYTES.decode(task.requests[0].tokens.tolist()) == "Home: How to. Do it Then we  Go on. So"


@pytest.mark.parametrize(("task", "line", "words"), [
    ("lambada", {"text": " \n"}, "line 1: 'text': expected a passage"),
    ("lambada", {"text": f"a {'b' * 30}"}, "line 1: 31 tokens to score, and the model has 24 positions"),
    ("hellaswag", {**QUESTION, "label": 4}, "line 1: 'label': expected a number from 0 to 3, found 4"),
    ("hellaswag", {**QUESTION, "label": ""}, "line 1: 'label': expected a number"),
    ("hellaswag", {**QUESTION, "label": True}, "line 1: 'label': expected a number"),
    ("hellaswag", {**QUESTION, "endings": []}, "line 1: 'endings': expected a list of texts"),
    ("hellaswag", {**QUESTION, "endings": ["a", 1]}, "line 1: 'endings': expected a list of texts"),
    ("hellaswag", {**QUESTION, "endings": "a"}, "line 1: 'endings': expected a list of texts, found str"),
    ("hellaswag", {"text": "a"}, "line 1: expected a key 'endings', found 'text'"),
])
def test_a_line_that_will_not_do_is_refused(tmp_path: Path, task: str, line: dict[str, object], words: str) -> None:
    with pytest.raises(DataError, match=words):
        outcome(WORDS, task=task, protocol="lm-eval", data=write_lines(tmp_path / "a.jsonl", [line]))
