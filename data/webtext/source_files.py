"""Input files of any format, cut into work units of equal size.

A `FileRange` is a byte range of a file, a `WorkUnit` some ranges that become one output shard. Units depend only on the
files and the shard size, so every machine computes the same ones. Only uncompressed line formats are cut.
Formats: `jsonl`, `array` (one JSON array of objects), `object`, `text`, `html`, `urls` (one address per line).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from data.compressed import (COMPRESSED_SUFFIXES, is_compressed, open_decompressed, read_until_damage,
                             strip_compression_suffix)
from data.input_files import (STAGE_FILE, WORK_FOLDER, InputFiles, ShardRecord, check_shards_complete, shards_of_folder,
                              walk_files)
from data.plain_text import BOM
from data.storage import DataError, check_is_file

FORMAT_OF_SUFFIX = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".txt": "text", ".html": "html",
                    ".htm": "html", ".xhtml": "html"}
FORMAT_CHOICES = ("auto", "jsonl", "json", "text", "html", "urls")
ARCHIVE_SIGNATURES = (("WARC", 0, b"WARC/"), ("ARC", 0, b"filedesc://"), ("tar", 257, b"ustar"), ("zip", 0, b"PK\3\4"),
                      ("7z", 0, b"7z\xbc\xaf"), ("RAR", 0, b"Rar!\x1a"), ("gzip", 0, b"\x1f\x8b"),
                      ("bzip2", 4, b"1AY&SY"), ("xz", 0, b"\xfd7zXZ"), ("Zstandard", 0, b"(\xb5/\xfd"))
"""Archives: (name, offset, signature)."""
UNPACK_HINT = "archives are not read; unpack it into a folder and give that"


@dataclass(frozen=True)
class SourceFile:
    path: str
    name: str
    """Path within the named folder, or the file's name: outputs depend on this only."""
    format: str
    size: int
    sha256: str | None = None
    """Known for shards only."""


@dataclass(frozen=True)
class FileRange:
    """The lines that begin in [start, stop), or a whole source that cannot be split (stop None)."""

    source: SourceFile
    start: int = 0
    stop: int | None = None


WorkUnit = tuple[FileRange, ...]


def find_source_files(inputs: Sequence[str | Path], format: str = "auto") -> tuple[list[SourceFile], list[str]]:
    """(sources of the paths, in order and by name within a folder; notes on what was left out). In folders, files of
    unknown kind, hidden files, pipes and sockets are left out. Links are followed, but not in loops."""
    sources: list[SourceFile] = []
    notes = []
    for path in map(Path, inputs):
        if not path.is_dir():
            sources.append(_source_file(path, path.name, format))
        elif (path / STAGE_FILE).exists():
            sources += shards_of_stage(path)
        elif (path / WORK_FOLDER).exists():
            raise DataError(f"{path}: this stage is not complete; run its command again first")
        elif (shards := shards_of_folder(path)) is not None:  # one part of a split
            sources += [SourceFile(file, Path(file).name, "jsonl", os.path.getsize(file), shard.sha256)
                        for file, shard in shards.items()]
        else:
            found = InputFiles()
            for file in sorted(walk_files(path, found)):
                if format != "auto" or format_of(file.name):
                    sources.append(_source_file(file, str(file.relative_to(path)), format))
                else:
                    found.unknown.append(str(file.relative_to(path)))
            if found.left_out:
                notes.append(f"{path.name}: {found.left_out}")
    if not sources:
        raise DataError(f"{' '.join(map(str, inputs))}: no file to read (known: {' '.join(FORMAT_OF_SUFFIX)}, "
                        f"each also with {' '.join(COMPRESSED_SUFFIXES)})")
    return sources, notes


