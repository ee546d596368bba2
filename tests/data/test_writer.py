"""Writing corpora: one process writes a name, readers never see a mixture, and an interrupted run goes on."""

from __future__ import annotations

import fcntl
import gzip
import json
import multiprocessing
import os
import random
import shutil
import socket
import subprocess
import sys
import threading
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from data import preprocess, text_files
from data.importers import import_tokens
from data.indexed import IndexedCorpus
from data.merge import merge_corpora
from data.preprocess import TextReadOptions, build_corpus
from data.sampling import parse_split
from data.split_json import split_json
from data.storage import DataError, ResumableError, StorageFault, hold_writer_lock, remove_stale_files
from data.text_files import Separator
from data.tokenizer import ByteLevelTokenizer
from data.writer import CorpusWriter
from tests.data.helpers import BYTE, Stop, files_of, in_a_fork

ROUNDS = 8
ROOT = Path(__file__).resolve().parents[2]
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


def test_what_a_killed_writer_left_is_removed_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = [".c.bin.tmp", ".c.idx.tmp", ".c.json.tmp", ".c.bin.123.0123abcd.tmp", ".c.mark.tmp",
            "..c.mark.tmp.9.0123abcd.tmp"]
    others = [".c.bin.bin.tmp", ".cc.bin.tmp", ".c.bin.tmp.tmp", ".C.idx.tmp", "c.bin.tmp", ".c.txt.tmp"]
    for name in (*ours, *others):
        (tmp_path / name).write_bytes(b"x" * 100_000)
    write(tmp_path / "c", 1)
    assert sorted(os.listdir(tmp_path)) == sorted([*others, "c.bin", "c.idx", "c.json"])
    assert capsys.readouterr().err == f"{tmp_path}/c: removed what a process that ended early had left (0.6 MB)\n"
    remove_stale_files("c", [tmp_path / "missing" / "c"])


@pytest.mark.parametrize("damage", [None, "cut", "changed", "no file", "no mark", "strange mark", "strange state",
                                    "other key"])
def test_a_mark_is_gone_on_from_if_both_files_hold_what_it_says(tmp_path, damage, capsys):
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
    assert files_of(tmp_path / "c") == files_of(tmp_path / "d")
    assert len(os.listdir(tmp_path)) == 6
    said = capsys.readouterr().err
    assert bool(said) == bool(damage) and ("which has other inputs" in said) == (damage not in (None, "no mark")), said


def test_only_an_interruption_leaves_something_to_go_on_from_and_the_old_corpus_stays(tmp_path: Path) -> None:
    write(tmp_path / "c", 1)
    for error, told in ((DataError("no"), DataError), (OSError(28, "full"), StorageFault), (KeyError(), KeyError)):
        with pytest.raises(told), CorpusWriter(tmp_path / "c", vocab_size=10, key="k") as writer:
            writer.add_documents([1] * 600, SHAPES[1][:2])
            writer.save_resume_point(None)
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


