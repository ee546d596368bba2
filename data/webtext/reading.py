"""Units -> documents, or what is wrong where.

Every line, file or array element gives one `Read`, good or bad, in order; nothing is left out silently except blank
lines and a byte order mark at the start of a file. Memory is bounded by `max_bytes`: what is longer is passed over and
reported, never held. Lines end at "\\n" only ("\\r" before it is JSON's white space, U+2028 is text).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from data.compressed import DAMAGED, opened
from data.storage import DataError
from data.webtext.document import Document, Fault, Keys, decode, read_line
from data.webtext.inputs import CHOICES, Piece, Unit
from data.webtext.jsonarray import elements

BOM = b"\xef\xbb\xbf"
ON_ERROR = ("strict", "skip", "replace")
_CHARSET = re.compile(rb"<meta[^>]{0,200}charset\s*=\s*[\"']?\s*([A-Za-z0-9_.:-]+)", re.IGNORECASE)


@dataclass(frozen=True)
class Reading:
    """How to read: flags of the command line."""

    text_key: str = "text"
    url_key: str = "url"
    format: str = CHOICES[0]
    on_error: str = "strict"
    max_bytes: int = 1 << 26

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
        try:
            with opened(path) as file:
                left = self.offset
                while left > 0 and (chunk := file.read(min(left, 1 << 20))):
                    line += chunk.count(b"\n")
                    left -= len(chunk)
        except DAMAGED:
            pass
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
    except DAMAGED as error:
        message = getattr(error, "strerror", None) or error or "the compressed data ends too early"
        yield Read(piece, end, 0, Fault("unreadable", f"cannot read on: {message}"))


def _raws(file: BinaryIO, piece: Piece, limit: int) -> Iterator[Raw]:
    kind = piece.source.format
    if kind in ("jsonl", "urls"):
        yield from _lines(file, piece.start, piece.stop, limit)
    elif kind == "array":
        yield from (Raw(offset, size, content) for offset, size, content in elements(file, limit))
    else:
        content = file.read(limit + 1)
        yield Raw(0, min(len(content), limit), content if len(content) <= limit else None)


def _lines(file: BinaryIO, start: int, stop: int | None, limit: int) -> Iterator[Raw]:
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


def _skip_line(file: BinaryIO) -> int:
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
        return Read(piece, raw.offset, raw.size, fault)
    return Read(piece, raw.offset, raw.size, document, repairs)


def _document(piece: Piece, content: bytes, reading: Reading) -> tuple[Document, tuple[str, ...]]:
    kind = piece.source.format
    if kind in ("jsonl", "array", "object"):
        return read_line(content.removeprefix(BOM) if kind == "object" else content, reading.keys, reading.mend)
    repairs: list[str] | None = [] if reading.mend else None
    if kind == "urls":
        document = Document("", decode(content, repairs))
    else:
        text = _decode_html(content, repairs) if kind == "html" else decode(content, repairs)
        document = Document(text.removeprefix("\ufeff"), None, {"file": piece.source.name})
    return document, tuple(repairs or ())


def _decode_html(content: bytes, repairs: list[str] | None) -> str:
    """By the character set the page declares, where that works; else as UTF-8."""
    declared = _CHARSET.search(content[:4096])
    if declared:
        try:
            return content.decode(declared[1].decode("ascii"))
        except (LookupError, UnicodeError):
            pass
    return decode(content, repairs)
