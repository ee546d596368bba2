"""Units -> documents, or what is wrong where.

Every line, file or array element gives one `Read`, good or bad, in order; so does the rest of a file that cannot be
read on. Nothing is left out silently except blank lines and a byte order mark at the start of a file. Memory is bounded
by `max_bytes`: what is longer is passed over and reported, never held. Lines end at "\\n" only ("\\r" before it is
JSON's white space, U+2028 is text).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedReader

from data.chunks import FROM_UTF16, UTF16
from data.compressed import Damaged, before_damage, opened
from data.storage import DataError
from data.webtext.charset import NOT_TEXT, decode_page
from data.webtext.document import Document, Fault, Keys, decode, read_line
from data.webtext.inputs import CHOICES, UNPACK, Piece, Unit, archive_kind
from data.webtext.jsonarray import elements

BOM = b"\xef\xbb\xbf"
ON_ERROR = ("strict", "skip", "replace")
UNREADABLE = "unreadable"


@dataclass(frozen=True)
class Reading:
    """How to read: flags of the command line."""

    text_key: str = "text"
    url_key: str = "url"
    format: str = CHOICES[0]
    on_error: str = "strict"
    max_bytes: int = 1 << 26
    charset: str | None = None
    """Of HTML files, as their server said; before what they say themselves."""

    @property
    def mend(self) -> bool:
        return self.on_error == "replace"

    @property
    def keys(self) -> Keys:
        return Keys(self.text_key, self.url_key)


@dataclass(frozen=True)
class Read:
    """What one line, element or file holds."""

    piece: Piece
    offset: int
    """Of its first byte in the (decompressed) file."""
    size: int
    """Bytes read, the line end included."""
    value: Document | Fault
    repairs: tuple[str, ...] = ()

    def where(self) -> str:
        """`file:line (byte offset)`. Counts the lines before it: for errors only."""
        path = self.piece.source.path
        if self.piece.source.format in ("text", "html", "object"):
            return path
        line = 1
        with suppress(OSError), opened(path) as file:
            for part in _before(file, self.offset):
                line += part.count(b"\n")
        return f"{path}:{line} (byte {self.offset})"


@dataclass(frozen=True)
class Raw:
    """Bytes of one document; None: there were too many."""

    offset: int
    size: int
    content: bytes | None


def read_unit(unit: Unit, reading: Reading) -> Iterator[Read]:
    """All of a unit, in order."""
    for piece in unit:
        yield from read_piece(piece, reading)


def read_piece(piece: Piece, reading: Reading) -> Iterator[Read]:
    end = piece.start
    try:
        with opened(piece.source.path) as file:
            for raw in _raws(file, piece, reading.max_bytes):
                yield _record(piece, raw, reading)
                end = raw.offset + raw.size
    except Fault as fault:  # of the array around the documents: what follows cannot be told apart
        yield Read(piece, end, 0, fault)
    except FileNotFoundError as error:
        raise DataError(f"{piece.source.path}: cannot read: {error.strerror}") from error
    except OSError as error:
        if isinstance(error, Damaged):
            yield from _line_without_end(piece, end, reading)
        yield Read(piece, end, 0, Fault(UNREADABLE, f"cannot read on: {error.strerror or error}"))


def _line_without_end(piece: Piece, start: int, reading: Reading) -> Iterator[Read]:
    """The last line before damage, if it is a whole object as it is; otherwise it is a part of the damage."""
    if piece.source.format == "jsonl":
        with opened(piece.source.path) as file:
            for _ in _before(file, start):
                pass
            rest, _ = before_damage(file, reading.max_bytes + 1)
        line = (rest if start else rest.removeprefix(BOM)).strip(b" \t\r\n")
        record = _record(piece, Raw(start, len(rest), line), reading)
        if isinstance(record.value, Document) and not record.repairs and len(rest) <= reading.max_bytes:
            yield record


def _before(file: BufferedReader, offset: int) -> Iterator[bytes]:
    """What is before a place that was read already."""
    while offset > 0 and (part := before_damage(file, min(offset, 1 << 20))[0]):
        yield part
        offset -= len(part)


def _raws(file: BufferedReader, piece: Piece, limit: int) -> Iterator[Raw]:
    kind = piece.source.format
    if kind in ("jsonl", "urls"):
        yield from _lines(file, piece.start, piece.stop, limit)
    elif kind == "array":
        yield from (Raw(offset, size, content) for offset, size, content in elements(file, limit))
    else:
        content = file.read(limit + 1)
        yield Raw(0, min(len(content), limit), content if len(content) <= limit else None)


def _lines(file: BufferedReader, start: int, stop: int | None, limit: int) -> Iterator[Raw]:
    """The lines that begin in [start, stop), blank ones left out."""
    offset = start
    if start:  # the line that reaches over `start` belongs to the piece before
        file.seek(start - 1)
        offset += _skip_line(file) - 1
    while stop is None or offset < stop:
        line = file.readline(limit + 1)
        if not line:
            return
        size = len(line)
        if size > limit and not line.endswith(b"\n"):
            size += _skip_line(file)
            yield Raw(offset, size, None)
        elif line := (line if offset else line.removeprefix(BOM)).strip(b" \t\r\n"):
            yield Raw(offset, size, line)
        offset += size


def _skip_line(file: BufferedReader) -> int:
    """Read to the end of the line; how many bytes that was."""
    skipped = 0
    while part := file.readline(1 << 20):
        skipped += len(part)
        if part.endswith(b"\n"):
            break
    return skipped


def _record(piece: Piece, raw: Raw, reading: Reading) -> Read:
    try:
        if raw.content is None:
            raise Fault("too long", f"more than {reading.max_bytes} bytes (--max-document-bytes)")
        document, repairs = _document(piece, raw.content, reading)
    except Fault as fault:
        return Read(piece, raw.offset, raw.size, _with_advice(fault, piece, raw))
    return Read(piece, raw.offset, raw.size, document, repairs)


def _with_advice(fault: Fault, piece: Piece, raw: Raw) -> Fault:
    """What to do, where the file as a whole is of another kind than it was taken for."""
    if piece.source.format != "html" and raw.offset == 0 and raw.content and raw.content.startswith(UTF16):
        return Fault(fault.reason, f"not UTF-8 but UTF-16, by its first bytes; {FROM_UTF16}")
    if piece.source.format == "object" and "Extra data" in str(fault):
        return Fault(fault.reason, f"{fault} (are these several objects? `jq -c .` makes a line of each)")
    return fault


def _document(piece: Piece, content: bytes, reading: Reading) -> tuple[Document, tuple[str, ...]]:
    kind = piece.source.format
    if kind in ("jsonl", "array", "object"):
        return read_line(content.removeprefix(BOM) if kind == "object" else content, reading.keys, reading.mend)
    if kind != "urls" and (archive := archive_kind(content)):
        raise Fault(NOT_TEXT, f"expected one document, found {archive} data; {UNPACK}")
    said = {"file": piece.source.name}
    if kind == "html":
        text, repaired = decode_page(content, reading.charset, reading.mend)
        return Document(text, None, {**said, "format": "html"}), repaired
    repairs: list[str] | None = [] if reading.mend else None
    text = decode(content, repairs)
    document = Document("", text) if kind == "urls" else Document(text.removeprefix("\ufeff"), None, said)
    return document, tuple(repairs or ())
