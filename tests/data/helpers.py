"""What a corpus holds, and a run that stops in the middle."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from data import preprocess
from data.indexed import IndexedCorpus
from data.parallel import ordered_map
from data.preprocess import EncodedChunk
from data.tokenizer import ByteLevelTokenizer

BYTE = ByteLevelTokenizer()


def files_of(prefix: Path | str) -> list[bytes]:
    return [Path(f"{prefix}{suffix}").read_bytes() for suffix in (".bin", ".idx", ".json")]


def documents_of(prefix: Path | str) -> list[list[int]]:
    corpus = IndexedCorpus(prefix)
    return [corpus.document(number).tolist() for number in range(corpus.num_documents)]


class Stop:
    """Raises an error when `data.preprocess` has encoded so many chunks; -1: never."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, chunks: int, error: BaseException) -> None:
        self.left, self.error, self.encoded = chunks, error, 0
        monkeypatch.setattr(preprocess, "ordered_map", self.map)

    def map(self, *arguments: Any) -> Iterator[EncodedChunk]:
        for encoded in ordered_map(*arguments):
            if self.left == 0:
                raise self.error
            self.left, self.encoded = self.left - 1, self.encoded + 1
            yield encoded
