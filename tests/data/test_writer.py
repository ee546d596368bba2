"""Writing corpora: one process writes a name, and readers never see a mixture."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from data.importers import import_tokens
from data.indexed import IndexedCorpus
from data.merge import merge_corpora
from data.preprocess import build_corpus
from data.sampling import parse_split
from data.split_json import split_json
from data.storage import DataError, StorageFault, hold_writer_lock
from data.writer import CorpusWriter
from tests.data.helpers import BYTE, in_a_fork, sizes_of

ROUNDS = 8
ROOT = Path(__file__).resolve().parents[2]
SHAPES = {1: [500, 100, 400], 2: [100, 800, 100]}
"""Token of a writer to the sizes of its documents: as many bytes in all three files as the other's have."""


def write(prefix: Path | str, token: int) -> None:
    with CorpusWriter(prefix, vocab_size=10) as writer:
        writer.add_documents([token] * 1000, SHAPES[token])


def is_whole(corpus: IndexedCorpus) -> bool:
    token = int(corpus.document(0)[0])
    return sizes_of(corpus) == SHAPES[token] and all((block == token).all() for _, block in corpus.token_blocks())


def rounds_of(prefix: str, token: int, start: Barrier, told: Any) -> None:
    """Both writers begin each round together."""
    for _ in range(ROUNDS):
        start.wait(60)
        try:
            write(prefix, token)
            told.put((token, ""))
        except StorageFault as fault:
            told.put((token, str(fault)))
        start.wait(60)


def test_two_writers_of_one_name_leave_the_corpus_of_one(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    start, told = context.Barrier(3), context.Queue()
    writers = [context.Process(target=rounds_of, args=(str(tmp_path / "c"), token, start, told), daemon=True)
               for token in SHAPES]
    for process in writers:
        process.start()
    refused = 0
    for _ in range(ROUNDS):
        start.wait(60)
        while True:  # a reader in between
            try:
                assert is_whole(IndexedCorpus(tmp_path / "c"))
            except DataError as error:
                assert "c.idx: cannot read: No such file" in str(error) or "was replaced while" in str(error), error
            if start.n_waiting == 2:
                break
            assert all(process.is_alive() for process in writers)
        start.wait(60)
        said = [told.get(timeout=60) for _ in writers]
        refused += sum(words != "" for _, words in said)
        assert any(words == "" for _, words in said), said
        assert all(words == "" or "is writing under this name now" in words for _, words in said), said
        assert is_whole(IndexedCorpus(tmp_path / "c"))
        assert sorted(os.listdir(tmp_path)) == ["c.bin", "c.idx", "c.json"]
    for process in writers:
        process.join()
    assert refused, "they never met: this test shows nothing"


def holder(path: Path) -> subprocess.Popen[str]:
    """Another process that is writing."""
    code = f"""
import sys
from data.storage import hold_writer_lock
with hold_writer_lock({str(path)!r}):
    print("ready", flush=True)
    sys.stdin.read()
"""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, text=True, stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE)
    assert process.stdout and process.stdout.readline() == "ready\n"
    return process


