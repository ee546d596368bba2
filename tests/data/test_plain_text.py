"""Plain text to documents: what a document is, how files are cut for the workers, and what is refused."""

from __future__ import annotations

import gzip
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from data import plain_text
from data.default_corpus import paragraphs
from data.indexed import IndexedCorpus
from data.plain_text import Separator, read_text_chunks
from data.preprocess import TextReadOptions, build_corpus, main as preprocess
from data.storage import DataError
from data.tokenizer import (ByteLevelTokenizer, GPT2BPETokenizer, SentencePieceTokenizer, Tokenizer,
                            train_sentencepiece)

REPOSITORY = Path(__file__).resolve().parents[2]
BYTE = ByteLevelTokenizer()


def documents_in(files: list[Path], separator: str | None = None, tokenizer: Tokenizer = BYTE,
                 **settings: object) -> list[list[int]]:
    prefix = files[0].parent / "corpus"
    build_corpus(files, prefix, tokenizer, TextReadOptions(separator=Separator.parse(separator)),  # type: ignore
                 **settings)
    corpus = IndexedCorpus(prefix)
    return [corpus.document(i).tolist() for i in range(corpus.num_documents)]


def texts(path: Path, content: bytes, separator: str | None = None) -> list[str]:
    path.write_bytes(content)
    found = documents_in([path], separator)
    assert all(ids[-1] == BYTE.eod for ids in found)
    return [BYTE.decode(ids[:-1]) for ids in found]


@pytest.mark.parametrize(("content", "expected"), [
    (b"one\n\ntwo\n", ["one\n\ntwo\n"]), (b"\xef\xbb\xbfone", ["one"]), (b"a\r\nb\r\n", ["a\nb\n"]),
    ("a\rb\u2028c\ufeff\x00".encode(), ["a\rb\u2028c\ufeff\x00"]), (b" \n a", [" \n a"]),
    (b"<|endoftext|>", ["<|endoftext|>"]),
])
def test_a_file_is_one_document(tmp_path: Path, content: bytes, expected: list[str]) -> None:
    assert texts(tmp_path / "a.txt", content) == expected


@pytest.mark.parametrize(("separator", "content", "expected"), [
    ("<|endoftext|>", b"one\n<|endoftext|>\ntwo\n<|endoftext|>\n", ["one", "two"]),
    ("<|endoftext|>", b"<|endoftext|><|endoftext|>one<|endoftext|> \n<|endoftext|>\n  two", ["one", "  two"]),
    ("blank-line", b"\n\none\n1\n\n\n  \n \t\r\n  two\r\n\r\nthree\n\n", ["one\n1", "  two", "three"]),
    (r"\n---\n", b"one --- 1\n---\ntwo\r\n---\r\nthree\n--", ["one --- 1", "two", "three\n--"]),
    (r"\n", b"one\n\ntwo\r\nthree", ["one", "two", "three"]), (r"\\n", rb"one\ntwo", ["one", "two"]),
    ("a.c", b"abc a.c d", ["abc ", " d"]), ("\u00e9", "a\u00e9b".encode(), ["a", "b"]),
    ("x", b"\xef\xbb\xbfaxb", ["a", "b"]), ("absent", b"one\n", ["one"]),
])
def test_a_separator_ends_documents(tmp_path: Path, separator: str, content: bytes, expected: list[str]) -> None:
    assert texts(tmp_path / "a.txt", content, separator) == expected


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
    train_sentencepiece(paragraphs(sentences), folder / "model", 320)
    return SentencePieceTokenizer(str(folder / "model"))


@pytest.mark.parametrize("make", [lambda _: BYTE, lambda _: GPT2BPETokenizer(), sentencepiece],
                         ids=["byte", "gpt2", "sentencepiece"])
