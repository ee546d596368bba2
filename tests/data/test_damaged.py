"""Damaged compressed files: everything before the damage is kept, the damage is told at its place and counted once."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest

from data.cli import format_count
from data.compressed import CorruptStreamError, open_decompressed
from data.indexed import IndexedCorpus
from data.jsonl import read_line_chunks
from data.plain_text import DamagedRest, MalformedDocument, Separator, read_text_chunks
from data.preprocess import TextReadOptions, build_corpus
from data.split_json import main as split_json
from data.storage import DataError
from data.tokenizer import ByteLevelTokenizer
from data.webtext.documents import Document, DocumentError
from data.webtext.readers import WebReadOptions as WebReading, read_unit
from data.webtext.runner import MapStage, StageRunOptions, run_map_stage
from data.webtext.readers import find_source_files, plan_units
from data.webtext.runner import ReadOptions, make_read_function
from tests.data.damaging import BEGIN, COMPRESS, accidents, flipped, text_before_damage

BYTE = ByteLevelTokenizer()
REPOSITORY = Path(__file__).resolve().parents[2]
EVERY = pytest.mark.parametrize("ending", COMPRESS)


def texts(seed: int, count: int, longest: int = 60) -> list[str]:
    rng = random.Random(seed)
    return [f"document {number} " + rng.randbytes(rng.randint(5, longest)).hex() for number in range(count)]


def lines(found: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in found).encode()


def text_of(line: bytes) -> str | None:
    try:
        value = json.loads(line)
        return value["text"] if isinstance(value["text"], str) else None
    except (ValueError, TypeError, KeyError):
        return None


def expected_of(content: bytes, ending: str) -> tuple[list[str], int, bool]:
    """Documents, lines that hold none, and whether the file is damaged. A line cut short is a part of the damage."""
    before, is_damaged = text_before_damage(content, ending)
    *whole, rest = before.split(b"\n")
    found = [text_of(line) for line in whole if line.strip()]
    last = [text for text in [text_of(rest)] if text is not None] if is_damaged else []
    assert is_damaged or not rest
    return [text for text in found if text is not None] + last, found.count(None), is_damaged


def preprocessed(paths: list[Path], prefix: Path, reading: TextReadOptions = TextReadOptions(), **settings: int
                 ) -> tuple[list[str], int]:
    _, skipped = build_corpus(paths, prefix, BYTE, reading, skip_malformed=True, **settings)
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
    whole, other = (COMPRESS[ending](lines(texts(seed, 60))) for seed in (1, 2))
    for name, content in accidents(whole, other):
        path.write_bytes(content)
        expected, bad, is_damaged = expected_of(content, ending)
        assert is_damaged, name
        assert preprocessed([path, good], tmp_path / "c") == (expected + ["after"], bad + 1), name
        told = [line for line in capfd.readouterr().err.splitlines() if "skipped the rest" in line]
        assert len(told) == 1 and f"{path}: cannot read: the compressed data is damaged at byte " in told[0], name
        assert told[0].endswith(f"; before the damage: {format_count(len(expected), 'document')}"), name
        found, reasons = web_read(path)
        assert found == expected, name
        assert len(reasons) == bad + 1 and reasons[-1] == "unreadable", name


@EVERY
def test_what_is_not_damaged_is_read_to_its_end(ending: str, tmp_path: Path) -> None:
    found = texts(3, 2000)
    content = lines(found)
    parts = [content[start:start + 997] for start in range(0, len(content), 997)]
    path = tmp_path / f"a.jsonl{ending}"
    for whole in (COMPRESS[ending](content), b"".join(map(COMPRESS[ending], parts))):
        path.write_bytes(whole)
        assert preprocessed([path], tmp_path / "c") == (found, 0)
        assert web_read(path) == (found, [])
    path.write_bytes(COMPRESS[ending](b""))
    (tmp_path / "good.jsonl").write_bytes(lines(["after"]))
    assert preprocessed([path, tmp_path / "good.jsonl"], tmp_path / "c") == (["after"], 0)
    assert web_read(path) == ([], [])


@pytest.mark.few(1)
@EVERY
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_file_of_megabytes_loses_only_what_is_after_the_damage(ending: str, workers: int, tmp_path: Path) -> None:
    found = texts(4, 3000, 1000)
    content = lines(found)
    whole = COMPRESS[ending](content)
    assert len(whole) > 1 << 20
    path = tmp_path / f"a.jsonl{ending}"
    cut = whole[:len(whole) * 2 // 3]
    path.write_bytes(cut)
    before = len(BEGIN[ending]().decompress(cut))
    kept = content[:before].count(b"\n")
    assert preprocessed([path], tmp_path / "c", workers=workers) == (found[:kept], 1)
    path.write_bytes(flipped(whole, len(whole) - 2))  # in the checksums: all of the text is before it
    assert preprocessed([path], tmp_path / "c", workers=workers) == (found, 1)
    path.write_bytes(flipped(whole, len(whole) * 2 // 3))
    got, skipped = preprocessed([path], tmp_path / "c", workers=workers)
    # Blocks of zstd, of 128 kB, are whole or not given at all; what the others make of a wrong bit is nonsense, told.
    surely = content[:before - (1 << 18)].count(b"\n")
    assert got[:surely] == found[:surely] and skipped >= 1
    assert web_read(path)[0] == got


@EVERY
@pytest.mark.parametrize("size", [777, 1 << 17, 1 << 20])
def test_the_bytes_before_damage_do_not_depend_on_how_they_are_read(ending: str, size: int, tmp_path: Path) -> None:
    """Text that compresses a hundredfold, so that few bytes of the file are megabytes."""
    content = b"".join(b'{"text": "%d"}\n' % (number // 5000) for number in range(50_000))
    whole = COMPRESS[ending](content)
    path = tmp_path / f"a{ending}"
    for damaged in (flipped(whole, len(whole) // 2), whole[:-3]):
        path.write_bytes(damaged)
        with open_decompressed(str(path)) as file, pytest.raises(CorruptStreamError) as one:
            parts = []
            while part := file.read1(size):
                parts.append(part)
        with open_decompressed(str(path)) as file, pytest.raises(CorruptStreamError) as other:
            all_at_once = []
            while part := file.read1(1 << 18):
                all_at_once.append(part)
        assert b"".join(parts) == b"".join(all_at_once) and str(one.value) == str(other.value)
        with pytest.raises(ValueError, match="closed"):
            file.read(1)


@EVERY
def test_the_last_line_before_a_wrong_checksum_needs_no_end(ending: str, tmp_path: Path) -> None:
    found = texts(5, 50)
    whole = COMPRESS[ending](lines(found)[:-1])
    path = tmp_path / f"a.jsonl{ending}"
    for content in (flipped(whole, len(whole) - 2), whole + b"junk"):
        path.write_bytes(content)
        assert preprocessed([path], tmp_path / "c") == (found, 1)
        assert web_read(path) == (found, ["unreadable"])


@EVERY
@pytest.mark.parametrize("size", [10, 1000, 1 << 20])
def test_the_document_of_plain_text_with_the_damage_in_it_goes(ending: str, size: int, tmp_path: Path,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_text_chunks, "__defaults__", (None, "", size))
    found = texts(6, 50)
    path, good = tmp_path / f"a.txt{ending}", tmp_path / "good.txt"
    good.write_text("after")
    for word, between in (("<|endoftext|>", "<|endoftext|>\n"), ("blank-line", "\n\n"), (r"\n--\n", "\n--\n")):
        reading = TextReadOptions(separator=Separator.parse(word))
        content = between.join(found).encode()
        for whole in (COMPRESS[ending](content), COMPRESS[ending](content + between.encode())):
            for damaged in (whole[:len(whole) // 2], flipped(whole, len(whole) - 2), whole + b"junk"):
                path.write_bytes(damaged)
                before, _ = text_before_damage(damaged, ending)
                assert content.startswith(before[:len(content)])
                kept = before.count(between.encode())
                expected = (found[:kept] + ["after"], 1)
                assert preprocessed([path, good], tmp_path / "c", reading) == expected, (word, len(damaged))
    path.write_bytes(flipped(whole, len(whole) - 2))
    assert preprocessed([path, good], tmp_path / "c") == (["after"], 1), "a file is a document"


@EVERY
def test_strict_runs_end_with_the_file_the_place_and_the_reason(ending: str, tmp_path: Path) -> None:
    found = texts(7, 300)
    whole = COMPRESS[ending](lines(found))
    path = tmp_path / f"a.jsonl{ending}"
    for content, place, line in ((whole[:-1], len(whole) - 1, 301), (whole + b"\x01\x01", len(whole) + 1, 301)):
        path.write_bytes(content)
        for workers in (1, 2):
            with pytest.raises(DataError) as error:
                build_corpus([path], tmp_path / "c", BYTE, workers=workers)
            match = re.fullmatch(r".*a\.jsonl\S+: cannot read: the compressed data is damaged at byte (\d+) \(after "
                                 r"(\d+) bytes of what is in it\): .+; it is in line (\d+)", str(error.value))
            assert match, str(error.value)
            assert place <= int(match[1]) <= place + 4 and match[2] == str(len(lines(found))) and match[3] == str(line)
        assert not list(tmp_path.glob("c.*"))
        with pytest.raises(DataError, match=r"a.jsonl\S+:\d+ \(byte \d+\) cannot read on: the compressed data is dam"):
            run_map_stage(MapStage("read", make_read_function, ReadOptions()), [path], tmp_path / "out")


@EVERY
def test_the_command_goes_on_with_the_next_file_and_says_so_at_its_end(ending: str, tmp_path: Path) -> None:
    found = texts(8, 300)
    whole = COMPRESS[ending](lines(found))
    for name, content in (("a", whole[:-7]), ("b", whole), ("c", whole + b"x"), ("d", b"")):
        (tmp_path / f"{name}.jsonl{ending}").write_bytes(content)

    def command(mode: str, workers: int) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "data.preprocess", "--input", tmp_path, "--output-prefix",
                               tmp_path / f"c{workers}", "--tokenizer-type", "byte", "--on-error", mode, "--workers",
                               str(workers)], cwd=REPOSITORY, text=True, capture_output=True)

    strict = command("strict", 1)
    assert strict.returncode == 3 and strict.stderr.startswith("error: ") and strict.stderr.count("\n") == 1
    done = [command("skip", workers) for workers in (1, 2)]
    assert [one.returncode for one in done] == [0, 0]
    *told, last = done[0].stderr.splitlines()
    assert [line.split(":")[1].strip() for line in told] == [f"{tmp_path}/{name}.jsonl{ending}" for name in "acd"]
    assert "4 files, " in last and "; 3 malformed documents skipped" in last
    assert (tmp_path / "c1.bin").read_bytes() == (tmp_path / "c2.bin").read_bytes()
    assert (tmp_path / "c1.idx").read_bytes() == (tmp_path / "c2.idx").read_bytes()


@EVERY
def test_a_web_stage_names_the_damaged_files_whatever_its_workers(ending: str, tmp_path: Path) -> None:
    found = texts(9, 200)
    whole = COMPRESS[ending](lines(found))
    (tmp_path / "in").mkdir()
    for name, content in (("a", whole + b"x"), ("b", whole), ("c", b""), ("d", whole)):
        (tmp_path / "in" / f"{name}.jsonl{ending}").write_bytes(content)
    stage = MapStage("read", make_read_function, ReadOptions())
    for workers in (1, 2):
        out = tmp_path / f"out{workers}"
        record = run_map_stage(stage, [tmp_path / "in"], out, WebReading(on_error="skip"),
                               StageRunOptions(workers, shard_bytes=5000))
        assert record.counts.documents_kept == 600 and record.counts.dropped == {"unreadable": 2}
        assert [note.split(": ")[0] for note in record.notes] == [f"a.jsonl{ending}", f"c.jsonl{ending}"]
        assert f"damaged at byte {len(whole) + 1} " in record.notes[0] and "damaged at byte 0 " in record.notes[1]
    files = [sorted(path.name for path in (tmp_path / out).iterdir()) for out in ("out1", "out2")]
    assert files[0] == files[1]
    assert all((tmp_path / "out1" / name).read_bytes() == (tmp_path / "out2" / name).read_bytes() for name in files[0])


@EVERY
def test_an_array_keeps_its_elements_before_the_damage(ending: str, tmp_path: Path) -> None:
    found = texts(10, 300)
    path = tmp_path / f"a.json{ending}"
    for content in (json.dumps([{"text": text} for text in found]), json.dumps([{"text": text} for text in found],
                                                                               indent=1)):
        whole = COMPRESS[ending](content.encode())
        for damaged in (flipped(whole, len(whole) - 2), whole + b"x"):
            path.write_bytes(damaged)
            assert web_read(path) == (found, ["unreadable"])
        path.write_bytes(cut := whole[:len(whole) // 2])
        kept = text_before_damage(cut, ending)[0].count(b"},")
        got, reasons = web_read(path)
        assert (got, reasons) == (found[:kept], ["unreadable"])


@EVERY
def test_nonsense_in_a_damaged_file_is_told_as_damage(ending: str, tmp_path: Path) -> None:
    """Where a wrong bit is decompressed into other text, and the checksum at the end of the stream finds it."""
    found = texts(14, 40)
    whole = COMPRESS[ending](lines(found))
    if ending == ".gz":  # each byte of text as it is, so that every place will do
        whole = gzip.compress(lines(found), 0)
    path, tried = tmp_path / f"a.jsonl{ending}", 0
    for place in range(len(whole) // 4, len(whole) - 40, len(whole) // 40):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x80]) + whole[place + 1:])
        _, bad, is_damaged = expected_of(path.read_bytes(), ending)
        if not bad:
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
            run_map_stage(MapStage("read", make_read_function, ReadOptions()), [path], tmp_path / "out")
    assert tried >= {".gz": 25, ".xz": 5, ".zst": 1}[ending]


@EVERY
def test_a_malformed_line_in_a_whole_file_is_told_as_before(ending: str, tmp_path: Path) -> None:
    content = lines(texts(15, 40)) + b"{]\n" + lines(texts(16, 5))
    path = tmp_path / f"a.jsonl{ending}"
    path.write_bytes(COMPRESS[ending](content))
    with pytest.raises(DataError, match=rf"^{path}:41 not JSON: .* \(the line begins at byte \d+\)$"):
        build_corpus([path], tmp_path / "c", BYTE)
    with pytest.raises(DataError, match=rf"^{path}:41 \(byte \d+\) not JSON: "):
        run_map_stage(MapStage("read", make_read_function, ReadOptions()), [path], tmp_path / "out")
    path.write_bytes(COMPRESS[ending](content)[:-1])  # what is skipped needs no second look
    with patch("data.plain_text.find_damage", side_effect=AssertionError), \
            patch("data.webtext.runner.find_damage", side_effect=AssertionError):
        assert preprocessed([path], tmp_path / "c")[1] == 2
        run_map_stage(MapStage("read", make_read_function, ReadOptions()), [path], tmp_path / "out",
                      WebReading(on_error="skip"))


def test_nonsense_from_a_drive_or_pipe_that_fails_stays_what_was_found(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(COMPRESS[".gz"](b"{]\n"))
    fault = MalformedDocument(str(path), 0, 0, "not JSON")
    with patch("data.compressed._decompressed_blocks", failing):
        assert str(fault.to_error(7)) == f"{path}:8 not JSON (the line begins at byte 0)"
    path.unlink()
    os.mkfifo(path)
    assert str(fault.to_error(7)) == f"{path}:8 not JSON (the line begins at byte 0)"


def test_split_json_keeps_what_is_before_the_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = texts(11, 100)
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(COMPRESS[".gz"](lines(found)) + b"x")
    split = [str(path), "--split", "1,1,0", "--output-prefix", str(tmp_path / "p")]
    with pytest.raises(DataError, match="a.jsonl.gz: cannot read: .* it is in line 101"):
        split_json(split)
    split_json([*split, "--on-error", "skip"])
    out = capsys.readouterr()
    assert out.out.startswith("100 documents: ") and out.out.endswith("; 1 malformed lines skipped\n")
    assert "skipped the rest of a file: " in out.err and out.err.endswith("; before the damage: 100 documents\n")


def test_a_pipe_tells_its_damage_though_it_cannot_be_read_again(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl.gz"
    os.mkfifo(path)
    whole = COMPRESS[".gz"](lines(texts(12, 100)))
    writer = threading.Thread(target=path.write_bytes, args=(whole[:-1],))
    writer.start()
    *_, last = read_line_chunks(path)
    writer.join()
    assert isinstance(last.damage, DamagedRest) and last.data is not None and last.data.count(b"\n") == 100


def test_a_disk_that_fails_is_an_error_even_where_damage_is_skipped(tmp_path: Path,
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not the file that is damaged: the same command may work tomorrow."""
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(COMPRESS[".gz"](lines(texts(13, 100))))
    monkeypatch.setattr("data.compressed._decompressed_blocks", failing)
    with pytest.raises(DataError, match="a.jsonl.gz: cannot read: Input/output error"):
        preprocessed([path], tmp_path / "c")


