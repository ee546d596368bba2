"""Files of nanoGPT and llm.c become corpora: every token stays, documents end where they said."""

from __future__ import annotations

import os
import struct
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from data import importers
from data.importers import import_tokens, main, order_warnings
from data.sources import Datasets, open_datasets
from data.storage import DataError
from tests.data.helpers import BYTE, documents_of

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
        if len(set(map(tuple, shards))) == len(shards):  # a copy is refused
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


def test_a_file_that_is_named_twice_is_refused(tmp_path: Path) -> None:
    tokens = [EOD, *(k % 250 for k in range(1 << 18))]
    path, near, link, copy = (tmp_path / name for name in ("a.bin", "near.bin", "link.bin", "copy.bin"))
    copy.write_bytes(llmc(path, tokens).read_bytes())
    link.symlink_to(path)
    tokens[len(tokens) // 2] = 251
    llmc(near, tokens)
    for other, what in ((path, "the same file as"), (link, "the same file as"), (copy, "a copy of")):
        with pytest.raises(DataError, match=f"{other}: is {what} {path}: every token would be there twice"):
            import_tokens([path, near, other], tmp_path / "c", BYTE)
    import_tokens([path, near], tmp_path / "c", BYTE)


def test_an_id_of_another_tokenizer_is_told_with_its_file_and_place(tmp_path, monkeypatch):
    monkeypatch.setattr(importers, "BLOCK_ENTRIES", 3)
    good = llmc(tmp_path / "good.bin", [EOD, 1, 2])
    bad = llmc(tmp_path / "bad.bin", [3, 4, 5, 6, 300, 301])
    with pytest.raises(DataError, match=r"/bad.bin: token 4 \(of 6, from 0\): expected an id from 0 to 256, found 300; "
                                        r"was it made with another tokenizer\? \(--tokenizer-type\)"):
        import_tokens([good, bad], tmp_path / "c", BYTE)
    assert sorted(os.listdir(tmp_path)) == ["bad.bin", "good.bin"]


def test_files_that_may_not_be_one_stream_in_order_are_told(tmp_path: Path) -> None:
    shards = {k: llmc(tmp_path / f"train_{k}.bin", [EOD, k]) for k in (1, 2, 10)}
    none = nanogpt(tmp_path / "n.bin", [1, 2, EOD])
    begins = nanogpt(tmp_path / "begins.bin", [EOD, 3])
    inside = llmc(tmp_path / "inside.bin", [3, EOD, 4])
    for files, said in (
            ([inside, shards[1]], f"{inside}: has a header of llm.c, "), ([shards[1], shards[2], shards[10]], ""),
            ([none, nanogpt(tmp_path / "2.bin", [4, EOD])], ""),
            ([shards[1], shards[10], shards[2]], f"{shards[2]}: comes after {shards[10]}: are the"),
            ([shards[1], none], f"{shards[1]}: has a header of llm.c, and {none} has none"),
            ([none, llmc(tmp_path / "i.bin", [3])], f"{none}: has no header, and {tmp_path}/i.bin has "),
            ([none, begins], f"{none}: ends with the end-of-document id, and {begins} begins with it")):
        import_tokens(files, tmp_path / "out" / "c", BYTE)
        lines = order_warnings(files, BYTE.eod)
        assert len(lines) == bool(said) and "".join(lines).startswith(said)


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
