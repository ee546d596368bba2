"""What the data flags mean."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from data import sources
from data.gpt2_dataset import BlendedDataset, GPT2Dataset
from data.input_files import find_text_files
from data.preprocess import build_corpus
from data.sources import Datasets, open_datasets
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
    assert data.notes[0] == (f"valid: --split 998,1,1 leaves 0 of the 100 documents of {folder / 'a'}, 0 tokens, and a "
                             "sample needs 10: not used; give --valid-data, or a larger share in --split")
    assert len(data.notes) == 2 and data.notes[1].startswith("test: --split 998,1,1 leaves 0 of the 100 documents")
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


def write_texts(folder: Path, count: int, words: str = "some words of text ") -> Path:
    folder.mkdir()
    for i in range(count):
        (folder / f"{i:02}.txt").write_text(f"{words}{i}" * 3)
    return folder


def test_a_folder_of_text_equals_its_corpus_and_is_reported_in_one_line(folder: Path) -> None:
    texts = write_texts(folder / "texts", 20)
    (texts / "notes.pdf").touch()
    (texts / "empty.txt").touch()
    build_corpus(find_text_files([texts]).files, folder / "c", BYTE)
    first = opened(texts)
    assert first.fingerprint == opened(folder / "c").fingerprint
    (line,) = first.notes
    assert line.startswith(f"{texts}: 21 files (1 empty), 20 documents, 1,2") and "tokenized in" in line
    assert f"{texts}.cache/texts-" in line and "left out: 1 of unknown kind" in line and "notes.pdf" in line
    (line,) = opened(texts).notes
    assert "found in the cache" in line
    assert opened(f"{texts}/").fingerprint == first.fingerprint
    assert opened("2", texts, "1", folder / "a.jsonl", valid_data=[str(texts)]).valid is not None


def test_everything_that_changes_the_text_of_a_source_changes_its_corpus(folder: Path) -> None:
    texts = write_texts(folder / "texts", 4)
    seen = {opened(texts).fingerprint}

    def is_new(**settings: Any) -> bool:
        before = len(seen)
        seen.add(opened(texts, **settings).fingerprint)
        return len(seen) > before

    (texts / "00.txt").write_text("Some words of text 0" * 3)  # the same size
    assert is_new()
    (texts / "00.txt").rename(texts / "99.txt")
    assert is_new(), "another order"
    (texts / "new.txt").write_text("more " * 9)
    assert is_new()
    assert is_new(document_separator="words") and is_new(document_separator="x" * 300 + "1") is False
    assert len(list((folder / "texts.cache").glob("*.idx"))) == 6
    opened(texts, document_separator="x" * 300 + "2")
    assert len(list((folder / "texts.cache").glob("*.idx"))) == 7, "a long separator counts to its end"
    assert is_new(tokenizer=GPT2BPETokenizer(), seq_length=2)
    (folder / "b.txt").write_bytes((folder / "b.jsonl").read_bytes())
    assert opened(folder / "b.txt", split="1").fingerprint != opened(folder / "b.jsonl", split="1").fingerprint


def test_one_text_file_is_one_document_and_the_note_says_how_to_validate(folder: Path) -> None:
    (folder / "book.txt").write_text("It was a dark night.\n\n" * 50)
    data = opened(folder / "book.txt", split="949,50,1")
    assert data.train is not None and data.valid is None
    assert "50 documents" not in data.notes[0] and "1 document, 1,101 tokens" in data.notes[0]
    book = folder / "book.txt"
    assert data.notes[1] == (f"valid: --split 949,50,1 cuts between documents, and {book} is a single one: not used; "
                             "give --valid-data, or a --document-separator")
    assert opened(folder / "book.txt", document_separator="blank-line").valid is not None


def test_a_file_of_unknown_kind_is_refused_with_what_is_expected(folder: Path) -> None:
    (folder / "paper.pdf").touch()
    with pytest.raises(DataError, match=r"paper.pdf: its name does not say what it holds; expected .* \.txt or \.bin"):
        opened(folder / "paper.pdf")
    (folder / "a.jsonl").rename(folder / "a")  # a corpus has its name, too
    assert opened(folder / "a").train is not None


def test_a_source_that_changes_while_it_is_read_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = write_texts(folder / "texts", 3)

    def checksums(*arguments: Any) -> tuple[list[str], int]:
        found = content_keys(*arguments)
        (texts / "00.txt").write_text("changed")
        return found

    content_keys = sources._content_keys
    monkeypatch.setattr(sources, "_content_keys", checksums)
    with pytest.raises(DataError, match="00.txt: changed while it was read"):
        opened(texts)
    monkeypatch.undo()
    assert "tokenized in" in opened(texts).notes[0]


def test_programs_that_start_together_build_a_corpus_once(folder: Path) -> None:
    texts = write_texts(folder / "texts", 50)
    program = ("import sys; from data.sources import open_datasets; from data.tokenizer import ByteLevelTokenizer; "
               "print(*open_datasets(train_data=sys.argv[1:], split='1', seq_length=9, seed=1, "
               "tokenizer=ByteLevelTokenizer()).notes)")
    running = [subprocess.Popen([sys.executable, "-c", program, texts], cwd=Path(__file__).resolve().parents[2],
                                stdout=subprocess.PIPE, text=True) for _ in range(3)]
    printed = [process.communicate(timeout=60)[0] for process in running]
    assert all("50 files, 50 documents" in line for line in printed)
    assert sum("tokenized in" in line for line in printed) == 1
