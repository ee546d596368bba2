"""What is not text costs no memory: a line without an end is named and passed over, and every program says the same."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import numpy as np
import pytest

from data import importers, jsonl
from data.importers import import_tokens
from data.indexed import IndexedCorpus
from data.jsonl import parse_lines, read_line_chunks
from data.preprocess import TextReadOptions, build_corpus
from data.split_json import split_json
from data.storage import DataError
from data.tokenizer import ByteLevelTokenizer, GPT2BPETokenizer
from data.verify import verify_corpus
from data.webtext import __main__ as webtext, dedup
from data.webtext.runner import GlobalStage, run_global_stage
from data.writer import CorpusWriter

BYTE = ByteLevelTokenizer()
ROOT = Path(__file__).resolve().parents[2]
LINE = b'{"text": "words"}\n'
LIMIT = 1000


def put(path: Path, content: bytes) -> Path:
    """As the name says."""
    if path.suffix == ".pipe":
        os.mkfifo(path)
        threading.Thread(target=path.write_bytes, args=(content,), daemon=True).start()
    else:
        path.write_bytes({".gz": gzip.compress, ".xz": lzma.compress}.get(path.suffix, bytes)(content))
    return path


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "jsonl.xz", "pipe"])
@pytest.mark.parametrize("long", [LIMIT, LIMIT + 1, 1599, 1600, 1601, 5000, 100_000])
@pytest.mark.parametrize("before", [0, 1, 33, 34, 35])
def test_a_line_that_is_too_long_is_named_wherever_it_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                             kind: str, long: int, before: int) -> None:
    """34 lines fill a chunk nearly, 35 more than that."""
    monkeypatch.setattr(jsonl.read_line_chunks, "__defaults__", (600,))
    monkeypatch.setattr(jsonl, "SKIP_BYTES", 64)
    content = LINE * before + b"\0" * (long - 1) + b"\n" + LINE * 40 + b"[]\n"
    path = put(tmp_path / f"a.{kind}", content)
    held, found, line = 0, [], 0
    for chunk in read_line_chunks(path, limit=LIMIT):
        data = chunk.read()
        held = max(held, len(data))
        for _, text in parse_lines(chunk, data, "text", LIMIT):
            if not isinstance(text, str):
                found.append(str(text.to_error(line)))
        line += data.count(b"\n") + (chunk.skipped_bytes > 0)
    assert held <= LIMIT + 600
    reason = "not JSON" if long <= LIMIT else f"more than {LIMIT} bytes in this line"
    assert found[0].startswith(f"{path}:{before + 1} {reason}"), found
    assert found[0].endswith(f"(the line begins at byte {len(LINE) * before})")
    assert len(found) == 2 and found[1].startswith(f"{path}:{before + 42} expected a JSON object"), found


def test_it_ends_the_run_or_is_skipped_by_preprocessing_and_splitting_alike(tmp_path: Path) -> None:
    path = put(tmp_path / "a.jsonl", LINE * 3 + b'{"text": "' + b"y" * LIMIT + b'"}\n' + LINE)
    reading, shares = TextReadOptions(max_document_bytes=LIMIT), [Fraction(1, 2), Fraction(1, 2), Fraction(0)]
    for program in (lambda: build_corpus([path], tmp_path / "c", BYTE, reading),
                    lambda: split_json([str(path)], str(tmp_path / "s"), shares, max_bytes=LIMIT)):
        with pytest.raises(DataError, match=r"a.jsonl:4 more than 1000 bytes .*--max-document-bytes of data"):
            program()
    progress, skipped = build_corpus([path], tmp_path / "c", BYTE, reading, skip_malformed=True)
    counts, left_out = split_json([str(path)], str(tmp_path / "s"), shares, max_bytes=LIMIT, skip_malformed=True)
    assert (progress.documents, skipped) == (sum(counts.values()), left_out) == (4, 1)
    assert progress.bytes == path.stat().st_size
    assert build_corpus([path], tmp_path / "c", BYTE, TextReadOptions(max_document_bytes=2 * LIMIT))[0].documents == 5


@pytest.mark.parametrize("tokenizer", [BYTE, GPT2BPETokenizer()], ids=["byte", "gpt2"])
@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_plain_text_without_white_space_is_named(tmp_path: Path, tokenizer: ByteLevelTokenizer, name: str) -> None:
    path = put(tmp_path / name, b"some words\nand a line \n" * 100_000 + bytes(1 << 22) + b"\nmore")
    with pytest.raises(DataError, match=rf"{name}:\d+ more than 1048576 bytes without white space to cut at"):
        build_corpus([path], tmp_path / "c", tokenizer, TextReadOptions(max_document_bytes=1 << 20))
    build_corpus([path], tmp_path / "c", tokenizer, TextReadOptions(max_document_bytes=1 << 23))
    assert IndexedCorpus(tmp_path / "c").num_documents == 1


def peak_of(tmp_path: Path, megabytes: int | None, name: str, *flags: str) -> tuple[int, str]:
    """Megabytes of the largest process, times how many there are; and what was said. Of some lines and so many zeros,
    or, None, of the file as it is."""
    if megabytes is not None:
        block = gzip.compress(bytes(1 << 24))
        (tmp_path / name).write_bytes(gzip.compress(LINE * 9) + block * (megabytes >> 4))
    code = """
