"""Work units to documents: every line, file or array element gives one `ReadResult`, good or bad, in order.

Only blank lines and a leading byte order mark are skipped silently. `max_bytes` bounds memory: longer documents are
reported, not held. A JSON array is split into elements as bytes, one at a time, without parsing it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedReader, BytesIO
from itertools import starmap

from data.compressed import CorruptStreamError, open_decompressed, read_until_damage, skip_line
from data.plain_text import BOM, CONVERT_UTF16_HINT, UTF16_BOMS
from data.storage import DataError
from data.webtext.documents import Document, DocumentError, JsonKeys, decode_utf8, parse_json_line
from data.webtext.encoding import NOT_TEXT, decode_page
from data.webtext.source_files import FORMAT_CHOICES, UNPACK_HINT, FileRange, WorkUnit, archive_kind

ON_ERROR = ("strict", "skip", "replace")
UNREADABLE = "unreadable"

ARRAY_READ_BYTES = 1 << 18
_OUTSIDE_STRING = re.compile(rb'["\[\]{},]')
_INSIDE_STRING = re.compile(rb'["\\]')
_JSON_SPACE = b" \t\r\n"


def array_elements(file: BufferedReader | BytesIO, limit: int) -> Iterator[tuple[int, int, bytes | None]]:
    """(offset, size, bytes) of each element; bytes None above `limit`. Tracks brackets, commas and quotes only; the
    caller parses elements. Raises DocumentError if the array does not open or close, or if something follows it."""
    parts = _array_parts(file, limit)
    _, size, before, opening = next(parts)
    if opening != b"[" or before is None or before.removeprefix(BOM).strip(_JSON_SPACE):
        raise DocumentError("not JSON", "not JSON: expected an array")
    found = False
    for offset, size, part, mark in parts:
        if mark == b"":
            raise DocumentError("not JSON", "not JSON: the array is not closed")
        content = None if part is None else part.strip(_JSON_SPACE)
        if content != b"" or mark == b"," or found:  # `[]` has no element, `[1,]` an empty one, which is an error
            found = True
            yield offset, size, None if content is None or len(content) > limit else content
        if mark == b"]":
            break
    _, size, after, mark = next(parts)
    if mark or after is None or after.strip(_JSON_SPACE):
        raise DocumentError("not JSON", "not JSON: something follows the array")


def _array_parts(file: BufferedReader | BytesIO, limit: int) -> Iterator[tuple[int, int, bytes | None, bytes]]:
    """(offset, size with delimiter, bytes before it, delimiter) for each outermost `[`, `,` and `]`, then b""."""
    offset, buffer, discarded = 0, bytearray(), 0  # of the current part: offset, bytes in memory, bytes discarded
    at, depth, inside = 0, 0, False
    while True:
        found = (_INSIDE_STRING if inside else _OUTSIDE_STRING).search(buffer, at)
        if found is None:
            at = max(at, len(buffer))
            if len(buffer) > limit:
                discarded, at = discarded + len(buffer), at - len(buffer)
                buffer.clear()
            if more := file.read1(ARRAY_READ_BYTES):  # `read` would discard bytes before damage
                buffer += more
                continue
            yield offset, discarded + len(buffer), None if discarded else bytes(buffer), b""
            return
        mark, at = found[0], found.end()
        if inside:
            inside = mark != b'"'
            at += inside  # skip the character after a backslash
            continue
        inside = mark == b'"'
        before, depth = depth, depth + (mark in (b"[", b"{")) - (mark in (b"]", b"}"))
        if (before, depth, mark) in ((0, 1, b"["), (1, 1, b","), (1, 0, b"]")):
            yield offset, discarded + at, None if discarded else bytes(buffer[:found.start()]), mark
            offset, discarded = offset + discarded + at, 0
            del buffer[:at]
            at = 0


@dataclass(frozen=True)
class WebReadOptions:
    text_key: str = "text"
    url_key: str = "url"
    format: str = FORMAT_CHOICES[0]
    on_error: str = "strict"
    max_bytes: int = 1 << 26
    charset: str | None = None
    """Charset of HTML files from the server; takes precedence over their own declaration."""


@dataclass(frozen=True)
class ReadResult:
    """The content of one line, element or file."""

    file_range: FileRange
    offset: int
    """Offset in the (decompressed) file."""
    size: int
    """Bytes read, including the line end."""
    value: Document | DocumentError
    repairs: tuple[str, ...] = ()

    def location(self) -> str:
        """`file:line (byte offset)`. Counts lines from the start, so use it for errors only."""
        path = self.file_range.source.path
        if self.file_range.source.format in ("text", "html", "object"):
            return path
        line = 1
        with suppress(OSError), open_decompressed(path) as file:
            for part in _read_before(file, self.offset):
                line += part.count(b"\n")
        return f"{path}:{line} (byte {self.offset})"


@dataclass(frozen=True)
class RawDocument:
    """The bytes of one document; None if there are too many."""

    offset: int
    size: int
    content: bytes | None


def read_unit(unit: WorkUnit, options: WebReadOptions) -> Iterator[ReadResult]:
    """All results of a unit, in order."""
    for file_range in unit:
        yield from _read_file_range(file_range, options)


def _read_file_range(file_range: FileRange, options: WebReadOptions) -> Iterator[ReadResult]:
    end = file_range.start
    try:
        with open_decompressed(file_range.source.path) as file:
            if file_range.source.format in ("jsonl", "urls"):
                documents = _raw_lines(file, file_range.start, file_range.stop, options.max_bytes)
            elif file_range.source.format == "array":
                documents = starmap(RawDocument, array_elements(file, options.max_bytes))
            else:
                content = file.read(options.max_bytes + 1)
                fits = len(content) <= options.max_bytes
                documents = iter([RawDocument(0, min(len(content), options.max_bytes), content if fits else None)])
            for raw in documents:
                yield _parse_raw(file_range, raw, options)
                end = raw.offset + raw.size
    except DocumentError as fault:  # the enclosing array is malformed: the rest cannot be split
        yield ReadResult(file_range, end, 0, fault)
    except FileNotFoundError as error:
        raise DataError(f"{file_range.source.path}: cannot read: {error.strerror}") from error
    except OSError as error:
        if isinstance(error, CorruptStreamError):
            yield from _last_line_before_damage(file_range, end, options)
        yield ReadResult(file_range, end, 0, DocumentError(UNREADABLE, f"cannot read on: {error.strerror or error}"))


def _last_line_before_damage(file_range: FileRange, start: int, options: WebReadOptions) -> Iterator[ReadResult]:
    """The last line before damage if it is a complete object; otherwise it is part of the damage."""
    if file_range.source.format == "jsonl":
        with open_decompressed(file_range.source.path) as file:
            for _ in _read_before(file, start):
                pass
            rest, _ = read_until_damage(file, options.max_bytes + 1)
        line = (rest if start else rest.removeprefix(BOM)).strip(_JSON_SPACE)
        record = _parse_raw(file_range, RawDocument(start, len(rest), line), options)
        if isinstance(record.value, Document) and not record.repairs and len(rest) <= options.max_bytes:
            yield record


def _read_before(file: BufferedReader, offset: int) -> Iterator[bytes]:
    """Read up to an offset that was read before."""
    while offset > 0 and (part := read_until_damage(file, min(offset, 1 << 20))[0]):
        yield part
        offset -= len(part)


def _raw_lines(file: BufferedReader, start: int, stop: int | None, limit: int) -> Iterator[RawDocument]:
    """The lines that begin in [start, stop), without blank ones."""
    offset = start
    if start:  # a line across `start` belongs to the previous range
        file.seek(start - 1)
        offset += skip_line(file) - 1
    while stop is None or offset < stop:
        line = file.readline(limit + 1)
        if not line:
            return
        size = len(line)
        if size > limit and not line.endswith(b"\n"):
            size += skip_line(file)
            yield RawDocument(offset, size, None)
        elif line := (line if offset else line.removeprefix(BOM)).strip(_JSON_SPACE):
            yield RawDocument(offset, size, line)
        offset += size


def _parse_raw(file_range: FileRange, raw: RawDocument, options: WebReadOptions) -> ReadResult:
    try:
        if raw.content is None:
            raise DocumentError("too long", f"more than {options.max_bytes} bytes (--max-document-bytes)")
        document, repairs = _parse_document(file_range, raw.content, options)
    except DocumentError as fault:
        # The whole file may be of another kind than assumed.
        kind, message = file_range.source.format, str(fault)
        if kind != "html" and raw.offset == 0 and raw.content and raw.content.startswith(UTF16_BOMS):
            message = f"not UTF-8 but UTF-16, by its first bytes; {CONVERT_UTF16_HINT}"
        elif kind == "object" and "Extra data" in message:
            message += " (are these several objects? `jq -c .` makes a line of each)"
        return ReadResult(file_range, raw.offset, raw.size, DocumentError(fault.reason, message))
    return ReadResult(file_range, raw.offset, raw.size, document, repairs)


def _parse_document(file_range: FileRange, content: bytes, options: WebReadOptions) -> tuple[Document, tuple[str, ...]]:
    kind, may_repair = file_range.source.format, options.on_error == "replace"
    if kind in ("jsonl", "array", "object"):
        keys = JsonKeys(options.text_key, options.url_key)
        return parse_json_line(content.removeprefix(BOM) if kind == "object" else content, keys, may_repair)
    if kind != "urls" and (archive := archive_kind(content)):
        raise DocumentError(NOT_TEXT, f"expected one document, found {archive} data; {UNPACK_HINT}")
    meta = {"file": file_range.source.name}
    if kind == "html":
        text, repaired = decode_page(content, options.charset, may_repair)
        return Document(text, None, {**meta, "format": "html"}), repaired
    repairs: list[str] | None = [] if may_repair else None
    text = decode_utf8(content, repairs)
    document = Document("", text) if kind == "urls" else Document(text.removeprefix("\ufeff"), None, meta)
    return document, tuple(repairs or ())