def test_every_program_that_writes_is_refused_with_the_name_of_the_one_that_does(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    np.array([1, 2, 256], "<u2").tofile(tmp_path / "tokens.bin")
    write(tmp_path / "other", 1)
    writer, splitter = holder(tmp_path / "c"), holder(tmp_path / "c.jsonl")
    try:
        before = sorted(os.listdir(tmp_path))
        for busy, program in ((writer, lambda: build_corpus([tmp_path / "a.jsonl"], tmp_path / "c", BYTE)),
                              (writer, lambda: merge_corpora([tmp_path / "other"], tmp_path / "c")),
                              (writer, lambda: import_tokens([tmp_path / "tokens.bin"], tmp_path / "c", BYTE)),
                              (splitter, lambda: split_json([str(tmp_path / "a.jsonl")], str(tmp_path / "c"),
                                                            parse_split("1,1,1")))):
            with pytest.raises(StorageFault, match=f": process {busy.pid} on {socket.gethostname()} is writing under"):
                program()
        assert sorted(os.listdir(tmp_path)) == before
    finally:
        for process in (writer, splitter):
            process.kill()
            process.communicate()
    merge_corpora([tmp_path / "other"], tmp_path / "c")  # a killed one blocks nobody
    assert is_whole(IndexedCorpus(tmp_path / "c"))
    assert not (tmp_path / ".c.writing").exists()


def test_a_lock_that_was_given_back_meanwhile_is_not_taken_for_held(tmp_path: Path) -> None:
    """Of two that opened the same lock file, the second must not lock one that the first has deleted."""
    really, done = fcntl.flock, []

    def late(file: Any, how: int) -> None:
        if not done:
            done.append(True)
            os.unlink(tmp_path / ".c.writing")
        really(file, how)

    with patch.object(fcntl, "flock", late), hold_writer_lock(tmp_path / "c"):
        with pytest.raises(StorageFault, match=f"process {os.getpid()} on"), hold_writer_lock(tmp_path / "c"):
            pass
    assert os.listdir(tmp_path) == []


def test_where_there_are_no_locks_writers_use_names_of_their_own_and_a_mixture_is_refused(tmp_path, capsys):
    with patch.object(fcntl, "flock", side_effect=OSError(38, "Function not implemented")):
        with CorpusWriter(tmp_path / "c", vocab_size=10) as first:
            first.add_documents([1] * 1000, SHAPES[1])
            write(tmp_path / "c", 2)
            assert is_whole(IndexedCorpus(tmp_path / "c"))
    assert is_whole(IndexedCorpus(tmp_path / "c"))
    assert sorted(os.listdir(tmp_path)) == ["c.bin", "c.idx", "c.json"] and capsys.readouterr().err == ""


@pytest.mark.parametrize("suffix", [".bin", ".idx", ".json"])
def test_a_file_of_another_corpus_is_refused_when_it_is_opened(tmp_path: Path, suffix: str) -> None:
    for token in SHAPES:
        write(tmp_path / str(token), token)
    shutil.copyfile(tmp_path / f"2{suffix}", tmp_path / f"1{suffix}")
    with pytest.raises(DataError, match=r"1\.(bin|idx)?: not the one that .*1\.json was written with"):
        IndexedCorpus(tmp_path / "1")
    os.unlink(tmp_path / "1.json")  # as of Megatron-LM
    if suffix != ".json":
        assert not is_whole(IndexedCorpus(tmp_path / "1")), "nothing but the identity could tell"


def test_other_tokens_are_found_wherever_they_are(tmp_path: Path) -> None:
    """A document of another text, a page long, anywhere in a megabyte."""
    with CorpusWriter(tmp_path / "c", vocab_size=10) as writer:
        writer.add_documents(np.zeros(500_000, "<u2"), [500_000])
    for place in (0, 30_000, 499_999):
        tokens = np.zeros(500_000, "<u2")
        tokens[max(0, place - 20_000):place + 20_000] = 1
        tokens.tofile(tmp_path / "c.bin")
        with pytest.raises(DataError, match="c.bin: not the one that"):
            IndexedCorpus(tmp_path / "c")


def test_a_writer_killed_at_any_step_leaves_no_mixture(tmp_path: Path) -> None:
    prefix = tmp_path / "c"
    write(prefix, 1)
    events = in_a_fork(lambda: write(prefix, 2))
    assert events > 12
    for stop in range(1, events + 1):
        write(prefix, 1)
        assert in_a_fork(lambda: write(prefix, 2), stop) == -1
        try:
            assert is_whole(IndexedCorpus(prefix))
        except DataError as error:
            assert "c.idx: cannot read: No such file" in str(error)
        write(prefix, 2)
        assert is_whole(IndexedCorpus(prefix))
        assert sorted(os.listdir(tmp_path)) == ["c.bin", "c.idx", "c.json"]


@pytest.mark.parametrize("error, raised", [(DataError("no"), DataError), (OSError(28, "full"), StorageFault),
                                           (KeyboardInterrupt(), KeyboardInterrupt)])
def test_a_failure_leaves_the_old_corpus_and_nothing_beside(tmp_path, error, raised):
    write(tmp_path / "c", 1)
    with pytest.raises(raised), CorpusWriter(tmp_path / "c", vocab_size=10) as writer:
        writer.add_documents([1] * 600, SHAPES[1][:2])
        raise error
    assert sorted(os.listdir(tmp_path)) == ["c.bin", "c.idx", "c.json"] and is_whole(IndexedCorpus(tmp_path / "c"))


# --------------------------------------------------------------------------- one corpus under two names, through links


def the_folder(folder: Path) -> Path:
    (folder / "also").symlink_to(folder)
    return folder / "also" / "real"


def the_index_twice(folder: Path) -> Path:
    """Through another link, from another folder."""
    (folder / "sub").mkdir()
    (folder / "between.idx").symlink_to("real.idx")
    (folder / "sub" / "link.idx").symlink_to("../between.idx")
    return folder / "sub" / "link"


@pytest.mark.parametrize("is_second", [False, True], ids=["the link is first", "the link is second"])
@pytest.mark.parametrize("link", [the_folder, the_index_twice])
def test_a_second_writer_is_refused_by_any_name_and_harms_nothing(tmp_path, link, is_second):
    names = [link(tmp_path), tmp_path / "real"][::-1 if is_second else 1]
    with CorpusWriter(names[0], vocab_size=10) as first:
        first.add_documents([1] * 500, [500])
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(StorageFault, match=f"^{names[1]}: process {os.getpid()} on .* is writing under this name"):
            write(names[1], 2)
        assert sorted(tmp_path.rglob("*")) == before
        first.add_documents([1] * 500, [100, 400])
    assert is_whole(IndexedCorpus(names[0]))
    assert not [*tmp_path.rglob("*.writing"), *tmp_path.rglob("*.tmp")]
    write(names[1], 2)
    assert is_whole(IndexedCorpus(names[1]))
