"""What a token is drawn from, against the slow obvious way, and that it is drawn from that; and the text of tokens."""

from __future__ import annotations

import io
import math
import random
from collections.abc import Callable, Collection, Iterable
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from data.gpt2_bpe import byte_alphabet
from data.tokenizer import (ByteLevelTokenizer, CharacterLevelTokenizer, GPT2BPETokenizer, SentencePieceTokenizer,
                            Tokenizer)
from megatron.errors import ConfigError
from megatron.inference.generation import (DECODE_WINDOW, Detokenizer, GeneratedSequence, apply_repetition_penalty,
                                           candidate_probabilities, gumbel_noise, sample_tokens)
from megatron.inference.request import Request, Sampling
from tests.megatron.counting import Launches

LOGITS = torch.randn(40, generator=torch.Generator().manual_seed(2)) * 2

SETTINGS = [
    Sampling(), Sampling(temperature=0.5), Sampling(temperature=3.0, top_k=7), Sampling(top_k=1), Sampling(top_k=40),
    Sampling(top_p=0.6), Sampling(top_p=0.01), Sampling(min_p=0.2), Sampling(repetition_penalty=1.7),
    Sampling(temperature=1.3, top_k=20, top_p=0.8, min_p=0.05, repetition_penalty=0.6)]


def probabilities(logits: torch.Tensor, settings: Sampling, seen: Collection[int] = ()) -> torch.Tensor:
    penalized = apply_repetition_penalty(logits[None], settings.repetition_penalty, [seen])
    found, tokens = candidate_probabilities(penalized, settings)
    return torch.zeros(len(logits), dtype=torch.float64).scatter(0, tokens[0], found[0])


def drawn(settings: Sampling, stream: str, count: int) -> torch.Tensor:
    """So many tokens, in turn."""
    return sample_tokens(LOGITS.expand(count, -1), settings, keys(stream, count), [()] * count)


def keys(stream: str, count: int) -> torch.Tensor:
    numbers = random.Random(stream)
    return torch.tensor([numbers.getrandbits(64) - (1 << 63) for _ in range(count)])


def splitmix64(number: int) -> int:
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        number = (number ^ number >> shift) * factor % 2**64
    return number ^ number >> 31


def test_noise_is_that_of_splitmix64() -> None:
    numbers, tokens = keys("noise", 50), torch.arange(1, 51)
    for key, token, noise in zip(*map(torch.Tensor.tolist, (numbers, tokens, gumbel_noise(numbers, tokens)))):
        uniform = ((splitmix64((token * 0x9E3779B97F4A7C15 + key) % 2**64) >> 11) + 0.5) / 2**53
        assert math.isclose(noise, -math.log(-math.log(uniform)), rel_tol=1e-12)


def slowly(settings: Sampling, seen: set[int]) -> list[float]:
    scores = {token: float(score) for token, score in enumerate(LOGITS.double())}
    for token in seen:
        penalty = settings.repetition_penalty
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    weights = {token: math.exp(score / settings.temperature) for token, score in scores.items()}
    order = sorted(weights, key=lambda token: -weights[token])
    if settings.top_k:
        order = order[: settings.top_k]
    total, kept, so_far = sum(weights[token] for token in order), [], 0.0
    for token in order:
        if so_far / total < settings.top_p:
            kept.append(token)
        so_far += weights[token]
    kept = [token for token in kept if weights[token] >= settings.min_p * weights[kept[0]]]
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(LOGITS))]


def test_probabilities_are_those_of_the_slow_way() -> None:
    before = LOGITS.clone()
    for settings, seen in product(SETTINGS, (set[int](), {0, 3, 39})):
        found = probabilities(LOGITS, settings, seen)
        assert found.tolist() == pytest.approx(slowly(settings, seen), abs=1e-12), settings
    assert torch.equal(LOGITS, before)


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    settings = SETTINGS[-1]
    draws, expected = 20_000, probabilities(LOGITS, settings)
    counts = drawn(settings, "5/0", draws).bincount(minlength=len(LOGITS)).double()
    assert not counts[expected == 0].any()
    likely = expected * draws >= 5
    chi = ((counts - expected * draws).square() / (expected * draws))[likely].sum().item()
    freedom = int(likely.sum()) - 1
    assert chi < freedom + 4 * math.sqrt(2 * freedom), "more than four deviations away"


