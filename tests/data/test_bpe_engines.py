"""gigatoken and tiktoken give the same ranks to every text, and each does the work that is its own."""

from __future__ import annotations

import importlib.metadata
import json
import pickle
import random
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
import regex
from numpy.typing import NDArray

from data import gpt2_bpe
from data.gpt2_bpe import (GPT2_PATTERN, UNICODE_17_LETTERS, GigatokenEngine, GPT2BPETokenizer,
                           TiktokenEngine, byte_alphabet, fastest_engine, packaged_merges, parse_merges)
from data.preprocess import build_corpus
from tests.data.test_tokenizer import NASTY, random_texts

fast = pytest.mark.skipif(type(fastest_engine([], is_gpt2=True)) is TiktokenEngine,
                          reason="the extra [fast] is not installed")

AWKWARD = [
    *NASTY, "\t", "\r\n", " \n", "\n ", " \n \n  a", "a   ", "a \t\n", "   a", "\u00a0a", "\u2003 \u2003b", "\u200ba",
    "\u180e", "\x1c\x1d\x1e\x1f", "it's IT'S 's's 'll'LL 're'v'ed ''m", "\u2019s don\u2019t", "--==>>", "a1b2c3",
    "\u0661\u0662\u00b2\u00bd\u2167\u2460", "\u0301\u0301a", "a\u0301\u0301", "\u1100\u1161\u11a8",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\U0001d400\U0001d7d8", "\ue000\U000f0000", "https://a.b/c?d=e&f#g",
    "a_b__c", "{'k': [1, 2.5e-3]}", "<|endoftext|><|endoftext|>", "<|fim_prefix|>", "\ufffd", "0x1F600", "x\u00ady",
    "SELECT * FROM t;\n\n\n\treturn;\n", "aA" * 200, "ab" * 5000, " " * 5000, "\n" * 5000, "!" * 5000, "7" * 5000,
    "\u65e5" * 2000, "\U0001f600" * 2000, "a " * 5000, " \n" * 2000, "\u3000\t " * 1000,
]


@pytest.fixture(scope="module")
def spelling() -> list[bytes]:
    alphabet = byte_alphabet()
    return [bytes(alphabet[character] for character in token) for token in parse_merges(packaged_merges(), "packaged")]


@pytest.fixture(scope="module")
def tiktoken(spelling: list[bytes]) -> TiktokenEngine:
    return TiktokenEngine(spelling)


@pytest.fixture(scope="module")
def gigatoken(spelling: list[bytes]) -> GigatokenEngine:
    return GigatokenEngine(spelling)


def assert_equal_ranks(one: TiktokenEngine, other: TiktokenEngine, texts: Iterable[str]) -> None:
    for text in texts:
        assert np.array_equal(one.encode_to_ranks(text), other.encode_to_ranks(text)), repr(text)


def mixtures(count: int) -> Iterator[str]:
    """Pieces of awkward texts in a row: every kind of neighbour."""
    draw = random.Random(2)
    for _ in range(count):
        yield "".join(text[at:at + draw.randint(1, 4)] for text in draw.choices(AWKWARD, k=draw.randint(2, 12))
                      for at in [draw.randrange(len(text) or 1)])


def beside_others(characters: Iterable[int]) -> Iterator[str]:
    """Each character beside a letter, a number, a symbol, white space and itself, 64 characters a text."""
    every = [chr(character) for character in characters if not 0xD800 <= character < 0xE000]
    for at in range(0, len(every), 64):
        yield "".join(f"a{c}b1{c}2 {c}  {c}.{c}. {c}{c} \n{c}'s{c}" for c in every[at:at + 64])


def newer_letters() -> list[int]:
    return [character for first, last in UNICODE_17_LETTERS for character in range(first, last + 1)]


def lately_assigned() -> list[int]:
    """Letters and numbers that `regex` knows and this Python does not: where libraries can be of different ages."""
    unknown = "".join(character for character in map(chr, range(0x110000)) if unicodedata.category(character) == "Cn")
    return [ord(character) for character in regex.findall(r"[\p{L}\p{N}]", unknown)]


@fast
def test_engines_agree_on_awkward_texts(tiktoken: TiktokenEngine, gigatoken: GigatokenEngine) -> None:
    assert_equal_ranks(gigatoken, tiktoken, [*AWKWARD, *random_texts(500), *mixtures(3000)])


@fast
def test_engines_agree_on_the_characters_of_every_block_of_unicode(tiktoken: TiktokenEngine,
                                                                   gigatoken: GigatokenEngine) -> None:
    some = {*range(0, 0x3000), *range(0x3000, 0x110000, 61), *lately_assigned()}
    edges = {edge + by for first, last in UNICODE_17_LETTERS for edge in (first, last) for by in range(-3, 4)}
    assert_equal_ranks(gigatoken, tiktoken, beside_others(sorted(some | edges)))


