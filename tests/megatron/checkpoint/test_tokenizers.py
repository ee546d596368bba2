"""The tokenizer that goes with an exported model: AutoTokenizer encodes and decodes as the run did."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

from data.tokenizer import build, train_sentencepiece  # noqa: E402
from megatron.checkpoint.cli import main  # noqa: E402
from megatron.checkpoint.convert.export_huggingface import TokenizerFiles, build_tokenizer_files  # noqa: E402
from megatron.config.cli import parse_args  # noqa: E402
from megatron.config.hf_config import read_tokenizer_fields  # noqa: E402
from megatron.config.tree import ModelConfig  # noqa: E402
from megatron.errors import ConfigError  # noqa: E402
from megatron.train.build import with_vocab_size  # noqa: E402
from tests.megatron.helpers import TINY, train, write_corpus  # noqa: E402

TEXTS = ["", " ", "a", "The quick brown fox, naïve in 2019.", "  two  spaces\n\n\tand a tab ",
         "def f(x):\n    return x\n", "日本語 текст 🙂 ẞ", "1234567890 3.14", "\x00\x01\r\n", "<|endoftext|>",
         "a<|endoftext|> b", "<0x41><s></s><unk>", "x" * 300, "ab ba aab bba " * 20, "\u00a0\u2003 \ufeff",
         "fi ﬁ e\u0301 é"]


MARKUP = ["<p>", "</p>", '<div class="a">', "</div>", "<br/>", "<b>", "</b>", "text", "hello world", "if a < b:",
          "x << 2", "<- y", "<?php", "<!-- c -->", "vector<int>", "std::cout << x;", "#include <map>", "a <= b", "<0x",
          "<un", "<|end", "<s>"]
"""Of which pieces are made that begin with a bracket."""


def section(**changes: Any) -> dict[str, Any]:
    return {"tokenizer_type": None, "tokenizer_path": None, "vocab_file": None, "merge_file": None, "train_data": (),
            **changes}


def written(tmp_path: Path, settings: dict[str, Any], tokens: int) -> TokenizerFiles:
    made = build_tokenizer_files(settings, ModelConfig(vocab_size=tokens))
    for name, content in made.files.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    return made


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sp") / "tokenizer.model"
    words = Path(__file__).read_text() + Path(build.__code__.co_filename).read_text()
    train_sentencepiece([*words.splitlines(keepends=True), *TEXTS, *markup(1000)], path, 600)
    return path


def markup(count: int) -> list[str]:
    generator = random.Random(0)
    return [generator.choice(["", " "]).join(generator.choices(MARKUP, k=12)) for _ in range(count)]


def kinds(sentencepiece: Path, tmp_path: Path) -> dict[str, dict[str, Any]]:
    (tmp_path / "characters.txt").write_text("abcdefghijklmnopqrstuvwxyz .,\n")
    return {"SentencePieceTokenizer": section(tokenizer_type="SentencePieceTokenizer",
                                              tokenizer_path=str(sentencepiece)),
            "ByteLevelTokenizer": section(tokenizer_type="ByteLevelTokenizer"),
            "CharacterLevelTokenizer": section(tokenizer_type="CharacterLevelTokenizer",
                                               vocab_file=str(tmp_path / "characters.txt")),
            "GPT2BPETokenizer": section()}


def check_same(theirs: Any, ours: Any, texts: Iterable[str]) -> None:
    for text in texts:
        ids = ours.encode(text)
        assert theirs.encode(text, add_special_tokens=False) == ids, text
        assert theirs.decode(ids, clean_up_tokenization_spaces=False) == ours.decode(ids), text


@pytest.mark.parametrize("kind", ["SentencePieceTokenizer", "ByteLevelTokenizer", "CharacterLevelTokenizer",
                                  "GPT2BPETokenizer"])
def test_transformers_encodes_and_decodes_as_the_run_did(kind: str, sentencepiece: Path, tmp_path: Path) -> None:
    settings = kinds(sentencepiece, tmp_path)[kind]
    ours = build(kind, settings["vocab_file"], None, settings["tokenizer_path"])
    made = written(tmp_path, settings, ours.vocab_size)
    assert made.note is None and made.eod == ours.eod
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.eos_token_id == ours.eod
    generator = random.Random(1)
    noise = ["".join(generator.choices("abc  \n12é<|>_日", k=60)) for _ in range(30)]
    check_same(theirs, ours, [*TEXTS, *noise, *markup(200), "a<0x0A><unk></s>", "<<<<<<<", "<" * 50 + ">" * 50])
    again = read_tokenizer_fields(str(tmp_path))  # for --load-hf
    if kind != "CharacterLevelTokenizer":  # its text is in no file that another program knows
        assert build(kind, again.get("vocab_file"), again.get("merge_file"), again.get("tokenizer_path")
                     ).fingerprint == ours.fingerprint and again["tokenizer_type"] == kind


def test_a_tokenizer_that_cannot_be_exported_costs_one_line_and_not_the_model(tmp_path: Path) -> None:
    """One that is gone, and one of more tokens than the model has; a larger table will do."""
    assert written(tmp_path, section(tokenizer_type="ByteLevelTokenizer"), 300).eod == 256
    gone = section(tokenizer_type="SentencePieceTokenizer", tokenizer_path=str(tmp_path / "no"))
    small = section(tokenizer_type="ByteLevelTokenizer")
    for settings, tokens, words in ((small, 200, "257 tokens, and the model 200"), (gone, 300, "no such file")):
        made = written(tmp_path, settings, tokens)
        assert not made.files and words in str(made.note) and "\n" not in str(made.note)


def test_a_sentencepiece_model_that_changes_the_text_is_copied_as_it_is(tmp_path: Path) -> None:
    import sentencepiece

    path = tmp_path / "unigram.model"
    with open(path, "wb") as file:
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(TEXTS[3:6] * 50), model_writer=file,
                                                 vocab_size=40, hard_vocab_limit=False, minloglevel=2)
    made = build_tokenizer_files(section(tokenizer_type="SentencePieceTokenizer", tokenizer_path=str(path)),
                                 ModelConfig(vocab_size=100))
    assert dict(made.files) == {"tokenizer.model": path.read_bytes()} and "sentencepiece package" in str(made.note)


def test_a_run_that_starts_from_an_exported_folder_uses_its_tokenizer(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    train([*TINY, "--train-data", corpus, "--train-iters", 1, "--save", tmp_path / "s"])
    assert main(["convert", str(tmp_path / "s"), "--output", str(tmp_path / "hf")]) == 0
    common = ["--train-data", corpus, "--train-iters", 1, "--num-workers", 0, "--sample-tokens", 0, "--batch-size", 1,
              "--load-hf", tmp_path / "hf"]
    assert "initial weights" in train(common)
    assert parse_args([str(word) for word in common]).data.tokenizer_type == "ByteLevelTokenizer"
    words = rf"--load-hf {tmp_path}/hf has 257 tokens, but this run uses the 50257 tokens of GPT2BPETokenizer"
    with pytest.raises(ConfigError, match=rf"{words}: give .*--tokenizer-type"):
        train([*common, "--tokenizer-type", "GPT2BPETokenizer"])
    wide = parse_args([str(word) for word in common])
    wide = replace(wide, model=replace(wide.model, vocab_size=50257))
    with pytest.raises(ConfigError, match="has 50257 tokens, but this run uses the 257 tokens of Byte"):
        with_vocab_size(wide, build("byte"))
    (tmp_path / "hf" / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=rf"{words}, the default: give .*--tokenizer-type"):
        train(common)
    (tmp_path / "hf" / "tokenizer.model").write_bytes(b"")
    said = parse_args([str(word) for word in common]).data
    assert (said.tokenizer_type, said.tokenizer_path) == ("SentencePieceTokenizer",
                                                          str(tmp_path / "hf" / "tokenizer.model"))
