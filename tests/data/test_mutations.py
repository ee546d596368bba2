"""Texts of every kind with accidents in them: the documents that are there, or a fault that is told and counted.

The readers are held against slow, obvious ones on the same damaged bytes, with chunks of every size: never a traceback,
never a hang, never a document that is lost, doubled or changed without a word. Each input follows from its number:
`MUTATION_SEED=7000 bash scripts/test_slow.sh tests/data/test_mutations.py` tries others.
"""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from data import jsonl, plain_text
from data.indexed import IndexedCorpus
from data.plain_text import Separator
from data.preprocess import TextReadOptions, build_corpus
from data.storage import DataError
from data.tokenizer import ByteLevelTokenizer
from data.webtext import extract
from data.webtext.documents import Document, DocumentError, DroppedDocument
from data.webtext.readers import WebReadOptions as WebReading, find_source_files, plan_units, read_unit
from tests.data.damaging import (COMPRESS, accidents, slow_array, slow_document, slow_lines, slow_text, slow_texts,
                                 text_before_damage)

BYTE = ByteLevelTokenizer()
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
        assert isinstance(extract.make_extract(extract.ExtractOptions())(values[0]), Document | DroppedDocument)


def check(number: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One input, through every reader that takes it."""
    rng = random.Random(number)
    kind = rng.choice(["jsonl", "jsonl", "txt", "txt", "csv", "html", "json"])
    ending, word = rng.choice(["", "", *COMPRESS]), rng.choice(list(SEPARATORS)) if kind == "txt" else None
    content = made(kind, rng)
    if ending and rng.random() < 0.7:
        whole, other = COMPRESS[ending](content), COMPRESS[ending](made(kind, rng))
        raw = mutated(whole, rng) if rng.random() < 0.7 else rng.choice([*accidents(whole, other, ending)])[1]
        before, is_damaged = text_before_damage(raw, ending)
        assert is_damaged or before in (content, content * 2), "checksums: what is read is what was written"
    else:
        before, is_damaged = mutated(content, rng), False
        raw = COMPRESS[ending](before) if ending else before
    path, good = folder / f"a.{kind}{ending}", folder / "good.jsonl"
    path.write_bytes(raw)
    good.write_text('{"text": "the end"}\n')
    size = rng.choice([1, 7, 100, 1 << 20])
    monkeypatch.setattr(jsonl.read_line_chunks, "__defaults__", (size,))
    monkeypatch.setattr(plain_text.read_text_chunks, "__defaults__", (None, "", size))
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
def test_mutated_inputs_end_in_their_documents_or_a_fault_that_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                       count: int) -> None:
    start = int(os.environ.get("MUTATION_SEED", "0"))
    for number in range(start, start + count):
        with patience(number):
            check(number, tmp_path, monkeypatch)
