"""Tokenizers: every text comes back, no id sequence hurts, and GPT-2's ids are GPT-2's, with any engine and file."""

from __future__ import annotations

import importlib.metadata
import json
import pickle
import random
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import regex

from data import tokenizer as tokenizers
from data.gpt2_bpe import (END_OF_TEXT, GPT2_PATTERN, UNICODE_17_LETTERS, GigatokenEngine, TiktokenEngine,
                           byte_alphabet, fastest_engine, packaged_merges, parse_merges)
from data.storage import DataError, UsageError
from data.tokenizer import GPT2BPETokenizer, SentencePieceTokenizer, Tokenizer, train_sentencepiece

NASTY = ["", " ", "  a  b ", "\n\n\t x\r\n", "\u2581", "a\u2581b \u2581 c", "e\u0301 \u00e9", "\u65e5\u672c\u8a9e",
         "\U0001f3f3\ufe0f\u200d\U0001f308",
         "\x00\x01\x7f\x85\u2028\u2029\u3000", "a\x00b", "<|endoftext|>", "<0x41><unk></s>",
         "\ufeffx", "\U0010ffff", "\uff41 \ufb01", "\ufffd\ufffe\uffff", "don't DON'T we'll", "x" * 300,
         "\u0627\u0644\u0639", "\uac00\u1100\u1161", "1234567890" * 3]


@pytest.fixture(scope="module")
def gpt2() -> GPT2BPETokenizer:
    return GPT2BPETokenizer()


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("sentencepiece") / "tokenizer.model"
    train_sentencepiece(TRAINING_TEXTS, path, 350)
    return str(path)


TRAINING_TEXTS = [f"the number {i} of many    spaces\n  and lines; a sentence, and another.\n\n" for i in range(200)]


@pytest.fixture(params=["gpt2", "sentencepiece", "byte"])
def tokenizer(request: pytest.FixtureRequest, gpt2: GPT2BPETokenizer, model_file: str) -> Tokenizer:
    if request.param == "gpt2":
        return gpt2
    return tokenizers.build(request.param, tokenizer_path=model_file)


def random_texts(count: int) -> list[str]:
    draw = random.Random(0)
    ranges = [(0x20, 0x7E), (0, 0x2FF), (0x2000, 0x2FFF), (0x3000, 0xD7FF), (0x10000, 0x10FFFF)]
    return ["".join(chr(draw.randint(*draw.choice(ranges))) for _ in range(draw.randint(1, 40))) for _ in range(count)]


def test_every_text_comes_back_and_its_bytes_are_those_of_its_ids(tokenizer: Tokenizer) -> None:
    lengths = tokenizer.byte_lengths()
    assert lengths is not None and len(lengths) == tokenizer.vocab_size and lengths[tokenizer.eod] == 0
    for text in NASTY + random_texts(300):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.eod not in ids and all(0 <= i < tokenizer.vocab_size for i in ids)
        assert lengths[ids].sum() == len(text.encode("utf-8", "replace")), text


def test_ids_of_a_model_that_changes_texts_say_no_bytes(tmp_path: Path) -> None:
    import sentencepiece
    for number, changes in enumerate([{"normalization_rule_name": "nmt_nfkc"}, {"add_dummy_prefix": True},
                                      {"remove_extra_whitespaces": True}, {"byte_fallback": False}, {}]):
        usual = {"normalization_rule_name": "identity", "add_dummy_prefix": False, "remove_extra_whitespaces": False,
                 "byte_fallback": True, "allow_whitespace_only_pieces": True}
        with open(tmp_path / f"{number}.model", "wb") as file:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(TRAINING_TEXTS), model_writer=file, model_type="bpe", vocab_size=350,
                minloglevel=2, **{**usual, **changes})
        found = SentencePieceTokenizer(str(tmp_path / f"{number}.model")).byte_lengths()
        assert (found is None) == bool(changes), changes


