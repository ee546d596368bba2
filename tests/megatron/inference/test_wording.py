"""Text from tokens as they come: the same as decoding every beginning, in linear work."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from data.gpt2_bpe import byte_alphabet
from data.tokenizer import (ByteLevelTokenizer, CharacterLevelTokenizer, GPT2BPETokenizer, SentencePieceTokenizer,
                            Tokenizer)
from megatron.inference.generation import DECODE_WINDOW, Detokenizer, GeneratedSequence, SequenceDetokenizer
from megatron.inference.request import Request, Sampling
from megatron.serve.admission import ServerLimits
from megatron.serve.api_request import ServedModel
from megatron.serve.openai_api import parse_completion
from megatron.serve.scheduler import SequenceLogprobs

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

    def subject_of(counts: Any) -> ServedModel:
        return ServedModel("gpt2", counts, 2 * length, None, ServerLimits(), 0)

    counts = Counting()
    job = parse_completion({"prompt": "x" * length, "max_tokens": 0, "echo": True, "logprobs": 2}, subject_of(counts))
    text = GeneratedSequence(job.generation_requests()[0], finish_reason="length")
    likely = ((65, -1.0), (66, -2.0))
    job.full_response([text], {0: SequenceLogprobs(0, (-1.0,) * (length - 1), (likely,) * (length - 1))})
    assert counts.decoded <= most

    counts = Counting()
    job = parse_completion({"prompt": "x", "max_tokens": length, "stream": True, "logprobs": 0}, subject_of(counts))
    text, parts = GeneratedSequence(job.generation_requests()[0]), []
    for _ in range(length):
        text.tokens.append(65)
        text.logprobs.append(-1.0)
        parts += job.new_chunks([text])
    assert len(parts) == length and counts.decoded <= most

    counts = Counting()
    wording: Any = SequenceDetokenizer(counts)  # type: ignore[arg-type]
    text = GeneratedSequence(Request(0, (65,), length, Sampling(), "0", ("zz", "yy")))
    for _ in range(length):
        text.tokens.append(65)
        assert not wording.has_stop_string(text)
    assert counts.decoded <= most