@pytest.mark.parametrize("separator", [None, "<|eot|>", "blank-line", r"\n"])
def test_where_a_file_is_cut_does_not_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                           make: Callable[[Path], Tokenizer], separator: str | None) -> None:
    tokenizer, rng = make(tmp_path), random.Random(7)
    assert tokenizer.safe_split_characters
    path = tmp_path / "a.txt"
    path.write_text("".join(rng.choices(AWKWARD, k=2000)), newline="")
    whole = documents_in([path], separator, tokenizer)
    parts = 0
    for size, near in ((1, 4), (7, 1), (100, 16), (1000, 4096)):
        monkeypatch.setattr(read_text_chunks, "__defaults__", (None, "", size))
        monkeypatch.setattr(plain_text, "TAIL_BYTES", near)
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


@pytest.mark.parametrize("kind", ["txt", "txt.gz", "pipe"])
def test_parts_know_their_place_and_are_the_file(tmp_path: Path, kind: str) -> None:
    content = "".join(random.Random(3).choices(AWKWARD, k=500)).encode()
    path = tmp_path / f"a.{kind}"
    if kind == "pipe":
        os.mkfifo(path)
        threading.Thread(target=path.write_bytes, args=(content,)).start()
    else:
        path.write_bytes(gzip.compress(content) if kind == "txt.gz" else content)
    chunks = list(read_text_chunks(path, None, " \n", 50))
    assert len(chunks) > 10 and all((chunk.data is None) == (kind == "txt") for chunk in chunks)
    assert [chunk.starts_inside_document for chunk in chunks] == [False] + [True] * (len(chunks) - 1)
    assert [chunk.ends_inside_document for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert b"".join(chunk.read() for chunk in chunks) == content
    assert all(content[chunk.offset:][:chunk.size] == chunk.read() for chunk in chunks)


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


@pytest.mark.parametrize("workers", [1, 2])
def test_what_is_not_utf8_is_named_by_file_and_line_or_skipped_whole(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
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


def test_utf16_is_recognized(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("text".encode("utf-16"))
    with pytest.raises(DataError, match="a.txt:1 not UTF-8 but UTF-16, by its first bytes; convert the file"):
        documents_in([tmp_path / "a.txt"])


def test_a_damaged_or_missing_file_is_a_data_error(tmp_path: Path) -> None:
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(random.Random(1).randbytes(1000))[:-20])
    for name in ("cut.txt.gz", "missing.txt"):
        with pytest.raises(DataError, match=f"{name}: cannot read"):
            documents_in([tmp_path / name])


def test_memory_does_not_grow_with_the_document(tmp_path: Path) -> None:
    """300 MB in one document, compressed and not, within 128 MB beyond what the program is itself."""
    line = b"the quick brown fox jumps over the lazy dog\n" * 1000
    with open(tmp_path / "a.txt", "wb") as plain, gzip.open(tmp_path / "b.txt.gz", "wb", compresslevel=1) as packed:
        for _ in range(3500):
            plain.write(line)
            packed.write(line)
    program = ("from tests.peak import peak; from data.preprocess import main; "
               "before = peak(); main(); print(peak() - before)")
    done = subprocess.run([sys.executable, "-c", program, "--input", tmp_path, "--tokenizer-type", "byte",
                           "--output-prefix", tmp_path / "c"], cwd=REPOSITORY, capture_output=True, text=True,
                          timeout=120, check=True)
    assert int(done.stdout) < 128 << 20
    assert IndexedCorpus(tmp_path / "c").num_documents == 2


def test_the_command_takes_a_folder_of_text_and_says_what_it_left_out(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "in"
    (folder / "deep").mkdir(parents=True)
    (folder / "b.txt").write_text("two")
    (folder / "deep" / "a.txt").write_text("three")
    (folder / "a.jsonl").write_text('{"text": "one"}\n')
    (folder / "paper.pdf").write_text("%PDF")
    preprocess(["--input", str(folder), "--output-prefix", str(tmp_path / "c"), "--tokenizer-type", "byte"])
    corpus = IndexedCorpus(tmp_path / "c")
    assert [BYTE.decode(corpus.document(i)) for i in range(3)] == ["one", "two", "three"]
    printed = capsys.readouterr().err
    assert f"left out: 1 of unknown kind ({folder}/paper.pdf)" in printed and "3 files, 3 documents" in printed
