"""Files of any kind -> work of equal size.

A *source* is one file with its format and compression; a folder stands for the files in it. A *piece* is a range of the
bytes of a source, a *unit* some pieces that are worked on together and become one shard of output. Units depend on the
files and the wanted shard size only, so every machine cuts the same ones.

Formats: `jsonl` (one object a line), `array` (one JSON array of objects), `object` (one object), `text` and `html` (the
file is the document), `urls` (an address a line). Only uncompressed lines can be cut: a compressed file, like an array,
is one piece however large it is, read as a stream.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from data.compressed import COMPRESSED, before_damage, is_compressed, opened, without_compression
from data.inputs import Found, files_in
from data.recorded import STAGE_FILE, WORK, Shard, check_complete, listed
from data.storage import DataError, check_is_file

LINES = ("jsonl", "urls")
FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".txt": "text", ".html": "html", ".htm": "html",
           ".xhtml": "html"}
CHOICES = ("auto", "jsonl", "json", "text", "html", "urls")
ARCHIVES = (("WARC", 0, b"WARC/"), ("ARC", 0, b"filedesc://"), ("tar", 257, b"ustar"), ("zip", 0, b"PK\3\4"),
            ("7z", 0, b"7z\xbc\xaf"), ("RAR", 0, b"Rar!\x1a"), ("gzip", 0, b"\x1f\x8b"), ("bzip2", 4, b"1AY&SY"),
            ("xz", 0, b"\xfd7zXZ"), ("Zstandard", 0, b"(\xb5/\xfd"))
"""What is not one document: a name, and the bytes at a place by which it is known."""
UNPACK = "archives are not read; unpack it into a folder and give that"


@dataclass(frozen=True)
class Source:
    """One file."""

    path: str
    name: str
    """Its place in the folder that was named, or its own name: what output may depend on."""
    format: str
    size: int
    sha256: str | None = None
    """Known of a shard."""


@dataclass(frozen=True)
class Piece:
    """The lines that begin in [start, stop), or all of a source that cannot be cut (stop None)."""

    source: Source
    start: int = 0
    stop: int | None = None


Unit = tuple[Piece, ...]


def find(inputs: Sequence[str | Path], format: str = "auto") -> tuple[list[Source], list[str]]:
    """The sources behind some paths, in the order given and by name within a folder; and notes on what is left out.

    Left out are, in folders only, files whose names do not say what they hold, hidden ones, pipes and sockets. Links
    are followed, but not round and round.
    """
    sources: list[Source] = []
    notes = []
    for path in map(Path, inputs):
        if not path.is_dir():
            sources.append(_source(path, path.name, format))
        elif (path / STAGE_FILE).exists():
            sources += shards_of(path)
        elif (path / WORK).exists():
            raise DataError(f"{path}: this stage is not complete; run its command again first")
        elif (shards := listed(path)) is not None:  # one part of a split
            sources += [Source(file, Path(file).name, "jsonl", os.path.getsize(file), shard.sha256)
                        for file, shard in shards.items()]
        else:
            found = Found()
            for file in sorted(files_in(path, found)):
                if format != "auto" or format_of(file.name):
                    sources.append(_source(file, str(file.relative_to(path)), format))
                else:
                    found.unknown.append(str(file.relative_to(path)))
            if found.left_out:
                notes.append(f"{path.name}: {found.left_out}")
    if not sources:
        raise DataError(f"{' '.join(map(str, inputs))}: no file to read (known: {' '.join(FORMATS)}, "
                        f"each also with {' '.join(COMPRESSED)})")
    return sources, notes


def shards_of(folder: Path) -> list[Source]:
    """The shards of a complete stage, in order."""
    if not (folder / STAGE_FILE).exists():
        kind = f"a folder without {STAGE_FILE}" if folder.is_dir() else "a file" if folder.exists() else "nothing"
        what = ("this stage is not complete; run its command again first" if (folder / WORK).exists() else
                f"expected the folder of a stage, found {kind}; make one of it first: "
                f"python -m data.webtext read {folder} --output DIR (or extract, clean), then give DIR")
        raise DataError(f"{folder}: {what}")
    try:
        record = json.loads((folder / STAGE_FILE).read_bytes())
        found = [Source(str(folder / output["name"]), output["name"], "jsonl", output["bytes"], output["sha256"])
                 for output in record["outputs"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder / STAGE_FILE}: not the record of a stage ({error}); run its command again") from error
    check_complete(folder, {source.path: Shard(source.size, source.sha256 or "") for source in found})
    return found


def format_of(name: str) -> str:
    """What a name says of the content, under any compression; "" if nothing."""
    return FORMATS.get(Path(without_compression(name)).suffix, "")


def _source(path: Path, name: str, format: str) -> Source:
    check_is_file(path)  # it is read for its checksum, and then for good
    if format in ("text", "html", "urls"):
        _check_is_no_archive(path, format)
    elif format == "auto":
        format = format_of(name)
    try:
        size = path.stat().st_size
        if not format:
            raise DataError(f"{path}: its name does not say what it holds; expected {' '.join(FORMATS)}, or give "
                            "--format")
        return Source(str(path), name, _look(path) if format == "json" else format, size)
    except OSError as error:
        raise DataError(f"{path}: cannot read: {error.strerror or error}") from error


def _check_is_no_archive(path: Path, format: str) -> None:
    """All that is in one would become one document, the headers of records included."""
    head = b""
    with suppress(OSError), opened(str(path)) as file:  # what cannot be read is counted where it is read
        head, _ = before_damage(file, 512)
    if kind := archive_kind(head):
        raise DataError(f"{path}: expected one file of --format {format}, found {kind} data; {UNPACK}")


def archive_kind(content: bytes) -> str | None:
    """By the first 512 bytes."""
    return next((kind for kind, start, mark in ARCHIVES if content.startswith(mark, start)), None)


def _look(path: Path) -> str:
    """What a .json file is: an array, one object on several lines, or (the usual name of it) objects line by line."""
    with opened(str(path)) as file:
        head, damage = before_damage(file, 1 << 16)  # damage is counted when it is read for good
        start = head.removeprefix(b"\xef\xbb\xbf").lstrip()
        while head and not start and not damage:
            head, damage = before_damage(file, 1 << 16)
            start = head.lstrip()
    first = start.split(b"\n", 1)[0].rstrip()
    return "array" if first.startswith(b"[") else "object" if first == b"{" else "jsonl"


def plan(sources: Iterable[Source], shard_bytes: int) -> list[Unit]:
    """Units of about `shard_bytes`: large files of lines are cut, small files put together."""
    units: list[Unit] = []
    unit: list[Piece] = []
    filled = 0
    for piece in (piece for source in sources for piece in _cut(source, shard_bytes)):
        size = (piece.source.size if piece.stop is None else piece.stop) - piece.start
        if unit and filled + size > shard_bytes:
            units.append(tuple(unit))
            unit, filled = [], 0
        unit.append(piece)
        filled += size
    return [*units, tuple(unit)] if unit else units


def _cut(source: Source, shard_bytes: int) -> Iterator[Piece]:
    if source.format not in LINES or is_compressed(source.path):
        yield Piece(source)
        return
    count = max(1, -(-source.size // shard_bytes))
    edges = [source.size * k // count for k in range(count + 1)]
    yield from (Piece(source, start, stop) for start, stop in zip(edges, edges[1:]))


def total_size(unit: Unit) -> int:
    """Bytes on the disk."""
    return sum((piece.source.size if piece.stop is None else piece.stop) - piece.start for piece in unit)