@fast
@pytest.mark.slow
def test_engines_agree_on_every_character_and_many_texts(tiktoken: TiktokenEngine, gigatoken: GigatokenEngine) -> None:
    assert_equal_ranks(gigatoken, tiktoken, beside_others(range(0x110000)))
    assert_equal_ranks(gigatoken, tiktoken, [*random_texts(20_000), *mixtures(20_000)])


@fast
def test_the_table_of_newer_letters_holds_nothing_needless(tiktoken: TiktokenEngine,
                                                           gigatoken: GigatokenEngine) -> None:
    """When this fails, the libraries have come closer: cut the table down."""
    agreeing = [hex(character) for character in newer_letters() for text in beside_others([character])
                if np.array_equal(gigatoken._encoder.encode(text), tiktoken.encode_to_ranks(text))]
    assert agreeing == []


@fast
def test_common_scripts_are_left_to_gigatoken(gigatoken: GigatokenEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(text: str) -> NDArray[np.uint32]:
        raise AssertionError(text)

    monkeypatch.setattr(TiktokenEngine, "encode_to_ranks", lambda self, text: refuse(text))
    for text in ("plain", "\u201ccurly\u201d", "\U0001f600\U0001f3f3\ufe0f", "\ud55c\uad6d\uc5b4", "\u0939\u093f\u0928",
                 "\u0e44\u0e17\u0e22", "\u65e5\u672c\u8a9e", "\u0440\u0443\u0441", "\U0001d400", "\U00020000"):
        gigatoken.encode_to_ranks(text)
    with pytest.raises(AssertionError, match="\u0c5c"):
        gigatoken.encode_to_ranks("Telugu \u0c5c")


@fast
def test_lone_surrogates_are_replaced_alike(tiktoken: TiktokenEngine, gigatoken: GigatokenEngine) -> None:
    assert tiktoken.encode_to_ranks("a\ud800b").tolist() == tiktoken.encode_to_ranks("a\ufffdb").tolist()
    assert_equal_ranks(gigatoken, tiktoken, ["\ud800", "a\udfff b", "\ude00\ud83d", "\U0001f600\ud83d"])


@fast
def test_a_renewed_encoder_gives_the_same_ranks(spelling: list[bytes], tiktoken: TiktokenEngine,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpt2_bpe, "REBUILD_AFTER_CHARACTERS", 100)
    engine, encoders = GigatokenEngine(spelling), []
    for text in ("one " * 20, "two " * 20, "three " * 3, "more than a hundred bytes " * 10):
        assert_equal_ranks(engine, tiktoken, [text])
        encoders.append(engine._encoder)
    assert encoders[0] is not encoders[1] is encoders[2] is not encoders[3]


@fast
def test_the_engine_does_not_show_in_a_corpus(tmp_path: Path, spelling: list[bytes]) -> None:
    lines = [json.dumps({"text": text}) + "\n" for text in [*AWKWARD, chr(0x10940), *mixtures(200)]]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    for kind in (TiktokenEngine, GigatokenEngine):
        build_corpus([tmp_path / "a.jsonl"], tmp_path / kind.__name__, GPT2BPETokenizer(engine=kind))
    for suffix in (".bin", ".idx", ".json"):
        one, other = (tmp_path / f"{kind.__name__}{suffix}" for kind in (TiktokenEngine, GigatokenEngine))
        assert one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize("kind", [TiktokenEngine, pytest.param(GigatokenEngine, marks=fast)])
def test_an_engine_can_be_sent_to_a_worker(kind: type[TiktokenEngine], spelling: list[bytes]) -> None:
    engine = kind(spelling)
    before = engine.encode_to_ranks("Hello world").tolist()
    assert pickle.loads(pickle.dumps(engine)).encode_to_ranks("Hello world").tolist() == before == [15496, 995]


def test_gigatoken_runs_only_the_spelling_it_was_proven_for(spelling: list[bytes], tmp_path: Path,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    def kind_for(merges: str) -> type[TiktokenEngine]:
        (tmp_path / "merges.txt").write_text(merges)
        return type(GPT2BPETokenizer(merge_file=str(tmp_path / "merges.txt"))._engine)

    def version(name: str) -> str:
        if installed is None:
            raise importlib.metadata.PackageNotFoundError
        return installed

    gpt2 = packaged_merges()
    monkeypatch.setattr(importlib.metadata, "version", version)
    for installed, kind in (("0.10.0", GigatokenEngine), ("0.11.0", TiktokenEngine), (None, TiktokenEngine)):
        assert type(fastest_engine(spelling, is_gpt2=True)) is kind_for(gpt2) is kind
        assert type(fastest_engine(spelling, is_gpt2=False)) is kind_for("#version: 0.2\nh e\n") is TiktokenEngine


def test_the_pattern_is_gpt2s_own(tiktoken: TiktokenEngine) -> None:
    original = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    for text in [*AWKWARD, *mixtures(500)]:
        assert regex.findall(GPT2_PATTERN, text) == regex.findall(original, text), repr(text)
