"""JSONL to corpus: exact bytes for any number of workers, every malformed line named, no half-made files."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from data import jsonl
from data.indexed import IndexedCorpus
from data.jsonl import parse_lines, parse_text, read_line_chunks
from data.merge import merge_corpora
from data.parallel import MAX_PENDING_PER_WORKER, ordered_map
from data.plain_text import count_lines
from data.preprocess import TextReadOptions, build_corpus, main as preprocess
from data.storage import DataError, ResumableError, UsageError
from data.tokenizer import ByteLevelTokenizer
from data.verify import main as verify

REPOSITORY = Path(__file__).resolve().parents[2]


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def command(module: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", module, *map(str, arguments)], cwd=REPOSITORY, text=True,
                          capture_output=True, timeout=60)


def files_of(prefix: Path) -> list[bytes]:
    return [Path(f"{prefix}{suffix}").read_bytes() for suffix in (".bin", ".idx", ".json")]


def test_the_corpus_holds_the_tokens_of_every_line(tmp_path: Path) -> None:
    texts = ["Hello", "", "w\u00f6rld \U0001f600", "a\nb"]
    (tmp_path / "b.jsonl").write_bytes(b'\n  \r\n{"text": "no line end"}')
    tokenizer = ByteLevelTokenizer()
    build_corpus([write_jsonl(tmp_path / "a.jsonl", texts), tmp_path / "b.jsonl"], tmp_path / "c", tokenizer)
    corpus = IndexedCorpus(tmp_path / "c")
    expected = [[*text.encode(), 256] for text in [*texts, "no line end"]]
    assert [corpus.document(i).tolist() for i in range(corpus.num_documents)] == expected
    assert corpus.facts is not None and corpus.facts.tokenizer is not None
    assert corpus.facts.tokenizer.fingerprint == tokenizer.fingerprint


def test_any_number_of_workers_makes_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"document {i} " * (i % 50) for i in range(500)]
    plain = write_jsonl(tmp_path / "a.jsonl", texts)
    with gzip.open(tmp_path / "a.jsonl.gz", "wb") as file:
        file.write(plain.read_bytes())
    monkeypatch.setattr(jsonl.read_line_chunks, "__defaults__", (10_000,))
    assert len(list(read_line_chunks(plain))) > 8
    for workers in (1, 2, 4):
        build_corpus([plain], tmp_path / f"w{workers}", ByteLevelTokenizer(), workers=workers)
    build_corpus([tmp_path / "a.jsonl.gz"], tmp_path / "gz", ByteLevelTokenizer())
    made = [files_of(tmp_path / name) for name in ("w1", "w2", "w4", "gz")]
    assert made[0] == made[1] == made[2] == made[3]


def test_shards_of_a_folder_merge_to_the_whole(tmp_path: Path) -> None:
    folder, whole = tmp_path / "in", tmp_path / "whole"
    folder.mkdir()
    for i in range(7):
        write_jsonl(folder / f"part-{i}.jsonl", [f"document {i}.{k}" for k in range(i + 1)])
    byte = ["--input", str(folder), "--tokenizer-type", "byte", "--append-eod", "--output-prefix"]
    preprocess([*byte, str(whole)])
    for count in (1, 3, 7):
        parts = [tmp_path / f"{count}-{i}" for i in range(count)]
        for i, part in enumerate(parts):
            preprocess([*byte, str(part), "--shard", f"{i}/{count}"])
        merge_corpora(parts, tmp_path / "merged")
        assert files_of(tmp_path / "merged") == files_of(whole)


def test_a_shard_that_cannot_be_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["a"])
    arguments = ["--input", str(path), "--tokenizer-type", "byte", "--output-prefix", str(tmp_path / "c"), "--shard"]
    with pytest.raises(DataError, match="only 1 input files"):
        preprocess([*arguments, "0/2"])
    for wrong in ("2/2", "-1/2", "1", "0/0", "a/b", "1/2/3"):
        with pytest.raises(UsageError, match="expected one argument" if wrong == "-1/2" else
                           "expected I/N with I from 0 to N - 1"):
            preprocess([*arguments, wrong])
    with pytest.raises(DataError, match="holds no file of text"):
        (tmp_path / "empty").mkdir()
        preprocess(["--input", str(tmp_path / "empty"), "--output-prefix", str(tmp_path / "c")])


LINES = b"".join(b"x" * (i % 9) + b"\n" for i in range(100)) + b"no line end"


@pytest.mark.parametrize("kind", ["file", "gz", "pipe"])
@pytest.mark.parametrize("size", [1, 10, 10_000])
def test_chunks_are_whole_lines_and_know_their_place(kind: str, size: int, tmp_path: Path) -> None:
    path = tmp_path / f"a.{kind}"
    if kind == "pipe":
        os.mkfifo(path)
        threading.Thread(target=path.write_bytes, args=(LINES,)).start()
    else:
        path.write_bytes(gzip.compress(LINES) if kind == "gz" else LINES)
    chunks = list(read_line_chunks(path, size))
    assert b"".join(chunk.read() for chunk in chunks) == LINES
    assert all((chunk.data is None) == (kind == "file") for chunk in chunks)
    for chunk in chunks:
        before = LINES[:chunk.offset]
        assert not before or before.endswith(b"\n")
        assert LINES[chunk.offset:][:chunk.size] == chunk.read()
        assert count_lines(chunk.read()) == chunk.read().count(b"\n")


def test_where_all_is_malformed_the_error_says_so(tmp_path: Path) -> None:
    """And not that the input is empty."""
    (tmp_path / "a.jsonl").write_bytes(gzip.compress(LINES) + b"\n{}\n")
    with pytest.raises(DataError, match=r"c: no tokens: \d+ malformed documents skipped, and no text beside; without"):
        build_corpus([tmp_path / "a.jsonl"], tmp_path / "c", ByteLevelTokenizer(), skip_malformed=True)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_file_that_becomes_shorter_while_it_is_read_is_a_data_error(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(LINES)
    last = list(read_line_chunks(tmp_path / "a", 10))[-1]
    os.truncate(tmp_path / "a", len(LINES) - 1)
    with pytest.raises(DataError, match="a: cannot read: the file became shorter meanwhile"):
        last.read()
    os.unlink(tmp_path / "a")
    with pytest.raises(DataError, match="a: cannot read: No such file"):
        last.read()


MALFORMED = [
    (b'{"text": "cut', "not JSON: "), (b"[]", "expected a JSON object, found an array"),
    (b'"text"', "expected a JSON object, found text"), (b"null", "expected a JSON object, found null"),
    (b'{"url": "u"}', "no key 'text'; found 'url'"), (b"{}", "no key 'text'; found no keys"),
    (b'{"text": 1}', "expected text, found a number"), (b'{"text": null}', "expected text, found null"),
    (b'{"text": ["a"]}', "expected text, found an array"), (b'{"text": true}', "expected text, found true or false"),
    (b'{"text": "a", "text": "b"}', "key 'text' appears twice"),
    (b'{"text": "a", "n": NaN}', "NaN is not a JSON number"),
    (b'{"text": "a", "n": -Infinity}', "-Infinity is not a JSON number"),
    (b'{"text": "\xff"}', "not UTF-8: byte 0xff at column 11"),
    (b'{"text": "a\\ud800"}', "lone surrogate U+D800 at character 2"),
    (b'\xef\xbb\xbf{"text": "a"}', "not JSON: "), (b'{"text": "a"} {}', "not JSON: Extra data at column 15"),
    (b'{"text": ' + b"[" * 100_000, "nested too deeply"),
    (b'{"text": "a", "n": ' + b"9" * 5000 + b"}", "integer string"),
]


@pytest.mark.parametrize(("line", "reason"), MALFORMED, ids=range(len(MALFORMED)))
def test_a_malformed_line_is_named_or_skipped(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n\n' + line + b'\n{"text": "also good"}\n')
    with pytest.raises(DataError) as caught:
        build_corpus([path], tmp_path / "c", ByteLevelTokenizer())
    assert str(caught.value).startswith(f"{path}:3 ") and reason in str(caught.value)
    assert str(caught.value).endswith("(the line begins at byte 18)")
    assert os.listdir(tmp_path) == ["a.jsonl"]
    progress, skipped = build_corpus([path], tmp_path / "c", ByteLevelTokenizer(), skip_malformed=True)
    assert (progress.documents, skipped) == (2, 1)


@pytest.mark.parametrize("workers", [1, 2])
def test_the_first_of_several_malformed_lines_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                       workers: int) -> None:
    monkeypatch.setattr(jsonl.read_line_chunks, "__defaults__", (100,))  # a few lines a chunk
    lines = ['{"text": "good"}'] * 100
    for bad in (70, 71, 99):
        lines[bad - 1] = "[]"
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with pytest.raises(DataError, match="a.jsonl:70 expected a JSON object"):
        build_corpus([tmp_path / "a.jsonl"], tmp_path / "c", ByteLevelTokenizer(), workers=workers)
    _, skipped = build_corpus([tmp_path / "a.jsonl"], tmp_path / "c", ByteLevelTokenizer(), workers=workers,
                              skip_malformed=True)
    assert skipped == 3
    (tmp_path / "good.jsonl").write_text('{"text": "good"}\n' * 100)  # the lines of each file count from 1
    with pytest.raises(DataError, match="a.jsonl:70 expected a JSON object"):
        build_corpus([tmp_path / "good.jsonl", tmp_path / "a.jsonl"], tmp_path / "c", ByteLevelTokenizer())


def test_surrogate_pairs_are_one_character() -> None:
    assert parse_text(b'{"text": "\\ud83d\\ude00"}', "text") == "\U0001f600"


def test_a_damaged_or_missing_input_is_a_data_error(tmp_path: Path) -> None:
    whole = gzip.compress(b'{"text": "a"}\n' * 1000)
    flipped = whole[:15] + b"\xff" + whole[16:]
    for name, content in (("cut.gz", whole[:-20]), ("no.gz", b"plain"), ("flip.gz", flipped)):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=f"{name}: cannot read"):
            build_corpus([tmp_path / name], tmp_path / "c", ByteLevelTokenizer())
    with pytest.raises(DataError, match="missing: cannot read: No such file"):
        list(read_line_chunks(tmp_path / "missing"))


def zstd_compress(data: bytes) -> bytes:
    """With a checksum, as the command `zstd` does."""
    zstd = pytest.importorskip("backports.zstd")
    made: bytes = zstd.compress(data, options={zstd.CompressionParameter.checksum_flag: 1})
    return made


def flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 255]) + data[place + 1:]


@pytest.mark.parametrize("compress", [gzip.compress, lzma.compress, zstd_compress])
def test_what_follows_a_compressed_stream_is_read_or_refused(compress: Callable[[bytes], bytes],
                                                             tmp_path: Path) -> None:
    path = tmp_path / f"a.{ {gzip.compress: 'gz', lzma.compress: 'xz'}.get(compress, 'zst')}"
    first, second = (compress(f'{{"text": "{letter}"}}\n'.encode() * 9999) for letter in "ab")
    padded = {lzma.compress: [bytes(4), bytes(1 << 17)], gzip.compress: [bytes(3)]}.get(compress, [])
    for whole, lines in ((first + second, 2), *((first + zeros + second, 2) for zeros in padded),
                         *((first + zeros, 1) for zeros in padded)):
        path.write_bytes(whole)
        chunks = list(read_line_chunks(path))
        assert sum(chunk.read().count(b"\n") for chunk in chunks) == 9999 * lines
        assert not any(chunk.damage for chunk in chunks)
    misfits = [flipped(second, 1), flipped(second, len(second) // 2), second[:-5], second[:3], b"x", b"garbage" * 9]
    for after in misfits + ([bytes(3), bytes(3) + second, bytes(4) + b"x"] if compress is lzma.compress else []):
        path.write_bytes(first + after)
        *_, last = read_line_chunks(path)
        assert last.damage and f"{path}: cannot read: " in str(last.damage.to_error(0))


def test_a_byte_order_mark_at_the_start_of_a_file_is_no_part_of_a_line(tmp_path: Path) -> None:
    line = '{"text": "a\ufeff"}'.encode()
    paths = [tmp_path / name for name in ("a.jsonl", "b.jsonl")]
    for path in paths:
        path.write_bytes(b"\xef\xbb\xbf" + line + b"\n")
    found = [line for path in paths for chunk in read_line_chunks(path)
             for line in parse_lines(chunk, chunk.read(), "text")]
    assert found == [(line, "a\ufeff")] * 2
    (tmp_path / "c.jsonl").write_bytes(b"\xef\xbb\xbf\n" + line + b"\n\xef\xbb\xbf" + line)
    with pytest.raises(DataError, match="c.jsonl:3 .*not JSON"):
        build_corpus([*paths, tmp_path / "c.jsonl"], tmp_path / "c", ByteLevelTokenizer())


def test_the_command_line_works_and_verify_agrees(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, prefix = write_jsonl(tmp_path / "a.jsonl", ["Hello world", "again"]), str(tmp_path / "new" / "c")
    preprocess(["--input", str(path), "--output-prefix", prefix, "--append-eod"])
    assert IndexedCorpus(prefix).document(0).tolist() == [15496, 995, 50256]
    assert "1 file, 2 documents in" in capsys.readouterr().err
    verify([prefix])
    assert "2 documents, 5 tokens (uint16)" in capsys.readouterr().out
    with pytest.raises(DataError, match="document 0, offset 0: token id 15496 is outside the vocabulary of 15000"):
        verify([prefix, "--vocab-size", "15000"])
    raw = bytearray(Path(f"{prefix}.bin").read_bytes())
    raw[2] ^= 1
    Path(f"{prefix}.bin").write_bytes(raw)
    with pytest.raises(DataError, match="c.bin: not the one that .*c.json was written with"):
        verify([prefix])
    facts = json.loads(Path(f"{prefix}.json").read_text())
    Path(f"{prefix}.json").write_text(json.dumps(facts | {"identity": None}))  # of an earlier version
    with pytest.raises(DataError, match="crc32: expected .* found"):
        verify([prefix])


def test_errors_are_one_line_and_an_exit_code(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["a"])
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "a"}\n[]\n')
    byte = ("--tokenizer-type", "byte", "--output-prefix")
    for code, done in (
        (3, command("data.preprocess", "--input", bad, *byte, tmp_path / "c", "--workers", 2)),
        (2, command("data.preprocess", "--input", path)),
        (7, command("data.preprocess", "--input", path, *byte, "/proc/nowhere/c")),
        (3, command("data.verify", tmp_path / "c")),
    ):
        assert done.returncode == code, done.stderr
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    assert sorted(os.listdir(tmp_path)) == ["a.jsonl", "bad.jsonl"]


def _pid_or_die(item: int) -> int:
    if item == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return item


def _refuse(item: int) -> int:
    raise DataError(f"item {item}")


def test_the_map_keeps_order_and_passes_errors_on() -> None:
    assert list(ordered_map(abs, range(-7, 0), workers=3)) == [7, 6, 5, 4, 3, 2, 1]
    assert list(ordered_map(abs, [], workers=2)) == [] and list(ordered_map(abs, [-1], workers=3)) == [1]
    with pytest.raises(DataError, match="item 0"):
        list(ordered_map(_refuse, range(9), workers=2))


def _number(item: tuple[int, Path]) -> int:
    """The first item is done when the last one that is given out beside it is."""
    number, reached = item
    end = time.monotonic() + 30
    while number == 0 and not reached.exists():
        assert time.monotonic() < end, "nobody goes on"
        time.sleep(0.01)
    if number == 2 * MAX_PENDING_PER_WORKER:
        reached.touch()
    return number


def test_the_map_gives_the_next_item_to_whoever_is_free_and_waits_for_the_slow_one(tmp_path: Path) -> None:
    taken: list[int] = []

    def items() -> Iterator[tuple[int, Path]]:
        for number in range(100):
            taken.append(number)
            yield number, tmp_path / "reached"

    results = ordered_map(_number, items(), workers=2)
    assert next(results) == 0
    assert len(taken) == 2 * MAX_PENDING_PER_WORKER + 1, (
        "the other worker went on while the first one waited, but not without end")
    assert list(results) == list(range(1, 100))


def test_a_killed_worker_is_an_error_not_a_hang() -> None:
    with pytest.raises(ResumableError, match="a worker process died"):  # so what was done is kept
        list(ordered_map(_pid_or_die, range(100), workers=2))


@pytest.mark.parametrize("moment", ["write", "fsync", "replace"])
def test_a_build_killed_at_any_moment_can_be_repeated(tmp_path: Path, moment: str,
                                                      dying: Callable[[str], str]) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [f"text {i}" for i in range(200)])
    script = dying(moment) + f"from data.preprocess import main\nmain(['--input', {str(path)!r}, " \
        f"'--output-prefix', {str(tmp_path / 'c')!r}, '--tokenizer-type', 'byte'])"
    killed = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "c.idx").exists()
    build_corpus([path], tmp_path / "c", ByteLevelTokenizer(), TextReadOptions(append_eod=False))
    build_corpus([path], tmp_path / "d", ByteLevelTokenizer(), TextReadOptions(append_eod=False))
    assert files_of(tmp_path / "c") == files_of(tmp_path / "d")


@pytest.fixture
def dying() -> Iterator[Callable[[str], str]]:
    """A program's first lines that kill it in its second write, fsync or rename."""
    where = {"write": "data.writer.CorpusWriter, 'add_documents'", "fsync": "os, 'fsync'", "replace": "os, 'replace'"}

    def lines(moment: str) -> str:
        return f"""
import os, signal, data.writer
def wrap(owner, name, calls=[]):
    original = getattr(owner, name)
    def call(*arguments):
        calls.append(1)
        if len(calls) == {1 if moment == 'write' else 2}:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments)
    setattr(owner, name, call)
wrap({where[moment]})
"""
    yield lines


def test_sizes_and_tokens_of_a_chunk_are_plain_arrays() -> None:
    """They travel between processes; objects would be slow."""
    from data.plain_text import Chunk
    from data.preprocess import encode_chunk

    encoded = encode_chunk(Chunk("f", 0, 27, b'{"text": "ab"}\n{"text": ""}'), ByteLevelTokenizer(), TextReadOptions())
    assert encoded.tokens.dtype == np.uint16 and encoded.tokens.tolist() == [97, 98, 256, 256]
    assert encoded.sizes.tolist() == [3, 1]
