"""Damaged files: everything before the damage is kept, the damage is told at its place and counted once."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from data import text_files
from data.indexed import IndexedCorpus
from data.preprocess import TextReadOptions, build_corpus, main as preprocess
from data.split_json import main as split_json
from data.storage import DataError
from data.text_files import Separator
from data.verify import verify_corpus
from data.webtext import extract
from data.webtext.documents import Document, DocumentError, DroppedDocument
from data.webtext.readers import WebReadOptions as WebReading, find_source_files, plan_units, read_unit
from data.webtext.runner import MapStage, StageRunOptions, make_read_function, run_map_stage
from tests.data.helpers import BYTE
from tests.data.damaging import (COMPRESS, PADDING, accidents, flipped, slow_array, slow_document, slow_lines,
                                 slow_text, slow_texts, text_before_damage)

READ = MapStage("read", make_read_function, {})
EVERY = pytest.mark.parametrize("ending", COMPRESS)


def texts(seed: int, count: int, longest: int = 60) -> list[str]:
    rng = random.Random(seed)
    return [f"document {number} " + rng.randbytes(rng.randint(5, longest)).hex() for number in range(count)]


def lines(found: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in found).encode()


def preprocessed(paths: list[Path], prefix: Path) -> tuple[list[str], int]:
    _, skipped = build_corpus(paths, prefix, BYTE, skip_malformed=True)
    corpus = IndexedCorpus(prefix)
    return [BYTE.decode(corpus.document(k).tolist()[:-1]) for k in range(corpus.num_documents)], skipped


def web_read(path: Path) -> tuple[list[str], list[str]]:
    reads = [read for unit in plan_units(find_source_files([path])[0], 1 << 20)
             for read in read_unit(unit, WebReading())]
    return ([read.value.text for read in reads if isinstance(read.value, Document)],
            [read.value.reason for read in reads if isinstance(read.value, DocumentError)])


@EVERY
def test_what_is_not_damaged_is_read_to_its_end(ending: str, tmp_path: Path) -> None:
    found, zeros = texts(3, 2000), bytes(PADDING[ending])
    content = lines(found)
    first, *others = (COMPRESS[ending](content[start:start + 997]) for start in range(0, len(content), 997))
    path = tmp_path / f"a.jsonl{ending}"
    for whole in (COMPRESS[ending](content), b"".join([first, *others]), first + (1 << 17) * zeros + b"".join(others),
                  COMPRESS[ending](content) + zeros):
        path.write_bytes(whole)
        assert preprocessed([path], tmp_path / "c") == (found, 0)
        assert web_read(path) == (found, [])
    path.write_bytes(COMPRESS[ending](b""))
    (tmp_path / "good.jsonl").write_bytes(lines(["after"]))
    assert preprocessed([path, tmp_path / "good.jsonl"], tmp_path / "c") == (["after"], 0)
    assert web_read(path) == ([], [])


@EVERY
def test_an_array_keeps_its_elements_before_the_damage(ending: str, tmp_path: Path) -> None:
    found = texts(10, 300)
    path = tmp_path / f"a.json{ending}"
    for indent in (None, 1):
        whole = COMPRESS[ending](json.dumps([{"text": text} for text in found], indent=indent).encode())
        for damaged in (flipped(whole, len(whole) - 2), whole + b"x"):
            path.write_bytes(damaged)
            assert web_read(path) == (found, ["unreadable"])
        path.write_bytes(cut := whole[:len(whole) // 2])
        kept = text_before_damage(cut, ending)[0].count(b"},")
        assert web_read(path) == (found[:kept], ["unreadable"])


@EVERY
def test_strict_runs_end_with_the_file_the_place_and_the_reason(ending: str, tmp_path: Path) -> None:
    content = lines(texts(7, 300))
    whole = COMPRESS[ending](content)
    path = tmp_path / f"a.jsonl{ending}"
    for damaged, place in ((whole[:-1], len(whole) - 1), (whole + b"\x01\x01", len(whole) + 1)):
        path.write_bytes(damaged)
        with pytest.raises(DataError) as error:
            build_corpus([path], tmp_path / "c", BYTE)
        match = re.fullmatch(r".*a\.jsonl\S+: cannot read: the compressed data is damaged at byte (\d+) \(after "
                             r"(\d+) bytes of what is in it\): .+; it is in line 301", str(error.value))
        assert match, str(error.value)
        assert place <= int(match[1]) <= place + 4 and match[2] == str(len(content))
        assert not list(tmp_path.glob("c.*"))
        with pytest.raises(DataError, match="a.jsonl.* cannot read: the compressed data is damaged .* in line 301"):
            split_json([str(path), "--output-prefix", str(tmp_path / "p")])
        with pytest.raises(DataError, match=r"a.jsonl\S+:\d+ \(byte \d+\) cannot read on: the compressed data is dam"):
            run_map_stage(READ, [path], tmp_path / "out")


def test_damage_is_told_by_file_and_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And with the next file it goes on."""
    for name, count in (("a", 7), ("c", 1), ("d", 300)):
        (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress(lines(texts(14, count))) + b"x")
    (tmp_path / "b.jsonl").write_bytes(lines(texts(13, 5)))
    (tmp_path / "e.jsonl.gz").touch()
    (tmp_path / "f.jsonl.gz").write_bytes(gzip.compress(lines(["after"])))
    for workers in ("1", "2"):
        preprocess(["--input", str(tmp_path), "--output-prefix", str(tmp_path / f"out{workers}"), "--tokenizer-type",
                    "byte", "--on-error", "skip", "--workers", workers])
    split_json([str(tmp_path), "--split", "1,1,0", "--output-prefix", str(tmp_path / "p"), "--on-error", "skip"])
    out = capsys.readouterr()
    assert out.err.count("6 files, 314 documents in ") == out.err.count("; 4 malformed documents skipped\n") == 2
    assert out.out.startswith("314 documents: ") and out.out.endswith("; 4 malformed lines skipped\n")
    told = [line.partition(f"{tmp_path}/")[2] for line in out.err.splitlines() if "skipped the rest" in line]
    assert [(line[0], line.rpartition("; it is in line ")[2]) for line in told] == [
        ("a", "8"), ("c", "2"), ("d", "301"), ("e", "1")] * 3
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"out1{suffix}").read_bytes() == (tmp_path / f"out2{suffix}").read_bytes()