def failing(*_: object) -> bool:
    raise OSError(5, os.strerror(5))


def test_the_whole_file_stays_in_no_memory(tmp_path: Path, peak_of: Callable[[Callable[[], object]], int]) -> None:
    path = tmp_path / "a.jsonl.xz"
    whole = COMPRESS[".xz"](b'{"text": "a"}\n' * 4_000_000)
    path.write_bytes(whole[:-5])

    def read() -> None:
        assert sum(chunk.size for chunk in read_line_chunks(path)) > 50_000_000

    assert peak_of(read) < 16_000_000


@pytest.fixture
def peak_of() -> Callable[[Callable[[], object]], int]:
    """Bytes that Python held at most while it did something."""
    def peak(action: Callable[[], object]) -> int:
        tracemalloc.start()
        try:
            action()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    return peak


def test_what_came_before_the_damage_is_counted_by_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not with the documents of the files before."""
    files = [tmp_path / "good.jsonl", tmp_path / "a.jsonl.gz", tmp_path / "b.jsonl.gz"]
    files[0].write_bytes(lines(texts(13, 5)))
    for path, count in zip(files[1:], (7, 1)):
        path.write_bytes(COMPRESS[".gz"](lines(texts(14, count))) + b"x")
    build_corpus(files, tmp_path / "c", ByteLevelTokenizer(), skip_malformed=True)
    split_json([*map(str, files), "--split", "1,1,0", "--output-prefix", str(tmp_path / "p"), "--on-error", "skip"])
    told = [line.rpartition("; ")[2] for line in capsys.readouterr().err.splitlines() if "skipped the rest" in line]
    assert told == ["before the damage: 7 documents", "before the damage: 1 document"] * 2


def test_json_that_is_nested_too_deeply_is_told_in_words_of_json(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n")
    with pytest.raises(DataError, match="a.jsonl:1 not JSON we can read: nested too deeply "):
        build_corpus([path], tmp_path / "c", ByteLevelTokenizer())
