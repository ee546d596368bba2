"""A tokenizer.json that says what GPT-2's two files would gives the same tokenizer; any other is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data.gpt2_bpe import GPT2BPETokenizer, packaged_merges, parse_merges
from data.storage import DataError, UsageError
from data.tokenizer_base import END_OF_TEXT

tokenizers = pytest.importorskip("tokenizers")

TEXTS = ["", " ", "The quick brown fox's  tail\n\n\tand 2019.", "naïve 日本語 🙂 \x00", "ab ba aab bba " * 9, "  x"]


def trained(**changes: Any) -> dict[str, Any]:
    """What the tokenizers library writes of a small byte-level BPE, with changes to its parts."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.train_from_iterator([Path(__file__).read_text()] * 3, tokenizers.trainers.BpeTrainer(
        vocab_size=600, special_tokens=[END_OF_TEXT], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    return {**json.loads(made.to_str()), **changes}


def written(folder: Path, fast: Any) -> str:
    (folder / "tokenizer.json").write_text(json.dumps(fast))
    return str(folder / "tokenizer.json")


@pytest.mark.parametrize("joined", [False, True])
def test_it_gives_the_ids_of_the_library(tmp_path: Path, joined: bool) -> None:
    fast = trained()
    if joined:  # as former versions wrote merges
        fast["model"]["merges"] = [" ".join(pair) for pair in fast["model"]["merges"]]
    path = written(tmp_path, fast)
    ours, theirs = GPT2BPETokenizer(path), tokenizers.Tokenizer.from_file(path)
    assert ours.vocab_size == theirs.get_vocab_size() and ours.eod == theirs.token_to_id(END_OF_TEXT) == 0
    for text in [*TEXTS, Path(__file__).read_text()[:4000]]:
        assert ours.encode(text) == theirs.encode(text).ids, text


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


def without_a_byte(fast: dict[str, Any]) -> None:
    del fast["model"]["vocab"]["!"]


@pytest.mark.parametrize(("change", "words"), [
    (changed("model", type="Unigram"), "its model is Unigram"),
    (changed("model", byte_fallback=True), "byte_fallback True"),
    (changed("pre_tokenizer", type="Metaspace"), "its pre_tokenizer is Metaspace"),
    (changed("pre_tokenizer", add_prefix_space=True), "add_prefix_space"),
    (lambda fast: fast.update(normalizer={"type": "NFC"}), "a normalizer, NFC"),
    (lambda fast: fast.update(post_processor={"type": "TemplateProcessing"}), "a post_processor, TemplateProcessing"),
    (lambda fast: fast["added_tokens"].append({"id": 600, "content": "<pad>"}), "a token '<pad>' beside the merges"),
    (lambda fast: fast["model"]["vocab"].update(zzzz=600), "1 tokens that no merge makes, 'zzzz'"),
    (without_a_byte, "1 of the 256 bytes are not"), (lambda fast: fast["model"].pop("merges"), "not a tokenizer.json"),
])
def test_another_kind_is_refused_with_the_flags_of_the_right_one(
        tmp_path: Path, change: Callable[[dict[str, Any]], Any], words: str) -> None:
    fast = trained()
    change(fast)
    with pytest.raises(DataError, match=f"tokenizer.json.*{words}.*--tokenizer-type with its files"):
        GPT2BPETokenizer(written(tmp_path, fast))


def test_a_vocabulary_alone_still_wants_its_merges(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--vocab-file without --merge-file"):
        GPT2BPETokenizer(written(tmp_path, {"a": 0, "model": 1}))
