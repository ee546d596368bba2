"""Damaged compressed files: everything before the damage is kept, the damage is told at its place and counted once."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import threading
import tracemalloc
from pathlib import Path
from unittest.mock import patch

import pytest

from data.cli import format_count
from data.compressed import CorruptStreamError, open_decompressed
from data.indexed import IndexedCorpus
from data.jsonl import read_line_chunks
from data.plain_text import DamagedRest, MalformedDocument
from data.preprocess import build_corpus, main as preprocess
from data.split_json import main as split_json
from data.storage import DataError
from data.tokenizer import ByteLevelTokenizer
from data.webtext.documents import Document, DocumentError
from data.webtext.readers import WebReadOptions as WebReading, find_source_files, plan_units, read_unit
from data.webtext.runner import MapStage, ReadOptions, StageRunOptions, make_read_function, run_map_stage
from tests.data.damaging import BEGIN, COMPRESS, PADDING, accidents, flipped, slow_lines, slow_text, text_before_damage

BYTE = ByteLevelTokenizer()
READ = MapStage("read", make_read_function, ReadOptions())
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
def test_every_document_before_the_damage_is_kept_by_both_readers(ending: str, tmp_path: Path,
                                                                  capfd: pytest.CaptureFixture[str]) -> None:
    path, good = tmp_path / f"a.jsonl{ending}", tmp_path / "good.jsonl"
    good.write_bytes(lines(["after"]))
    other = COMPRESS[ending](lines(texts(2, 60)))
    for content in (lines(texts(1, 60)), lines(texts(1, 60))[:-1]):  # the last line before a wrong checksum needs no end
        for name, damaged in accidents(COMPRESS[ending](content), other, ending):
            path.write_bytes(damaged)
            before, is_damaged = text_before_damage(damaged, ending)
            assert is_damaged, name
            found = slow_lines(before, True, slow_text)
            expected, bad = [text for text in found if text is not None], found.count(None)
            assert preprocessed([path, good], tmp_path / "c") == (expected + ["after"], bad + 1), name
            told = [line for line in capfd.readouterr().err.splitlines() if "skipped the rest" in line]
            assert len(told) == 1 and f"{path}: cannot read: the compressed data is damaged at byte " in told[0], name
            assert told[0].endswith(f"; before the damage: {format_count(len(expected), 'document')}"), name
            assert web_read(path)[0] == expected, name
            assert len(web_read(path)[1]) == bad + 1 and web_read(path)[1][-1] == "unreadable", name


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


@pytest.mark.few(1)
@EVERY
def test_a_file_of_megabytes_loses_only_what_is_after_the_damage(ending: str, tmp_path: Path) -> None:
    found = texts(4, 3000, 1000)
    content = lines(found)
    whole = COMPRESS[ending](content)
    assert len(whole) > 1 << 20
    path = tmp_path / f"a.jsonl{ending}"
    path.write_bytes(cut := whole[:len(whole) * 2 // 3])
    before = len(BEGIN[ending]().decompress(cut))
    assert preprocessed([path], tmp_path / "c") == (found[:content[:before].count(b"\n")], 1)
    path.write_bytes(flipped(whole, len(whole) - 2))  # in the checksums: all of the text is before it
    assert preprocessed([path], tmp_path / "c") == (found, 1)
    path.write_bytes(flipped(whole, len(whole) * 2 // 3))
    got, skipped = preprocessed([path], tmp_path / "c")
    # Blocks of zstd, of 128 kB, are whole or not given at all; what the others make of a wrong bit is nonsense, told.
    surely = content[:before - (1 << 18)].count(b"\n")
    assert got[:surely] == found[:surely] and skipped >= 1
    assert web_read(path)[0] == got


@EVERY
@pytest.mark.parametrize("size", [777, 1 << 20])
def test_the_bytes_before_damage_do_not_depend_on_how_they_are_read(ending: str, size: int, tmp_path: Path) -> None:
    """Text that compresses a hundredfold, so that few bytes of the file are megabytes."""
    whole = COMPRESS[ending](b"".join(b'{"text": "%d"}\n' % (number // 5000) for number in range(50_000)))
    path = tmp_path / f"a{ending}"
    for damaged in (flipped(whole, len(whole) // 2), whole[:-3]):
        path.write_bytes(damaged)
        found = []
        for step in (size, 1 << 18):
            with open_decompressed(str(path)) as file, pytest.raises(CorruptStreamError) as caught:
                parts = []
                while part := file.read1(step):
                    parts.append(part)
            found.append((b"".join(parts), str(caught.value)))
        assert found[0] == found[1]


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


def test_what_came_before_the_damage_is_counted_by_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not with the documents of the files before; and with the next file it goes on."""
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
    assert [(line[0], line.rpartition("; before the damage: ")[2]) for line in told] == [
        ("a", "7 documents"), ("c", "1 document"), ("d", "300 documents"), ("e", "0 documents")] * 3
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"out1{suffix}").read_bytes() == (tmp_path / f"out2{suffix}").read_bytes()