def test_a_web_stage_names_the_damaged_files_whatever_its_workers(tmp_path: Path) -> None:
    ending = ".xz"
    whole = COMPRESS[ending](lines(texts(9, 200)))
    (tmp_path / "in").mkdir()
    for name, content in (("a", whole + b"x"), ("b", whole), ("c", b""), ("d", whole)):
        (tmp_path / "in" / f"{name}.jsonl{ending}").write_bytes(content)
    records = [run_map_stage(READ, [tmp_path / "in"], tmp_path / f"out{workers}", WebReading(on_error="skip"),
                             StageRunOptions(workers, shard_bytes=5000)) for workers in (1, 2)]
    assert records[0] == records[1] and records[0].counts.documents_kept == 600
    assert records[0].counts.dropped == {"unreadable": 2}
    assert [note.split(": ")[0] for note in records[0].notes] == [f"a.jsonl{ending}", f"c.jsonl{ending}"]
    assert f"damaged at byte {len(whole) + 1} " in records[0].notes[0] and "damaged at byte 0 " in records[0].notes[1]


# ----------------------------------------------------------------------------------------------------- random accidents

PATIENCE = 120
"""Seconds after which an input is taken to hang; one takes a few hundredths."""
PIECES = ["word", " ", "\n", "\r\n", "\n\n", "\n \t\n", "\u00e9", "\U0001f600", "\u2028", "\u00a0", "\ufeff", "\\n",
          "\"", "<|endoftext|>", "<|endof", "{", "}", "[", ",", "\0", "\x85", "x" * 40, "<p>", "&amp;", "---"]
