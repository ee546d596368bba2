"""Perplexity of any text, in any of the three forms that it comes in."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from data.storage import DataError
from data.writer import CorpusWriter
from megatron.errors import ConfigError
from megatron.evaluate.eval_args import EvalRequest
from megatron.evaluate.scoring import EvalModelInfo
from megatron.evaluate.tasks import prepare_task
from megatron.model.gpt2 import GPT2
from tests.megatron.evaluate.models import BYTES, LENGTH, SHAPE, logprob, outcome, write_lines

TEXTS = ["one text\n", "another text, which is longer than the model has positions", "ünïcode 文", "x y", "",
         "six words in the last one"]
CLOSE = 1e-5


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "texts.jsonl", [{"text": text} for text in TEXTS])


def corpus(prefix: Path, eod: bool) -> Path:
    with CorpusWriter(prefix, tokenizer=BYTES.facts) as writer:
        for text in TEXTS:
            writer.add_document([*BYTES.encode(text), *([BYTES.eod] if eod else [])])
    return prefix


def test_documents_in_a_row_are_what_training_reads(lines: Path) -> None:
    model, row = GPT2(SHAPE), BYTES.encode(TEXTS[0])
    for text in TEXTS[1:]:
        row += [BYTES.eod, *BYTES.encode(text)] if text else []
    total = sum(logprob(model, row[(place - 1) // LENGTH * LENGTH : place], row[place]) for place in range(1, len(row)))
    found = outcome(model, task="perplexity", protocol="megatron", data=lines)
    assert found.tokens == len(row) - 1 and found.examples == 5
    assert found.words == sum(len(text.split()) for text in TEXTS)
    assert found.bytes == len("".join(TEXTS).encode())
    assert found.logprob == pytest.approx(total, rel=CLOSE)


def test_documents_one_by_one_do_not_see_each_other(lines: Path, tmp_path: Path) -> None:
    model = GPT2(SHAPE)
    found = outcome(model, task="perplexity", protocol="lm-eval", data=lines)
    apart = [outcome(model, task="perplexity", protocol="lm-eval",
                     data=write_lines(tmp_path / f"{number}.jsonl", [{"text": text}]))
             for number, text in enumerate(TEXTS) if text]
    assert found.tokens == sum(len(text.encode()) for text in TEXTS)
    assert found.logprob == pytest.approx(sum(one.logprob for one in apart), rel=CLOSE)


@pytest.mark.parametrize("protocol", ["megatron", "lm-eval"])
@pytest.mark.parametrize("eod", [False, True])
def test_a_corpus_is_the_text_it_was_made_of(lines: Path, tmp_path: Path, protocol: str, eod: bool) -> None:
    model, prefix = GPT2(SHAPE), corpus(tmp_path / "corpus", eod)
    for part in (None, "train", "valid", "test"):
        assert outcome(model, task="perplexity", protocol=protocol, data=prefix, part=part) == (
            outcome(model, task="perplexity", protocol=protocol, data=lines, part=part))


def test_a_part_is_that_of_the_split_that_the_model_was_trained_with(lines: Path, tmp_path: Path) -> None:
    model = GPT2(SHAPE)
    for part, texts in (("train", TEXTS[:3]), ("valid", TEXTS[3:5]), ("test", TEXTS[5:])):  # SUBJECT says 2,1,1
        only = write_lines(tmp_path / f"{part}.jsonl", [{"text": text} for text in texts])
        assert outcome(model, task="perplexity", protocol="lm-eval", data=lines, part=part) == (
            outcome(model, task="perplexity", protocol="lm-eval", data=only))
    with pytest.raises(ConfigError, match="does not say how its text was split"):
        outcome(model, task="perplexity", protocol="megatron", data=lines, part="valid",
                subject=EvalModelInfo(BYTES, LENGTH))
    with pytest.raises(DataError, match="leaves it no document"):
        outcome(model, task="perplexity", protocol="megatron", data=lines, part="test",
                subject=EvalModelInfo(BYTES, LENGTH, {"split": "1,1,0"}))


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufefftwo lines\r\nof it\n".encode())
    same = write_lines(tmp_path / "a.jsonl", [{"text": "two lines\r\nof it\n"}])
    model = GPT2(SHAPE)
    assert outcome(model, task="perplexity", protocol="megatron", data=tmp_path / "a.txt") == (
        outcome(model, task="perplexity", protocol="megatron", data=same))


def test_a_corpus_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    with CorpusWriter(tmp_path / "c", tokenizer=BYTES.facts.__class__("Other", "0" * 16, 257, 256)) as writer:
        writer.add_document([1, 2, 3])
    with pytest.raises(DataError, match="made with another tokenizer \\(Other\\)"):
        outcome(GPT2(SHAPE), task="perplexity", protocol="megatron", data=tmp_path / "c")
    with CorpusWriter(tmp_path / "d", vocab_size=300) as writer:
        writer.add_document([1, 299, 3])
    with pytest.raises(DataError, match="document 0, offset 1: token id 299"):
        outcome(GPT2(SHAPE), task="perplexity", protocol="megatron", data=tmp_path / "d")


@pytest.mark.parametrize("part", [None, "train"])
@pytest.mark.parametrize("protocol", ["megatron", "lm-eval"])
def test_what_is_kept_of_a_text_is_its_tokens(tmp_path: Path, protocol: str, part: str | None) -> None:
    text = "a few words " * 200
    data = write_lines(tmp_path / "a.jsonl", [{"text": text, "other": 3 * text} for _ in range(400)])
    asked = EvalRequest(task="perplexity", protocol=protocol, data=str(data), part=part)
    tracemalloc.start()
    try:
        task = prepare_task(asked, EvalModelInfo(BYTES, 1024, {"split": "8,1,1"}))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert all(piece.tokens.dtype == np.uint16 for piece in task.requests)
    tokens = (320 if part else 400) * len(text)
    assert 2 * tokens < peak < 5 * tokens  # two bytes each, once more while they are put together, and what is small


@pytest.mark.parametrize(("content", "words"), [
    (b"", "a.jsonl: the file is empty"), (b"\n\n", "the file is empty"), (b'{"text": "a b"}\nx\n', "line 2: not JSON"),
    (b'{"text": "a b"}\n{"txt": 1}\n', "line 2: expected a key 'text', found 'txt'"),
    (b'{"text": "a b"}\n\n[1]\n', "line 3: expected a JSON object, found list"),
    (b'{"text": 3}\n', "line 1: 'text': expected text, found int"), (b'{"text": "\xff"}', "line 1: not UTF-8"),
    (b'{"text": ""}\n', "no token to score"), (b'{"text": "a\\ud800"}', "line 1: a lone surrogate"),
    (b'{"text": "x"}\n', "1 token: the first one is not scored"),
])
def test_a_file_that_will_not_do_is_refused_with_its_line(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=words):
        outcome(GPT2(SHAPE), task="perplexity", protocol="megatron", data=tmp_path / "a.jsonl")


def test_of_an_object_it_is_the_text_that_training_took(tmp_path: Path) -> None:
    """Or its `text`, where the file is another one."""
    model, other = GPT2(SHAPE), EvalModelInfo(BYTES, LENGTH, {"text_key": "body"})
    both = write_lines(tmp_path / "a.jsonl", [{"text": "title", "body": text} for text in TEXTS])
    bodies = write_lines(tmp_path / "b.jsonl", [{"text": text} for text in TEXTS])
    expected = outcome(model, task="perplexity", protocol="lm-eval", data=bodies)
    for data in (both, bodies):
        assert outcome(model, task="perplexity", protocol="lm-eval", data=data, subject=other) == expected


def test_a_part_that_had_data_of_its_own_is_not_looked_for_in_the_split(lines: Path) -> None:
    subject = EvalModelInfo(BYTES, LENGTH, {"split": "2,1,1", "valid_data": ("mine.jsonl",)})
    with pytest.raises(ConfigError, match="--valid-data mine.jsonl: give that as --data, without --part"):
        outcome(GPT2(SHAPE), task="perplexity", protocol="lm-eval", data=lines, part="valid", subject=subject)
    assert outcome(GPT2(SHAPE), task="perplexity", protocol="lm-eval", data=lines, part="test", subject=subject)
