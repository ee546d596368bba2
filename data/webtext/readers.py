"""Input files of any format to documents, in work units of equal size: every line, file, record, row or array element
gives one `ReadResult`, good or bad, in order.

A *unit* is some files, or ranges of lines of them, that become one output shard. Units depend only on the files and the
shard size, so every machine computes the same ones. Only uncompressed line formats are cut. Formats:
`jsonl`, `array` (one JSON array of objects), `object`, `text`, `html`, `urls` (one address per line), `warc` (pages of
WARC files, texts of WET files), `parquet`. Only blank lines, a leading byte order mark, and the records of WARC files
that hold no answer of a server (requests, metadata) are skipped silently. `max_bytes` bounds memory: longer documents
are reported, not held.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

from data.compressed import (COMPRESSED_SUFFIXES, CorruptStreamError, DecompressedFile, is_compressed,
                             open_decompressed, read_errors_for, strip_compression_suffix)
from data.input_files import STAGE_FILE, InputFiles, shards_of_folder, walk_files
from data.storage import DataError, check_is_file, file_system_of, is_url, open_binary
from data.text_files import BOM
from data.webtext.documents import Document, DocumentError, Repairs, decode_utf8, parse_json_line
from data.webtext.extract import decode_page

FORMAT_OF_SUFFIX = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".txt": "text", ".html": "html",
                    ".htm": "html", ".xhtml": "html", ".warc": "warc", ".wet": "warc", ".parquet": "parquet"}
FORMAT_CHOICES = ("auto", "jsonl", "json", "text", "html", "urls", "warc", "parquet")
# Types that servers give pages and plain texts; other answers are dropped.
PAGE_TYPES = {"text/html": "html", "application/xhtml+xml": "html", "text/plain": "text", "": "html"}
ON_ERROR = ("strict", "skip", "replace")
UNREADABLE = "unreadable"
ARRAY_READ_BYTES = 1 << 18
PARQUET_ROWS = 100  # read at a time
SKIP_BYTES = 1 << 20  # bytes of a line in memory that is skipped
_OUTSIDE_STRING = re.compile(rb'["\[\]{},]')
_INSIDE_STRING = re.compile(rb'["\\]')
_JSON_SPACE = b" \t\r\n"


@dataclass(frozen=True)
class SourceFile:
    path: str
    name: str  # path within the named folder, or the file's name: outputs depend on this only
    format: str
    size: int
    sha256: str | None = None  # known for shards only
    # In a work unit: the lines that begin in [start, stop); None: the whole file.
    start: int = 0
    stop: int | None = None


WorkUnit = tuple[SourceFile, ...]


@dataclass(frozen=True)
class WebReadOptions:
    text_key: str = "text"
    url_key: str = "url"
    format: str = FORMAT_CHOICES[0]
    on_error: str = "strict"
    max_bytes: int = 1 << 26
    # Charset of HTML files from the server; takes precedence over their own declaration.
    charset: str | None = None


@dataclass(frozen=True)
class ReadResult:
    """The content of one line, element or file."""

    source: SourceFile
    offset: int  # offset in the (decompressed) file
    size: int  # bytes read, including the line end
    value: Document | DocumentError
    repairs: tuple[str, ...] = ()
    drop_reason: str = ""  # why the document is none for the corpus, such as an image; empty: it is one

    def location(self) -> str:
        """`file:line (byte offset)`. Counts lines from the start, so use it for errors only."""
        path = self.source.path
        if self.source.format in ("text", "html", "object"):
            return path
        if self.source.format in ("warc", "parquet"):
            return f"{path} ({'byte' if self.source.format == 'warc' else 'row'} {self.offset})"
        return f"{path}:{line_number(path, self.offset)} (byte {self.offset})"


def line_number(path: str, offset: int) -> int:
    """The number, from 1, of the line at an offset of a (decompressed) file. Reads all before it: for errors only."""
    line = 1
    with suppress(OSError), open_decompressed(path, until_damage=True) as file:
        while offset > 0 and (part := file.read(min(offset, ARRAY_READ_BYTES))):
            line += part.count(b"\n")
            offset -= len(part)
    return line


# (offset, size, bytes) of one document; bytes None if there are too many.
RawDocument = tuple[int, int, bytes | None]


def find_source_files(inputs: Sequence[str | Path], format: str = "auto") -> tuple[list[SourceFile], list[str]]:
    """(sources of the paths, in order and by name within a folder; notes on what was left out). In folders, files of
    unknown kind, hidden files, pipes and sockets are left out. Links are followed, but not in loops."""
    sources: list[SourceFile] = []
    notes: list[str] = []
    for given in inputs:
        path = Path(given)
        if is_url(given):
            sources += _objects_of(str(given), format, notes)
        elif not path.is_dir():
            sources.append(_source_file(path, path.name, format))
        elif (shards := _stage_shards(path)) is not None:
            sources += shards
        else:
            found = InputFiles()
            for file in sorted(walk_files(path, found)):
                if format != "auto" or format_of(file.name):
                    sources.append(_source_file(file, str(file.relative_to(path)), format))
                else:
                    found.others.append(str(file.relative_to(path)))
            if found.left_out:
                notes.append(f"{path.name}: {found.left_out}")
    if not sources:
        raise DataError(f"{' '.join(map(str, inputs))}: no file to read (known: {' '.join(FORMAT_OF_SUFFIX)}, "
                        f"each also with {' '.join(COMPRESSED_SUFFIXES)})")
    return sources, notes


def _objects_of(url: str, format: str, notes: list[str]) -> list[SourceFile]:
    """The object of a URL, or those of known kinds below it, by name."""
    system, root = file_system_of(url)
    with read_errors_for(url):
        names = [root] if system.isfile(root) else sorted(system.find(root))
        names = [name for name in names if not Path(name).name.startswith(".") and Path(name).name != STAGE_FILE]
        known = [name for name in names if format != "auto" or format_of(name)]
        if len(names) > len(known):
            notes.append(f"{url}: left out: {len(names) - len(known)} other")
        return [_source_file(system.unstrip_protocol(name), name.removeprefix(root).lstrip("/") or Path(name).name,
                             format, system.size(name)) for name in known]


def shards_of_stage(folder: Path) -> list[SourceFile]:
    """The shards of a complete stage, in order; DataError otherwise."""
    shards = _stage_shards(folder)
    if shards is None:
        kind = f"a folder without {STAGE_FILE}" if folder.is_dir() else "a file" if folder.exists() else "nothing"
        raise DataError(f"{folder}: expected the folder of a stage, found {kind}; make one of it first: "
                        f"python -m data.webtext read {folder} --output DIR (or extract, clean), then give DIR")
    return shards


def _stage_shards(folder: Path) -> list[SourceFile] | None:
    """The shards of a stage, or of one part of a split; None for any other folder."""
    shards = shards_of_folder(folder)
    return None if shards is None else [
        SourceFile(path, os.path.relpath(path, folder), "jsonl", os.path.getsize(path), sha256)
        for path, (_, sha256) in shards.items()]


def format_of(name: str) -> str:
    """The format that a name implies, under any compression; "" if unknown."""
    return FORMAT_OF_SUFFIX.get(Path(strip_compression_suffix(name)).suffix, "")


def _source_file(path: str | Path, name: str, format: str, size: int | None = None) -> SourceFile:
    if size is None:
        check_is_file(path)  # it is read twice: for its checksum, then its content
    if format == "auto":
        format = format_of(name)
    with read_errors_for(str(path)):
        size = os.path.getsize(path) if size is None else size
        if not format:
            raise DataError(
                f"{path}: its name does not say what it holds; expected {' '.join(FORMAT_OF_SUFFIX)}, or give --format")
        if format == "json":  # an array, one object over several lines, or (most common) an object per line
            with open_decompressed(str(path), until_damage=True) as file:  # damage is counted later
                first = file.read(1 << 16).removeprefix(BOM).lstrip().split(b"\n", 1)[0].rstrip()
            format = "array" if first.startswith(b"[") else "object" if first == b"{" else "jsonl"
        return SourceFile(str(path), name, format, size)


def plan_units(sources: Iterable[SourceFile], shard_bytes: int) -> list[WorkUnit]:
    """Units of about `shard_bytes`: large line-based files are split, small files combined."""
    units: list[WorkUnit] = []
    unit: list[SourceFile] = []
    for source in sources:
        ranges = [source]
        if source.format in ("jsonl", "urls") and not is_compressed(source.path):
            count = max(1, -(-source.size // shard_bytes))
            edges = [source.size * k // count for k in range(count + 1)]
            ranges = [replace(source, start=start, stop=stop) for start, stop in pairwise(edges)]
        for lines in ranges:
            if unit and unit_bytes((*unit, lines)) > shard_bytes:
                units.append(tuple(unit))
                unit = []
            unit.append(lines)
    return [*units, tuple(unit)] if unit else units


def unit_bytes(unit: Iterable[SourceFile]) -> int:
    """Size on disk."""
    return sum((source.size if source.stop is None else source.stop) - source.start for source in unit)


def read_unit(unit: WorkUnit, options: WebReadOptions) -> Iterator[ReadResult]:
    """All results of a unit, in order. At damage: all that was whole before it, then a fault."""
    for source in unit:
        end = source.start
        by_lines = source.format in ("jsonl", "urls")
        try:
            if source.format == "parquet":
                with open_binary(source.path) as table:
                    yield from _parquet_rows(table, source, options)
                continue
            with open_decompressed(source.path, until_damage=by_lines or source.format == "warc") as file:
                if source.format == "warc":
                    for result in _warc_records(file, source, options):
                        yield result
                        end = result.offset + result.size
                    continue
                if by_lines:
                    documents = _raw_lines(file, source, options)
                elif source.format == "array":
                    documents = array_elements(file, options.max_bytes)
                else:
                    content = file.read(options.max_bytes + 1)
                    documents = iter([(0, len(content), content) if len(content) <= options.max_bytes else
                                      (0, options.max_bytes, None)])
                for offset, size, raw in documents:
                    yield ReadResult(source, offset, size, *_parse_raw(source, offset, raw, options))
                    end = offset + size
        except DocumentError as fault:  # the enclosing array is malformed: the rest cannot be split
            yield ReadResult(source, end, 0, fault)
        except FileNotFoundError as error:
            raise DataError(f"{source.path}: cannot read: {error.strerror}") from error
        except OSError as error:
            if is_url(source.path) and not isinstance(error, CorruptStreamError):  # the network, and not the content
                raise DataError(f"{source.path}: cannot read on: {error.strerror or error}; start again") from error
            damage = DocumentError(UNREADABLE, f"cannot read on: {error.strerror or error}")
            yield ReadResult(source, end, 0, damage)


def skip_line(file: DecompressedFile, most: float = math.inf) -> int:
    """Read to the end of the line, at most `most` bytes; returns the number of bytes."""
    skipped = 0
    while skipped < most and (part := file.readline(int(min(SKIP_BYTES, most - skipped)))):
        skipped += len(part)
        if part.endswith(b"\n"):
            break
    return skipped


def _raw_lines(file: DecompressedFile, source: SourceFile, options: WebReadOptions) -> Iterator[RawDocument]:
    """The lines that begin in the range, without blank ones; at its damage raises that of the file. A line of more than
    `max_bytes` is not held."""
    stop, offset = math.inf if source.stop is None else source.stop, source.start
    if offset:  # a line across the start belongs to the range before
        file.seek(offset - 1)
        offset += skip_line(file, stop - offset + 1) - 1
    while offset < stop and (raw := file.readline(options.max_bytes + 1)):
        is_too_long = len(raw) > options.max_bytes and not raw.endswith(b"\n")
        size = len(raw) + (skip_line(file) if is_too_long else 0)
        line = (raw if offset else raw.removeprefix(BOM)).strip(_JSON_SPACE)
        if not file.damage:
            if line or is_too_long:
                yield offset, size, None if is_too_long else line
        elif line and not is_too_long and source.format == "jsonl":  # a complete object is no part of the damage
            with suppress(DocumentError):
                parse_json_line(line, options.text_key, options.url_key)
                yield offset, size, line
        offset += size
    if file.damage:
        raise file.damage


def _warc_records(file: DecompressedFile, source: SourceFile, options: WebReadOptions) -> Iterator[ReadResult]:
    """Pages that servers gave (`response`), files (`resource`), and texts made of pages (`conversion`, in WET files).
    Raises OSError at damage of the file; damage of one page is an error of that page."""
    from fastwarc.warc import ArchiveIterator, WarcRecordType

    kinds = WarcRecordType.response | WarcRecordType.resource | WarcRecordType.conversion
    for record in ArchiveIterator(file, stream_detect=False, record_types=WarcRecordType.any_type, parse_http=False):
        offset, size, url = record.stream_pos, record.content_length, record.headers.get("WARC-Target-URI")
        if not record.headers.get("Content-Length"):  # cut off, or line ends that are not CRLF
            raise file.damage or OSError(f"the header at byte {offset} has no Content-Length")
        if not record.record_type & kinds:
            continue
        content: bytes | None = record.reader.read(options.max_bytes)
        found = len(content or b"")
        while found < size and (more := record.reader.read(ARRAY_READ_BYTES)):  # too long, but is it complete?
            content, found = None, found + len(more)
        if found < size:
            raise file.damage or OSError(f"the record at byte {offset} ends too early")
        value, repairs, reason = _parse_warc_content(record, content, source, options)
        if isinstance(value, Document):
            value = replace(value, url=url and url.strip("<>"))  # wget writes these
        yield ReadResult(source, offset, size, value, repairs, reason)
    if file.damage:
        raise file.damage


def _parse_warc_content(record: Any, content: bytes | None, source: SourceFile, options: WebReadOptions
                        ) -> tuple[Document | DocumentError, tuple[str, ...], str]:
    """(document or what is wrong, repairs made, why it is dropped)."""
    media, charset, status = record.headers.get("Content-Type") or "text/plain", None, 200
    if content is not None and record.is_http:
        # a record of its own: the iterator cannot go on from one that failed
        answer = record.from_bytes(b"WARC/1.0\r\nWARC-Type: response\r\nContent-Type: application/http\r\n"
                                   b"Content-Length: %d\r\n\r\n%b\r\n\r\n" % (len(content), content))
        try:
            answer.parse_http(auto_decode="all", quirks_mode=True)  # also what is compressed or in chunks
            content = answer.reader.read(options.max_bytes + 1)
        except OSError as error:
            return DocumentError(UNREADABLE, f"cannot decode the page: {error}"), (), ""
        content = None if len(content) > options.max_bytes else content
        media, charset, status = answer.http_content_type or "", answer.http_charset, answer.http_headers.status_code
    kind = PAGE_TYPES.get(media.partition(";")[0].strip().lower())
    if content is not None and (status != 200 or kind is None):
        return Document("", None, {"file": source.name}), (), f"status {status}" if status != 200 else "no page"
    return *_parse_raw(replace(source, format=kind or "text"), record.stream_pos, content,
                       replace(options, charset=options.charset or charset)), ""


def _parquet_rows(table: Any, source: SourceFile, options: WebReadOptions) -> Iterator[ReadResult]:
    """The columns of text and address, a few rows in memory at a time."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise DataError(f"{source.path}: reading Parquet needs a package: pip install pyarrow") from error
    try:
        file = parquet.ParquetFile(table)
        columns = [key for key in (options.text_key, options.url_key) if key in file.schema_arrow.names]
        if options.text_key not in columns:
            raise DataError(f"{source.path}: no column {options.text_key!r}; found "
                            f"{', '.join(file.schema_arrow.names)} (see --text-key)")
        number = 0
        for batch in file.iter_batches(PARQUET_ROWS, columns=columns):
            for row in range(len(batch)):
                text, url = (_cell(batch.column(key)[row]) if key in columns else None
                             for key in (options.text_key, options.url_key))
                value, repairs = _parse_cells(text, url, options)
                size = len(value.text.encode()) if isinstance(value, Document) else 0
                yield ReadResult(source, number, size, value, repairs)
                number += 1
    except (ArrowException, KeyError) as error:  # KeyError: two columns of one name
        raise OSError(f"not Parquet that can be read: {error}") from error