def shards_of_stage(folder: Path) -> list[SourceFile]:
    """The shards of a complete stage, in order; DataError otherwise."""
    if not (folder / STAGE_FILE).exists():
        kind = f"a folder without {STAGE_FILE}" if folder.is_dir() else "a file" if folder.exists() else "nothing"
        what = ("this stage is not complete; run its command again first" if (folder / WORK_FOLDER).exists() else
                f"expected the folder of a stage, found {kind}; make one of it first: "
                f"python -m data.webtext read {folder} --output DIR (or extract, clean), then give DIR")
        raise DataError(f"{folder}: {what}")
    try:
        record = json.loads((folder / STAGE_FILE).read_bytes())
        found = [SourceFile(str(folder / output["name"]), output["name"], "jsonl", output["bytes"], output["sha256"])
                 for output in record["outputs"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder / STAGE_FILE}: not the record of a stage ({error}); run its command again") from error
    check_shards_complete(folder, {source.path: ShardRecord(source.size, source.sha256 or "") for source in found})
    return found


def format_of(name: str) -> str:
    """The format that a name implies, under any compression; "" if unknown."""
    return FORMAT_OF_SUFFIX.get(Path(strip_compression_suffix(name)).suffix, "")


def _source_file(path: Path, name: str, format: str) -> SourceFile:
    check_is_file(path)  # it is read twice: for its checksum, then its content
    if format in ("text", "html", "urls"):  # all of an archive, headers included, would become one document
        head = b""
        with suppress(OSError), open_decompressed(str(path)) as file:  # read errors are counted later
            head, _ = read_until_damage(file, 512)
        if kind := archive_kind(head):
            raise DataError(f"{path}: expected one file of --format {format}, found {kind} data; {UNPACK_HINT}")
    elif format == "auto":
        format = format_of(name)
    try:
        size = path.stat().st_size
        if not format:
            raise DataError(
                f"{path}: its name does not say what it holds; expected {' '.join(FORMAT_OF_SUFFIX)}, or give --format")
        return SourceFile(str(path), name, _detect_json_layout(path) if format == "json" else format, size)
    except OSError as error:
        raise DataError(f"{path}: cannot read: {error.strerror or error}") from error


def archive_kind(content: bytes) -> str | None:
    """The archive format, by the first 512 bytes; None if it is none."""
    return next((kind for kind, start, mark in ARCHIVE_SIGNATURES if content.startswith(mark, start)), None)


def _detect_json_layout(path: Path) -> str:
    """Layout of a .json file: an array, one object over several lines, or (most common) an object per line."""
    with open_decompressed(str(path)) as file:
        head, damage = read_until_damage(file, 1 << 16)  # damage is counted later
        start = head.removeprefix(BOM).lstrip()
        while head and not start and not damage:
            head, damage = read_until_damage(file, 1 << 16)
            start = head.lstrip()
    first = start.split(b"\n", 1)[0].rstrip()
    return "array" if first.startswith(b"[") else "object" if first == b"{" else "jsonl"


def plan_units(sources: Iterable[SourceFile], shard_bytes: int) -> list[WorkUnit]:
    """Units of about `shard_bytes`: large line-based files are split, small files combined."""
    units: list[WorkUnit] = []
    unit: list[FileRange] = []
    filled = 0
    for source in sources:
        ranges = [FileRange(source)]
        if source.format in ("jsonl", "urls") and not is_compressed(source.path):
            count = max(1, -(-source.size // shard_bytes))
            edges = [source.size * k // count for k in range(count + 1)]
            ranges = [FileRange(source, start, stop) for start, stop in pairwise(edges)]
        for file_range in ranges:
            size = unit_bytes((file_range,))
            if unit and filled + size > shard_bytes:
                units.append(tuple(unit))
                unit, filled = [], 0
            unit.append(file_range)
            filled += size
    return [*units, tuple(unit)] if unit else units


def unit_bytes(unit: WorkUnit) -> int:
    """Size on disk."""
    return sum((piece.source.size if piece.stop is None else piece.stop) - piece.start for piece in unit)
