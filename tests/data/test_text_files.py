"""Plain text to documents: what a document is, how files are cut for the workers, and what is refused or skipped."""

from __future__ import annotations

import gzip
import json
import os
import random
import threading
from pathlib import Path

import pytest

from data import preprocess, text_files
from data.indexed import IndexedCorpus
from data.preprocess import TextReadOptions, build_corpus
from data.storage import DataError
from data.text_files import Separator, read_text_chunks
from data.tokenizer import GPT2BPETokenizer, SentencePieceTokenizer, Tokenizer, train_sentencepiece
from tests.data.helpers import BYTE, Stop, documents_of, files_of


def documents_in(files: list[Path], separator: str | None = None, tokenizer: Tokenizer = BYTE,
                 **settings: object) -> list[list[int]]:
    prefix = files[0].parent / "corpus"
    build_corpus(files, prefix, tokenizer, TextReadOptions(separator=Separator.parse(separator)),  # type: ignore
                 **settings)
    return documents_of(prefix)


def texts(path: Path, content: bytes, separator: str | None = None) -> list[str]:
    path.write_bytes(content)
    found = documents_in([path], separator)
    assert all(ids[-1] == BYTE.eod for ids in found)
    return [BYTE.decode(ids[:-1]) for ids in found]


DOCUMENTS_OF: list[tuple[str | None, bytes, list[str]]] = [
    (None, b"one\n\ntwo\n", ["one\n\ntwo\n"]), (None, b"\xef\xbb\xbfone", ["one"]), (None, b"a\r\nb\r\n", ["a\nb\n"]),
    (None, "a\rb\u2028c\ufeff\x00".encode(), ["a\rb\u2028c\ufeff\x00"]), (None, b" \n a", [" \n a"]),
    (None, b"<|endoftext|>", ["<|endoftext|>"]),
    ("<|endoftext|>", b"one\n<|endoftext|>\ntwo\n<|endoftext|>\n", ["one", "two"]),
    ("<|endoftext|>", b"<|endoftext|><|endoftext|>one<|endoftext|> \n<|endoftext|>\n  two", ["one", "  two"]),
    ("blank-line", b"\n\none\n1\n\n\n  \n \t\r\n  two\r\n\r\nthree\n\n", ["one\n1", "  two", "three"]),
    (r"\n---\n", b"one --- 1\n---\ntwo\r\n---\r\nthree\n--", ["one --- 1", "two", "three\n--"]),
    (r"\n", b"one\n\ntwo\r\nthree", ["one", "two", "three"]), (r"\\n", rb"one\ntwo", ["one", "two"]),
    ("a.c", b"abc a.c d", ["abc ", " d"]), ("\u00e9", "a\u00e9b".encode(), ["a", "b"]),
    ("x", b"\xef\xbb\xbfaxb", ["a", "b"]), ("absent", b"one\n", ["one"])]
"""Separator, file, documents."""


def test_a_file_is_one_document_or_those_between_separators(tmp_path: Path) -> None:
    for separator, content, expected in DOCUMENTS_OF:
        assert texts(tmp_path / "a.txt", content, separator) == expected, (separator, content)


def test_files_without_text_are_no_documents(tmp_path: Path) -> None:
    for name, content in (("a", b""), ("b", b" \r\n\t\n"), ("c", b"\xef\xbb\xbf"), ("d", b"text")):
        (tmp_path / f"{name}.txt").write_bytes(content)
    assert len(documents_in(sorted(tmp_path.glob("*.txt")))) == 1
    with pytest.raises(DataError, match="no tokens: the input holds 0 documents"):
        documents_in([tmp_path / "b.txt"])


AWKWARD = ["a", "it's", "  ", " ", "\n", "\r\n", "\n\n", "\n \n", "\t", "\u3000", "\u00a0", "\u2028", "\u200b",
           "\u3002", "\u4e2d\u6587", "\U0001f600", "h\u00e9", "12", "?!", "<|eot|>", "<|e", "ot|>", "\u1680", "\u205f",
           "\x1c", "."]


def sentencepiece(folder: Path) -> SentencePieceTokenizer:
    rng = random.Random(1)
    sentences = ["".join(rng.choices(["the ", "it's ", "  a", "\n", "ab", "ba "], k=20)) for _ in range(300)]
    paragraphs = (f"{part}\n\n" for text in sentences for part in text.split("\n\n") if part)
    train_sentencepiece(paragraphs, folder / "model", 320)
    return SentencePieceTokenizer(str(folder / "model"))


@pytest.mark.parametrize("make, separator", [
    (sentencepiece, None), (lambda _: GPT2BPETokenizer(), "<|eot|>"), (sentencepiece, "blank-line"),
    (lambda _: BYTE, r"\n")], ids=["whole", "marked", "blank-line", "lines"])
def test_where_a_file_is_cut_does_not_show(tmp_path, monkeypatch, make, separator):
    tokenizer, rng = make(tmp_path), random.Random(7)
    assert tokenizer.safe_split_characters
    path = tmp_path / "a.txt"
    path.write_text("".join(rng.choices(AWKWARD, k=2000)), newline="")
    whole = documents_in([path], separator, tokenizer)
    parts = 0
    for size, near in ((1, 4), (7, 1), (100, 16), (1000, 4096)):
        monkeypatch.setattr(read_text_chunks, "__defaults__", (None, "", size))
        monkeypatch.setattr(text_files, "TAIL_BYTES", near)
        chunks = list(read_text_chunks(path, Separator.parse(separator), tokenizer.safe_split_characters))
        parts = max(parts, len(chunks))
        assert documents_in([path], separator, tokenizer) == whole, size
    assert parts > 30