import resource
from data.preprocess import main
from tests.peak import peak
try:
    main()
except Exception as error:
    print(error)
print(peak() >> 20, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10)  # a worker's begins at its parent's
"""
    done = subprocess.run(
        [sys.executable, "-c", code, "--input", str(tmp_path / name), "--output-prefix", str(tmp_path / "c"),
         "--tokenizer-type", "byte", "--workers", "2", *flags], cwd=ROOT, capture_output=True, text=True)
    *said, peaks = done.stdout.splitlines()
    own, worker = map(int, peaks.split())
    return own + 2 * worker, "\n".join(said)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.txt.gz"])
def test_zeros_do_not_cost_their_size_in_memory(tmp_path: Path, name: str) -> None:
    peak, said = peak_of(tmp_path, 192, name, "--max-document-bytes", "4M", "--workers", "1")
    base, _ = peak_of(tmp_path, 0, name, "--workers", "1")
    assert peak < base + 100 and re.search(rf"{name}:(9|10) more than 4194304 bytes", said), (peak, base, said)


@pytest.mark.parametrize("end", [b"", b"\xff", bytes(1 << 23)], ids=["good", "bad", "too long"])
def test_a_long_document_that_may_be_skipped_costs_no_more_than_one_that_may_not(tmp_path: Path, end: bytes) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"some words " * (1 << 22), compresslevel=1) + gzip.compress(end))
    (tmp_path / "b.txt").write_text("words")
    flags = ("--max-document-bytes", "4M", "--on-error", "skip", "--workers", "1", "--append-eod")
    peak, _ = peak_of(tmp_path, None, "a.txt.gz", "--input", *(str(tmp_path / name) for name in ("a.txt.gz", "b.txt")),
                      *flags)
    assert IndexedCorpus(tmp_path / "c").sizes.tolist() == [11 << 22 | 1] * (end == b"") + [6]
    base, _ = peak_of(tmp_path, 0, "c.txt.gz", *flags)
    assert peak < base + 40, (peak, base)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.txt.gz"])
def test_a_gigabyte_of_zeros_costs_less_than_half_of_it(tmp_path: Path, name: str) -> None:
    peak, said = peak_of(tmp_path, 1024, name)
    base, _ = peak_of(tmp_path, 0, name)
    assert peak < base + 512 and re.search(rf"{name}:(9|10) more than 67108864 bytes", said), (peak, base, said)


OBJECT = json.dumps({"text": "one"}, indent=1)
ARRAY = json.dumps([{"text": "one"}, {"text": "two"}], indent=1)


@pytest.mark.parametrize("content", [OBJECT, ARRAY, json.dumps([{"text": "one"}]), "[{\"text\": \"one\"},\n]"])
def test_json_over_several_lines_is_refused_with_what_to_do(tmp_path: Path, content: str) -> None:
    for mark in (b"", b"\xef\xbb\xbf"):
        (tmp_path / "a.json").write_bytes(mark + content.encode())
        for program in (lambda: build_corpus([tmp_path / "a.json"], tmp_path / "c", BYTE),
                        lambda: split_json([str(tmp_path / "a.json")], str(tmp_path / "s"), [Fraction(1)] * 3)):
            with pytest.raises(DataError, match=r"a.json:1 .*python -m data.webtext read --format json FILE"):
                program()


@pytest.mark.parametrize("content", [OBJECT, ARRAY, json.dumps([{"text": "one"}])])
@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_what_to_do_works(tmp_path: Path, content: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / name).write_text("\ufeff" + content)
    webtext.main(["read", "--format", "json", str(tmp_path / name), "--output", str(tmp_path / "out")])
    build_corpus([*(tmp_path / "out").glob("part-*.jsonl")], tmp_path / "c", BYTE)
    assert bytes(IndexedCorpus(tmp_path / "c").document(0)[:-1].astype("u1")) == b"one"


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf_16_is_named(tmp_path: Path, encoding: str) -> None:
    for name in ("a.jsonl", "a.txt"):
        (tmp_path / name).write_bytes(("\ufeff" + LINE.decode() * 3).encode(encoding))
        with pytest.raises(DataError, match=f"{name}:1 not UTF-8 but UTF-16, by its first bytes; convert"):
            build_corpus([tmp_path / name], tmp_path / "c", BYTE)
        with pytest.raises(DataError, match=f"{name}.* not UTF-8 but UTF-16, by its first bytes; convert"):
            webtext.main(["read", str(tmp_path / name), "--output", str(tmp_path / "out")])
    for name in ("a.jsonl", "a.txt"):
        (tmp_path / name).write_bytes(b"\xff\xff words\n")
        with pytest.raises(DataError, match=f"{name}.* not UTF-8: byte 0xff"):
            webtext.main(["read", str(tmp_path / name), "--output", str(tmp_path / "out")])


@pytest.mark.parametrize("content", [OBJECT + "\n" + OBJECT, OBJECT + OBJECT, OBJECT + "\n" + ARRAY])
def test_several_objects_over_several_lines_are_refused_with_what_to_do(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(DataError, match=r"a.json not JSON: Extra data.*`jq -c \.` makes a line of each"):
        webtext.main(["read", str(tmp_path / "a.json"), "--output", str(tmp_path / "out")])


@pytest.mark.parametrize(("name", "found"), [("a.json", "text"), ("a.txt", "text"), ("a.jsonl.gz", "text"),
                                             ("a.ndjson", "text"), ("a.bin.gz", "a compressed"), ("a.xz", "a comp")])
def test_text_is_not_taken_for_tokens(tmp_path: Path, name: str, found: str) -> None:
    (tmp_path / name).write_bytes(b'{"text": "a pair of bytes"} ')
    with pytest.raises(DataError, match=f"{name}: expected a file of tokens, found {found}"):
        import_tokens([tmp_path / name], tmp_path / "c", BYTE)
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match="folder: expected a file, found a folder"):
        import_tokens([tmp_path / "folder"], tmp_path / "c", BYTE)


def unreadable(*_: object) -> NoReturn:
    raise OSError(5, "Input/output error")


def whose_tokens_are_unreadable(path: object, dtype: object, count: int, offset: int = 0) -> np.ndarray[Any, Any]:
    """The head of a token file can be read."""
    return np.zeros(count, "<i4") if isinstance(path, str) else unreadable()


class Broken(io.FileIO):
    """A drive that fails after the file was opened."""

    readinto = read = readall = unreadable  # type: ignore[assignment]


@pytest.mark.parametrize("program", ["preprocess", "split", "import", "verify"])
def test_a_drive_that_fails_is_named_by_every_program(tmp_path: Path, program: str) -> None:
    """With 3: it is what is read that is at fault."""
    for name in ("a.jsonl", "a.txt"):
        (tmp_path / name).write_bytes(LINE)
    (tmp_path / "a.bin").write_bytes(b"\1\0" * 100)
    with CorpusWriter(tmp_path / "v", vocab_size=10) as writer:
        writer.add_document([1] * 9)

    def broken(path: object, mode: str = "r", *arguments: object, **more: object) -> object:
        return Broken(str(path)) if "r" in mode and not str(path).endswith((".json", ".idx")) else open(
            str(path), mode, *arguments, **more)  # type: ignore[call-overload]

    runs: dict[str, tuple[str, Callable[[], object]]] = {
        "preprocess": ("data.compressed", lambda: build_corpus([tmp_path / "a.txt"], tmp_path / "c", BYTE)),
        "split": ("data.compressed", lambda: split_json([str(tmp_path / "a.jsonl")], str(tmp_path / "s"),
                                                        [Fraction(1)] * 3)),
        "import": ("data.tokenizer", lambda: import_tokens([tmp_path / "a.bin"], tmp_path / "c", BYTE)),
        "verify": ("data.storage", lambda: verify_corpus(str(tmp_path / "v"))),
    }
    module, run = runs[program]
    with patch(f"{module}.open", broken, create=True), \
            patch.object(importers.np, "fromfile", whose_tokens_are_unreadable), \
            pytest.raises(DataError, match="cannot read: Input/output error"):
        run()


def test_a_stage_that_is_given_a_raw_folder_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "a.jsonl").write_bytes(LINE)
    stage = GlobalStage("dedup", dedup.run_dedup, dedup.DedupOptions())
    for name, found in (("raw", "a folder without stage.json"), ("raw/a.jsonl", "a file"), ("none", "nothing")):
        with pytest.raises(DataError, match=rf"{name}: expected the folder of a stage, found {found}; make one of it "
                                            rf"first: python -m data.webtext read .*{name} --output DIR"):
            run_global_stage(stage, [tmp_path / name], tmp_path / "out")
    (tmp_path / "raw" / ".work").mkdir()
    with pytest.raises(DataError, match="raw: this stage is not complete; run its command again first"):
        run_global_stage(stage, [tmp_path / "raw"], tmp_path / "out")
    assert not (tmp_path / "out").exists()
