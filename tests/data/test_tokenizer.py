"""Tokenizers: every text comes back, no id sequence hurts, and GPT-2's ids are GPT-2's."""

from __future__ import annotations

import json
import pickle
import random
from pathlib import Path

import pytest
import regex

from data import tokenizer as tokenizers
from data.gpt2_bpe import packaged_merges, byte_alphabet, parse_merges
from data.storage import DataError
from data.tokenizer import (ByteLevelTokenizer, GPT2BPETokenizer, SentencePieceTokenizer, Tokenizer,
                            train_sentencepiece)

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


def test_the_bytes_of_a_text_are_those_of_its_ids(tokenizer: Tokenizer) -> None:
    lengths = tokenizer.byte_lengths()
    assert lengths is not None and len(lengths) == tokenizer.vocab_size and lengths[tokenizer.eod] == 0
    for text in NASTY + random_texts(300):
        assert lengths[tokenizer.encode(text)].sum() == len(text.encode("utf-8", "replace")), text


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


def test_characters_have_the_bytes_of_their_spelling(tmp_path: Path) -> None:
    (tmp_path / "letters").write_text("ab\u00e9\u65e5")
    found = tokenizers.build("character", vocab_file=str(tmp_path / "letters"))
    lengths = found.byte_lengths()
    assert lengths is not None and lengths[found.encode("ba\u65e5\u00e9")].tolist() == [1, 1, 3, 2]
    assert lengths[[*found.encode("?"), found.eod]].tolist() == [0, 0], "what is not known, and the end"


def test_every_text_comes_back(tokenizer: Tokenizer) -> None:
    for text in NASTY + random_texts(300):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.eod not in ids
        assert all(0 <= i < tokenizer.vocab_size for i in ids)


def test_no_sequence_of_ids_hurts(tokenizer: Tokenizer) -> None:
    draw = random.Random(1)
    for _ in range(300):
        ids = [draw.randint(-3, tokenizer.vocab_size + 3) for _ in range(draw.randint(0, 20))]
        assert isinstance(tokenizer.decode(ids), str)
    assert tokenizer.decode([tokenizer.eod, -1, 10**12]) == "<|endoftext|>\ufffd\ufffd"
    tokenizer.encode("lone \ud800 surrogate")


def test_a_worker_can_be_sent_one(tokenizer: Tokenizer) -> None:
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.encode("Hello world, again") == tokenizer.encode("Hello world, again")
    assert copy.fingerprint == tokenizer.fingerprint


def test_gpt2_gives_the_published_ids(gpt2: GPT2BPETokenizer) -> None:
    assert gpt2.encode("Hello world") == [15496, 995]
    assert (gpt2.vocab_size, gpt2.eod) == (50257, 50256)


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


def test_tiktoken_agrees_with_plain_bpe_and_the_original_pattern(gpt2: GPT2BPETokenizer) -> None:
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


def test_characters_come_from_the_file(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello\n")
    tokenizer = tokenizers.build("CharacterLevelTokenizer", vocab_file=str(tmp_path / "text"))
    assert (tokenizer.vocab_size, tokenizer.eod) == (7, 6)
    assert tokenizer.decode(tokenizer.encode("hole\n")) == "hole\n"
    assert tokenizer.decode([*tokenizer.encode("h?"), 6, 7, -1]) == "h\ufffd<|endoftext|>\ufffd\ufffd"


@pytest.mark.parametrize(("settings", "message"), [
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
    ({"kind": "character"}, "needs --vocab-file"),
])
def test_errors_name_the_flag(settings: dict[str, str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        tokenizers.build(**settings)


def test_names_are_megatrons_and_case_does_not_matter() -> None:
    assert type(tokenizers.build("ByteLevelTokenizer")) is type(tokenizers.build("BYTE")) is ByteLevelTokenizer
    assert tokenizers.canonical_kind("gpt2bpetokenizer") == "GPT2BPETokenizer"
