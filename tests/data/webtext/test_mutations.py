"""Damaged inputs: a clean error or an equal decode, never a silent change.

A compressed file carries checksums: damage is a fault, or what is read is what was written. Plain lines carry none, so
there the reader is held against a slow, obvious one on the same damaged bytes: the same documents, and a fault for each
line the other one refuses.
"""

from __future__ import annotations

import gzip
import json
import lzma
import math
import random
from pathlib import Path
from typing import Any

import pytest

from data.webtext.documents import Document, DocumentError
from data.webtext.readers import ReadResult, WebReadOptions, read_unit
from data.webtext.readers import find_source_files, plan_units

zstd = pytest.importorskip("backports.zstd")

TEXTS = ["plain words", "two\nlines\t\u2028", "caf\u00e9 \U0001f600 \"quoted\" \\ back", "", "x" * 300]
OBJECTS: list[dict[str, Any]] = [{"text": text, "url": f"http://example.org/{k}", "n": [k, 0.5, None]}
                                 for k, text in enumerate(TEXTS * 3)]
LINES = "".join(json.dumps(value, ensure_ascii=k % 2 == 0) + "\r\n"[k % 2:] for k, value in enumerate(OBJECTS)).encode()
DOCUMENTS = [Document(value["text"], value["url"], {"n": value["n"]}) for value in OBJECTS]
TOKENS = [b'"', b"\n", b"{", b"}", b"\\", b"\0", b"\xff", b"\\ud800", b"[", b"NaN", b","]


def mutated(content: bytes, rng: random.Random) -> bytes:
    """One to three small accidents."""
    raw = bytearray(content)
    for _ in range(rng.randint(1, 3)):
        place = rng.randrange(len(raw) + 1)
        length = rng.choice([1, 1, 2, 8, 50])
        kind = rng.randrange(5)
        if kind == 0 and place < len(raw):
            raw[place] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del raw[place:place + length]
        elif kind == 2:
            raw[place:place] = rng.randbytes(length)
        elif kind == 3:
            del raw[place:]
        else:
            raw[place:place] = rng.choice(TOKENS)
    return bytes(raw)


def slow_reader(content: bytes) -> list[Document | None]:
    """What a file of lines holds; None for a line that is not right."""
    found: list[Document | None] = []
    for number, line in enumerate(content.split(b"\n")):
        if number == 0 and line[:3] == b"\xef\xbb\xbf":
            line = line[3:]
        if line.strip(b" \t\r\n"):
            found.append(slow_line(line))
    return found


def slow_line(line: bytes) -> Document | None:
    try:
        pairs = json.JSONDecoder(object_pairs_hook=Pairs).decode(line.decode("utf-8"))
        if not isinstance(pairs, Pairs) or not sound(pairs):
            return None
        value = plain(pairs)
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError):
        return None
    text, url = value.pop("text", None), value.pop("url", None)
    if not isinstance(text, str) or not (url is None or isinstance(url, str)):
        return None
    return Document(text, url, value)


class Pairs(list[tuple[str, Any]]):
    """An object, its keys in their order."""


def sound(value: Any) -> bool:
    """No key twice, no number that JSON cannot say."""
    if isinstance(value, Pairs):
        return len({key for key, _ in value}) == len(value) and all(sound(inner) for _, inner in value)
    if isinstance(value, list):
        return all(map(sound, value))
    return not isinstance(value, float) or math.isfinite(value)


def plain(value: Any) -> Any:
    if isinstance(value, Pairs):
        return {key: plain(inner) for key, inner in value}
    return [plain(inner) for inner in value] if isinstance(value, list) else value


def read_file(path: Path, reading: WebReadOptions = WebReadOptions()) -> list[ReadResult]:
    sources, _ = find_source_files([path])
    return [read for unit in plan_units(sources, 1 << 20) for read in read_unit(unit, reading)]


def check_lines(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    found = [read.value if isinstance(read.value, Document) else None for read in read_file(path)]
    assert found == slow_reader(content), content
    for read in read_file(path, WebReadOptions(on_error="replace")):
        if isinstance(read.value, Document):
            read.value.to_line()  # what was repaired can be written
            assert read.repairs or read.value in found
        else:
            assert None in found


def check_array(path: Path, content: bytes) -> None:
    """Equal to a parser where there is a fault nowhere; a fault where there is no array."""
    path.write_bytes(content)
    values = [read.value for read in read_file(path)]
    try:
        whole = json.loads(content.decode("utf-8-sig"), object_pairs_hook=Pairs)
    except (ValueError, RecursionError):
        assert any(isinstance(value, DocumentError) for value in values) or not content.strip(), content
        return
    if isinstance(whole, list) and not isinstance(whole, Pairs):
        expected = [slow_line(json.dumps(plain(value)).encode()) if sound(value) else None for value in whole]
        assert [value if isinstance(value, Document) else None for value in values] == expected, content


def check_compressed(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    values = [read.value for read in read_file(path)]
    if not any(isinstance(value, DocumentError) for value in values):
        assert values == DOCUMENTS or not content, content


def check(tmp_path: Path, count: int) -> None:
    checksum = {zstd.CompressionParameter.checksum_flag: 1}  # zstd itself does not write one unless asked to
    compressed = {".gz": gzip.compress(LINES), ".xz": lzma.compress(LINES),
                  ".zst": zstd.compress(LINES, options=checksum)}
    array = json.dumps(OBJECTS, indent=1).encode()
    for seed in range(count):
        rng = random.Random(seed)
        kind = seed % 8
        if kind < 4:
            check_lines(tmp_path / "a.jsonl", mutated(LINES, rng))
        elif kind == 4:
            check_array(tmp_path / "a.json", mutated(array, rng))
        else:
            ending = (".gz", ".xz", ".zst")[kind - 5]
            check_compressed(tmp_path / f"a.jsonl{ending}", mutated(compressed[ending], rng))


def test_the_slow_reader_reads_what_was_written() -> None:
    assert slow_reader(LINES) == DOCUMENTS


def test_200_damaged_files_are_read_rightly_or_refused(tmp_path: Path) -> None:
    check(tmp_path, 200)


@pytest.mark.slow
def test_2000_damaged_files_are_read_rightly_or_refused(tmp_path: Path) -> None:
    check(tmp_path, 2000)
