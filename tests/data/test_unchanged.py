"""A file that is still being written, cut off or replaced while it is read is told, and nothing is made of it."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from data import importers, preprocess, split_json as splitting
from data.importers import import_tokens
from data.preprocess import build_corpus
from data.sources import MTIME_SETTLED_NS
from data.split_json import split_json
from data.storage import DataError
from data.tokenizer import ByteLevelTokenizer
from data.webtext import clean, runner
from data.webtext.runner import MapStage, run_map_stage

BYTE = ByteLevelTokenizer()
LINES = "".join(f'{{"text": "document {number} of some words"}}\n' for number in range(400))


def cut(path: Path) -> None:
    """Where nothing but the size tells."""
    half = path.read_bytes()[:path.stat().st_size // 2]
    os.truncate(path, half.rfind(b"\n") + 1 or len(half))


def grow(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b'{"text": "one more"}\n')


def replace(path: Path) -> None:
    """By another of the same length and time."""
    status = path.stat()
    other = path.with_name("other")
    other.write_bytes(path.read_bytes().replace(b"words", b"parts"))
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    os.replace(other, path)


def touch(path: Path) -> None:
    os.utime(path, ns=(0, path.stat().st_mtime_ns + MTIME_SETTLED_NS))


CHANGES = {"cut": cut, "grown": grow, "replaced": replace, "touched": touch}


def after_the_first(function: Callable[..., Any], change: Callable[[Path], None], path: Path) -> Callable[..., Any]:
    """`function`, and the file changes when it has been called once."""
    calls = []

    def called(*args: Any, **more: Any) -> Any:
        found = function(*args, **more)
        if not calls:
            change(path)
        calls.append(1)
        return found

    return called


@pytest.fixture(params=CHANGES.values(), ids=CHANGES)
def change(request: pytest.FixtureRequest) -> Callable[[Path], None]:
    found: Callable[[Path], None] = request.param
    return found


def test_no_corpus_is_made_of_a_file_that_changes(tmp_path: Path, change: Callable[[Path], None]) -> None:
    (tmp_path / "a.jsonl").write_text(LINES)
    (tmp_path / "b.jsonl").write_text(LINES)
    spy = after_the_first(preprocess.encode_chunk, change, tmp_path / "a.jsonl")
    with patch.object(preprocess, "encode_chunk", spy), pytest.raises(DataError, match="a.jsonl: changed while it was"):
        build_corpus([tmp_path / "a.jsonl", tmp_path / "b.jsonl"], tmp_path / "c", BYTE)
    assert not [*tmp_path.glob("c.*")]


def test_no_files_are_split_from_one_that_changes(tmp_path: Path, change: Callable[[Path], None]) -> None:
    (tmp_path / "a.jsonl").write_text(LINES)
    spy = after_the_first(splitting.part_of_text, change, tmp_path / "a.jsonl")
    with patch.object(splitting, "part_of_text", spy), \
            pytest.raises(DataError, match="a.jsonl: changed while it was read"):
        split_json([str(tmp_path / "a.jsonl")], str(tmp_path / "s"), [Fraction(1, 2), Fraction(1, 2), Fraction(0)])
    assert not [*tmp_path.glob("s.*")]


def test_no_corpus_is_imported_from_tokens_that_change(tmp_path: Path, change: Callable[[Path], None]) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(struct.pack("<256i", 20240520, 1, 2000, *[0] * 253) + b"\1\0" * 2000)
    spy = after_the_first(importers.inspect_token_file, change, path)
    with patch.object(importers, "inspect_token_file", spy), \
            pytest.raises(DataError, match="a.bin: changed while it was read"):
        import_tokens([path], tmp_path / "c", BYTE)
    assert not [*tmp_path.glob("c.*")]


def test_no_stage_is_complete_whose_source_changes(tmp_path: Path, change: Callable[[Path], None]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(LINES)
    stage = MapStage("clean", clean.make_clean, clean.CleanOptions(1))
    spy = after_the_first(runner.run_job, change, path)
    with patch.object(runner, "run_job", spy), pytest.raises(DataError, match="a.jsonl: changed while it was read"):
        run_map_stage(stage, [path], tmp_path / "out")
    record = run_map_stage(stage, [path], tmp_path / "out")  # begins anew, with what is there now
    assert record.counts.documents_in == len(path.read_text().splitlines())
