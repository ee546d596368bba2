"""A corpus that changes under the program that reads it is an error with its name, never other numbers or a dead
process."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from data.indexed import IndexedCorpus
from data.storage import DataError
from data.writer import CorpusWriter

ROOT = Path(__file__).resolve().parents[2]
SIZES = [1000, 0, 3000, 7, 2000]
TOKENS = np.arange(sum(SIZES)) % 50_000


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    write(tmp_path / "corpus")
    return tmp_path / "corpus"


def write(prefix: Path, shift: int = 0) -> None:
    with CorpusWriter(prefix, vocab_size=50_257) as writer:
        writer.add_documents(TOKENS + shift, SIZES)


def cut(size: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, size)


def append(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b"more")


def overwrite(path: Path) -> None:
    """Of the same length, in place."""
    length = path.stat().st_size
    with open(path, "r+b") as file:
        file.write(bytes(length))
    os.utime(path, ns=(0, time.time_ns() + 1_000_000_000))


def cut_and_grow(path: Path) -> None:
    """As a copy does that is under way: zeros where the text was."""
    length = path.stat().st_size
    os.truncate(path, 0)
    os.truncate(path, length)
    os.utime(path, ns=(0, time.time_ns() + 1_000_000_000))


CHANGES: dict[str, Callable[[Path], None]] = {
    "nothing left": cut(0), "half": cut(6007), "within the last page": cut(2 * sum(SIZES) - 2), "one byte": cut(12_013),
    "longer": append, "overwritten": overwrite, "cut and grown": cut_and_grow}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("document", range(len(SIZES)))
def test_a_corpus_that_was_changed_in_its_place_is_named_wherever_it_is_read(
        prefix: Path, change: Callable[[Path], None], document: int) -> None:
    corpus = IndexedCorpus(prefix)
    path = prefix.with_suffix(".bin")
    change(path)
    with pytest.raises(DataError, match=f"^{path}: (size: 12014 bytes when it was opened|was written to)"):
        corpus.document(document)
    with pytest.raises(DataError, match=str(path)):
        corpus.scan_id_range()


@pytest.mark.parametrize("change", [
    lambda path: path.rename(path.with_name("elsewhere")), lambda path: path.unlink(),
    lambda path: path.chmod(0o444), lambda path: os.link(path, path.with_name("link")),
    lambda path: write(path.with_suffix(""), shift=5)], ids=["renamed", "deleted", "read only", "linked", "new build"])
def test_a_corpus_that_was_moved_away_is_read_on(prefix: Path, change: Callable[[Path], None]) -> None:
    corpus = IndexedCorpus(prefix)
    change(prefix.with_suffix(".bin"))
    for number, (stop, size) in enumerate(zip(np.cumsum(SIZES), SIZES, strict=True)):
        np.testing.assert_array_equal(corpus.document(number), TOKENS[stop - size:stop])


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_disk_that_cannot_read_is_named(prefix: Path, suffix: str, number: int) -> None:
    corpus = IndexedCorpus(prefix)
    with patch("data.stable_file.os.preadv", side_effect=OSError(number, os.strerror(number))):
        with pytest.raises(DataError, match=f"corpus{suffix}: cannot read: {os.strerror(number)}"):
            if suffix == ".bin":
                corpus.read(0, 3, 9)
            else:
                IndexedCorpus(prefix)


def test_reads_that_come_in_pieces_are_joined(prefix: Path) -> None:
    whole, really = IndexedCorpus(prefix).document(2), os.preadv

    def some(descriptor: int, buffers: list[Any], offset: int) -> int:
        return really(descriptor, [buffers[0][:7]], offset)

    with patch("data.stable_file.os.preadv", some):
        np.testing.assert_array_equal(IndexedCorpus(prefix).document(2), whole)


def test_every_slice_is_that_of_the_document(prefix: Path) -> None:
    corpus = pickle.loads(pickle.dumps(IndexedCorpus(prefix)))
    document = TOKENS[1000:4000]
    for start, stop in ((0, None), (5, 9), (-3, None), (2999, 9999), (7, 7), (9, 3), (0, 0), (-9999, 2)):
        np.testing.assert_array_equal(corpus.read(2, start, stop), document[start:stop])


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_run_whose_corpus_is_cut_off_ends_with_3_and_its_name(prefix: Path, ranks: int) -> None:
    flags = ("--num-layers 1 --hidden-size 16 --num-attention-heads 2 --max-position-embeddings 64 --batch-size 2 "
             "--vocab-size 50257 --train-iters 100000 --eval-interval 0 --split 1,0,0 --tokenizer-type GPT2BPETokenizer"
             ).split()
    metrics = prefix.with_name("metrics")
    process = subprocess.Popen(
        [sys.executable, "-m", "megatron.launch", "--nproc-per-node", str(ranks), "pretrain_gpt2.py", *flags,
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
    shutil.rmtree(prefix.parent, ignore_errors=True)
