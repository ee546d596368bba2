"""What a token is drawn from, against the slow obvious way, and that it is drawn from that; and the text of tokens."""

from __future__ import annotations

import io
import json
import math
import random
from collections.abc import Callable, Collection, Iterable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from data.gpt2_bpe import byte_alphabet
from data.tokenizer import (ByteLevelTokenizer, CharacterLevelTokenizer, GPT2BPETokenizer, SentencePieceTokenizer,
                            Tokenizer)
from megatron.errors import ConfigError
from megatron.inference.generation import (DECODE_WINDOW, Detokenizer, GeneratedSequence, TokenScores,
                                           candidate_probabilities, gumbel_noise, sample_tokens)
from megatron.inference.request import Request, Sampling
from megatron.serve.admission import ServerLimits
from megatron.serve.api import OpenAICompletion, ServedModel, parse_completion

LOGITS = torch.randn(40, generator=torch.Generator().manual_seed(2)) * 2

SETTINGS = [
    Sampling(), Sampling(temperature=0.5), Sampling(temperature=3.0, top_k=7), Sampling(top_k=1), Sampling(top_k=40),
    Sampling(top_p=0.6), Sampling(top_p=0.01), Sampling(min_p=0.2), Sampling(repetition_penalty=1.7),
    Sampling(temperature=1.3, top_k=20, top_p=0.8, min_p=0.05, repetition_penalty=0.6)]


def probabilities(logits: torch.Tensor, settings: Sampling, seen: Collection[int] = ()) -> torch.Tensor:
    found, tokens = candidate_probabilities(logits[None], settings, [seen])
    return torch.zeros(len(logits), dtype=torch.float64).scatter(0, tokens[0], found[0])


def drawn(settings: Sampling, stream: str, count: int) -> torch.Tensor:
    """So many tokens, in turn."""
    return sample_tokens(LOGITS.expand(count, -1), settings, keys(stream, count), [()] * count)


def keys(stream: str, count: int) -> torch.Tensor:
    numbers = random.Random(stream)
    return torch.tensor([numbers.getrandbits(64) - (1 << 63) for _ in range(count)])


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


@pytest.mark.parametrize("seen", [set(), {0, 3, 39}], ids=str)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_probabilities_are_those_of_the_slow_way(settings: Sampling, seen: set[int]) -> None:
    before = LOGITS.clone()
    found = probabilities(LOGITS, settings, seen)
    assert found.tolist() == pytest.approx(slowly(settings, seen), abs=1e-12) and torch.equal(LOGITS, before)


@pytest.mark.parametrize("settings", [SETTINGS[0], SETTINGS[-1]], ids=str)
def test_tokens_are_drawn_as_often_as_they_are_likely(settings: Sampling) -> None:
    draws, expected = 20_000, probabilities(LOGITS, settings)
    counts = drawn(settings, "5/0", draws).bincount(minlength=len(LOGITS)).double()
    assert not counts[expected == 0].any()
    likely = expected * draws >= 5
    chi = ((counts - expected * draws).square() / (expected * draws))[likely].sum().item()
    freedom = int(likely.sum()) - 1
    assert chi < freedom + 4 * math.sqrt(2 * freedom), "more than four deviations away"


def test_random_numbers_of_neighbours_in_key_and_token_are_as_good_as_any() -> None:
    """Their mean and deviation, that of products of neighbours, and the shares below some bounds: four deviations."""
    found = gumbel_noise(torch.arange(500)[:, None], torch.arange(1000)[None])
    uniform = (-(-found).exp()).exp()
    count = uniform.numel()
    assert bool(found.isfinite().all()) and abs(uniform.mean().item() - 0.5) < 4 * (12 * count) ** -0.5
    for bound in (0.001, 0.1, 0.5, 0.9, 0.999):
        share = (uniform < bound).double().mean().item()
        assert abs(share - bound) < 4 * (bound * (1 - bound) / count) ** 0.5
    for first, second in ((uniform[:, 1:], uniform[:, :-1]), (uniform[1:], uniform[:-1])):
        assert abs(((first - 0.5) * (second - 0.5)).mean().item()) < 4 / 12 * first.numel() ** -0.5


def test_last_digits_change_a_draw_only_where_it_was_near() -> None:
    """Of a flat distribution, whose border of top-p moves with them."""
    made = torch.Generator().manual_seed(5)
    logits, count = torch.randn(20000, generator=made).double() * 0.01, 200
    for settings in (Sampling(top_p=0.5), Sampling(top_k=5000), Sampling(min_p=0.99), Sampling()):
        first = sample_tokens(logits.expand(count, -1), settings, keys("a", count), [()] * count)
        moved = logits * (1 + 1e-6 * torch.randn(20000, generator=made))
        again = sample_tokens(moved.expand(count, -1), settings, keys("a", count), [()] * count)
        assert (first != again).sum() <= 1 and len(first.unique()) > 20


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_rows_are_drawn_as_each_would_be_alone_and_nothing_waits_for_the_device(settings: Sampling) -> None:
    made = torch.Generator().manual_seed(3)
    logits, own = torch.randn(5, 40, generator=made), keys("b", 5)
    seen = [(), (1, 2), (39,), (0, 0, 5), (7,)]
    alone = [int(sample_tokens(logits[row][None], settings, own[row][None], [seen[row]])) for row in range(5)]
    with Waits() as waits:
        together = sample_tokens(logits, settings, own, seen)
    assert together.tolist() == alone and not waits.found


class Waits(TorchDispatchMode):
    """Operations whose result the host reads, or whose shape it has to learn."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(name in str(func) for name in ("_local_scalar_dense", "nonzero", "masked_select", "unique")):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("wrong", [
    {"temperature": 0.0}, {"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}, {"min_p": 2.0},
    {"repetition_penalty": 0.0}], ids=str)
def test_settings_without_a_meaning_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"--{next(iter(wrong)).replace('_', '-')} is"):
        Sampling(**wrong)


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

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


@pytest.mark.parametrize("length", [256, 2048])
def test_an_answer_decodes_each_token_a_few_times_whole_streamed_or_looked_at_for_its_end(length: int) -> None:
    most = 3 * DECODE_WINDOW * length

    def asked(counts: Any, **given: object) -> OpenAICompletion:
        served = ServedModel("gpt2", counts, 2 * length, None, ServerLimits(), 0, 2 * length)
        return parse_completion(json.dumps(given).encode(), served)

    counts = Counting()
    job = asked(counts, prompt="x" * length, max_tokens=0, echo=True, logprobs=2)
    likely = ((65, -1.0), (66, -2.0))
    job.sequences[0].finish_reason = "length"
    job.sequences[0].scores = TokenScores([-1.0] * (length - 1), [likely] * (length - 1))
    job.full_response()
    assert counts.decoded <= most

    counts = Counting()
    job = asked(counts, prompt="x", max_tokens=length, stream=True, logprobs=0)
    (text,), parts = job.sequences, []
    for _ in range(length):
        text.tokens.append(65)
        text.logprobs.append(-1.0)
        parts += job.new_chunks()
    assert len(parts) == length and counts.decoded <= most

    counts = Counting()
    text = GeneratedSequence(Request(0, (65,), length, Sampling(), "0", ("zz", "yy")), Detokenizer(counts.decode))
    for _ in range(length):
        text.tokens.append(65)
        assert "zz" not in text.detokenized().text
    assert counts.decoded <= most