@EVERY
def test_a_web_stage_names_the_damaged_files_whatever_its_workers(ending: str, tmp_path: Path) -> None:
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


@EVERY
def test_nonsense_in_a_damaged_file_is_told_as_damage(ending: str, tmp_path: Path) -> None:
    """Where a wrong bit is decompressed into other text, and the checksum at the end of the stream finds it."""
    content = lines(texts(14, 40))
    # gzip: each byte of text as it is, so that every place will do
    whole = gzip.compress(content, 0) if ending == ".gz" else COMPRESS[ending](content)
    path, tried = tmp_path / f"a.jsonl{ending}", 0
    for place in range(len(whole) // 4, len(whole) - 40, len(whole) // 40):
        path.write_bytes(damaged := whole[:place] + bytes([whole[place] ^ 0x80]) + whole[place + 1:])
        before, is_damaged = text_before_damage(damaged, ending)
        if None not in slow_lines(before, is_damaged, slow_text):
            continue
        assert is_damaged
        tried += 1
        for read in (lambda: build_corpus([path], tmp_path / "c", BYTE),
                     lambda: split_json([str(path), "--output-prefix", str(tmp_path / "p")])):
            with pytest.raises(DataError, match=rf"^{path}: cannot read: the compressed data is damaged at byte \d+ .*"
                               r"; before that, line \d+ is malformed: (not UTF-8|not JSON|no key|key)"):
                read()
        with pytest.raises(DataError, match=rf"^{path}: cannot read: the compressed data is damaged at byte \d+ .*; "
                           rf"before that, {path}:\d+ \(byte \d+\) (not|no|key)"):
            run_map_stage(READ, [path], tmp_path / "out")
    assert tried >= {".gz": 25, ".xz": 5, ".zst": 1}[ending]


def test_a_malformed_line_in_a_whole_file_is_no_damage(tmp_path: Path) -> None:
    content = lines(texts(15, 40)) + b"{]\n" + lines(texts(16, 5))
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(content))
    with pytest.raises(DataError, match=rf"^{path}:41 not JSON: .* \(the line begins at byte \d+\)$"):
        build_corpus([path], tmp_path / "c", BYTE)
    with pytest.raises(DataError, match=rf"^{path}:41 \(byte \d+\) not JSON: "):
        run_map_stage(READ, [path], tmp_path / "out")
    path.write_bytes(gzip.compress(content)[:-1])  # what is skipped needs no second look
    with patch("data.plain_text.find_damage", side_effect=AssertionError), \
            patch("data.webtext.runner.find_damage", side_effect=AssertionError):
        assert preprocessed([path], tmp_path / "c")[1] == 2
        run_map_stage(READ, [path], tmp_path / "out", WebReading(on_error="skip"))


def test_a_drive_or_pipe_that_fails_is_no_damage_of_the_file(tmp_path: Path) -> None:
    """The same command may work tomorrow."""
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(lines(texts(13, 100))))
    fault = MalformedDocument(str(path), 0, 0, "not JSON")
    with patch("data.compressed._decompressed_blocks", side_effect=OSError(5, "Input/output error")):
        assert str(fault.to_error(7)) == f"{path}:8 not JSON (the line begins at byte 0)"
        with pytest.raises(DataError, match="a.jsonl.gz: cannot read: Input/output error"):
            preprocessed([path], tmp_path / "c")
    path.unlink()
    os.mkfifo(path)
    assert str(fault.to_error(7)) == f"{path}:8 not JSON (the line begins at byte 0)"
    whole = gzip.compress(lines(texts(12, 100)))
    writer = threading.Thread(target=path.write_bytes, args=(whole[:-1],))
    writer.start()
    *_, last = read_line_chunks(path)  # a pipe tells its damage though it cannot be read again
    writer.join()
    assert isinstance(last.damage, DamagedRest) and last.data is not None and last.data.count(b"\n") == 100


def test_the_whole_file_stays_in_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.xz"
    path.write_bytes(COMPRESS[".xz"](b'{"text": "a"}\n' * 4_000_000)[:-5])
    tracemalloc.start()
    try:
        assert sum(chunk.size for chunk in read_line_chunks(path)) > 50_000_000
        assert tracemalloc.get_traced_memory()[1] < 16_000_000
    finally:
        tracemalloc.stop()