def test_rows_are_drawn_as_each_would_be_alone_and_nothing_waits_for_the_device() -> None:
    logits, own = torch.randn(5, 40, generator=torch.Generator().manual_seed(3)), keys("b", 5)
    seen = [(), (1, 2), (39,), (0, 0, 5), (7,)]
    for settings in SETTINGS:
        alone = [int(sample_tokens(logits[row][None], settings, own[row][None], [seen[row]])) for row in range(5)]
        with Launches() as launches:
            together = sample_tokens(logits, settings, own, seen)
        assert together.tolist() == alone, settings
        assert not {"_local_scalar_dense", "nonzero", "masked_select", "unique"} & launches.by_name.keys()


def test_settings_without_a_meaning_are_refused() -> None:
    for name, value in (("temperature", 0.0), ("temperature", -1.0), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.1),
                        ("min_p", 2.0), ("repetition_penalty", 0.0)):
        with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} is"):
            Sampling(**{name: value})  # type: ignore[arg-type]


# ---- text: the same as decoding every beginning, in linear work ---------------------------------------------------


WORDS = "the cat sat on the mat é ü 日本語"
BYTES = bytes((0xF0, 0x9F, 0x98, 0x80, 0xE2, 0x82, 0xAC, 0xEF, 0xBF, 0xBD, 0xC3, 0x41))
"""Characters of 2 to 4 bytes and U+FFFD itself: in any order, most of them are broken."""


@cache
def sentencepiece_of(**more: Any) -> Tokenizer:
    import sentencepiece

    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter([WORDS] * 50), model_writer=made, minloglevel=2,
                                             hard_vocab_limit=False, **more)
    with TemporaryDirectory() as folder:
        (path := Path(folder) / "model").write_bytes(made.getvalue())
        return SentencePieceTokenizer(str(path))


def characters() -> Tokenizer:
    with TemporaryDirectory() as folder:
        (path := Path(folder) / "text").write_text("abc é日 \ufffd")
        return CharacterLevelTokenizer(str(path))


def byte_ids(tokenizer: Tokenizer) -> list[int]:
    """The tokens that are single bytes."""
    if isinstance(tokenizer, GPT2BPETokenizer):
        order = list(byte_alphabet().values())
        return [order.index(byte) for byte in BYTES]
    if isinstance(tokenizer, SentencePieceTokenizer):  # with control tokens, which have no text
        return [tokenizer._model.piece_to_id(f"<0x{byte:02X}>") for byte in BYTES] + [0, 1, 2]
    return [byte % tokenizer.vocab_size for byte in BYTES]


@pytest.mark.parametrize("make", [
    GPT2BPETokenizer, ByteLevelTokenizer, characters,
    lambda: sentencepiece_of(model_type="bpe", vocab_size=290, byte_fallback=True),
    lambda: sentencepiece_of(model_type="unigram", vocab_size=40)],
    ids=["gpt2", "bytes", "characters", "sentencepiece with bytes", "sentencepiece"])
def test_text_and_places_of_tokens_are_those_of_decoding_every_beginning(make: Callable[[], Tokenizer]) -> None:
    tokenizer, draw = make(), random.Random(1)
    texts = [WORDS + " 😀 \ufffd\ufffd x" + WORDS * 2, "\ufffd" * 40, "😀" * 60]
    for trial in range(60):
        ids = [[draw.randrange(tokenizer.vocab_size + 2) for _ in range(100)],
               [token for token in tokenizer.encode(texts[trial // 4 % 3]) if draw.random() < 0.95][:150],
               draw.choices(byte_ids(tokenizer), k=100),
               [draw.choice((tokenizer.eod, draw.randrange(20))) for _ in range(100)]][trial % 4]
        found = Detokenizer(tokenizer.decode)
        for start in range(0, len(ids), 7):  # as they come
            found.extend(ids[start : start + 7])
            assert found.text == tokenizer.decode(ids[: start + 7])
        assert found.offsets == [len(tokenizer.decode(ids[:number])) for number in range(len(ids))]


class Counting:
    """A tokenizer that counts the tokens it decodes."""

    def __init__(self) -> None:
        self._tokenizer, self.decoded = ByteLevelTokenizer(), 0

    def decode(self, ids: Iterable[int]) -> str:
        found = list(ids)
        self.decoded += len(found)
        return self._tokenizer.decode(found)


def test_an_answer_that_is_looked_at_after_each_token_decodes_each_a_few_times() -> None:
    for length in (256, 2048):
        counts = Counting()
        text = GeneratedSequence(Request(0, (65,), length, Sampling(), "0", ("zz", "yy")), Detokenizer(counts.decode))
        for _ in range(length):
            text.tokens.append(65)
            assert "zz" not in text.detokenized().text
        assert counts.decoded <= 3 * DECODE_WINDOW * length