def test_a_tokenizer_that_adds_to_the_start_of_a_text_gets_documents_whole(tmp_path: Path) -> None:
    import sentencepiece as library

    (tmp_path / "text").write_text("the cat sat on the mat and the dog ran\n" * 50)
    library.SentencePieceTrainer.train(input=str(tmp_path / "text"), model_prefix=str(tmp_path / "m"), vocab_size=18,
                                       remove_extra_whitespaces=False, minloglevel=2)
    tokenizer = SentencePieceTokenizer(str(tmp_path / "m.model"))
    assert tokenizer.safe_split_characters == ""
    (tmp_path / "a.txt").write_text("the cat " * 1000)
    assert len(list(read_text_chunks(tmp_path / "a.txt", None, tokenizer.safe_split_characters, size=10))) == 1


def test_workers_and_compression_do_not_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zstd = pytest.importorskip("backports.zstd")
    content = "".join(random.Random(3).choices(AWKWARD, k=2000)).encode()
    for suffix, pack in (("", bytes), (".gz", gzip.compress), (".zst", zstd.compress)):
        (tmp_path / f"a.txt{suffix}").write_bytes(pack(content))
    (tmp_path / "b.jsonl.zst").write_bytes(zstd.compress(json.dumps({"text": "json"}).encode()))
    monkeypatch.setattr(read_text_chunks, "__defaults__", (None, "", 100))
    plain = documents_in([tmp_path / "a.txt", tmp_path / "b.jsonl.zst"])
    assert [len(plain), BYTE.decode(plain[1])] == [2, "json<|endoftext|>"]
    for suffix, workers in (("", 2), (".gz", 2), (".zst", 1)):
        assert documents_in([tmp_path / f"a.txt{suffix}", tmp_path / "b.jsonl.zst"], workers=workers) == plain
    os.mkfifo(tmp_path / "pipe.txt")
    threading.Thread(target=(tmp_path / "pipe.txt").write_bytes, args=(content,)).start()
    assert documents_in([tmp_path / "pipe.txt", tmp_path / "b.jsonl.zst"]) == plain


@pytest.mark.parametrize("workers", [1, 2])
def test_what_is_not_utf8_is_named_by_file_and_line_or_skipped_whole(tmp_path, monkeypatch, workers):
    path = tmp_path / "a.txt"
    path.write_bytes(b"good words\n" * 20 + b"caf\xe9 au lait\n" + b"more words\n" * 20)
    (tmp_path / "b.txt").write_bytes(b"fine")
    monkeypatch.setattr(read_text_chunks, "__defaults__", (None, "", 50))
    with pytest.raises(DataError) as caught:
        documents_in([path, tmp_path / "b.txt"], workers=workers)
    assert str(caught.value) == (f"{path}:21 not UTF-8: byte 0xe9 at column 4; convert the file (iconv -t UTF-8) "
                                 "(the line begins at byte 220)")
    assert sorted(os.listdir(tmp_path)) == ["a.txt", "b.txt"]
    prefix = tmp_path / "c"
    for separator, kept, missing in ((None, 1, 1), (r"\n", 41, 1)):
        progress, skipped = build_corpus([path, tmp_path / "b.txt"], prefix, BYTE,
                                         TextReadOptions(separator=Separator.parse(separator)), skip_malformed=True)
        assert (progress.documents, skipped) == (kept, missing)


# --------------------------------------------------------- a malformed part of a long document takes the others with it

SIZE = 300
SEPARATED = TextReadOptions(separator=Separator.parse("<|end|>"), append_eod=False)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files.read_text_chunks, "__defaults__", (None, "", SIZE))


def words(seed: int, count: int) -> bytes:
    rng = random.Random(seed)
    return b" ".join(b"%s%d" % (rng.choice([b"cat", b"roof", b"day"]), rng.randrange(99)) for _ in range(count))


def spoiled(document: bytes, places: list[float]) -> bytes:
    for place in places:
        at = int(len(document) * place)
        document = document[:at] + b"\xff" + document[at + 1:]
    return document


LONG = words(1, 1000)
DOCUMENTS = [words(2, 800), spoiled(LONG, [0.3, 0.5, 0.51]), b"short",
             LONG + "\u00ff \U0001f600 ".encode() + spoiled(words(5, 400), [0.7]), b"after"]


@pytest.mark.usefixtures("small_parts")
def test_a_document_too_long_to_be_cut_goes_in_all_its_parts(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(LONG + bytes(5000) + LONG)
    (tmp_path / "b.txt").write_text("after")
    reading = TextReadOptions(max_document_bytes=1000)
    _, skipped = build_corpus([tmp_path / "a.txt", tmp_path / "b.txt"], tmp_path / "c", BYTE, reading,
                              skip_malformed=True)
    assert skipped == 1 and IndexedCorpus(tmp_path / "c").sizes.tolist() == [6]


@pytest.mark.usefixtures("small_parts")
def test_it_can_be_interrupted_before_and_after_it_takes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preprocess, "RESUME_POINT_BYTES", 1)
    (tmp_path / "a.txt").write_bytes(b"<|end|>".join(DOCUMENTS))

    def build(name: str) -> int:
        return build_corpus([tmp_path / "a.txt"], tmp_path / name, BYTE, SEPARATED, skip_malformed=True)[1]

    expected = build("whole")
    for stop in (1, 4, 8, 11, 20, 30, 38):
        Stop(monkeypatch, stop, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            build("c")
        Stop(monkeypatch, -1, KeyboardInterrupt())
        assert build("c") == expected and files_of(tmp_path / "c") == files_of(tmp_path / "whole")
