"""Plain text to documents: what a document is, how files are cut for the workers, and what is refused or skipped. Files
of nanoGPT and llm.c become corpora: every token stays, documents end where they said."""

from __future__ import annotations

import gzip
import json
import os
import random
import struct
import threading
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from data import importers, text_files
from data.importers import import_tokens, main
from data.preprocess import TextReadOptions, build_corpus
from data.sources import Datasets, open_datasets
from data.storage import DataError
from data.text_files import Separator, read_text_chunks
from data.tokenizer import GPT2BPETokenizer, SentencePieceTokenizer, Tokenizer, train_sentencepiece
from tests.data.helpers import BYTE, documents_of


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


# ---- files of tokens -----------------------------------------------------------------------------------------------

EOD = BYTE.eod


def nanogpt(path: Path, tokens: list[int]) -> Path:
    np.array(tokens, "<u2").tofile(path)
    return path


def llmc(path: Path, tokens: list[int], magic: int = 20240520, version: int = 1, count: int | None = None) -> Path:
    header = struct.pack("<256i", magic, version, len(tokens) if count is None else count, *[0] * 253)
    path.write_bytes(header + np.array(tokens, "<u2").tobytes())
    return path


def plainly_cut(tokens: list[int]) -> list[list[int]]:
    """Documents end with the end-of-document id, or all begin with it, as the first token says."""
    documents: list[list[int]] = [[]]
    for token in tokens:
        if tokens[0] == EOD and token == EOD and documents[-1]:
            documents.append([])
        documents[-1].append(token)
        if tokens[0] != EOD and token == EOD:
            documents.append([])
    return documents if documents[-1] else documents[:-1]


def test_documents_are_those_of_the_stream_whatever_its_shards_and_blocks(tmp_path, monkeypatch):
    """llm.c ends a shard where it is full, also inside of a document."""
    draw = np.random.default_rng(1)
    for i in range(90):
        monkeypatch.setattr(importers, "BLOCK_ENTRIES", (1, 3, 1000)[i % 3])
        count = int(draw.integers(1, 200))
        tokens = np.where(draw.random(count) < draw.choice([0.1, 0.5]), EOD, np.arange(count)).tolist()
        edges = [0, *sorted({int(edge) for edge in draw.integers(1, count + 1, draw.integers(0, 5))} - {count}), count]
        shards = [tokens[start:stop] for start, stop in pairwise(edges)]
        make = draw.choice([nanogpt, llmc])
        files = [make(tmp_path / f"{k}.bin", shard) for k, shard in enumerate(shards)]
        import_tokens(files, tmp_path / f"c{i}", BYTE)
        assert documents_of(tmp_path / f"c{i}") == plainly_cut(tokens)


DAMAGED_HEADERS = [
    (20240520, 2, 3, 0, "version: expected 1, found 2"),
    (20240520, 1, 4, 0, "expected 1032 bytes, found 1030"), (20240520, 1, -1, 0, "expected 1022 bytes, found 1030"),
    (20240520, 1, 3, 1, "expected 1030 bytes, found 1029"),
    (20240520, 1, 3, 1023, "cut off: expected 1024 bytes, found 7"),
    (20240520, 1, 0, 6, "for 0 tokens: expected at least 1"),
    (20240521, 1, 3, 1, "size: expected uint16 tokens, found 1029 bytes")]
"""Magic number, version and count of the header, bytes that are cut off, and the message."""


def test_what_is_no_token_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    for magic, version, count, cut, message in DAMAGED_HEADERS:
        content = llmc(path, [1, 2, 3], magic, version, count).read_bytes()
        path.write_bytes(content[:max(1030 - cut, 4)])
        with pytest.raises(DataError, match=f"a.bin: .*{message}"):
            import_tokens([path], tmp_path / "c", BYTE)
    (tmp_path / "odd.bin").write_bytes(b"abc")
    for name in ("a.jsonl.gz", "a.bin.gz"):
        (tmp_path / name).write_bytes(b"a pair of bytes ")
    for name, message in (("odd.bin", "found 3 bytes"), ("none.bin", "No such file"),
                          ("a.jsonl.gz", "expected a file of tokens, found text"),
                          ("a.bin.gz", "expected a file of tokens, found a compressed"),
                          (".", "expected a file, found a folder")):
        with pytest.raises(DataError, match=f"{tmp_path / name}: .*{message}"):
            import_tokens([tmp_path / name], tmp_path / "c", BYTE)
    assert not [*tmp_path.glob("c.*"), *tmp_path.glob(".*")]


def test_an_id_of_another_tokenizer_is_told_with_its_file_and_place(tmp_path, monkeypatch):
    monkeypatch.setattr(importers, "BLOCK_ENTRIES", 3)
    good = llmc(tmp_path / "good.bin", [EOD, 1, 2])
    bad = llmc(tmp_path / "bad.bin", [3, 4, 5, 6, 300, 301])
    with pytest.raises(DataError, match=r"/bad.bin: token 4 \(of 6, from 0\): expected an id from 0 to 256, found 300; "
                                        r"was it made with another tokenizer\? \(--tokenizer-type\)"):
        import_tokens([good, bad], tmp_path / "c", BYTE)
    assert sorted(os.listdir(tmp_path)) == ["bad.bin", "good.bin"]


def test_the_command_and_train_data_read_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = nanogpt(tmp_path / "train.bin", [*range(100), EOD] * 5)
    main(["--input", str(path), "--output-prefix", str(tmp_path / "c"), "--tokenizer-type", "byte"])
    assert capsys.readouterr().out == f"{tmp_path}/c: 5 documents, 505 tokens\n"

    def opened(name: str) -> Datasets:
        return open_datasets(train_data=[str(tmp_path / name)], split="1", seq_length=9, seed=1, tokenizer=BYTE,
                             cache_path=str(tmp_path / "cache"))

    (note,) = opened("train.bin").notes
    assert "train.bin: 1 file of tokens, 5 documents, 505 tokens, found in the cache: " in opened("train.bin").notes[0]
    assert "train.bin: 1 file of tokens, 5 documents, 505 tokens, copied in " in note
    assert opened("train.bin").fingerprint == opened("c").fingerprint == opened("c.bin").fingerprint
    made = sorted(os.listdir(tmp_path / "cache"))
    opened("train.bin")
    assert sorted(os.listdir(tmp_path / "cache")) == made