TOKENS = [b"\n", b"\r\n", b"\r", b"\n\n", b"\xef\xbb\xbf", b"\xff\xfe", b"\xff", b"\0", b'"', b"{", b"}", b"\\", b"NaN",
          b"\\ud800", b"[" * 2000, b'{"text": "new"}\n', b"<|endoftext|>", b"\xc3", b"\xe2\x80\xa8", b"<!--", b"<pre>",
          b"9" * 5000, b",", b"]"]
SEPARATORS = {None: None, "<|endoftext|>": rb"<\|endoftext\|>", "blank-line": rb"\r?\n(?:[ \t]*\r?\n)+",
              r"\n": rb"\r?\n", r"---\n": rb"---\r?\n"}


def prose(rng: random.Random, most: int = 30) -> str:
    return "".join(rng.choice(PIECES) for _ in range(rng.randint(0, most)))


def made(kind: str, rng: random.Random) -> bytes:
    """A good file."""
    if kind in ("jsonl", "json"):
        objects = [{"id": k, "text": prose(rng), "n": [0.5, None]} for k in range(rng.randint(1, 40))]
        if kind == "json":
            return json.dumps(objects, indent=rng.choice([None, 1])).encode()
        return "".join(json.dumps(value, ensure_ascii=rng.random() < 0.5) + rng.choice(["\n", "\n", "\r\n", "\n\n"])
                       for value in objects).encode()
    if kind == "csv":
        return "".join(f'{k},"{prose(rng)}",0.5\n' for k in range(rng.randint(1, 10))).encode()
    if kind == "html":
        return (f"<!doctype html><html><head><title>t</title></head><body><p>{prose(rng)}</p><table><tr><td>"
                f"{prose(rng)}</table><pre>{prose(rng)}</pre></body></html>").encode()
    return prose(rng, 300).encode()


def mutated(content: bytes, rng: random.Random) -> bytes:
    """None to three accidents."""
    raw = bytearray(content)
    for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
        place, length = rng.randrange(len(raw) + 1), rng.choice([1, 1, 2, 8, 50])
        accident = rng.randrange(7)
        if accident == 0 and place < len(raw):
            raw[place] ^= 1 << rng.randrange(8)
        elif accident == 1:
            del raw[place:place + length]
        elif accident == 2:
            raw[place:place] = rng.randbytes(length)
        elif accident == 3:
            del raw[place:]
        elif accident == 4:
            raw[place:place] = rng.choice(TOKENS)
        elif accident == 5:
            raw += raw[place:]
        else:
            raw[place:place + length] = bytes(length)
    return bytes(raw)


def check_preprocess(path: Path, good: Path, word: str | None, expected: list[str | None], is_damaged: bool) -> None:
    prefix, reading = path.parent / "c", TextReadOptions(separator=Separator.parse(word))
    bad = expected.count(None) + is_damaged
    for skip in (False, True):
        try:
            _, skipped = build_corpus([path, good], prefix, BYTE, reading, skip_malformed=skip)
        except DataError as error:
            assert not skip and bad and str(path) in str(error) and "\n" not in str(error)
            continue
        assert skipped == bad if skip else not bad
        verify_corpus(str(prefix))  # also what is recorded, after parts of a document were taken back
        corpus = IndexedCorpus(prefix)
        found = [BYTE.decode(corpus.document(k).tolist()[:-1]) for k in range(corpus.num_documents)]
        assert found == [text for text in expected if text is not None] + ["the end"]