def test_characters_come_from_the_file(tmp_path: Path) -> None:
    (tmp_path / "letters").write_text("ab\u00e9\u65e5")
    found = tokenizers.build("CharacterLevelTokenizer", vocab_file=str(tmp_path / "letters"))
    assert (found.vocab_size, found.eod) == (6, 5) and found.decode(found.encode("ba\u65e5\u00e9")) == "ba\u65e5\u00e9"
    assert found.decode([*found.encode("b?"), 5, 6, -1]) == "b\ufffd<|endoftext|>\ufffd\ufffd"
    lengths = found.byte_lengths()
    assert lengths is not None and lengths[found.encode("ba\u65e5\u00e9")].tolist() == [1, 1, 3, 2]
    assert lengths[[*found.encode("?"), found.eod]].tolist() == [0, 0], "what is not known, and the end"


def test_no_sequence_of_ids_hurts(tokenizer: Tokenizer) -> None:
    draw = random.Random(1)
    for _ in range(300):
        ids = [draw.randint(-3, tokenizer.vocab_size + 3) for _ in range(draw.randint(0, 20))]
        assert isinstance(tokenizer.decode(ids), str)
    assert tokenizer.decode([tokenizer.eod, -1, 10**12]) == "<|endoftext|>\ufffd\ufffd"
    tokenizer.encode("lone \ud800 surrogate")
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.encode("Hello world, again") == tokenizer.encode("Hello world, again")
    assert copy.fingerprint == tokenizer.fingerprint, "a worker can be sent one"


