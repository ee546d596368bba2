"""A file that is still being written, cut off or replaced while it is read is told, and nothing is made of it."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from data import importers, preprocess, sources, split_json as splitting
from data.importers import import_tokens
from data.preprocess import TextReadOptions, build_corpus
from data.sampling import parse_split
from data.sources import cached_corpus
from data.split_json import split_json
from data.storage import DataError, change_detector
from data.tokenizer import ByteLevelTokenizer
from data.webtext import runner
from data.webtext.runner import run_global_stage, run_map_stage
from tests.data.webtext.stages import REVERSE, SHOUT

BYTE = ByteLevelTokenizer()
LINES = "".join(json.dumps({"text": f"document {number} of some words"}) + "\n" for number in range(400))


def cut(path: Path) -> None:
    """After a line, where nothing but the size tells."""
    os.truncate(path, path.read_bytes().index(b"\n") + 1)


def append(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b'{"text": "one more"}\n')


def replace_by_a_twin(path: Path) -> None:
    """By another of the same length and time."""
    status = path.stat()
    other = path.with_name("other")
    other.write_bytes(path.read_bytes().replace(b"words", b"parts"))
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    os.replace(other, path)


def touch(path: Path) -> None:
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


@pytest.mark.parametrize("change", [cut, append, replace_by_a_twin, touch, Path.unlink])
def test_every_change_of_a_file_is_seen(tmp_path: Path, change: Callable[[Path], None]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(LINES)
    check = change_detector([path, "/dev/null"])
    check()
    change(path)
    with pytest.raises(DataError, match="a.jsonl: changed while it was read; start again when it is complete"):
        check()


# program -> where a function of it is, its name, and the program, of a source and a prefix
PROGRAMS: dict[str, tuple[ModuleType, str, Callable[[Path, Path], object]]] = {
    "data.preprocess": (preprocess, "encode_chunk", lambda path, out: build_corpus([path], out, BYTE)),
    "data.split_json": (splitting, "part_of_text",
                        lambda path, out: split_json([str(path)], str(out), parse_split("1,1"))),
    "data.importers": (importers, "inspect_token_file", lambda path, out: import_tokens([path], out, BYTE)),
    "--train-data": (sources, "_content_keys", lambda path, out: cached_corpus(
        str(path), BYTE, TextReadOptions(), str(out.with_name("cache")))),
    "a map stage": (runner, "run_job", lambda path, out: run_map_stage(SHOUT, [path], out))}


@pytest.mark.parametrize("program", PROGRAMS)
def test_nothing_is_made_of_a_file_that_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(LINES)
    if program == "data.importers":
        path = tmp_path / "a.bin"
        path.write_bytes(struct.pack("<256i", 20240520, 1, 2000, *[0] * 253) + b"\1\0" * 2000)
    module, name, run = PROGRAMS[program]
    really = getattr(module, name)

    def then_change(*arguments: Any, **named: Any) -> Any:
        found = really(*arguments, **named)
        touch(path)
        return found

    monkeypatch.setattr(module, name, then_change)
    with pytest.raises(DataError, match=f"^{path}: changed while it was read"):
        run(path, tmp_path / "out")
    assert not [*tmp_path.glob("out.*"), *tmp_path.glob("out/*.json*"), *tmp_path.glob("cache/*.idx")]
    monkeypatch.undo()
    run(path, tmp_path / "out")


def test_a_shard_that_changes_while_a_global_stage_reads_it_ends_the_stage(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(LINES)
    run_map_stage(SHOUT, [tmp_path / "a.jsonl"], tmp_path / "stage")

    def run(shards: list[Path], *rest: Any) -> None:
        REVERSE.run(shards, *rest)
        touch(shards[0])

    with pytest.raises(DataError, match="part-00000.jsonl: changed while it was read"):
        run_global_stage(replace(REVERSE, run=run), [tmp_path / "stage"], tmp_path / "out")
    assert not (tmp_path / "out" / "stage.json").exists()
