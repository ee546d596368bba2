"""Every line, element and file becomes one record, good or bad, whatever its format and wherever the file is cut."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data.storage import DataError
from data.webtext.documents import Document, DocumentError, parse_json_line, parse_shard_line
from data.webtext.readers import (ReadResult, WebReadOptions, array_elements, find_source_files, plan_units,
                                  read_unit)

zstd = pytest.importorskip("backports.zstd")

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstd.compress}


def read_all(paths: list[Path], reading: WebReadOptions = WebReadOptions(),
             shard_bytes: int = 1 << 24) -> list[ReadResult]:
    sources, _ = find_source_files(paths, reading.format)
    return [read for unit in plan_units(sources, shard_bytes) for read in read_unit(unit, reading)]


def documents(reads: list[ReadResult]) -> list[Document]:
    assert all(isinstance(read.value, Document) for read in reads), [read.value for read in reads]
    return [read.value for read in reads if isinstance(read.value, Document)]


def reasons(reads: list[ReadResult]) -> list[str]:
    return [read.value.reason if isinstance(read.value, DocumentError) else "" for read in reads]


@pytest.mark.parametrize("compression", COMPRESS)
def test_every_format_is_read_compressed_or_not(tmp_path: Path, compression: str) -> None:
    objects = [{"text": "one\ntwo"}, {"text": "h\u00e4", "url": "u"}]
    lines = "".join(json.dumps(value, ensure_ascii=False) + "\n" for value in objects).encode()
    expected = [Document("one\ntwo"), Document("h\u00e4", "u")]
    contents = {
        "a.jsonl": (lines, expected), "b.json": (lines, expected), "c.json": (json.dumps(objects).encode(), expected),
        "d.json": (json.dumps(objects, indent=2).encode(), expected),
        "e.json": (json.dumps(objects[1], indent=2).encode(), expected[1:]),
        "f.ndjson": (lines[:-1], expected), "g.jsonl": (b"", []), "h.json": (b"[]", []),
        "i.txt": ("\ufeffa\r\nb\u2028".encode(), [Document("a\r\nb\u2028", None, {"file": f"i.txt{compression}"})]),
        "j.html": (b"<p>\xc3\xa4", [Document("<p>\u00e4", None, {"file": f"j.html{compression}", "format": "html"})]),
        "k.html": (b'<meta charset="latin-1">\xe4', [Document('<meta charset="latin-1">\u00e4', None,
                                                              {"file": f"k.html{compression}", "format": "html"})]),
    }
    for name, (content, documents_in) in contents.items():
        path = tmp_path / (name + compression)
        path.write_bytes(COMPRESS[compression](content))
        assert documents(read_all([path])) == documents_in, name
    everything = [document for _, found in contents.values() for document in found]
    assert documents(read_all([tmp_path])) == everything, "a folder is its files by name"
    (tmp_path / "list").write_text("http://a.org\nhttp://b.org\n")
    assert documents(read_all([tmp_path / "list"], WebReadOptions(format="urls"))) == [
        Document("", "http://a.org"), Document("", "http://b.org")]


def warc_record(kind: str, url: str, block: bytes, content_type: str) -> bytes:
    return (f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Target-URI: {url}\r\nWARC-Record-ID: <urn:uuid:{url}>\r\n"
            f"WARC-Date: 2024-01-01T00:00:00Z\r\nContent-Type: {content_type}\r\nContent-Length: {len(block)}"
            "\r\n\r\n").encode() + block + b"\r\n\r\n"


def answer(body: bytes, kind: str = "text/html", status: str = "200 OK", headers: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\n{headers}\r\n".encode() + body


HTTP = "application/http; msgtype=response"
CRAWL = [warc_record("warcinfo", "i", b"software: x\r\n", "application/warc-fields"),
         warc_record("request", "http://a/1", b"GET / HTTP/1.1\r\n\r\n", "application/http; msgtype=request")] + [
    warc_record("response", f"http://a/{number}", block, HTTP) for number, block in enumerate([
        answer(b"<p>caf\xe9", "text/html; charset=ISO-8859-1"),
        answer(gzip.compress("<p>\u00e4".encode()), headers="Content-Encoding: gzip\r\n"),
        answer(b"5\r\n<p>in\r\n7\r\n chunks\r\n0\r\n\r\n", headers="Transfer-Encoding: chunked\r\n"),
        answer(b"\x89PNG", "image/png"), answer(b"<p>gone", status="404 Not Found"),
        answer(b"plain", "Text/Plain"), answer(b"<p>" + b"x" * 5000),
        answer(gzip.compress(b"x" * 5000), headers="Content-Encoding: gzip\r\n"),
        answer(b"<p>not in chunks", headers="Transfer-Encoding: chunked\r\n"),
        answer(b"<p>line ends").replace(b"\r\n", b"\n")])]
CRAWL += [warc_record("conversion", "<http://b/>", "text of \u00e4 page\n".encode(), "text/plain"),
          warc_record("resource", "http://c/", b"<p>file", "text/html; charset=utf-8"),
          warc_record("response", "dns:c", b"c. 1 A 192.0.2.1", "text/dns")]
FATES: list[tuple[str, str | None]] = [
    ("<p>caf\u00e9", ""), ("<p>\u00e4", ""), ("<p>in chunks", ""), ("", "no page"), ("", "status 404"), ("plain", ""),
    ("too long", None), ("too long", None), ("unreadable", None), ("<p>line ends", ""), ("text of \u00e4 page\n", ""),
    ("<p>file", ""), ("", "no page")]


def fates(reads: list[ReadResult]) -> list[tuple[str, str | None]]:
    return [(read.value.reason, None) if isinstance(read.value, DocumentError) else (read.value.text, read.drop_reason)
            for read in reads]


@pytest.mark.parametrize("suffix", [".warc", ".warc.gz", ".warc.wet.zst"])
def test_pages_of_a_crawl_have_the_fate_that_was_planted(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"crawl{suffix}"
    compress = COMPRESS[path.suffix if path.suffix in COMPRESS else ""]
    path.write_bytes(b"".join(map(compress, CRAWL)))  # each record by itself, as crawlers compress
    reads = read_all([path], WebReadOptions(max_bytes=1000))
    assert fates(reads) == FATES
    assert [one.value.url for one in reads if isinstance(one.value, Document)] == [
        *(f"http://a/{number}" for number in (*range(6), 9)), "http://b/", "http://c/", "dns:c"]
    whole = b"".join(CRAWL)
    assert all(whole[one.offset:].startswith(b"WARC/1.0") for one in reads)
    if path.suffix == ".gz":  # all whole records before damage, and its error
        path.write_bytes(path.read_bytes()[:-40])
        assert fates(read_all([path], WebReadOptions(max_bytes=1000))) == [*FATES[:-1], ("unreadable", None)]


def test_a_crawl_that_is_cut_or_damaged_gives_all_records_before(tmp_path: Path) -> None:
    path, whole = tmp_path / "crawl.warc", b"".join(CRAWL)
    options = WebReadOptions(max_bytes=1000)
    for stop in (len(whole) - 5, len(whole) - 300, whole.index(b"chunks"), whole.index(b"<p>caf"),
                 whole.index(b"WARC-Record-ID: <urn:uuid:http://a/1")):
        path.write_bytes(whole[:stop])
        found = fates(read_all([path], options))
        assert found[-1] == ("unreadable", None) and found[:-1] == FATES[:len(found) - 1]
    at = whole.index(CRAWL[4])
    path.write_bytes(whole[:at] + b"garbage" + whole[at:])
    assert fates(read_all([path], options)) == [*FATES[:2], ("unreadable", None)]


def test_rows_of_parquet_are_documents(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "rows.parquet"
    texts = [f"text {number}" for number in range(250)] + [None, "x" * 2000]
    parquet.write_table(arrow.table({"text": texts, "url": [None] * 251 + ["u"], "other": [0] * 252}), path)
    reads = read_all([path], WebReadOptions(max_bytes=1000))
    assert documents(reads[:250]) == [Document(text) for text in texts[:250] if text]
    assert reasons(reads[250:]) == ["wrong type", "too long"]
    with pytest.raises(DataError, match="no column 'body'; found text, url, other"):
        read_all([path], WebReadOptions(text_key="body"))
    path.write_bytes(path.read_bytes()[:-40])
    assert reasons(read_all([path])) == ["unreadable"]
    invalid = arrow.array([b"ab", b"a\xff", b"c"], arrow.binary()).view(arrow.string())
    parquet.write_table(arrow.table({"text": invalid, "url": [None, None, 5]}), path)
    assert reasons(read_all([path])) == ["", "not UTF-8", "wrong type"]
    repaired = documents(read_all([path], WebReadOptions(on_error="replace")))
    assert [document.text for document in repaired] == ["ab", "a\ufffd", "c"]


def test_what_ends_a_line_and_what_does_not(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes('\ufeff{"text": "a"}\r\n\n   \n\r\n{"text": "b\u2028\u0085"}\n{"text": "c"}'.encode())
    reads = read_all([path])
    assert [document.text for document in documents(reads)] == ["a", "b\u2028\u0085", "c"]
    assert [read.location() for read in reads] == [f"{path}:1 (byte 0)", f"{path}:5 (byte 25)", f"{path}:6 (byte 44)"]


def test_a_file_cut_anywhere_gives_every_line_once(tmp_path: Path) -> None:
    rng = random.Random(1)
    path = tmp_path / "a.jsonl"
    lines = [b"" if rng.random() < 0.1 else json.dumps({"text": "x" * rng.choice([0, 1, 5, 300])}).encode()
             for _ in range(50)]
    for end in (b"", b"\n"):
        path.write_bytes(b"\n".join(lines) + end)
        whole = [(read.offset, read.size, read.value) for read in read_all([path])]
        assert len(whole) == sum(map(bool, lines))
        for shard_bytes in [*range(1, 40, 3), 400, 1000, 5000]:
            cut = read_all([path], WebReadOptions(), shard_bytes)
            assert [(read.offset, read.size, read.value) for read in cut] == whole, shard_bytes


@pytest.mark.parametrize("limit", [100, 64])
def test_a_document_over_the_limit_is_passed_over_and_those_beside_it_are_not(tmp_path: Path, limit: int) -> None:
    good = [json.dumps({"text": str(k)}).encode() for k in range(3)]
    long = json.dumps({"text": "x" * 100}).encode()
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([good[0], long, good[1], long, good[2]]))
    (tmp_path / "b.json").write_bytes(b"[" + b", ".join([good[0], long, good[1], long, good[2]]) + b"]")
    (tmp_path / "c.txt").write_bytes(b"x" * 101)
    reading = WebReadOptions(max_bytes=limit)
    expected = ["", "too long", "", "too long", ""]
    for name in ("a.jsonl", "b.json"):
        for shard_bytes in (1 << 20, 7):
            assert reasons(read_all([tmp_path / name], reading, shard_bytes)) == expected, name
    assert reasons(read_all([tmp_path / "c.txt"], reading)) == ["too long"]
    read = read_all([tmp_path / "a.jsonl"], WebReadOptions(max_bytes=len(long)))
    assert reasons(read) == [""] * 5, "the limit itself fits"


ARRAYS = [
    b"[]", b" [ ] ", b"[1]", b'[{"a": "]"}, {"b": "\\"],["}]', b'[[1, [2, 3]], {"x": [{}]}, "a,b", "\\\\"]',
    b'\xef\xbb\xbf["\\\\\\"", "[{"]', b"[1 ,\n 2\n]\n",
]


def test_array_elements_are_those_of_a_parser_for_any_size_of_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for array, size in ((array, size) for array in ARRAYS for size in range(1, len(array) + 2)):
        expected = json.loads(array.decode("utf-8-sig"))
        monkeypatch.setattr("data.webtext.readers.ARRAY_READ_BYTES", size)
        found = list(array_elements(io.BytesIO(array), 1000))
        assert [json.loads(content or b"") for _, _, content in found] == expected, size
        for offset, length, content in found:
            assert content and content in array[offset:offset + length]


BROKEN_ARRAYS = [
    (b'[{"text": "a"}, {"text": "b"}', 1, "not closed"), (b'[{"text": "a"}] x', 1, "something follows"),
    (b'[{"text": "a"},]', 1, "Expecting value"), (b'[{"text": "a"}, {"text": "b]', 1, "not closed"),
    (b'[{"text": "a"} {"text": "b"}]', 0, "Extra data"), (b"[,]", 0, "Expecting value"), (b"[", 0, "not closed")]
"""And how many of its elements are whole."""


def test_a_broken_array_keeps_what_is_whole_and_says_what_is_wrong(tmp_path: Path) -> None:
    for array, good, message in BROKEN_ARRAYS:
        (tmp_path / "a.json").write_bytes(array)
        reads = read_all([tmp_path / "a.json"])
        assert reasons(reads)[:good] == [""] * good
        assert isinstance(reads[good].value, DocumentError) and message in str(reads[good].value)


def test_names_that_say_nothing_are_refused_alone_and_left_out_of_folders(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.dat", ".hidden.jsonl", "c.JSONL"):
        (tmp_path / name).write_text('{"text": "a"}\n')
    sources, notes = find_source_files([tmp_path])
    assert [source.name for source in sources] == ["a.jsonl", "c.JSONL"]
    assert notes == [f"{tmp_path.name}: left out: 1 hidden, 1 other (b.dat)"]
    with pytest.raises(DataError, match="b.dat: its name does not say what it holds.*--format"):
        find_source_files([tmp_path / "b.dat"])
    assert find_source_files([tmp_path / "b.dat"], "jsonl")[0][0].format == "jsonl"
    with pytest.raises(DataError, match="missing.jsonl: cannot read: No such file"):
        find_source_files([tmp_path / "missing.jsonl"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no file to read"):
        find_source_files([tmp_path / "empty"])


def test_a_pipe_is_refused_where_a_file_is_read_twice(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "p.jsonl")
    for path, format in ((tmp_path / "p.jsonl", "auto"), (Path("/dev/zero"), "jsonl")):
        with pytest.raises(DataError, match=f"{path}: is no file but a pipe or a device"):
            find_source_files([path], format)
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    sources, notes = find_source_files([tmp_path])
    assert [source.name for source in sources] == ["a.jsonl"]
    assert notes == [f"{tmp_path.name}: left out: 1 other ({tmp_path}/p.jsonl)"]


def test_what_is_nested_too_deeply_is_a_fault() -> None:
    for opening, closing, mend in ((b"[", b"]", False), (b'{"k":', b"}", True)):
        with pytest.raises(DocumentError, match="not JSON we can read: nested too deeply"):
            parse_json_line(b'{"text": "a", "x": ' + opening * 100_000 + b'"y"' + closing * 100_000 + b"}", repair=mend)


# ---------------------------------------------------------------------------------------------------------------- lines

# line, reason of the fault, part of the message, and the document that repairing gives (None: it cannot be repaired)
DIRT: list[tuple[bytes, str, str, Document | None]] = [
    (b'{"text": "cut', "not JSON", "Unterminated string", None),
    (b'{"text": "a"} {}', "not JSON", "Extra data at column 15", None),
    (b'\xef\xbb\xbf{"text": "a"}', "not JSON", "", None),
    (b'{"text": ' + b"[" * 100_000, "not JSON", "nested too deeply", None),
    (b'{"text": "a", "n": ' + b"9" * 5000 + b"}", "not JSON", "integer string", None),
    (b"[]", "not an object", "found an array", None),
    (b'{"body": "b"}', "no text", "no key 'text'; found 'body'", None),
    (b'{"text": ["a"]}', "wrong type", "expected text, found an array", None),
    (b'{"text": "a", "url": 7}', "wrong type", "key 'url': expected text, found a number", Document("a")),
    (b'{"text": "a", "text": "b"}', "duplicate key", "key 'text' appears twice", Document("b")),
    (b'{"text": "a", "m": {"x": 1, "x": 2}}', "duplicate key", "'x' appears twice",
     Document("a", None, {"m": {"x": 2}})),
    (b'{"text": "a", "n": NaN}', "not JSON", "NaN is not a number", Document("a", None, {"n": None})),
    (b'{"text": "a", "n": [-Infinity]}', "not JSON", "-Infinity", Document("a", None, {"n": [None]})),
    (b'{"text": "a", "n": 1e999}', "not JSON", "1e999", Document("a", None, {"n": None})),
    (b'{"text": "a\xff"}', "not UTF-8", "byte 0xff at column 12", Document("a\ufffd")),
    (b'{"text": "a\\ud800"}', "lone surrogate", "U+D800 at character 2", Document("a\ufffd")),
    (b'{"text": "a", "k\\ud800": ["\\udc00"]}', "lone surrogate", "U+D800",
     Document("a", None, {"k\ufffd": ["\ufffd"]})),
    (b'{"text": "a\0b\tc"}', "not JSON", "Invalid control character", Document("a\0b\tc")),
]


def test_dirt_is_named_and_repaired_only_where_that_is_asked_for() -> None:
    for line, reason, message, mended in DIRT:
        with pytest.raises(DocumentError) as caught:
            parse_json_line(line)
        assert caught.value.reason == reason and message in str(caught.value)
        if mended is None:
            with pytest.raises(DocumentError):
                parse_json_line(line, repair=True)
        else:
            document, repairs = parse_json_line(line, repair=True)
            assert document == mended and repairs
            assert parse_json_line(document.to_line()) == (mended, ()), "what was repaired is clean"


CLEAN: list[tuple[bytes, Document]] = [
    (b'{"text": "a"}', Document("a")),
    (b'{"text": "", "url": null}', Document("")),
    (b'{"url": "u", "text": "t", "n": 1}\r\n', Document("t", "u", {"n": 1})),
    (b'{"text": "\\ud83d\\ude00\\u0000\\u2028"}', Document("\U0001f600\0\u2028")),
    ('{"text": "\u2028\u0085\x7f\ufeff"}'.encode(), Document("\u2028\u0085\x7f\ufeff")),
    (b'{"text": "\\\\ud800"}', Document("\\ud800")),
    (b'{"text": "a", "meta": {"b": 1}}', Document("a", None, {"b": 1})),
    (b'{"text": "a", "meta": 5}', Document("a", None, {"meta": 5})),
    (b'{"text": "a", "meta": {"b": 1}, "c": 2}', Document("a", None, {"meta": {"b": 1}, "c": 2})),
    (b'{"text": "a", "n": 0.1, "m": [true, null]}', Document("a", None, {"n": 0.1, "m": [True, None]})),
]


def test_clean_lines_are_read_alike_with_and_without_repairs() -> None:
    for line, document in CLEAN:
        assert parse_json_line(line) == parse_json_line(line, repair=True) == (document, ())
    line = b'{"content": "a", "link": "u", "text": "other"}'
    assert parse_json_line(line, "content", "link")[0] == Document("a", "u", {"text": "other"})


def random_value(rng: random.Random, depth: int = 0) -> Any:
    text = "".join(chr(rng.choice([rng.randrange(0x80), rng.randrange(0xD800), rng.randrange(0xE000, 0x110000)]))
                   for _ in range(rng.randrange(6)))
    kinds: list[Any] = [text, rng.randrange(-10**9, 10**9), rng.random() * 10 ** rng.randrange(-300, 300), None, True]
    if depth < 3:
        kinds += [[random_value(rng, depth + 1) for _ in range(rng.randrange(3))],
                  {text + str(k): random_value(rng, depth + 1)
                   for k in range(rng.randrange(3))}]
    return rng.choice(kinds)


def test_any_document_comes_back_from_its_line_which_is_one_line_of_utf8() -> None:
    rng = random.Random(0)
    for _ in range(500):
        text, url = str(random_value(rng)), rng.choice([None, "http://a.org/é"])
        meta = {str(random_value(rng, 9)): random_value(rng) for _ in range(rng.randrange(3))}
        document = Document(text, url, meta)
        line = document.to_line()
        assert line.count(b"\n") == 1 and line.endswith(b"\n")
        assert parse_shard_line(line, "x") == document
        assert parse_shard_line(line, "x").to_line() == line
        assert json.loads(line)["text"] == text
