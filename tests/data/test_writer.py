"""Several processes and one name: one writes, the others are told, and what is opened is of one corpus."""

from __future__ import annotations

import fcntl
import json
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

from data import indexed, writer
from data.importers import import_tokens
from data.indexed import IndexedCorpus
from data.merge import merge_corpora
from data.preprocess import build_corpus
from data.sampling import parse_split
from data.split_json import split_json
from data.storage import DataError, StorageFault, hold_writer_lock, stale_temporary_files
from data.tokenizer import ByteLevelTokenizer
from data.writer import CORPUS_SUFFIXES, CorpusWriter

BYTE = ByteLevelTokenizer()
ROOT = Path(__file__).resolve().parents[2]
ROUNDS = 40
SHAPES = {1: [500, 100, 400], 2: [100, 800, 100]}
"""Token of a writer to the sizes of its documents: as many bytes in all three files as the other's have."""


def write(prefix: Path | str, token: int) -> None:
    with CorpusWriter(prefix, vocab_size=10) as writer:
        writer.add_documents([token] * 1000, SHAPES[token])


def is_whole(corpus: IndexedCorpus) -> bool:
    token = int(corpus.document(0)[0])
    return corpus.sizes.tolist() == SHAPES[token] and all((block == token).all() for _, block in corpus.token_blocks())


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
        done = subprocess.run([sys.executable, "-m", "data.merge", tmp_path / "c", tmp_path / "other"], cwd=ROOT,
                              text=True, capture_output=True)
        assert done.returncode == 7 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done
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


