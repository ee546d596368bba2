"""What the data flags mean."""

from __future__ import annotations

import json
import os
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from data import corpora
from data.corpora import Datasets, Source, open_datasets, parse_sources
from data.gpt2_dataset import BlendedDataset, GPT2Dataset
from data.preprocess import build_corpus
from data.storage import DataError
from data.tokenizer import ByteLevelTokenizer, GPT2BPETokenizer

BYTE = ByteLevelTokenizer()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """a and b: JSONL files of lower and upper case letters, and their corpora."""
    for name, letter in (("a", "a"), ("b", "B")):
        lines = [json.dumps({"text": letter * 9}) + "\n" for _ in range(100)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
        build_corpus([tmp_path / f"{name}.jsonl"], tmp_path / name, BYTE)
    return tmp_path


def opened(*train: object, **settings: Any) -> Datasets:
    defaults = dict(train_data=list(map(str, train)), split="8,1,1", seq_length=9, seed=1, tokenizer=BYTE)
    return open_datasets(**(defaults | settings))


def letters(dataset: object, count: int = 200) -> str:
    assert isinstance(dataset, GPT2Dataset | BlendedDataset)
    return "".join(BYTE.decode(dataset[i]) for i in range(count)).replace("<|endoftext|>", "")


def test_a_prefix_is_cut_by_the_split(folder: Path) -> None:
    data = opened(folder / "a")
    parts = (data.train, data.valid, data.test)
    assert [part.samples_per_epoch for part in parts if isinstance(part, GPT2Dataset)] == [88, 11, 11]
    assert data.notes == ()


def test_a_jsonl_file_equals_its_corpus_and_is_tokenised_once(folder: Path) -> None:
    cache = folder / "cache"
    first = opened(folder / "a.jsonl", cache_path=str(cache))
    assert first.fingerprint == opened(folder / "a").fingerprint
    made = {entry.name: entry.stat().st_mtime_ns for entry in os.scandir(cache)}
    opened(folder / "a.jsonl", cache_path=str(cache))
    assert made == {entry.name: entry.stat().st_mtime_ns for entry in os.scandir(cache)}
    (folder / "a.jsonl").write_text((folder / "b.jsonl").read_text())  # same name, same size
    assert set(letters(opened(folder / "a.jsonl", cache_path=str(cache)).train)) == {"B"}
    assert (folder / "a.jsonl.cache").exists() is False


def test_weights_are_proportions_of_samples(folder: Path) -> None:
    text = letters(opened("1", folder / "a", "3", folder / "b").train)
    assert text.count("B") / len(text) == pytest.approx(0.75, abs=0.02)
    text = letters(opened(folder / "a", folder / "b").train)  # equal sizes, no weights
    assert text.count("B") / len(text) == pytest.approx(0.5, abs=0.02)


def test_corpora_of_equal_sizes_are_shuffled_apart(folder: Path) -> None:
    lines = [json.dumps({"text": chr(0x21 + i % 90) * 9}) + "\n" for i in range(100)]
    (folder / "c.jsonl").write_text("".join(lines))
    data = opened(folder / "c.jsonl", folder / "c.jsonl").train
    assert data is not None
    assert [data[i].tolist() for i in range(0, 40, 2)] != [data[i].tolist() for i in range(1, 40, 2)]


def test_named_parts_replace_those_of_the_split(folder: Path) -> None:
    data = opened(folder / "a", valid_data=[str(folder / "b")])
    assert set(letters(data.valid)) == {"B"} and set(letters(data.train)) == set(letters(data.test)) == {"a"}
    assert isinstance(data.train, GPT2Dataset) and isinstance(data.valid, GPT2Dataset)
    assert data.valid.samples_per_epoch == samples_of(100)
    assert data.train.samples_per_epoch == samples_of(89)  # 8 of 8 + 1 parts: the share of validation is free


def samples_of(documents: int) -> int:
    """Samples of 9 + 1 tokens in documents of 9 letters and an end."""
    return (documents * 10 - 1) // 9


def test_a_part_that_is_too_small_is_absent_with_a_note(folder: Path) -> None:
    data = opened(folder / "a", split="998,1,1")
    assert data.valid is None and data.test is None
    assert len(data.notes) == 2 and "valid: the split leaves 0 documents with 0 tokens" in data.notes[0]
    data = opened(folder / "a", split="1")
    assert (data.valid, data.test, data.notes) == (None, None, ())


def test_what_the_user_names_must_be_usable(folder: Path) -> None:
    with pytest.raises(DataError, match="train: 80 documents with 800 tokens, one sample needs 1001"):
        opened(folder / "a", seq_length=1000)
    with pytest.raises(DataError, match="valid: 100 documents with 1000 tokens, one sample needs 1002"):
        opened(valid_data=[str(folder / "a")], seq_length=1001)
    assert opened(valid_data=[str(folder / "a")]).train is None


def test_another_tokenizer_is_refused_naming_both(folder: Path) -> None:
    with pytest.raises(DataError, match="made with ByteLevelTokenizer .* this run uses GPT2BPETokenizer"):
        opened(folder / "a", tokenizer=GPT2BPETokenizer())


def test_a_corpus_without_facts_is_checked_by_its_ids(folder: Path) -> None:
    os.unlink(folder / "a.json")
    assert opened(folder / "a").train is not None
    (folder / "a.bin").write_bytes(b"\xff\xff" + (folder / "a.bin").read_bytes()[2:])
    with pytest.raises(DataError, match="document 0, offset 0: token id 65535 is outside the vocabulary of 257"):
        opened(folder / "a")


def test_mock_data_needs_no_files() -> None:
    data = opened(mock=True)
    assert data.train is not None and data.valid is not None
    assert data.train[0].tolist() != data.valid[0].tolist()
    assert opened(mock=True).fingerprint == data.fingerprint != opened(mock=True, seed=2).fingerprint


@pytest.mark.parametrize(("words", "expected"), [
    ("a", [("a", None)]), ("a b c", [("a", None), ("b", None), ("c", None)]),
    ("0.3 a 7 b", [("a", Fraction("0.3")), ("b", 7)]), ("1 2", [("2", 1)]), ("2020", [("2020", None)]),
])
def test_sources_are_names_or_weighted_names(words: str, expected: list[tuple[str, Fraction | None]]) -> None:
    assert parse_sources(words.split(), "--train-data") == [Source(*pair) for pair in expected]


@pytest.mark.parametrize("words", ["1 a b", "1 a b c", "0 a 1 b", "1 a -1 b"])
def test_half_weighted_lists_are_refused(words: str) -> None:
    with pytest.raises(DataError, match="--train-data .*weight and name in turn"):
        parse_sources(words.split(), "--train-data")


def test_missing_data_is_refused_with_the_command_that_makes_it(
        folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpora, "DEFAULT_FOLDER", folder / "none")
    monkeypatch.delenv("WEBTEXT_PREFIX", raising=False)
    for source, message in (("default", "python -m data.default_corpus"), ("webtext", "preprocess_webtext.sh"),
                            ("missing", "missing.idx: cannot read"), ("missing.jsonl", "missing.jsonl: cannot read")):
        with pytest.raises(DataError, match=message):
            opened(source)
    monkeypatch.setenv("WEBTEXT_PREFIX", str(folder / "a"))
    assert opened("webtext").fingerprint == opened(folder / "a").fingerprint
