"""LAMBADA: right where the answer was planted, wrong where it was not; the rules of each protocol."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from data.storage import DataError
from data.tokenizer import GPT2BPETokenizer
from megatron.evaluate.eval_args import EvalRequest
from megatron.evaluate.tasks import EvalModelInfo, prepare_task
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
        (piece,) = prepare_task(EvalRequest(task="lambada", protocol=protocol, data=str(data), strict=strict),
                                SUBJECT).requests
        return (BYTES.decode(piece.tokens[: piece.first_target].tolist()),
                BYTES.decode(piece.tokens[piece.first_target :].tolist()))

    assert parts("megatron") == parts("openai") == ("He said\n no \n  way", " ")
    assert parts("megatron", strict=True) == ("He said\n no", " way")
    assert parts("lm-eval") == ("He said\n no \n  way", " ")


def test_by_lm_evals_rules_a_target_is_tokenized_with_what_is_before_it(tmp_path: Path) -> None:
    gpt2 = GPT2BPETokenizer()
    for context, target in (("I do", " not"), ("I do ", " not"), ("a\n", " b")):
        data = write_lines(tmp_path / "a.jsonl", [{"text": context + target}])
        (piece,) = prepare_task(EvalRequest(task="lambada", protocol="lm-eval", data=str(data)),
                                EvalModelInfo(gpt2, 99)).requests
        assert piece.tokens[: piece.first_target].tolist() == gpt2.encode(context.rstrip())
        assert gpt2.decode(piece.tokens.tolist()) == context + target


@pytest.mark.parametrize(("task", "line", "words"), [
    ("lambada", {"text": " \n"}, "line 1: 'text': expected a passage"),
    ("lambada", {"text": f"a {'b' * 30}"}, "line 1: 31 tokens to score, and the model has 24 positions"),
])
def test_a_line_that_will_not_do_is_refused(tmp_path: Path, task: str, line: dict[str, object], words: str) -> None:
    with pytest.raises(DataError, match=words):
        outcome(WORDS, task=task, protocol="lm-eval", data=write_lines(tmp_path / "a.jsonl", [line]))
