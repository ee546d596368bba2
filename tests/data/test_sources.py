"""What the data flags mean: names, weights, parts, folders; what is made of text, once, and again when it changes."""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import random
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data import default_corpus, sources
from data.default_corpus import build_default_corpus, read_novels
from data.gpt2_dataset import BlendedDataset, GPT2Dataset
from data.indexed import IndexedCorpus
from data.input_files import find_text_files
from data.preprocess import build_corpus
from data.sampling import Blend
from data.sources import Datasets, Source, check_epochs, check_sources, open_datasets, parse_sources
from data.mix import main as mix
from data.storage import DataError, UsageError
from data.tokenizer import GPT2BPETokenizer, SentencePieceTokenizer
from tests.data.helpers import BYTE

ROOT = Path(__file__).resolve().parents[2]


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


# ------------------------------------------------------------------------------------------------- names and weights

def test_sources_are_names_or_weighted_names() -> None:
    for words, expected in (
            ("a", [Source("a")]), ("a b c", [Source("a"), Source("b"), Source("c")]),
            ("0.3 a 7 b", [Source("a", Fraction("0.3")), Source("b", Fraction(7))]),
            ("1 2", [Source("2", Fraction(1))]), ("2020", [Source("2020")])):
        assert parse_sources(words.split(), "--train-data") == expected
    for words in ("1 a b", "1 a b c", "0 a 1 b", "1 a -1 b"):
        with pytest.raises(DataError, match="--train-data .*weight and name in turn"):
            parse_sources(words.split(), "--train-data")


@pytest.mark.parametrize("there", ["2024.idx", "2023.bin"])
def test_a_weight_that_may_be_a_name_is_refused_with_how_to_write_either(there, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["2024", "a", "2023", "b"] if there == "2024.idx" else ["2023", "2024"]
    weighted = parse_sources(words, "--train-data")
    Path(there).touch()
    with pytest.raises(DataError, match=rf"write \./{there[:4]} for what is there, or \+{there[:4]} for the weight"):
        check_sources(words, "--train-data")
    assert parse_sources([word.replace("202", "+202") for word in words[:1]] + words[1:2], "") == weighted[:1]
    assert parse_sources(["./2023", "2024"], "") == [Source("./2023"), Source("2024")]


def complaint(name: object) -> str:
    with pytest.raises(DataError) as caught:
        check_sources(["1", str(name)], "--valid-data")
    return str(caught.value)


def test_a_name_of_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "corpus.bin").touch()
    (tmp_path / "corpus.idx").touch()
    assert complaint(tmp_path / "corpse") == (
        f"--valid-data {tmp_path}/corpse: no file or folder of this name; give a text file, a folder of them, or the "
        "PREFIX of a corpus (PREFIX.bin and PREFIX.idx)")
    check_sources([str(tmp_path / "corpus"), f"{tmp_path}/"], "--train-data")


