"""A chunk: some neighbouring bytes of a file of text, the unit of parallel work; and what is wrong in one, and where.

`jsonl` cuts files into chunks of whole lines, `plain_text` into chunks of whole documents or of one document's parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from data.compressed import damage_in, reading
from data.storage import DataError

CHUNK_BYTES = 1 << 20

LONGEST = 1 << 26
"""Bytes of a line, or of text in which no place to cut it is found, unless more are allowed. Memory follows from it."""

UTF16 = (b"\xff\xfe", b"\xfe\xff")
FROM_UTF16 = "convert the file (iconv -f UTF-16 -t UTF-8)"
BOM = b"\xef\xbb\xbf"
"""The byte order mark of UTF-8. At the start of a file it is no part of the text."""


@dataclass(frozen=True)
class Malformed:
    """A document that cannot be used: the line at fault, and why."""

    path: str
    number: int
    """Lines before it in its chunk."""
    offset: int
    reason: str

    def error(self, before: int) -> DataError:
        """For a chunk that begins after so many lines. Of a compressed file that is damaged the damage is told."""
        line = before + self.number + 1
        if damage := damage_in(self.path):
            return DataError(f"{self.path}: cannot read: {damage}; before that, line {line} is malformed: "
                             f"{self.reason}")
        return DataError(f"{self.path}:{line} {self.reason} (the line begins at byte {self.offset})")


def too_long(path: str, number: int, offset: int, limit: int, what: str = "in this line") -> Malformed:
    return Malformed(path, number, offset, f"more than {limit} bytes {what}, which would have to be held in memory; "
                     "--max-document-bytes of data.preprocess allows more")


class Damage(Malformed):
    """All the rest of a file, which cannot be decompressed. It counts as one document."""

    def error(self, before: int) -> DataError:
        return DataError(f"{self.path}: cannot read: {self.reason}; it is in line {before + self.number + 1}")


@dataclass(frozen=True)
class Chunk:
    """Some bytes of a file, or where they are in it: then whoever works on the chunk reads them."""

    path: str
    offset: int
    """Bytes before it in the file (in the decompressed file, where it is compressed)."""
    size: int
    data: bytes | None = None
    """The bytes, where the file is compressed or a pipe, and can only be read from its start."""
    continues: bool = False
    """It begins inside a document."""
    unfinished: bool = False
    """It ends inside a document."""
    passed_over: int = 0
    """Bytes that follow in the file, belong to its last line, and are too many to be held."""
    damage: Damage | None = None
    """What comes after all that."""

    @property
    def end(self) -> int:
        """Where the next one begins."""
        return self.offset + self.size + self.passed_over

    def read(self) -> bytes:
        if self.data is not None:
            return self.data
        with reading(self.path), open(self.path, "rb") as file:
            file.seek(self.offset)
            data = file.read(self.size)
        if len(data) < self.size:
            raise DataError(f"{self.path}: cannot read: the file became shorter meanwhile")
        return data


def count_lines(data: bytes) -> int:
    """`data.count(b"\\n")`, which looks at one byte after the other."""
    return int(np.count_nonzero(np.frombuffer(data, np.uint8) == ord("\n")))
