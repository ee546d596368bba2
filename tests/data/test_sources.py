"""What the values of the data flags name, and what is said of one that names nothing."""

from __future__ import annotations

import os
from fractions import Fraction
from pathlib import Path

import pytest

from data import default_corpus, sources
from data.preprocess import build_corpus
from data.sources import WeightedSource, check_sources, open_datasets, parse_sources
from data.storage import DataError
from data.tokenizer import ByteLevelTokenizer


@pytest.mark.parametrize(("words", "expected"), [
    ("a", [("a", None)]), ("a b c", [("a", None), ("b", None), ("c", None)]),
    ("0.3 a 7 b", [("a", Fraction("0.3")), ("b", 7)]), ("1 2", [("2", 1)]), ("2020", [("2020", None)]),
])
def test_sources_are_names_or_weighted_names(words: str, expected: list[tuple[str, Fraction | None]]) -> None:
    assert parse_sources(words.split(), "--train-data") == [WeightedSource(*pair) for pair in expected]


@pytest.mark.parametrize("words", ["1 a b", "1 a b c", "0 a 1 b", "1 a -1 b"])
def test_half_weighted_lists_are_refused(words: str) -> None:
    with pytest.raises(DataError, match="--train-data .*weight and name in turn"):
        parse_sources(words.split(), "--train-data")


@pytest.mark.parametrize("there", ["2023", "2024.idx", "2023.bin"])
def test_a_weight_that_may_be_a_name_is_refused_with_how_to_write_either(
        there: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["2024", "a", "2023", "b"] if there == "2024.idx" else ["2023", "2024"]
    weighted = parse_sources(words, "--train-data")
    Path(there).touch()
    with pytest.raises(DataError, match=rf"write \./{there[:4]} for what is there, or \+{there[:4]} for the weight"):
        check_sources(words, "--train-data")
    assert parse_sources([word.replace("202", "+202") for word in words[:1]] + words[1:2], "") == weighted[:1]
    assert parse_sources(["./2023", "2024"], "") == [WeightedSource("./2023"), WeightedSource("2024")]


def complaint(name: object) -> str:
    with pytest.raises(DataError) as caught:
        check_sources(["1", str(name)], "--valid-data")
    return str(caught.value)


def test_a_name_of_nothing_is_told_with_what_is_there(tmp_path: Path) -> None:
    for name in ("my_texts", "corpus.bin", "corpus.idx", "book.txt", ".my_text.swp"):
        (tmp_path / name).touch()
    told = f"--valid-data {tmp_path}/%s: no file or folder of this name"
    for wrong, near in (("my_text", "my_texts"), ("corpse", "corpus"), ("book", "book.txt"), ("book.gz", "book.txt")):
        assert complaint(tmp_path / wrong) == told % wrong + f"; did you mean {tmp_path}/{near}?"
    assert complaint(tmp_path / "xyz").startswith(told % "xyz" + "; give a text file, a folder of them, or the PREFIX")
    assert complaint(tmp_path / "no/x").endswith(f"no file or folder of this name, nor a folder {tmp_path}/no")
    check_sources([str(tmp_path / name) for name in ("my_texts", "my_texts/", "corpus", "book.txt")], "--train-data")


def test_every_name_is_looked_at_before_the_first_is_made_into_a_corpus(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text " * 99)
    with pytest.raises(DataError, match="--test-data .*/b.txt: no file or folder of this name; did you mean"):
        open_datasets(train_data=[str(tmp_path / "a.txt")], test_data=[str(tmp_path / "b.txt")], seq_length=9, seed=1,
                      tokenizer=ByteLevelTokenizer())
    assert os.listdir(tmp_path) == ["a.txt"]


def test_a_corpus_that_has_a_name_is_refused_with_the_command_that_makes_it(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "DEFAULT_FOLDER", tmp_path / "none")
    monkeypatch.delenv("WEBTEXT_PREFIX", raising=False)
    assert complaint("default").endswith("build it (10 seconds, no download): python -m data.default_corpus")
    assert "preprocess_webtext.sh" in complaint("webtext")
    (tmp_path / "a.txt").write_text("some text")
    build_corpus([tmp_path / "a.txt"], tmp_path / "a", ByteLevelTokenizer())
    monkeypatch.setenv("WEBTEXT_PREFIX", str(tmp_path / "a"))
    check_sources(["webtext"], "--train-data")


def test_the_default_corpus_of_the_repository_is_in_the_repository() -> None:
    """An installation's is in the current folder: test_packaging.py."""
    assert default_corpus.DEFAULT_FOLDER == Path(__file__).resolve().parents[2] / ".cache" / "default-corpus"
