"""The protocols of WikiText, against slow references written from their descriptions."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

from megatron.errors import ConfigError
from megatron.evaluate.tasks import detokenize, split_articles
from megatron.model.gpt2 import GPT2
from tests.megatron.evaluate.models import BYTES, LENGTH, SHAPE, WIKITEXT, logprob, outcome, write_lines

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


def test_megatron_shows_no_perplexity_above_that_of_a_loss_of_20(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(f"two {'long' * 9} words\n")
    found, other = (outcome(GPT2(SHAPE), task="wikitext", protocol=protocol, data=tmp_path / "a.txt")
                    for protocol in ("megatron", "openai"))
    assert found.adjusted_perplexity == math.exp(20)
    assert (other.adjusted_perplexity or 0) > 1e10


def test_openai_reads_the_file_in_one_after_the_end_of_a_document(file: Path) -> None:
    model = GPT2(SHAPE)
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
def test_json_lines_of_pages_are_the_file(file: Path, tmp_path: Path, protocol: str) -> None:
    pages = write_lines(tmp_path / "pages.jsonl", [{"page": page} for page in split_articles(WIKITEXT)])
    model = GPT2(SHAPE)
    assert outcome(model, task="wikitext", protocol=protocol, data=pages) == (
        outcome(model, task="wikitext", protocol=protocol, data=file))


@pytest.mark.parametrize("protocol", ["megatron", "openai", "lm-eval"])
def test_the_perplexity_of_a_model_that_knows_nothing_is_its_vocabulary(file: Path, protocol: str) -> None:
    """Of 257 tokens; the table has 384 rows."""
    model = GPT2(SHAPE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    found = outcome(model, task="wikitext", protocol=protocol, data=file)
    assert model.wte.weight.shape[0] == 384
    assert found.perplexity == pytest.approx(257, rel=1e-6)  # log 257 in fp32 is right to 2e-7
    assert found.loss == pytest.approx(math.log(257), rel=1e-7)


def test_a_stride_longer_than_the_position_table_is_refused(file: Path) -> None:
    with pytest.raises(ConfigError, match=f"--stride is {LENGTH + 1}, and the model has {LENGTH} positions"):
        outcome(GPT2(SHAPE), task="wikitext", protocol="megatron", data=file, stride=LENGTH + 1)
