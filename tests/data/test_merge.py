"""Merging equals writing everything at once, and refuses what does not belong together."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import pytest

from data import indexed, writer
from data.format import TokenizerFacts
from data.indexed import IndexedCorpus
from data.merge import main, merge_corpora
from data.storage import DataError
from data.writer import CorpusWriter
from tests.data.test_indexed import DOCUMENTS, write

MADE_BY = TokenizerFacts("T", "abcd", 10, 9)


def files_of(prefix: Path) -> list[bytes]:
    return [Path(f"{prefix}{suffix}").read_bytes() for suffix in (".bin", ".idx", ".json")]


def test_merging_equals_writing_everything_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (indexed, writer):
        monkeypatch.setattr(module, "BLOCK_ENTRIES", 2)  # documents lie across blocks
    parts = [DOCUMENTS, [[7], [8, 9]], [[0]], [[], [3, 1, 4, 1, 5]]]
    prefixes = [write(tmp_path / f"part{i}", part, tokenizer=MADE_BY) for i, part in enumerate(parts)]
    whole = write(tmp_path / "whole", sum(parts, []), tokenizer=MADE_BY)
    assert merge_corpora(prefixes, tmp_path / "new" / "merged").endswith("9 documents, 15 tokens of 4 corpora")
    assert files_of(tmp_path / "new" / "merged") == files_of(whole)


def test_a_corpus_of_several_sequences_a_document_merges_by_documents(tmp_path: Path) -> None:
    index = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 3, 3) + struct.pack("<3i", 2, 1, 3)
    (tmp_path / "theirs.idx").write_bytes(index + struct.pack("<3q", 0, 4, 6) + struct.pack("<3q", 0, 2, 3))
    np.array([1, 2, 3, 4, 5, 6], "<u2").tofile(tmp_path / "theirs.bin")
    ours = write(tmp_path / "ours", [[7]])
    merge_corpora([tmp_path / "theirs", ours], tmp_path / "both")
    corpus = IndexedCorpus(tmp_path / "both")
    assert [corpus.document(i).tolist() for i in range(3)] == [[1, 2, 3], [4, 5, 6], [7]]


def test_different_origins_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    a = write(tmp_path / "a", DOCUMENTS)
    b = write(tmp_path / "b", DOCUMENTS, vocab_size=70_000)
    c = write(tmp_path / "c", DOCUMENTS, tokenizer=MADE_BY)
    with pytest.raises(DataError, match="uint16.*int32"):
        merge_corpora([a, b], tmp_path / "new" / "out")
    with pytest.raises(DataError, match="different tokenizers"):
        merge_corpora([a, c], tmp_path / "new" / "out")
    with pytest.raises(DataError, match="missing.idx: cannot read"):
        merge_corpora([a, tmp_path / "missing"], tmp_path / "new" / "out")
    assert not (tmp_path / "new").exists()


def test_a_corpus_that_changed_since_it_was_made_is_refused(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", DOCUMENTS), write(tmp_path / "b", [[1] * 100_000])
    raw = bytearray(Path(f"{b}.bin").read_bytes())
    raw[5000] ^= 1  # between the places that opening looks at
    Path(f"{b}.bin").write_bytes(raw)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(DataError, match="b.bin: crc32: expected .* found .* make this corpus again"):
        merge_corpora([a, b], tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == before


def test_the_command_merges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with CorpusWriter(tmp_path / "a", vocab_size=10) as writer:
        writer.add_document([1, 2])
    main([str(tmp_path / "out"), str(tmp_path / "a"), str(tmp_path / "a")])
    assert capsys.readouterr().out == f"{tmp_path}/out: 2 documents, 4 tokens of 2 corpora\n"
    assert IndexedCorpus(tmp_path / "out").document(1).tolist() == [1, 2]
