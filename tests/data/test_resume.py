"""Tokenizing that was interrupted goes on from where it was, and the files are those of a run that was not."""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from data import jsonl, plain_text, preprocess
from data.parallel import ordered_map
from data.plain_text import Separator
from data.preprocess import EncodedChunk, TextReadOptions, build_corpus
from data.storage import DataError, ResumableError, StorageFault
from data.tokenizer import ByteLevelTokenizer
from data.writer import CorpusWriter

ROOT = Path(__file__).resolve().parents[2]
BYTE = ByteLevelTokenizer()
SUFFIXES = (".bin", ".idx", ".json")


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Files of every kind, a few hundred bytes a chunk, marked after each second one or so."""
    monkeypatch.setattr(preprocess, "RESUME_POINT_BYTES", 1000)
    monkeypatch.setattr(jsonl.read_line_chunks, "__defaults__", (600,))
    monkeypatch.setattr(plain_text.read_text_chunks, "__defaults__", (None, "", 600))
    lines = "".join(json.dumps({"text": f"line {i} " * (i % 9)}) + "\n" for i in range(200))
    paths = [tmp_path / name for name in ("a.jsonl", "b.txt", "c.jsonl.gz", "d.txt.gz")]
    for path in paths:
        text = lines if "jsonl" in path.name else " ".join(f"word{i}" for i in range(1500))
        path.write_bytes(gzip.compress(text.encode()) if path.name.endswith("gz") else text.encode())
    return paths


def files_of(prefix: Path) -> list[bytes]:
    return [Path(f"{prefix}{suffix}").read_bytes() for suffix in SUFFIXES]


def chunks_marked(prefix: Path) -> int:
    mark = prefix.with_name(f".{prefix.name}.mark.tmp")
    return int(json.loads(mark.read_bytes())["state"]["caller"]["chunks"]) if mark.exists() else 0


DIES = """
import os, signal
from data import jsonl, plain_text, preprocess, writer
preprocess.RESUME_POINT_BYTES = 1000
jsonl.read_line_chunks.__defaults__ = (600,)
plain_text.read_text_chunks.__defaults__ = (None, "", 600)
left = [{left}]
def dies(real):
    def call(*arguments, **more):
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **more)
    return call
writer.AppendFile.write, os.fsync, os.replace, os.truncate = map(
    dies, (writer.AppendFile.write, os.fsync, os.replace, os.truncate))
if __name__ == "__main__":
    preprocess.main({arguments!r})
"""


@pytest.mark.parametrize(("workers", "kills"), [
    (1, 3), pytest.param(1, 10, marks=pytest.mark.slow), pytest.param(2, 10, marks=pytest.mark.slow)])
def test_a_run_killed_at_random_moments_makes_the_files_of_one_that_was_not(
        tmp_path: Path, texts: list[Path], workers: int, kills: int) -> None:
    build_corpus(texts, tmp_path / "whole", BYTE)
    draw, prefix, killed, furthest, said = random.Random(workers), tmp_path / "c", 0, 0, ""
    arguments = ["--input", *map(str, texts), "--output-prefix", str(prefix), "--tokenizer-type", "byte",
                 "--append-eod", "--workers", str(workers)]
    script = tmp_path / "script.py"
    while killed < kills:
        script.write_text(DIES.format(left=draw.randrange(1, 40), arguments=arguments))
        done = subprocess.run([sys.executable, str(script)], cwd=ROOT, capture_output=True, text=True,
                              env=os.environ | {"PYTHONPATH": str(ROOT)})
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert not (tmp_path / "c.idx").exists()
        killed, said = killed + 1, said + done.stderr
        furthest = max(furthest, chunks_marked(prefix))
        assert chunks_marked(prefix) == furthest, "work that was marked is lost"
    assert furthest > kills and "going on after" in said and "other inputs" not in said
    build_corpus(texts, prefix, BYTE)
    assert files_of(prefix) == files_of(tmp_path / "whole")
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


class Stop:
    """Raises an error when so many chunks were encoded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, chunks: int, error: BaseException) -> None:
        self.left, self.error, self.encoded = chunks, error, 0
        monkeypatch.setattr(preprocess, "ordered_map", self.map)

    def map(self, *arguments: Any) -> Iterator[EncodedChunk]:
        for encoded in ordered_map(*arguments):
            if self.left == 0:
                raise self.error
            self.left, self.encoded = self.left - 1, self.encoded + 1
            yield encoded


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ResumableError("a worker process died")],
                         ids=["ctrl-c", "worker"])
@pytest.mark.parametrize("reading", [TextReadOptions(),
                                     TextReadOptions(separator=Separator.parse("word7"), append_eod=False)],
                         ids=["files", "separated"])
def test_an_interrupted_run_goes_on_at_every_chunk(tmp_path: Path, texts: list[Path], monkeypatch: pytest.MonkeyPatch,
                                                   error: BaseException, reading: TextReadOptions,
                                                   capsys: pytest.CaptureFixture[str]) -> None:
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


def test_lines_and_skipped_ones_are_counted_through(tmp_path: Path, texts: list[Path],
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_other_inputs_or_settings_begin_anew_and_say_so(
        tmp_path: Path, texts: list[Path], monkeypatch: pytest.MonkeyPatch, change: str,
        capsys: pytest.CaptureFixture[str]) -> None:
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
            writer.add_document([1])
    else:
        build_corpus(files, tmp_path / "c", tokenizer, reading, skip_malformed=change == "skip")
        whole, rest = rest, Stop(monkeypatch, -1, KeyboardInterrupt())
        said = capsys.readouterr().err
        build_corpus(files, tmp_path / "d", tokenizer, reading, skip_malformed=change == "skip")
        assert files_of(tmp_path / "c") == files_of(tmp_path / "d") and whole.encoded == rest.encoded
        assert "c: removed what a process that ended early had left, which has other inputs or settings" in said
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_what_cannot_be_read_twice_is_not_gone_on_from(tmp_path: Path, texts: list[Path],
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(texts[0].read_bytes(),), daemon=True).start()
    Stop(monkeypatch, 9, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        build_corpus([tmp_path / "pipe", *texts], tmp_path / "c", BYTE)
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".c.")]


def test_a_full_drive_gives_back_what_the_run_had_written(tmp_path: Path, texts: list[Path],
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (OSError(28, "No space left on device"), DataError("malformed")):
        Stop(monkeypatch, 9, error)
        with pytest.raises((StorageFault, DataError)):
            build_corpus(texts, tmp_path / "c", BYTE)
        assert not [name for name in os.listdir(tmp_path) if name.startswith((".", "c.bin", "c.idx"))]