# -------------------------------------------------------------------------------------- tokenizing that was interrupted


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Files of every kind, a few hundred bytes a chunk, marked after each second one or so."""
    monkeypatch.setattr(preprocess, "RESUME_POINT_BYTES", 1000)
    monkeypatch.setattr(text_files.read_line_chunks, "__defaults__", (600,))
    monkeypatch.setattr(text_files.read_text_chunks, "__defaults__", (None, "", 600))
    lines = "".join(json.dumps({"text": f"line {i} " * (i % 9)}) + "\n" for i in range(200))
    paths = [tmp_path / name for name in ("a.jsonl", "b.txt", "c.jsonl.gz", "d.txt.gz")]
    for path in paths:
        text = lines if "jsonl" in path.name else " ".join(f"word{i}" for i in range(1500))
        path.write_bytes(gzip.compress(text.encode()) if path.name.endswith("gz") else text.encode())
    return paths


def chunks_marked(prefix: Path) -> int:
    mark = prefix.with_name(f".{prefix.name}.mark.tmp")
    return int(json.loads(mark.read_bytes())["state"]["caller"]["chunks"]) if mark.exists() else 0


@pytest.mark.parametrize(("workers", "kills"), [
    (1, 5), pytest.param(1, 20, marks=pytest.mark.slow), pytest.param(2, 10, marks=pytest.mark.slow)])
def test_a_run_killed_at_random_moments_makes_the_files_of_one_that_was_not(tmp_path, texts, workers, kills):
    build_corpus(texts, tmp_path / "whole", BYTE)
    draw, prefix, furthest = random.Random(workers), tmp_path / "c", 0
    for _ in range(kills):
        assert in_a_fork(lambda: build_corpus(texts, prefix, BYTE, workers=workers), draw.randrange(1, 30)) == -1
        assert not (tmp_path / "c.idx").exists()
        assert chunks_marked(prefix) >= furthest, "work that was marked is lost"
        furthest = chunks_marked(prefix)
    assert furthest > kills
    build_corpus(texts, prefix, BYTE)
    assert files_of(prefix) == files_of(tmp_path / "whole")
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


@pytest.mark.parametrize(("error", "reading"), [
    (KeyboardInterrupt(), TextReadOptions(separator=Separator.parse("word7"), append_eod=False)),
    (ResumableError("a worker process died"), TextReadOptions())], ids=["ctrl-c, separated", "worker, files"])
def test_an_interrupted_run_goes_on_at_every_chunk(tmp_path, texts, monkeypatch, error, reading, capsys):
    whole = Stop(monkeypatch, -1, error)
    progress, _ = build_corpus(texts, tmp_path / "whole", BYTE, reading)
    for stop in (4, 5, whole.encoded // 2, whole.encoded - 1):
        Stop(monkeypatch, stop, error)
        with pytest.raises(type(error)):
            build_corpus(texts, tmp_path / "c", BYTE, reading)
        rest = Stop(monkeypatch, -1, error)
        again, _ = build_corpus(texts, tmp_path / "c", BYTE, reading)
        assert files_of(tmp_path / "c") == files_of(tmp_path / "whole")
        assert rest.encoded <= whole.encoded - stop + 3, "what was done is done again"
        assert (again.documents, again.bytes) == (progress.documents, progress.bytes)
        assert f"{tmp_path}/c: going on after " in capsys.readouterr().err


def test_lines_and_skipped_ones_are_counted_through(tmp_path, texts, monkeypatch):
    lines = texts[0].read_text().splitlines()
    lines[5] = lines[150] = "[]"
    texts[0].write_text("\n".join(lines))
    Stop(monkeypatch, 8, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        build_corpus(texts, tmp_path / "c", BYTE, skip_malformed=True)
    rest = Stop(monkeypatch, -1, KeyboardInterrupt())
    _, skipped = build_corpus(texts, tmp_path / "c", BYTE, skip_malformed=True)
    assert skipped == 2 and rest.encoded
    lines[5] = lines[4]
    texts[0].write_text("\n".join(lines))
    Stop(monkeypatch, 8, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        build_corpus(texts, tmp_path / "c", BYTE)
    Stop(monkeypatch, -1, KeyboardInterrupt())
    with pytest.raises(DataError, match="a.jsonl:151 expected a JSON object"):
        build_corpus(texts, tmp_path / "c", BYTE)


@pytest.mark.parametrize("change", ["touched", "order", "one less", "tokenizer", "key", "eod", "skip", "merge"])
def test_other_inputs_or_settings_begin_anew_and_say_so(tmp_path, texts, monkeypatch, change, capsys):
    Stop(monkeypatch, 9, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        build_corpus(texts, tmp_path / "c", BYTE)
    assert chunks_marked(tmp_path / "c") >= 7
    reading = TextReadOptions("other" if change == "key" else "text", append_eod=change != "eod")
    tokenizer = ByteLevelTokenizer()
    if change == "touched":
        os.utime(texts[-1], (1, 1))
    if change == "tokenizer":
        monkeypatch.setattr(tokenizer, "fingerprint", "0123456789abcdef")
    files = {"order": texts[::-1], "one less": texts[:-1]}.get(change, texts)
    files = [path for path in files if "txt" in path.name] if change == "key" else files
    rest = Stop(monkeypatch, -1, KeyboardInterrupt())
    if change == "merge":
        with CorpusWriter(tmp_path / "c", tokenizer=BYTE.facts) as writer:
            writer.add_documents([1], [1])
    else:
        build_corpus(files, tmp_path / "c", tokenizer, reading, skip_malformed=change == "skip")
        whole, rest = rest, Stop(monkeypatch, -1, KeyboardInterrupt())
        said = capsys.readouterr().err
        build_corpus(files, tmp_path / "d", tokenizer, reading, skip_malformed=change == "skip")
        assert files_of(tmp_path / "c") == files_of(tmp_path / "d") and whole.encoded == rest.encoded
        assert "c: removed what a process that ended early had left, which has other inputs or settings" in said
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_what_cannot_be_read_twice_is_not_gone_on_from(tmp_path, texts, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(texts[0].read_bytes(),), daemon=True).start()
    Stop(monkeypatch, 9, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        build_corpus([tmp_path / "pipe", *texts], tmp_path / "c", BYTE)
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".c.")]