def _cell(scalar: Any) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError as error:  # nothing in Parquet checks that strings are UTF-8
        return error.object


def _parse_cells(text: Any, url: Any, options: WebReadOptions) -> tuple[Document | DocumentError, tuple[str, ...]]:
    """(document or what is wrong, repairs made)."""
    repairs = Repairs(options.on_error == "replace")
    try:
        text = decode_utf8(text, repairs) if isinstance(text, bytes) else text
        if not isinstance(text, str):
            raise DocumentError("wrong type",
                                f"column {options.text_key!r}: expected text, found {type(text).__name__}")
        if len(text.encode()) > options.max_bytes:
            raise DocumentError("too long", f"more than {options.max_bytes} bytes (--max-document-bytes)")
        if not isinstance(url, str | None):
            repairs.add("wrong type", f"column {options.url_key!r}: expected text, found {type(url).__name__}")
            url = None
        return Document(text, url), tuple(repairs)
    except DocumentError as fault:
        return fault, ()


def array_elements(file: DecompressedFile | BytesIO, limit: int) -> Iterator[RawDocument]:
    """The elements of a JSON array, split as bytes by brackets, commas and quotes only; the caller parses them. Raises
    DocumentError if the array does not open or close, or if something follows it."""
    offset, buffer, discarded = 0, bytearray(), 0  # of the current part: offset, bytes in memory, bytes discarded
    at, depth, inside_string, found_any, is_closed = 0, 0, False, False, False
    while True:
        found = (_INSIDE_STRING if inside_string else _OUTSIDE_STRING).search(buffer, at)
        if found is None:
            at = max(at, len(buffer))
            if len(buffer) > limit:
                discarded, at = discarded + len(buffer), at - len(buffer)
                buffer.clear()
            if more := file.read1(ARRAY_READ_BYTES):  # `read` would discard bytes before damage
                buffer += more
                continue
            break
        mark, at = found[0], found.end()
        if inside_string:
            inside_string = mark != b'"'
            at += inside_string  # skip the character after a backslash
            continue
        inside_string = mark == b'"'
        before, depth = depth, depth + (mark in (b"[", b"{")) - (mark in (b"]", b"}"))
        if is_closed or (before, depth, mark) not in ((0, 1, b"["), (1, 1, b","), (1, 0, b"]")):
            continue
        content, size = bytes(buffer[:found.start()]).strip(_JSON_SPACE), discarded + at
        if mark == b"[":
            if discarded or content not in (b"", BOM):
                raise DocumentError("not JSON", "not JSON: expected an array")
        elif discarded or content or mark == b"," or found_any:  # `[]` has no element; `[1,]` an empty one, an error
            found_any = True
            yield offset, size, None if discarded or len(content) > limit else content
        is_closed = mark == b"]"
        offset, discarded, at = offset + size, 0, 0
        del buffer[:found.end()]
    if not is_closed:
        raise DocumentError("not JSON", "not JSON: the array is not closed")
    if discarded or buffer.strip(_JSON_SPACE):
        raise DocumentError("not JSON", "not JSON: something follows the array")


def _parse_raw(source: SourceFile, offset: int, content: bytes | None,
               options: WebReadOptions) -> tuple[Document | DocumentError, tuple[str, ...]]:
    """(document or what is wrong, repairs made)."""
    kind, repairs = source.format, Repairs(options.on_error == "replace")
    try:
        if content is None:
            raise DocumentError("too long", f"more than {options.max_bytes} bytes (--max-document-bytes)")
        if kind in ("jsonl", "array", "object"):
            line = content.removeprefix(BOM) if kind == "object" else content
            return parse_json_line(line, options.text_key, options.url_key, repairs.allowed)
        if kind == "urls":
            return Document("", decode_utf8(content, repairs)), tuple(repairs)
        if kind == "html":
            text, repaired = decode_page(content, options.charset, repairs.allowed)
            return Document(text, None, {"file": source.name, "format": "html"}), repaired
        text = decode_utf8(content, repairs).removeprefix("\ufeff")
        return Document(text, None, {"file": source.name}), tuple(repairs)
    except DocumentError as fault:
        return fault, ()
