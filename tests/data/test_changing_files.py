"""A file that changes while it is read is an error with its name, never other numbers, a dead process or a corpus."""

from __future__ import annotations

import errno
import json
import os
import pickle
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from data import importers, preprocess, sources, split_json as splitting
from data.importers import import_tokens
from data.indexed import IndexedCorpus
from data.preprocess import TextReadOptions, build_corpus
from data.sampling import parse_split
from data.sources import cached_corpus
from data.split_json import split_json
from data.storage import DataError, change_detector
from data.webtext import runner
from data.webtext.documents import DocumentCounts
from data.webtext.runner import run_global_stage, run_map_stage
from data.writer import CorpusWriter
from tests.data.helpers import BYTE
from tests.data.webtext.stages import REVERSE, SHOUT

ROOT = Path(__file__).resolve().parents[2]
SIZES = [1000, 0, 3000, 7, 2000]
TOKENS = np.arange(sum(SIZES)) % 50_000


def write(prefix: Path, shift: int = 0) -> None:
    with CorpusWriter(prefix, vocab_size=50_257) as writer:
        writer.add_documents(TOKENS + shift, SIZES)


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    write(tmp_path / "corpus")
    return tmp_path / "corpus"


def overwrite(path: Path, cut: bool = False) -> None:
    """By zeros, of the same length and in place; `cut`: as a copy does that is under way."""
    length = path.stat().st_size
    os.truncate(path, 0 if cut else length)
    with open(path, "r+b") as file:
        file.write(bytes(length))
    os.utime(path, ns=(0, time.time_ns() + 1_000_000_000))


CHANGES: dict[str, Callable[[Path], object]] = {
    "nothing left": lambda path: os.truncate(path, 0), "half": lambda path: os.truncate(path, 6007),
    "all but the last token": lambda path: os.truncate(path, 2 * sum(SIZES) - 2),
    "longer": lambda path: os.truncate(path, 2 * sum(SIZES) + 4), "overwritten": overwrite,
    "cut and grown": lambda path: overwrite(path, cut=True)}


def test_a_corpus_that_was_changed_in_its_place_is_named_wherever_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "corpus.bin"
    for change in CHANGES.values():
        write(tmp_path / "corpus")
        corpus = IndexedCorpus(tmp_path / "corpus")
        change(path)
        for document in range(len(SIZES)):
            with pytest.raises(DataError, match=f"^{path}: (size: 12014 bytes when it was opened|was written to)"):
                corpus.document(document)
        with pytest.raises(DataError, match=str(path)):
            corpus.scan_id_range()


MOVES: list[Callable[[Path], object]] = [
    lambda path: path.rename(path.with_name("elsewhere")), lambda path: path.unlink(), lambda path: path.chmod(0o444),
    lambda path: os.link(path, path.with_name("link")), lambda path: write(path.with_suffix(""), shift=5)]


def test_a_corpus_that_was_moved_away_is_read_on(tmp_path: Path) -> None:
    """Also one whose permissions or links change, or whose name another build takes."""
    for number, move in enumerate(MOVES):
        write(prefix := tmp_path / f"corpus{number}")
        corpus = IndexedCorpus(prefix)
        move(prefix.with_suffix(".bin"))
        for document, (stop, size) in enumerate(zip(np.cumsum(SIZES), SIZES, strict=True)):
            np.testing.assert_array_equal(corpus.document(document), TOKENS[stop - size:stop])


def test_a_disk_that_cannot_read_is_named(prefix: Path) -> None:
    corpus = IndexedCorpus(prefix)
    reads: dict[str, Callable[[], object]] = {
        f"{prefix}.bin": lambda: corpus.read_tokens(3, 9), f"{prefix}.idx": lambda: IndexedCorpus(prefix)}
    with patch("data.indexed.os.preadv", side_effect=OSError(errno.EIO, "Input/output error")):
        for path, read in reads.items():
            with pytest.raises(DataError, match=f"^{path}: cannot read: Input/output error$"):
                read()


def test_slices_are_those_of_the_document_though_reads_come_in_pieces(prefix: Path) -> None:
    really = os.preadv

    def some(descriptor: int, buffers: list[Any], offset: int) -> int:
        return really(descriptor, [buffers[0][:7]], offset)

    with patch("data.indexed.os.preadv", some):
        corpus = pickle.loads(pickle.dumps(IndexedCorpus(prefix)))
        for start, stop in ((0, None), (5, 9), (-3, None), (2999, 9999), (7, 7), (9, 3), (0, 0), (-9999, 2)):
            np.testing.assert_array_equal(corpus.document(2, start, stop), TOKENS[1000:4000][start:stop])


def test_a_run_whose_corpus_is_cut_off_ends_with_3_and_its_name(prefix: Path) -> None:
    flags = ("--num-layers 1 --hidden-size 16 --num-attention-heads 2 --max-position-embeddings 64 --batch-size 2 "
             "--vocab-size 50257 --train-iters 100000 --eval-interval 0 --split 1,0,0 --tokenizer-type GPT2BPETokenizer"
             ).split()
    metrics = prefix.with_name("metrics")
    process = subprocess.Popen(
        [sys.executable, "-m", "megatron.launch", "--nproc-per-node", "2", "pretrain_gpt2.py", *flags,
         "--train-data", str(prefix), "--metrics-file", str(metrics)], cwd=ROOT, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True, env={name: value for name, value in os.environ.items()
                                                if name not in ("RANK", "WORLD_SIZE")} | {"OMP_NUM_THREADS": "1"})
    try:
        until = time.monotonic() + 60
        while not (metrics.exists() and metrics.read_bytes().count(b"\n") > 2):
            assert time.monotonic() < until and process.poll() is None
            time.sleep(0.05)
        os.truncate(prefix.with_suffix(".bin"), 2 * sum(SIZES) - 2)
        _, said = process.communicate(timeout=30)
    finally:
        process.kill()
    errors = [line for line in said.splitlines() if line.startswith("error:")]
    assert process.returncode == 3 and len(errors) == 1 and f"{prefix}.bin: size: 12014 bytes when" in errors[0], said
    assert "Traceback" not in said


# ---------------------------------------------------------------------- text that changes while something is made of it

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


def test_every_change_of_a_file_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for change in (cut, append, replace_by_a_twin, touch, Path.unlink):
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
    "--train-data": (sources, "file_stamp", lambda path, out: cached_corpus(
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

    def run(shards: list[Path], *rest: Any) -> Iterator[DocumentCounts]:
        yield from REVERSE.run(shards, *rest)
        touch(shards[0])

    with pytest.raises(DataError, match="part-00000.jsonl: changed while it was read"):
        run_global_stage(replace(REVERSE, run=run), [tmp_path / "stage"], tmp_path / "out")
    assert not (tmp_path / "out" / "stage.json").exists()