def test_every_name_is_looked_at_before_the_first_is_made_into_a_corpus(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text " * 99)
    with pytest.raises(DataError, match="--test-data .*/b.txt: no file or folder of this name; give"):
        opened(tmp_path / "a.txt", test_data=[str(tmp_path / "b.txt")])
    assert os.listdir(tmp_path) == ["a.txt"]


def test_a_corpus_that_has_a_name_is_refused_with_the_command_that_makes_it(folder, monkeypatch):
    assert default_corpus.DEFAULT_FOLDER == ROOT / ".cache" / "default-corpus"  # of an installation: test_packaging.py
    monkeypatch.setattr(sources, "DEFAULT_FOLDER", folder / "none")
    monkeypatch.delenv("WEBTEXT_PREFIX", raising=False)
    assert complaint("default").endswith("build it (5 seconds, no download): python -m data.default_corpus")
    assert "preprocess_webtext.sh" in complaint("webtext")
    monkeypatch.setenv("WEBTEXT_PREFIX", str(folder / "a"))
    assert set(letters(opened("webtext").train)) == {"a"}


def test_training_text_that_can_be_read_only_once_is_refused(tmp_path: Path) -> None:
    """Its checksum would take what the tokenizer is to read."""
    for name in ("pipe", "pipe.jsonl", "pipe.bin"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(DataError, match=f"--train-data: .*{name}: is no file but a pipe or a device"):
            check_sources([str(tmp_path / name)], "--train-data")
        with pytest.raises(DataError, match=f"{name}: is no file but a pipe or a device"):
            IndexedCorpus(tmp_path / name)


def test_a_file_of_unknown_kind_is_refused_with_what_is_expected(folder: Path) -> None:
    (folder / "paper.pdf").touch()
    with pytest.raises(DataError, match=r"paper.pdf: its name does not say what it holds; expected .* \.txt or \.bin"):
        opened(folder / "paper.pdf")
    (folder / "a.jsonl").rename(folder / "a")  # a corpus has its name, too
    assert opened(folder / "a").train is not None


# --------------------------------------------------------------------------------------------------- parts and blends

def samples_of(documents: int) -> int:
    """Samples of 9 + 1 tokens in documents of 9 letters and an end."""
    return (documents * 10 - 1) // 9


def test_named_parts_replace_those_of_the_split(folder: Path) -> None:
    data = opened(folder / "a")
    parts = (data.train, data.valid, data.test)
    assert [part.samples_per_epoch for part in parts if isinstance(part, GPT2Dataset)] == list(
        map(samples_of, (80, 10, 10))) and data.notes == ()
    data = opened(folder / "a", valid_data=[str(folder / "b")])
    assert set(letters(data.valid)) == {"B"} and set(letters(data.train)) == set(letters(data.test)) == {"a"}
    assert isinstance(data.train, GPT2Dataset) and isinstance(data.valid, GPT2Dataset)
    assert data.valid.samples_per_epoch == samples_of(100)
    assert data.train.samples_per_epoch == samples_of(89)  # 8 of 8 + 1 parts: the share of validation is free


def test_weights_are_proportions_of_samples(folder: Path) -> None:
    for names, share in (([1, folder / "a", 3, folder / "b"], 0.75), ([folder / "a", folder / "b"], 0.5)):
        text = letters(opened(*names).train)
        assert text.count("B") / len(text) == pytest.approx(share, abs=0.02)


def test_a_mixture_file_is_another_way_to_write_the_words(folder: Path) -> None:
    a, b = str(folder / "a"), str(folder / "b")
    for rows, words in (
            ([{"name": a, "weight": 0.7, "max_epochs": 4}, {"name": b, "weight": "3e-1"}], (0.7, a, 0.3, b)),
            ([{"name": a}, {"name": b, "max_epochs": 2}], (a, b))):
        (folder / "m.yaml").write_text(json.dumps({"sources": rows}))  # which is YAML, too
        assert opened(folder / "m.yaml", train_samples=100).fingerprint == opened(*words).fingerprint
    for text, message in (("sources: [{name: a, weigh: 1}]", "weigh"), ("sources: [{name: a, weight: 0}]", "0 is no"),
                          ("sources: [{name: a, weight: 1}, {name: b}]", "all have a weight or none"), ("[", "parsing"),
                          ("sources: []", "or none has"), ("", "`sources:`"), ("sources: 3", "a list of objects")):
        (folder / "m.yaml").write_text(text)
        with pytest.raises(DataError, match=f"^--train-data .*m.yaml: expected .*{message}"):
            check_sources([str(folder / "m.yaml")], "--train-data")


def test_budgets_are_refused_that_read_a_source_more_often_than_it_allows() -> None:
    """Counted one by one: within one sample, and exactly at the end of each period of the blend."""
    draw, refusals = random.Random(2), 0
    for _ in range(20):
        sizes = [draw.randint(1, 30) for _ in range(draw.randint(1, 4))]
        weights = [draw.randint(1, 4) for _ in sizes]
        limits = [draw.choice([Fraction(1), Fraction("1.5"), Fraction(4)]) for _ in sizes]
        sources, blend = list(map(Source, "abcd", map(Fraction, weights), limits)), Blend(weights)
        for samples in range(1, 150):
            read = np.bincount(blend.locate(np.arange(samples))[0], minlength=len(sizes)).tolist()
            over = max(count - limit * size for count, limit, size in zip(read, limits, sizes, strict=True))
            try:
                check_epochs(sources, sizes, samples, 8)
                assert over < 1 and (over <= 0 or samples % blend.period)
            except DataError as error:
                assert over > -1 and (over > 0 or samples % blend.period)
                refusals += 1
                name, most = str(error)[0], int(re.findall(r"([\d,]+) samples\)", str(error))[0].replace(",", ""))
                alone = [source._replace(max_epochs=source.max_epochs if source.name == name else None)
                         for source in sources]
                check_epochs(alone, sizes, most, 8)
                with pytest.raises(DataError, match=f"^{name}: {(most + 1) * 8:,} tokens of the blend read it"):
                    check_epochs(alone, sizes, most + 1, 8)
    assert refusals > 500


def test_data_mix_shows_a_blend_writes_it_and_refuses_a_budget_that_repeats_too_often(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    flags = ["--split", "8,2", "--seq-length", "9"]  # 80 documents of 10 tokens: 88 samples
    mix([*"3 a 1 b".split(), "--max-epochs", "2", "--tokens", "1000", "--output", "m.yaml", *flags])
    table = capsys.readouterr().out
    assert [line.split() for line in table.splitlines()[1:]] == [
        ["a", "792", "3", "75.00%", "747", "0.95", "2"], ["b", "792", "1", "25.00%", "243", "0.32", "2"],
        ["all", "1,584", "100.00%", "999"]]
    mix(["m.yaml", "--tokens", "1000", *flags])
    assert capsys.readouterr().out == table
    with pytest.raises(DataError, match="^a: 2,520 tokens of the blend read it 2.39 times, max_epochs is 2; read at "
                       r"most 2,106 tokens \(234 samples\), or"):
        mix(["m.yaml", "--tokens", "2520", *flags])
    assert "2.39" in capsys.readouterr().out, "the table shows it, too"
    with pytest.raises(DataError, match="--train-data: a: 8,091 tokens of the blend read it"):
        opened("m.yaml", split="8,2", train_samples=899)
    with pytest.raises(UsageError, match="--output m.json: expected a name that ends in .yaml or .yml"):
        mix(["a", "--output", "m.json"])


def test_corpora_of_equal_sizes_are_shuffled_apart(folder: Path) -> None:
    lines = [json.dumps({"text": chr(0x21 + i % 90) * 9}) + "\n" for i in range(100)]
    (folder / "c.jsonl").write_text("".join(lines))
    data = opened(folder / "c.jsonl", folder / "c.jsonl").train
    assert data is not None
    assert [data[i].tolist() for i in range(0, 40, 2)] != [data[i].tolist() for i in range(1, 40, 2)]


def test_a_part_that_is_too_small_is_absent_with_a_note(folder: Path) -> None:
    data = opened(folder / "a", split="998,1,1")
    assert data.valid is None and data.test is None
    assert data.notes[0] == (f"valid: --split 998,1,1 leaves 0 of the 100 documents of {folder / 'a'}, 0 tokens, and a "
                             "sample needs 10: not used; give --valid-data, or a larger share in --split")
    assert len(data.notes) == 2 and data.notes[1].startswith("test: --split 998,1,1 leaves 0 of the 100 documents")
    data = opened(folder / "a", split="1")
    assert (data.valid, data.test, data.notes) == (None, None, ())
    book = folder / "book.txt"
    book.write_text("It was a dark night.\n\n" * 50)
    data = opened(book, split="949,50,1")
    assert data.train is not None and data.valid is None and "1 document, 1,101 tokens" in data.notes[0]
    assert data.notes[1] == (
        f"valid: --split 949,50,1 divides between documents, and {book} is a single one: not used; give --valid-data "
        "FILE, or --document-separator blank-line, which makes a document of each paragraph")
    assert opened(book, document_separator="blank-line").valid is not None


def test_what_the_user_names_must_be_usable(folder: Path) -> None:
    a, b = [str(folder / "a")], [str(folder / "b")]
    refused: list[tuple[dict[str, Any], str]] = [
        ({"train_data": a, "seq_length": 1000}, "train: 80 documents with 800 tokens, one sample needs 1001"),
        ({"valid_data": a, "seq_length": 1001}, "valid: 100 documents with 1000 tokens, one sample needs 1002"),
        ({"train_data": a, "split": "0,1", "valid_data": b}, "^--split 0,1: the share for training is 0, and each oth"),
        ({"train_data": a, "split": "0,1,2", "valid_data": b, "test_data": b}, "^--split 0,1,2: .* a first number abo")]
    for settings, message in refused:
        with pytest.raises(DataError, match=message):
            opened(**settings)
    assert opened(*a, split="0,1").train is None
    assert opened(valid_data=[str(folder / "a")]).train is None
    with pytest.raises(DataError, match="made with ByteLevelTokenizer .* this run uses GPT2BPETokenizer"):
        opened(folder / "a", tokenizer=GPT2BPETokenizer())
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


# ---------------------------------------------------------------------------------------------- text, and its cache

def write_texts(folder: Path, count: int) -> Path:
    folder.mkdir()
    for i in range(count):
        (folder / f"{i:02}.txt").write_text(f"some words of text {i}" * 3)
    return folder


def test_text_equals_its_corpus_and_is_tokenised_once_and_reported_in_one_line(folder: Path) -> None:
    texts = write_texts(folder / "texts", 20)
    (texts / "notes.pdf").touch()
    (texts / "empty.txt").touch()
    build_corpus(find_text_files([texts]).files, folder / "c", BYTE)
    first = opened(texts)
    assert first.fingerprint == opened(folder / "c").fingerprint
    assert opened(folder / "a.jsonl").fingerprint == opened(folder / "a").fingerprint
    (line,) = first.notes
    assert line.startswith(f"{texts}: 21 files (1 empty), 20 documents, 1,2") and "tokenized in" in line
    assert f"{texts}.cache/texts-" in line and "left out: 1 other" in line and "notes.pdf" in line
    made = {entry.name: entry.stat().st_mtime_ns for entry in os.scandir(f"{texts}.cache")}
    assert "found in the cache" in opened(texts).notes[0] and opened(f"{texts}/").fingerprint == first.fingerprint
    assert made == {entry.name: entry.stat().st_mtime_ns for entry in os.scandir(f"{texts}.cache")}
    assert opened("2", texts, "1", folder / "a.jsonl", valid_data=[str(texts)]).valid is not None
    opened(folder / "b.jsonl", cache_path=str(folder / "cache"))
    assert (folder / "cache").exists() and not (folder / "b.jsonl.cache").exists()


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


def test_programs_that_start_together_build_a_corpus_once(folder: Path) -> None:
    texts = write_texts(folder / "texts", 50)
    program = ("import sys; from data.sources import open_datasets; from data.tokenizer import ByteLevelTokenizer; "
               "print(*open_datasets(train_data=sys.argv[1:], split='1', seq_length=9, seed=1, "
               "tokenizer=ByteLevelTokenizer()).notes)")
    running = [subprocess.Popen([sys.executable, "-c", program, texts], cwd=ROOT, stdout=subprocess.PIPE, text=True)
               for _ in range(3)]
    printed = [process.communicate(timeout=60)[0] for process in running]
    assert all("50 files, 50 documents" in line for line in printed)
    assert sum("tokenized in" in line for line in printed) == 1


# -------------------------------------------------------------------------------------------------------------- folders

def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def names(folder: Path) -> list[str]:
    return [os.path.relpath(path, folder) for path in find_text_files([folder]).files]


def test_what_is_left_out_is_counted_and_named(tmp_path: Path) -> None:
    touch(tmp_path, "a.txt", ".hidden.txt", ".git/config", "a.txt.cache/a-0.bin", "paper.pdf", "corpus.json", "c.bin",
          "README", "sub/page.html")
    os.mkfifo(tmp_path / "pipe.txt")
    found = find_text_files([tmp_path])
    assert [Path(path).name for path in found.files] == ["a.txt"]
    assert found.hidden == 2
    assert sorted(Path(path).name for path in found.others) == [
        "README", "a-0.bin", "c.bin", "corpus.json", "page.html", "paper.pdf", "pipe.txt"]
    assert found.left_out == f"left out: 2 hidden, 7 other ({', '.join(found.others[:3])} and 4 more)"


def test_links_are_followed_but_not_in_circles(tmp_path: Path) -> None:
    touch(tmp_path, "in/a.txt", "other/b.txt", "other/deep/c.txt")
    (tmp_path / "in" / "link").symlink_to(tmp_path / "other")
    (tmp_path / "other" / "deep" / "up").symlink_to(tmp_path / "other")
    (tmp_path / "in" / "self").symlink_to(".")
    (tmp_path / "in" / "l.txt").symlink_to(tmp_path / "other" / "b.txt")
    assert names(tmp_path / "in") == ["a.txt", "l.txt", "link/b.txt", "link/deep/c.txt"]
    assert "2 other (" in find_text_files([tmp_path / "in"]).left_out


def test_a_folder_without_text_is_refused_with_what_it_holds(tmp_path: Path) -> None:
    touch(tmp_path, "corpus.bin", "corpus.idx")
    with pytest.raises(DataError, match="holds no file of text .*left out: 2 other .*corpus.bin"):
        find_text_files([tmp_path])


# --------------------------------------------------------------------------------------------------- the default corpus

def test_it_is_deterministic_complete_and_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = read_novels()[:300]
    monkeypatch.setattr(default_corpus, "read_novels", lambda: texts)
    prefix = build_default_corpus(tmp_path / "a", 600, workers=2)
    build_default_corpus(tmp_path / "b", 600, workers=1)
    names = ["corpus.jsonl", "tokenizer.model", "corpus.bin", "corpus.idx", "corpus.json", "source.json"]
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name

    corpus, tokenizer = IndexedCorpus(prefix), SentencePieceTokenizer(str(tmp_path / "a" / "tokenizer.model"))
    assert [json.loads(line)["text"] for line in (tmp_path / "a" / "corpus.jsonl").read_text().splitlines()] == texts
    assert tokenizer.vocab_size == 600 and corpus.num_documents == 300
    for number in (0, 299):
        *ids, end = corpus.document(number).tolist()
        assert tokenizer.decode(ids) == texts[number] and end == tokenizer.eod

    monkeypatch.setattr(default_corpus, "read_novels", lambda: pytest.fail("built again"))
    build_default_corpus(tmp_path / "a", 600)
    (tmp_path / "a" / "corpus.bin").unlink()
    with pytest.raises(pytest.fail.Exception):
        build_default_corpus(tmp_path / "a", 600)


def test_the_novels_are_whole_and_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = read_novels()
    assert len(set(texts)) == 2169 and min(map(len, texts)) > 300 and texts[0] != min(texts)
    assert texts == sorted(texts, key=lambda text: hashlib.sha256(text.encode()).digest())
    (tmp_path / "changed.xz").write_bytes(lzma.compress(lzma.decompress(default_corpus.NOVELS.read_bytes())[:-1]))
    monkeypatch.setattr(default_corpus, "NOVELS", tmp_path / "changed.xz")
    with pytest.raises(DataError, match="the text is not the shipped one"):
        read_novels()