def test_a_lock_is_no_link_and_empties_nothing(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("words")
    (tmp_path / ".c.writing").symlink_to("mine")
    with pytest.raises(StorageFault, match="c: cannot write"), hold_writer_lock(tmp_path / "c"):
        pass
    assert (tmp_path / "mine").read_text() == "words"


def test_where_there_are_no_locks_writers_use_names_of_their_own_and_a_mixture_is_refused(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with patch.object(fcntl, "flock", side_effect=OSError(38, "Function not implemented")):
        with CorpusWriter(tmp_path / "c", vocab_size=10, key="k") as first:
            first.add_documents([1] * 1000, SHAPES[1])
            first.save_resume_point(None)
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
    os.unlink(tmp_path / "1.json")
    if suffix != ".json":
        assert not is_whole(IndexedCorpus(tmp_path / "1")), "nothing but the identity could tell"


@pytest.mark.parametrize("place", [0, 1, 30_000, 499_999])
def test_other_tokens_are_found_wherever_they_are(tmp_path: Path, place: int) -> None:
    """A document of another text, a page long, anywhere in a megabyte."""
    tokens = np.zeros(500_000, "<u2")
    with CorpusWriter(tmp_path / "c", vocab_size=10) as writer:
        writer.add_documents(tokens, [len(tokens)])
    tokens[max(0, place - 20_000):place + 20_000] = 1
    tokens.tofile(tmp_path / "c.bin")
    with pytest.raises(DataError, match="c.bin: not the one that"):
        IndexedCorpus(tmp_path / "c")


def test_corpora_without_an_identity_are_read(tmp_path: Path) -> None:
    write(tmp_path / "c", 1)
    facts = json.loads((tmp_path / "c.json").read_text())
    del facts["identity"]
    (tmp_path / "c.json").write_text(json.dumps(facts))
    assert is_whole(IndexedCorpus(tmp_path / "c"))
    (tmp_path / "c.json").unlink()
    assert is_whole(IndexedCorpus(tmp_path / "c"))
    (tmp_path / "c.json").write_text(json.dumps(facts | {"identity": 3}))
    with pytest.raises(DataError, match="c.json: not the facts of a corpus .identity: expected str, found 3"):
        IndexedCorpus(tmp_path / "c")


def test_a_reader_that_opens_one_file_of_each_corpus_is_told(tmp_path: Path) -> None:
    """The worst moment: the old index is open, the new tokens are there, and what would tell them apart is not yet."""
    write(tmp_path / "c", 1)
    really = indexed.StableFile

    def meanwhile(path: str) -> Any:
        if path.endswith(".bin"):
            write(tmp_path / "c", 2)
            os.unlink(tmp_path / "c.json")
        return really(path)

    with patch.object(indexed, "StableFile", meanwhile), pytest.raises(DataError, match="c.idx: was replaced while"):
        IndexedCorpus(tmp_path / "c")


@pytest.mark.parametrize("step", range(13))
def test_a_writer_killed_at_any_step_of_publishing_leaves_no_mixture(tmp_path: Path, step: int) -> None:
    write(tmp_path / "c", 1)
    code = f"""
import os, signal
from tests.data.test_writer import Path, write
left = [{step}]
def dies(real):
    def call(*arguments, **more):
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        return real(*arguments, **more)
    return call
from data import writer
os.replace, Path.unlink, writer.fsync_directory = dies(os.replace), dies(Path.unlink), dies(writer.fsync_directory)
write({str(tmp_path / 'c')!r}, 2)
"""
    killed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert killed.returncode == (-9 if step < 12 else 0), killed.stderr
    try:
        assert is_whole(IndexedCorpus(tmp_path / "c"))
    except DataError as error:
        assert "c.idx: cannot read: No such file" in str(error)
    write(tmp_path / "c", 2)
    assert is_whole(IndexedCorpus(tmp_path / "c"))
    assert sorted(os.listdir(tmp_path)) == ["c.bin", "c.idx", "c.json"]


def test_what_a_killed_writer_left_is_removed_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = [".c.bin.tmp", ".c.idx.tmp", ".c.json.tmp", ".c.bin.123.0123abcd.tmp", ".c.mark.tmp",
            "..c.mark.tmp.9.0123abcd.tmp"]
    others = [".c.bin.bin.tmp", ".cc.bin.tmp", ".c.bin.tmp.tmp", ".C.idx.tmp", "c.bin.tmp", ".c.txt.tmp"]
    for name in (*ours, *others):
        (tmp_path / name).write_bytes(b"x" * 100_000)
    write(tmp_path / "c", 1)
    assert sorted(os.listdir(tmp_path)) == sorted([*others, "c.bin", "c.idx", "c.json"])
    assert capsys.readouterr().err == f"{tmp_path}/c: removed what a process that ended early had left (0.6 MB)\n"
    assert stale_temporary_files(tmp_path / "missing" / "c") == []


def test_what_another_process_is_writing_stays(tmp_path: Path) -> None:
    with CorpusWriter(tmp_path / "c", vocab_size=10) as writer:
        writer.add_documents([1] * 1000, SHAPES[1])
        with pytest.raises(StorageFault):
            write(tmp_path / "c", 2)
        write(tmp_path / "d", 2)
    assert is_whole(IndexedCorpus(tmp_path / "c"))


@pytest.mark.parametrize("damage", [None, "cut", "changed", "no file", "no mark", "strange mark", "strange state",
                                    "other key"])
def test_a_mark_is_gone_on_from_if_both_files_hold_what_it_says(tmp_path: Path, damage: str | None,
                                                                capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt), CorpusWriter(tmp_path / "c", vocab_size=10, key="k") as writer:
        writer.add_documents([1] * 600, SHAPES[1][:2])
        writer.save_resume_point({"at": 2})
        writer.add_documents([9] * 5, [5])
        raise KeyboardInterrupt
    left, mark = tmp_path / ".c.bin.tmp", tmp_path / ".c.mark.tmp"
    if damage == "cut":
        os.truncate(left, 7)
    elif damage == "changed":
        left.write_bytes(b"\2" + left.read_bytes()[1:])
    elif damage == "no file":
        left.unlink()
    elif damage == "no mark":
        mark.unlink()
    elif damage == "strange mark":
        mark.write_text('{"key": "k", "files": {".bin": 3}}')
    elif damage == "strange state":
        mark.write_text(json.dumps(json.loads(mark.read_text()) | {"state": {"written": [2, "600"], "caller": {}}}))
    with CorpusWriter(tmp_path / "c", vocab_size=10, key="l" if damage == "other key" else "k") as writer:
        assert (writer.resumed_state, writer.documents) == ((None, 0) if damage else ({"at": 2}, 2))
        if damage:
            writer.add_documents([1] * 600, SHAPES[1][:2])
        writer.add_documents([1] * 400, SHAPES[1][2:])
    assert is_whole(IndexedCorpus(tmp_path / "c"))
    write(tmp_path / "d", 1)
    for suffix in CORPUS_SUFFIXES:
        assert (tmp_path / f"c{suffix}").read_bytes() == (tmp_path / f"d{suffix}").read_bytes()
    assert len(os.listdir(tmp_path)) == 6
    said = capsys.readouterr().err
    assert bool(said) == bool(damage) and ("which has other inputs" in said) == (damage not in (None, "no mark")), said


def test_a_writer_that_cannot_begin_does_not_hold_the_name(tmp_path: Path) -> None:
    with pytest.raises(MemoryError) as kept, patch.object(writer.AppendFile, "write", side_effect=MemoryError):
        CorpusWriter(tmp_path / "c", vocab_size=10).__enter__()
    assert kept.tb and not os.listdir(tmp_path)
    write(tmp_path / "c", 1)


def test_only_an_interruption_leaves_something_to_go_on_from(tmp_path: Path) -> None:
    for error in (DataError("malformed"), StorageFault("full"), KeyError()):
        with pytest.raises(type(error)), CorpusWriter(tmp_path / "c", vocab_size=10, key="k") as writer:
            writer.add_documents([1] * 600, SHAPES[1][:2])
            writer.save_resume_point(None)
            raise error
        assert os.listdir(tmp_path) == []
