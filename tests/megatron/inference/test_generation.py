"""Text from a cache is text from the whole model, whatever runs beside it, with recorded steps or without. What a token
is drawn from is found the slow obvious way as well."""

from __future__ import annotations

import io
import math
import random
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from data.gpt2_bpe import byte_alphabet
from data.tokenizer import (ByteLevelTokenizer, CharacterLevelTokenizer, GPT2BPETokenizer, SentencePieceTokenizer,
                            Tokenizer)
from megatron.config.tree import ModelConfig
from megatron.errors import ConfigError
from megatron.inference import decoder as decoders, generation
from megatron.inference.decoder import CudaGraphRunner, Decoder
from megatron.inference.generation import (DECODE_WINDOW, Detokenizer, GeneratedSequence, Generator,
                                           apply_repetition_penalty, candidate_probabilities, gumbel_noise,
                                           sample_tokens, texts_of)
from megatron.inference.request import Request, Sampling
from megatron.model.gpt2 import GPT2
from tests.megatron.counting import Launches

SHAPE = ModelConfig(num_layers=3, hidden_size=48, num_attention_heads=4, max_position_embeddings=24, vocab_size=61,
                    init_method_std=0.3, attention_dropout=0.2, hidden_dropout=0.2)
PROMPTS = [[5], [1, 2, 3, 4, 5, 6], [9, 8, 7], [60] * 11, [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [0, 1], [30, 31, 32, 33],
           [7, 7, 7]]
GREEDY = Sampling(greedy=True)


def whole(model: GPT2, ids: Sequence[int]) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.tensor([ids]))[0]


def answers(model: GPT2, rows: int, settings: Sampling = GREEDY, most: int = 9, seed: int = 3, slides: bool = False,
            eod: int | None = None) -> list[GeneratedSequence]:
    generator = Generator(Decoder(model, rows), vocabulary=61, eod=eod, sliding_window=slides)
    return texts_of(generator, PROMPTS, most, settings, seed)


def by_hand(model: GPT2, prompt: Sequence[int], most: int) -> list[int]:
    """The likeliest token, by the whole model, of the last positions that it has."""
    ids = [*prompt]
    for _ in range(most):
        ids.append(int(whole(model, ids[-model.config.max_position_embeddings:]).argmax()))
    return ids[len(prompt):]


