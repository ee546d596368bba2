"""A chunk: some neighbouring bytes of a file of text, the unit of parallel work; and what is wrong in one, and where.

`jsonl` cuts files into chunks of whole lines, `plain_text` into chunks of whole documents or of one document's parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from data.compressed import find_damage, read_errors_for
from data.storage import DataError

CHUNK_BYTES = 1 << 20

MAX_DOCUMENT_BYTES = 1 << 26
"""Bytes of a line, or of text in which no place to cut it is found, unless more are allowed. Memory follows from it."""

UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")
CONVERT_UTF16_HINT = "convert the file (iconv -f UTF-16 -t UTF-8)"
BOM = b"\xef\xbb\xbf"
"""The byte order mark of UTF-8. At the start of a file it is no part of the text."""


@dataclass(frozen=True)
class MalformedDocument:
    """A document that cannot be used: the line at fault, and why."""

    path: str
    lines_before: int
    """Lines before it in its chunk."""
    offset: int
    reason: str

    def to_error(self, lines_before_chunk: int) -> DataError:
        """For a chunk that begins after so many lines. Of a compressed file that is damaged the damage is told."""
        line = lines_before_chunk + self.lines_before + 1
        if damage := find_damage(self.path):
            return DataError(f"{self.path}: cannot read: {damage}; before that, line {line} is malformed: "
                             f"{self.reason}")
        return DataError(f"{self.path}:{line} {self.reason} (the line begins at byte {self.offset})")


def too_long_document(path: str,
                      lines_before: int,
                      offset: int,
                      limit: int,
                      what: str = "in this line") -> MalformedDocument:
    return MalformedDocument(
        path, lines_before, offset, f"more than {limit} bytes {what}, which would have to be held in memory; "
        "--max-document-bytes of data.preprocess allows more")


class DamagedRest(MalformedDocument):
    """All the rest of a file, which cannot be decompressed. It counts as one document."""

    def to_error(self, lines_before_chunk: int) -> DataError:
        return DataError(
            f"{self.path}: cannot read: {self.reason}; it is in line {lines_before_chunk + self.lines_before + 1}")


@dataclass(frozen=True)
class Chunk:
    """Some bytes of a file, or where they are in it: then whoever works on the chunk reads them."""

    path: str
    offset: int
    """Bytes before it in the file (in the decompressed file, where it is compressed)."""
    size: int
    data: bytes | None = None
    """The bytes, where the file is compressed or a pipe, and can only be read from its start."""
    starts_inside_document: bool = False
    """It begins inside a document."""
    ends_inside_document: bool = False
    """It ends inside a document."""
    skipped_bytes: int = 0
    """Bytes that follow in the file, belong to its last line, and are too many to be held."""
    damage: DamagedRest | None = None
    """What comes after all that."""

    @property
    def end(self) -> int:
        """Where the next one begins."""
        return self.offset + self.size + self.skipped_bytes

    def read(self) -> bytes:
        if self.data is not None:
            return self.data
        with read_errors_for(self.path), open(self.path, "rb") as file:
            file.seek(self.offset)
            data = file.read(self.size)
        if len(data) < self.size:
            raise DataError(f"{self.path}: cannot read: the file became shorter meanwhile")
        return data


def count_lines(data: bytes) -> int:
    """`data.count(b"\\n")`, which looks at one byte after the other."""
    return int(np.count_nonzero(np.frombuffer(data, np.uint8) == ord("\n")))