def check_web(path: Path, kind: str, before: bytes, is_damaged: bool, reading: WebReading) -> None:
    reads = [read for unit in plan_units(find_source_files([path])[0], 1 << 20) for read in read_unit(unit, reading)]
    values = [read.value if isinstance(read.value, Document) else None for read in reads]
    reasons = [read.value.reason for read in reads if isinstance(read.value, DocumentError)]
    for read in reads:
        assert str(path) in read.location()
        if isinstance(read.value, Document):
            read.value.to_line()  # what was repaired can be written
    if kind == "json":
        whole = None if is_damaged else slow_array(before)
        if whole is None:
            assert reasons or before.strip()[:1] != b"[", "no array"
        elif reading.on_error == "strict":
            assert values == whole
        return
    assert (reasons[-1:] == ["unreadable"]) == is_damaged and "unreadable" not in reasons[:-1]
    if kind == "jsonl":
        expected = slow_lines(before, is_damaged, slow_document) + [None] * is_damaged
        if reading.on_error == "replace":
            assert len(values) == len(expected)
            assert all(value == slow or slow is None and (value is None or read.repairs)
                       for value, slow, read in zip(values, expected, reads))
        else:
            assert values == expected
        return
    assert len(values) == 1, "one file, one document"
    if is_damaged:
        return
    if values[0] and before.isascii() and kind == "txt":
        assert values[0].text == before.decode()
    assert values[0] or kind == "html" or reading.on_error == "strict", reasons
    if values[0] and kind == "html":
        assert isinstance(extract.make_extract()(values[0]), Document | DroppedDocument)


def check(number: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One input, through every reader that takes it."""
    rng = random.Random(number)
    kind = rng.choice(["jsonl", "jsonl", "txt", "txt", "csv", "html", "json"])
    ending, word = rng.choice(["", "", *COMPRESS]), rng.choice(list(SEPARATORS)) if kind == "txt" else None
    content = b"\xef\xbb\xbf" * (rng.random() < 0.1) + made(kind, rng)
    if ending and rng.random() < 0.7:
        whole, other = COMPRESS[ending](content), COMPRESS[ending](made(kind, rng))
        raw = mutated(whole, rng) if rng.random() < 0.5 else rng.choice([*accidents(whole, other, ending)])[1]
        before, is_damaged = text_before_damage(raw, ending)
        assert is_damaged or before in (content, content * 2), "checksums: what is read is what was written"
    else:
        before, is_damaged = mutated(content, rng), False
        raw = COMPRESS[ending](before) if ending else before
    path, good = folder / f"a.{kind}{ending}", folder / "good.jsonl"
    path.write_bytes(raw)
    good.write_text('{"text": "the end"}\n')
    size = rng.choice([1, 7, 100, 1 << 20])
    monkeypatch.setattr(text_files.read_line_chunks, "__defaults__", (size,))
    monkeypatch.setattr(text_files.read_text_chunks, "__defaults__", (None, "", size))
    if kind != "html":
        expected = slow_texts(before, is_damaged, SEPARATORS[word]) if kind == "txt" else \
            slow_lines(before, is_damaged, slow_text)
        check_preprocess(path, good, word, expected, is_damaged)
    if kind == "csv":
        with pytest.raises(DataError, match="its name does not say what it holds"):
            find_source_files([path])
    else:
        for mode in ("strict", "replace"):
            check_web(path, kind, before, is_damaged, WebReading(on_error=mode))
    path.unlink()


@contextmanager
def patience(number: int) -> Iterator[None]:
    def give_up(*_: object) -> None:
        raise AssertionError(f"input {number} hangs")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(PATIENCE)
    try:
        yield
    except Exception as error:
        raise AssertionError(f"input {number}: {type(error).__name__}: {error}") from error
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("count", [120, pytest.param(4000, marks=pytest.mark.slow)])
def test_mutated_inputs_end_in_their_documents_or_a_fault_that_is_told(tmp_path, monkeypatch, count):
    """The readers are held against slow, obvious ones on the same damaged bytes, with chunks of every size: never a
    traceback, never a hang, never a document that is lost, doubled or changed without a word. Each input follows from
    its number: `MUTATION_SEED=7000 bash scripts/test_slow.sh tests/data/test_damaged.py` tries others."""
    start = int(os.environ.get("MUTATION_SEED", "0"))
    for number in range(start, start + count):
        with patience(number):
            check(number, tmp_path, monkeypatch)