def test_logits_over_a_cache_are_those_of_the_whole_text() -> None:
    model, tokens = GPT2(SHAPE), torch.randint(61, (4, 12), generator=torch.Generator().manual_seed(0)).tolist()
    decoder, texts = Decoder(model, 4), [[*prompt] for prompt in PROMPTS[:4]]
    expected = torch.stack([whole(model, text) for text in texts])
    torch.testing.assert_close(decoder.prefill(range(4), texts), expected, atol=1e-5, rtol=1e-5)
    for step in range(12):
        if step == 6:  # a text ends, and the last one takes its row
            decoder.move_row(3, 1)
            texts[1] = texts.pop()
        for text, row in zip(texts, tokens):
            text.append(row[step])
        found = decoder.decode_step([text[-1] for text in texts])
        for text, logits in zip(texts, found, strict=True):
            torch.testing.assert_close(logits, whole(model, text), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("settings", [GREEDY, Sampling(temperature=2.0, top_k=0)], ids=["greedy", "drawn"])
def test_no_token_comes_that_the_tokenizer_does_not_have(settings: Sampling) -> None:
    """Neither padding (61 are padded to 128) nor an entry of the model that the tokenizer lacks, however likely."""
    model = GPT2(SHAPE)
    with torch.no_grad():
        model.wte.weight[50:] = 9 * model.wte.weight[0]
    likely = int(whole(model, PROMPTS[1]).abs().argmax())
    assert likely >= 50 and len(model.wte.weight) == 128
    texts = texts_of(Generator(Decoder(model, 3), vocabulary=50, eod=None), PROMPTS, 9, settings, 3)
    assert all(len(text.tokens) == 9 and max(text.tokens) < 50 for text in texts)


@pytest.mark.parametrize("together", [1, 6, 13, 1000])
def test_prompts_may_be_read_any_number_at_a_time(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, expected = GPT2(SHAPE), [text.tokens for text in answers(GPT2(SHAPE), 1)]
    monkeypatch.setattr(generation, "PREFILL_TOKENS", together)
    read = list[int]()
    whole_read = Decoder.prefill
    monkeypatch.setattr(Decoder, "prefill", lambda self, rows, texts: (read.append(sum(map(len, texts))),
                                                                       whole_read(self, rows, texts))[1])
    assert [text.tokens for text in answers(model, 8)] == expected
    assert sum(read) == sum(map(len, PROMPTS)) and max(read) <= max(together, 11)
    assert len(read) == {1: 8, 6: 7, 13: 4, 1000: 1}[together]


@pytest.mark.parametrize("rows", [1, 3, 11])
def test_greedy_text_is_that_of_the_whole_model_and_at_the_end_of_the_position_table_it_ends_or_slides(rows):
    model = GPT2(SHAPE)
    for text, prompt in zip(answers(model, rows), PROMPTS, strict=True):
        assert text.tokens == by_hand(model, prompt, 9) and text.finish_reason == "length"
    for text, prompt in zip(answers(model, rows, most=40), PROMPTS, strict=True):
        room = 24 - len(prompt) + 1
        assert text.tokens == by_hand(model, prompt, room) and text.finish_reason == "positions"
    for text, prompt in zip(answers(model, rows, most=30, slides=True), PROMPTS, strict=True):
        assert text.tokens == by_hand(model, prompt, 30) and text.finish_reason == "length"


def test_a_text_ends_with_its_document() -> None:
    model = GPT2(SHAPE)
    free = answers(model, 3)
    eod = free[1].tokens[4]
    for text, before in zip(answers(model, 3, eod=eod), free, strict=True):
        cut = before.tokens.index(eod) if eod in before.tokens else None
        assert text.tokens == before.tokens[:cut] and text.finish_reason == ("length" if cut is None else "eod")


@pytest.mark.parametrize("settings", [Sampling(), Sampling(temperature=0.7, top_k=9, repetition_penalty=1.3)])
def test_a_text_is_drawn_alike_whatever_runs_beside_it(settings: Sampling) -> None:
    model = GPT2(SHAPE)
    alone, together = (answers(model, rows, settings) for rows in (1, 5))
    assert [text.tokens for text in alone] == [text.tokens for text in together]
    assert [text.tokens for text in alone] != [text.tokens for text in answers(model, 5, settings, seed=4)]


def test_texts_come_and_go_in_any_order_and_each_is_what_it_is_alone() -> None:
    """As under a server: one begins when there is room, one is dropped, each has settings of its own."""
    model, drawn = GPT2(SHAPE), Sampling(temperature=0.9)
    alone = {number: texts_of(Generator(Decoder(model, 1), vocabulary=61, eod=None), [prompt], 9,
                              GREEDY if number % 2 else drawn, seed=number)[0].tokens
             for number, prompt in enumerate(PROMPTS)}
    generator, waiting, ended = Generator(Decoder(model, 3), vocabulary=61, eod=None), list(range(8)), {}
    for step in range(200):
        texts = []
        if generator.free_slots and waiting and step % 3 != 1:
            number = waiting.pop()
            texts = generator.start([Request(number, tuple(PROMPTS[number]), 9, GREEDY if number % 2 else drawn,
                                             f"{number}/0")])
        if step == 5:
            generator.cancel(6)
        for text in texts + generator.step():
            if text.finish_reason is not None:
                ended[text.request.number] = text.tokens
    assert generator.free_slots == 3 and ended == {number: tokens for number, tokens in alone.items() if number != 6}


@pytest.mark.parametrize("accelerator", [False, True])
def test_a_text_without_numbers_ends_as_such_and_leaves_nothing_behind(accelerator, monkeypatch):
    """Token 60 stands for what overflows in fp16: from there on keys and values are not finite."""
    monkeypatch.setattr(decoders, "on_accelerator", lambda where: accelerator)
    monkeypatch.setattr(decoders.CudaGraphRunner, "_capture", lambda self, run: run)
    model = GPT2(SHAPE)
    with torch.no_grad():
        model.wte.weight[60] = torch.inf
    generator = Generator(Decoder(model, 2), vocabulary=60, eod=None)
    fine = texts_of(generator, [[5], [1, 2, 3]], 9, GREEDY, 0)
    for prompt in ([60] * 12, [3, 60]):
        bad, other = texts_of(generator, [prompt, [1, 2, 3]], 9, GREEDY, 0)
        assert (bad.tokens, bad.finish_reason) == ([], "not finite") and other.tokens == fine[1].tokens
        again = texts_of(generator, [[5], [1, 2, 3]], 9, GREEDY, 0)
        assert [text.tokens for text in again] == [text.tokens for text in fine]


# ---- recorded steps -----------------------------------------------------------------------------------------------

def record(runner: CudaGraphRunner, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """What a graph does: the operations once before, none while recording, and the results always in one place."""
    run()
    place: list[Tensor] = []

    def again() -> Tensor:
        found = run()
        if not place:
            place.append(found.clone())
        return place[0].copy_(found)
    return again


def test_text_from_recordings_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model = GPT2(SHAPE)

    def drawn() -> list[list[int]]:
        return [text.tokens for text in answers(model, 3, Sampling(top_k=9))]

    expected = drawn()
    monkeypatch.setattr(decoders, "on_accelerator", lambda where: True)
    monkeypatch.setattr(decoders, "MIN_GRAPH_POSITIONS", 8)
    with patch.object(CudaGraphRunner, "_capture", autospec=True, side_effect=record) as made:
        assert drawn() == expected and made.called


def test_there_is_one_recording_for_each_size_of_rows_and_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[tuple[int, int]]()

    def step(tokens: Tensor, places: Tensor, positions: int) -> Tensor:
        made.append((len(tokens), positions))
        return tokens[:, None] + places[:, None]
    monkeypatch.setattr(CudaGraphRunner, "_capture", lambda self, run: (run(), run)[1])
    steps = CudaGraphRunner(6, 1000, torch.device("cpu"))
    for count in (1, 2, 3, 4, 5, 6):
        for place in (0, 127, 128, 600, 999):
            tokens, places = [*range(count)], [place] * count
            assert steps(step, tokens, places).flatten().tolist() == [token + place for token in tokens]
    assert set(made) == {(rows, positions) for rows in (1, 2, 4, 6) for positions in (128, 256, 1000)}
    assert len(made) == 6 * 5 + len(set(made))


# ---- what a token is drawn from, and the text of tokens ------------------------------------------------------------

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