def plain_bpe(text: str, tokens: list[str]) -> list[int]:
    """Byte-pair encoding as the paper says it: merge the best pair until none is left."""
    rank = {token: i for i, token in enumerate(tokens)}
    spelled = {byte: character for character, byte in byte_alphabet().items()}
    ids = []
    for piece in regex.findall(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+", text):
        parts = [spelled[byte] for byte in piece.encode()]
        while len(parts) > 1:
            best = min(range(len(parts) - 1), key=lambda i: rank.get(parts[i] + parts[i + 1], len(rank)))
            if parts[best] + parts[best + 1] not in rank:
                break
            parts[best:best + 2] = [parts[best] + parts[best + 1]]
        ids += [rank[part] for part in parts]
    return ids


def test_gpt2_agrees_with_plain_bpe_and_the_original_pattern(gpt2: GPT2BPETokenizer) -> None:
    assert gpt2.encode("Hello world") == [15496, 995] and (gpt2.vocab_size, gpt2.eod) == (50257, 50256)
    tokens = parse_merges(packaged_merges(), "vocab.bpe")
    for text in NASTY + random_texts(100) + ["  The quick\n\n brown fox's   1,234 jumps. \t\n"]:
        assert gpt2.encode(text) == plain_bpe(text, tokens)


def test_files_of_any_numbering_are_followed(tmp_path: Path) -> None:
    merges = tmp_path / "merges.txt"
    merges.write_text("#version: 0.2\nh e\nl l\nhe ll\n")
    tokens = parse_merges(merges.read_text(), "merges.txt")
    assert tokens[256:] == ["he", "ll", "hell"]
    plain = tokenizers.build("gpt2", merge_file=str(merges))
    assert plain.encode("hello") == [258, tokens.index("o")] and plain.eod == 259

    vocabulary = {"<|endoftext|>": 0} | {token: 1 + i for i, token in enumerate(reversed(tokens))}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    shifted = tokenizers.build("gpt2", vocab_file=str(tmp_path / "vocab.json"), merge_file=str(merges))
    assert shifted.encode("hello") == [vocabulary["hell"], vocabulary["o"]] and shifted.eod == 0
    assert shifted.vocab_size == 260 and shifted.decode(shifted.encode("hello \u00e9")) == "hello \u00e9"
    assert shifted.fingerprint != plain.fingerprint


def test_sentencepiece_training_is_deterministic_and_exact_in_size(tmp_path: Path, model_file: str) -> None:
    train_sentencepiece(iter(TRAINING_TEXTS), tmp_path / "again.model", 350)
    assert (tmp_path / "again.model").read_bytes() == Path(model_file).read_bytes()
    assert SentencePieceTokenizer(model_file).vocab_size == 350
    with pytest.raises(DataError, match="cannot train"):
        train_sentencepiece(["abc"], tmp_path / "tiny.model", 100_000)
    assert not (tmp_path / "tiny.model").exists()


REFUSED: list[tuple[dict[str, str], str]] = [
    ({"kind": "GPT3BPETokenizer"}, "did you mean GPT2BPETokenizer"),
    ({"kind": "sentencpiece"}, "did you mean SentencePieceTokenizer"),
    ({"kind": "gpt2", "vocab_file": "/missing/v"}, "--vocab-file /missing/v: no such file"),
    ({"kind": "gpt2", "merge_file": "/missing/m"}, "--merge-file /missing/m: no such file"),
    ({"kind": "gpt2", "merge_file": "/"}, "--merge-file /: a folder; give the path of a file"),
    ({"kind": "sentencepiece", "vocab_file": "/missing/v"}, "--vocab-file /missing/v: no such file"),
    ({"kind": "character", "vocab_file": "/missing/v"}, "--vocab-file /missing/v: no such file"),
    ({"kind": "gpt2", "merge_file": __file__}, "test_tokenizer.py:1: expected two tokens"),
    ({"kind": "sentencepiece"}, "needs --tokenizer-path"),
    ({"kind": "sentencepiece", "tokenizer_path": __file__}, "not a SentencePiece model"),
    ({"kind": "character"}, "needs --vocab-file")]


def test_errors_name_the_flag() -> None:
    for settings, message in REFUSED:
        with pytest.raises(DataError, match=message):
            tokenizers.build(**settings)


# ----------------------------------------------------------------------------------------------------- tokenizer.json

TEXTS = ["", " ", "The quick brown fox's  tail\n\n\tand 2019.", "naïve 日本語 🙂 \x00", "ab ba aab bba " * 9, "  x"]


@cache
def trained_text() -> str:
    """The tokenizer.json that the tokenizers library writes of a small byte-level BPE."""
    library = pytest.importorskip("tokenizers")
    made = library.Tokenizer(library.models.BPE())
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.train_from_iterator([Path(__file__).read_text()] * 3, library.trainers.BpeTrainer(
        vocab_size=600, special_tokens=[END_OF_TEXT], show_progress=False,
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet()))
    return str(made.to_str())


def trained() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(trained_text())
    return found


def written(folder: Path, fast: Any) -> str:
    (folder / "tokenizer.json").write_text(json.dumps(fast))
    return str(folder / "tokenizer.json")


def test_it_gives_the_ids_of_the_library(tmp_path: Path) -> None:
    fast, library = trained(), pytest.importorskip("tokenizers")
    for _ in range(2):
        path = written(tmp_path, fast)
        ours, theirs = GPT2BPETokenizer(path), library.Tokenizer.from_file(path)
        assert ours.vocab_size == theirs.get_vocab_size() and ours.eod == theirs.token_to_id(END_OF_TEXT) == 0
        for text in [*TEXTS, Path(__file__).read_text().replace(END_OF_TEXT, "")[:4000]]:
            assert ours.encode(text) == theirs.encode(text).ids, text
        # as former versions wrote merges
        fast["model"]["merges"] = [" ".join(pair) for pair in fast["model"]["merges"]]


def test_openais_is_the_built_in_one(tmp_path: Path) -> None:
    merges = packaged_merges()
    vocabulary = {token: i for i, token in enumerate([*parse_merges(merges, "vocab.bpe"), END_OF_TEXT])}
    model = {"type": "BPE", "vocab": vocabulary, "merges": merges.splitlines()[1:]}
    fast = {"model": model, "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False},
            "added_tokens": [{"id": 50256, "content": END_OF_TEXT}]}
    built_in = GPT2BPETokenizer().facts
    assert GPT2BPETokenizer(written(tmp_path, fast)).facts == built_in
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text(merges)
    assert GPT2BPETokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt")).facts == built_in


def changed(part: str, **values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda fast: fast[part].update(values)


OTHER_KINDS: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (changed("model", type="Unigram"), "its model is Unigram"),
    (changed("model", byte_fallback=True), "byte_fallback True"),
    (changed("pre_tokenizer", type="Metaspace"), "its pre_tokenizer is Metaspace"),
    (changed("pre_tokenizer", add_prefix_space=True), "add_prefix_space"),
    (lambda fast: fast.update(normalizer={"type": "NFC"}), "a normalizer, .*NFC"),
    (lambda fast: fast.update(post_processor={"type": "TemplateProcessing"}), "a post_processor, TemplateProcessing"),
    (lambda fast: fast["added_tokens"].append({"id": 600, "content": "<pad>"}), "a token '<pad>' beside the merges"),
    (lambda fast: fast["model"]["vocab"].update(zzzz=600), "1 tokens that no merge makes, 'zzzz'"),
    (lambda fast: fast["model"]["vocab"].pop("!"), "1 of the 256 bytes are not"),
    (lambda fast: fast["model"].pop("merges"), "not a tokenizer.json")]


def test_another_kind_is_refused_with_the_flags_of_the_right_one(tmp_path: Path) -> None:
    for change, words in OTHER_KINDS:
        fast = trained()
        change(fast)
        with pytest.raises(DataError, match=f"tokenizer.json.*{words}.*--tokenizer-type with its files"):
            GPT2BPETokenizer(written(tmp_path, fast))
    with pytest.raises(UsageError, match="--vocab-file without --merge-file"):
        GPT2BPETokenizer(written(tmp_path, {"a": 0, "model": 1}))


# ----------------------------------------------------------------------------------------------- gigatoken and tiktoken

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


def lately_assigned() -> list[int]:
    """Letters and numbers that `regex` knows and this Python does not: where libraries can be of different ages."""
    unknown = "".join(character for character in map(chr, range(0x110000)) if unicodedata.category(character) == "Cn")
    return [ord(character) for character in regex.findall(r"[\p{L}\p{N}]", unknown)]


@fast
def test_engines_agree_on_awkward_texts(tiktoken: TiktokenEngine, gigatoken: GigatokenEngine) -> None:
    assert_equal_ranks(gigatoken, tiktoken, [*AWKWARD, *random_texts(500), *mixtures(1500)])
    assert tiktoken.encode_to_ranks("a\ud800b").tolist() == tiktoken.encode_to_ranks("a\ufffdb").tolist()
    assert_equal_ranks(gigatoken, tiktoken, ["\ud800", "a\udfff b", "\ude00\ud83d", "\U0001f600\ud83d"])


@fast
def test_engines_agree_on_the_characters_of_every_block_of_unicode(tiktoken, gigatoken):
    some = {*range(0, 0x3000), *range(0x3000, 0x110000, 61), *lately_assigned()}
    edges = {edge + by for first, last in UNICODE_17_LETTERS for edge in (first, last) for by in range(-3, 4)}
    assert_equal_ranks(gigatoken, tiktoken, beside_others(sorted(some | edges)))


@fast
def test_common_scripts_are_left_to_gigatoken(gigatoken: GigatokenEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TiktokenEngine, "encode_to_ranks", Mock(side_effect=AssertionError))
    for text in ("plain", "\u201ccurly\u201d", "\U0001f600\U0001f3f3\ufe0f", "\ud55c\uad6d\uc5b4", "\u0939\u093f\u0928",
                 "\u0e44\u0e17\u0e22", "\u65e5\u672c\u8a9e", "\u0440\u0443\u0441", "\U0001d400", "\U00020000"):
        gigatoken.encode_to_ranks(text)
    with pytest.raises(AssertionError):
        gigatoken.encode_to_ranks("Telugu \u0c5c")


def test_gigatoken_runs_only_the_spelling_it_was_proven_for(spelling, tmp_path, monkeypatch):
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
