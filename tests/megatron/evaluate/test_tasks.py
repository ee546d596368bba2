"""The tasks by each protocol, against slow references written from their descriptions."""

from __future__ import annotations

import math
import re
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from data.tokenizer import GPT2BPETokenizer
from data.storage import DataError
from data.writer import CorpusWriter
from megatron.errors import ConfigError
from megatron.evaluate.cli import EvalRequest
from megatron.evaluate.tasks import EvalModelInfo, detokenize, prepare_task, split_articles
from megatron.model.gpt2 import GPT2
from tests.megatron.evaluate.models import BYTES, LENGTH, SHAPE, WIKITEXT, chain, logprob, outcome, write_lines

CLOSE = 1e-5
"""Relative, of losses: logits are fp32 products of 48 numbers in another order."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "wiki.txt").write_bytes(WIKITEXT.encode())
    return tmp_path / "wiki.txt"


def test_the_detokeniser_undoes_what_was_done_to_the_text() -> None:
    assert detokenize(" = = A = = \n It 's 3 @.@ 5 @-@ fold , ( x ) and [ y ] { z } ; \" so \" : 4 ° C . \n") == (
        " == A ==\nIt's 3.5-fold, (x) and [y] {z}; \"so\": 4°C.\n")
    assert detokenize("the 1990s ' end N = = = = 7 @,@ 000 ! Is it ?") == "the 1990s' end 1 ==== 7,000! Is it ?"
    assert detokenize("He said ' no ' . N") == "He said 'no'. N"
    assert detokenize("/' 4/ a/' 4/") == "/'[0-9]/ a/'[0-9]/"  # a slip that every published figure has


def test_articles_begin_at_headings_of_the_first_level_and_make_up_the_file() -> None:
    found = list(split_articles(WIKITEXT))
    assert [re.findall(r"^ ?= ([^=]+) = $", page, re.M) for page in found] == [["A title"], ["Another"]]
    assert "\n".join(found) == WIKITEXT


@pytest.mark.parametrize("stride", [None, 1, 7, LENGTH])
def test_megatron_is_what_its_description_says(file: Path, stride: int | None) -> None:
    """Samples of LENGTH + 1 tokens every `stride`, padded; the first counts as a whole, of the others what is new."""
    model, each = GPT2(SHAPE), min(32, LENGTH) if stride is None else stride
    tokens = BYTES.encode(detokenize(WIKITEXT))
    targets = len(tokens) - 1
    total, counted = 0.0, 0
    for number in range(max(math.ceil(max(targets - each, 0) / each) + 1, 1)):
        sample = tokens[number * each : number * each + LENGTH + 1]
        mask = [1] * (len(sample) - 1) + [0] * (LENGTH + 1 - len(sample))
        if number and each != LENGTH:
            mask[:-each] = [0] * (LENGTH - each)
        for place, counts in enumerate(mask):
            if counts:
                total -= logprob(model, sample[: place + 1], sample[place + 1])
                counted += 1
    original = len(WIKITEXT.strip().split(" "))
    found = outcome(model, task="wikitext", protocol="megatron", data=file, stride=stride)
    assert (found.tokens, found.words) == (counted, original) == (targets, original)
    assert found.loss == pytest.approx(total / targets, rel=CLOSE)
    assert found.perplexity == pytest.approx(math.exp(min(20, total / targets)), rel=1e-4)
    ratio = targets / (original - 1)
    assert found.adjusted_perplexity == pytest.approx(math.exp(min(20, total / targets * ratio)), rel=1e-4)
    assert found.bits_per_byte == pytest.approx(total / math.log(2) / len(WIKITEXT.encode()), rel=CLOSE)


def test_openai_reads_the_file_in_one_after_the_end_of_a_document(file: Path, tmp_path: Path) -> None:
    """And shows a perplexity above that of a loss of 20, as megatron does not."""
    model = GPT2(SHAPE)
    (tmp_path / "a.txt").write_text(f"two {'long' * 9} words\n")
    found, other = (outcome(model, task="wikitext", protocol=protocol, data=tmp_path / "a.txt")
                    for protocol in ("megatron", "openai"))
    assert found.adjusted_perplexity == math.exp(20) and other.adjusted_perplexity > 1e10
    tokens = [BYTES.eod, *BYTES.encode(detokenize(WIKITEXT))]
    total = 0.0
    for start in range(0, len(tokens) - 1, LENGTH):
        window = tokens[start : start + LENGTH + 1]
        total -= sum(logprob(model, window[:place], window[place]) for place in range(1, len(window)))
    found = outcome(model, task="wikitext", protocol="openai", data=file)
    assert (found.tokens, found.words) == (len(tokens) - 1, len(WIKITEXT.split()))
    assert found.loss == pytest.approx(total / found.tokens, rel=CLOSE)
    assert found.bits_per_byte == pytest.approx(total / math.log(2) / len(WIKITEXT.encode()), rel=CLOSE)


def test_lm_eval_reads_each_article_for_itself_and_the_last_window_is_full(file: Path) -> None:
    model, total, words, size = GPT2(SHAPE), 0.0, 0, 0
    pages = list(split_articles(WIKITEXT))
    for page in pages:
        tokens = [BYTES.eod, *BYTES.encode(detokenize(page))]
        for place in range(1, len(tokens)):
            begin = (place - 1) // LENGTH * LENGTH
            if begin + LENGTH > len(tokens) - 1:  # the last window
                begin = max(0, len(tokens) - 1 - LENGTH)
            total -= logprob(model, tokens[begin:place], tokens[place])
        words, size = words + len(re.split(r"\s+", page)), size + len(page.encode())
    found = outcome(model, task="wikitext", protocol="lm-eval", data=file)
    assert (found.words, found.bytes, found.examples) == (words, size, len(pages))
    assert found.loss * found.tokens == pytest.approx(total, rel=CLOSE)
    assert math.log(found.adjusted_perplexity or 0) == pytest.approx(total / words, rel=CLOSE)


@pytest.mark.parametrize("protocol", ["megatron", "openai", "lm-eval"])
def test_json_lines_of_pages_are_the_file_and_a_model_that_knows_nothing_has_the_perplexity_of_its_vocabulary(
        file: Path, tmp_path: Path, protocol: str) -> None:
    """Of 257 tokens; the table has 384 rows."""
    pages = write_lines(tmp_path / "pages.jsonl", [{"page": page} for page in split_articles(WIKITEXT)])
    model = GPT2(SHAPE)
    assert outcome(model, task="wikitext", protocol=protocol, data=pages) == (
        outcome(model, task="wikitext", protocol=protocol, data=file))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    found = outcome(model, task="wikitext", protocol=protocol, data=file)
    assert model.wte.weight.shape[0] == 384
    assert found.perplexity == pytest.approx(257, rel=1e-6)  # log 257 in fp32 is right to 2e-7
    assert found.loss == pytest.approx(math.log(257), rel=1e-7)


# ---- LAMBADA: right where the answer was planted ------------------------------------------------------------------


WORDS = chain(b" abc")
"""abc follows abc."""

RULES = [("megatron", False), ("megatron", True), ("openai", False), ("lm-eval", False)]


@pytest.mark.parametrize(("protocol", "strict"), RULES)
def test_planted_last_words_are_found_and_the_loss_is_that_of_what_is_to_come(tmp_path, protocol, strict):
    """A passage that is longer than the position table loses its beginning."""
    right = [{"text": "abc " * count + "abc"} for count in range(1, 12)]
    whole_word = strict or protocol == "lm-eval"
    for lines, correct in ((right, 11), ([*right, {"text": "abc abc abd"}], 11),
                           ([*right, {"text": "abc abc bbc"}], 11 if whole_word else 12)):
        found = outcome(WORDS, task="lambada", protocol=protocol, strict=strict,
                        data=write_lines(tmp_path / "a.jsonl", lines))
        assert found.accuracies == {"acc": correct / len(lines), "correct": correct}
        assert found.examples == found.words == len(lines)

    model, total, count = GPT2(SHAPE), 0.0, 0
    texts = ["a short one", "a passage, one that is longer than all the positions there are"]
    for text in texts:
        first = text.rindex(" ") if whole_word else len(text) - 1
        for place in range(first, len(text)):
            total += logprob(model, list(text.encode())[max(0, len(text) - 1 - LENGTH) : place], text.encode()[place])
            count += 1
    found = outcome(model, task="lambada", protocol=protocol, strict=strict,
                    data=write_lines(tmp_path / "a.jsonl", [{"text": text} for text in texts]))
    assert found.tokens == found.bytes == count
    assert found.logprob == pytest.approx(total, rel=1e-5)
    assert found.adjusted_perplexity == pytest.approx(math.exp(-total / 2), rel=1e-3)


def test_by_lm_evals_rules_a_target_is_tokenized_with_what_is_before_it(tmp_path: Path) -> None:
    gpt2 = GPT2BPETokenizer()
    for context, target in (("I do", " not"), ("I do ", " not"), ("a\n", " b")):
        data = write_lines(tmp_path / "a.jsonl", [{"text": context + target}])
        (piece,) = prepare_task(EvalRequest(task="lambada", protocol="lm-eval", data=str(data)),
                                EvalModelInfo(gpt2, 99)).requests
        assert piece.tokens[: piece.first_target].tolist() == gpt2.encode(context.rstrip())
        assert gpt2.decode(piece.tokens.tolist()) == context + target


# ---- perplexity of any text, in any of its forms ------------------------------------------------------------------


TEXTS = ["one text\n", "another text, which is longer than the model has positions", "ünïcode 文", "x y", "",
         "six words in the last one"]


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "texts.jsonl", [{"text": text} for text in TEXTS])


def corpus(prefix: Path, eod: bool) -> Path:
    with CorpusWriter(prefix, tokenizer=BYTES.facts) as writer:
        for text in TEXTS:
            tokens = [*BYTES.encode(text), *([BYTES.eod] if eod else [])]
            writer.add_documents(tokens, [len(tokens)])
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


def test_a_corpus_is_the_text_it_was_made_of(lines: Path, tmp_path: Path) -> None:
    model = GPT2(SHAPE)
    for protocol, eod in (("megatron", False), ("lm-eval", True)):
        prefix = corpus(tmp_path / protocol, eod)
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


def test_a_corpus_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    with CorpusWriter(tmp_path / "c", tokenizer=BYTES.facts.__class__("Other", "0" * 16, 257, 256)) as writer:
        writer.add_documents([1, 2, 3], [3])
    with pytest.raises(DataError, match="made with another tokenizer \\(Other\\)"):
        outcome(GPT2(SHAPE), task="perplexity", protocol="megatron", data=tmp_path / "c")
    with CorpusWriter(tmp_path / "d", vocab_size=300) as writer:
        writer.add_documents([1, 299, 3], [3])
    with pytest.raises(DataError, match="document 0, offset 1: token id 299"):
        outcome(GPT2(SHAPE), task="perplexity", protocol="megatron", data=tmp_path / "d")


@pytest.mark.parametrize(("protocol", "part"), [("megatron", None), ("lm-eval", "train")])
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


BAD_FILES = [
    (b"", "a.jsonl: the file is empty"), (b"\n\n", "the file is empty"), (b'{"text": "a b"}\nx\n', "line 2: not JSON"),
    (b'{"text": "a b"}\n{"txt": 1}\n', "line 2: no key 'text'; found 'txt'"),
    (b'{"text": "a b"}\n\n[1]\n', "line 3: expected a JSON object, found an array"),
    (b'{"text": 3}\n', "line 1: key 'text': expected text, found a number"), (b'{"text": "\xff"}', "line 1: not UTF-8"),
    (b'{"text": ""}\n', "no token to score"), (b'{"text": "a\\ud800"}', "line 1: key 'text': lone surrogate"),
    (b'{"text": "x"}\n', "1 token: the first one is not scored"),
]


def test_a_file_that_will_not_do_is_refused_with_its_line(tmp_path: Path) -> None:
    def refused(task: str, protocol: str, content: bytes, words: str) -> None:
        (tmp_path / "a.jsonl").write_bytes(content)
        with pytest.raises(DataError, match=words):
            outcome(WORDS, task=task, protocol=protocol, data=tmp_path / "a.jsonl")

    for content, words in BAD_FILES:
        refused("perplexity", "megatron", content, words)
    refused("lambada", "lm-eval", b'{"text": " \\n"}', "line 1: 'text': expected a passage")
    refused("lambada", "lm-eval", b'{"text": "a %b"}' % (b"b" * 30), "31 tokens to score, and the model has 24 pos")


def test_of_an_object_it_is_the_text_that_training_took(tmp_path: Path) -> None:
    """Or its `text`, where the file is another one."""
    model, other = GPT2(SHAPE), EvalModelInfo(BYTES, LENGTH, {"text_key": "body"})
    both = write_lines(tmp_path / "a.jsonl", [{"text": "title", "body": text} for text in TEXTS])
    bodies = write_lines(tmp_path / "b.jsonl", [{"text": text} for text in TEXTS])
    expected = outcome(model, task="perplexity", protocol="lm-eval", data=bodies)
    for data in (both, bodies):
        assert outcome(model, task="perplexity", protocol="lm-eval", data=data, subject=other) == expected
