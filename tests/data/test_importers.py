"""Files of nanoGPT and llm.c become corpora: every token stays, documents end where they said."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import pytest

from data import importers
from data.corpora import Datasets, open_datasets
from data.importers import import_tokens, main
from data.indexed import IndexedCorpus
from data.storage import DataError
from data.tokenizer import ByteLevelTokenizer
from data.verify import verify

BYTE = ByteLevelTokenizer()
EOD = BYTE.eod


def nanogpt(path: Path, tokens: list[int]) -> Path:
    np.array(tokens, "<u2").tofile(path)
    return path


def llmc(path: Path, tokens: list[int], magic: int = 20240520, version: int = 1, count: int | None = None) -> Path:
    header = struct.pack("<256i", magic, version, len(tokens) if count is None else count, *[0] * 253)
    path.write_bytes(header + np.array(tokens, "<u2").tobytes())
    return path


def documents_of(prefix: Path) -> list[list[int]]:
    corpus = IndexedCorpus(prefix)
    return [corpus.document(i).tolist() for i in range(corpus.num_documents)]


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


def test_documents_end_after_the_id_in_nanogpt_and_begin_with_it_in_llmc(tmp_path: Path) -> None:
    import_tokens([nanogpt(tmp_path / "a.bin", [1, 2, EOD, EOD, 3, EOD, 4])], tmp_path / "c", BYTE)
    assert documents_of(tmp_path / "c") == [[1, 2, EOD], [EOD], [3, EOD], [4]]
    import_tokens([llmc(tmp_path / "b.bin", [EOD, 1, 2, EOD, EOD, 3])], tmp_path / "e", BYTE)
    assert documents_of(tmp_path / "e") == [[EOD, 1, 2], [EOD], [EOD, 3]]
    import_tokens([llmc(tmp_path / "c.bin", [5, EOD, 1]), llmc(tmp_path / "d.bin", [2, EOD])], tmp_path / "cd", BYTE)
    assert documents_of(tmp_path / "cd") == [[5, EOD], [1, 2, EOD]]
    assert "5 tokens (uint16), ids 0 to 256 of 257" in verify(str(tmp_path / "cd"))


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("shards", [1, 2, 7, 40])
def test_documents_that_lie_across_shards_stay_whole(tmp_path: Path, shards: int, begins: bool) -> None:
    """llm.c ends a shard where it is full."""
    draw = np.random.default_rng(shards)
    texts = [[int(token) for token in draw.integers(0, EOD, draw.integers(1, 60))] for _ in range(100)]
    documents = [[EOD, *text] if begins else [*text, EOD] for text in texts]
    stream = [token for document in documents for token in document]
    edges = [len(stream) * k // shards for k in range(shards + 1)]
    files = [llmc(tmp_path / f"{k}.bin", stream[edges[k]:edges[k + 1]]) for k in range(shards)]
    import_tokens(files, tmp_path / "all", BYTE)
    assert documents_of(tmp_path / "all") == documents


@pytest.mark.parametrize("block", [1, 2, 3, 1000])
def test_blocks_do_not_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(importers, "BLOCK", block)
    draw = np.random.default_rng(block)
    for i in range(20):
        tokens = draw.choice([1, 2, EOD], int(draw.integers(1, 12))).tolist()
        make = draw.choice([nanogpt, llmc])
        import_tokens([make(tmp_path / "x.bin", tokens)], tmp_path / f"c{i}", BYTE)
        assert documents_of(tmp_path / f"c{i}") == plainly_cut(tokens)


@pytest.mark.parametrize(("magic", "version", "count", "cut", "message"), [
    (20240520, 2, 3, 0, "version 2, expected 1030 bytes, found 1030"),
    (20240520, 1, 4, 0, "expected 1032 bytes, found 1030"), (20240520, 1, -1, 0, "expected 1022 bytes, found 1030"),
    (20240520, 1, 3, 1, "expected 1030 bytes, found 1029"), (20240520, 1, 3, 1023, "version missing"),
    (20240521, 1, 3, 1, "size: expected uint16 tokens, found 1029 bytes"),
])
def test_a_damaged_header_is_refused(tmp_path: Path, magic: int, version: int, count: int, cut: int,
                                     message: str) -> None:
    path = llmc(tmp_path / "a.bin", [1, 2, 3], magic, version, count)
    path.write_bytes(path.read_bytes()[:max(1030 - cut, 4)])
    with pytest.raises(DataError, match=f"a.bin: .*{message}"):
        import_tokens([path], tmp_path / "c", BYTE)
    assert os.listdir(tmp_path) == ["a.bin"]


def test_what_is_no_token_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.bin").touch()
    (tmp_path / "odd.bin").write_bytes(b"abc")
    for name, message in (("empty.bin", "found 0 bytes"), ("odd.bin", "found 3 bytes"), ("none.bin", "No such file")):
        with pytest.raises(DataError, match=f"{name}: .*{message}"):
            import_tokens([tmp_path / name], tmp_path / "c", BYTE)
    with pytest.raises(DataError, match="token id 257 .* expected 0 to 256"):
        import_tokens([nanogpt(tmp_path / "a.bin", [1, 257])], tmp_path / "c", BYTE)
    assert not (tmp_path / "c.idx").exists()


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
