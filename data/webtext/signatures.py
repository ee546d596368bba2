"""What duplicates are found by, on disk: one row of numbers per document, one file per shard.

A row holds the size of the document's line in bytes, a 128-bit digest of its text as two numbers (white space counts
only as a separator), and its bands (`minhash`; zeros if it is shorter than one shingle). A file is made once for a
shard as it is, so a search that was stopped goes on, and machines can share the work.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from data.parallel import ordered_map
from data.storage import DataError, make_folder, staged_file
from data.webtext.external import Rows
from data.webtext.minhash import Banding, minhash_signatures, shingle_hashes
from data.webtext.shards import LineRange, parse_document_at, read_lines, split_into_ranges

SIZE_COLUMN, DIGEST_COLUMNS, BAND_COLUMNS = 0, slice(1, 3), slice(3, None)
"""Columns of a row."""
WHITE_SPACE = re.compile(r"\s")
DIGEST_BLOCK_CHARACTERS = 1 << 18
"""Characters that are split into words together, so that a text of 50 MB is never a list of ten million words."""
SIGNATURE_VERSION = 1
"""Part of the file names; to be raised when the same text gets other numbers."""


def write_signatures(shards: Sequence[Path], shard_numbers: range, folder: Path, banding: Banding,
                     workers: int) -> None:
    """Make those files of the wanted shards that are not there yet."""
    make_folder(folder)
    missing = [(shards[number], target) for number in shard_numbers
               if not (target := _signature_file(folder, number, shards[number], banding)).exists()]
    ranges = [split_into_ranges(shard) for shard, _ in missing]
    rows = ordered_map(partial(signature_rows, banding=banding), (piece for pieces in ranges for piece in pieces),
                       workers)
    for (_, target), line_ranges in zip(missing, ranges):
        with staged_file(target) as file:
            for _ in line_ranges:
                file.write(next(rows).data)


def signature_rows(line_range: LineRange, banding: Banding) -> Rows:
    """The rows of some neighbouring documents."""
    found = list(read_lines(line_range))
    rows = np.zeros((len(found), 3 + banding.bands), np.uint64)
    shingles = []
    for row, (offset, line) in zip(rows, found):
        text = parse_document_at(line_range.path, offset, line).text
        row[SIZE_COLUMN] = len(line)
        row[DIGEST_COLUMNS] = np.frombuffer(text_digest(text), "<u8")
        shingles.append(shingle_hashes(text))
    long_enough = np.array(list(map(len, shingles)), bool)
    rows[long_enough, BAND_COLUMNS] = banding.bands_of(minhash_signatures([some for some in shingles if len(some)]))
    return rows


def text_digest(text: str) -> bytes:
    """128 bits that stand for the text, white space made equal."""
    state, start = hashlib.blake2b(digest_size=16), 0
    while start < len(text):
        space = WHITE_SPACE.search(text, start + DIGEST_BLOCK_CHARACTERS)
        stop = space.start() if space else len(text)
        if words := text[start:stop].split():
            state.update(f"{' '.join(words)} ".encode())
        start = stop
    return state.digest()


@dataclass(frozen=True)
class SignatureFiles:
    """The rows of all documents."""

    files: Sequence[Path]
    width: int
    first_documents: np.ndarray[tuple[int], np.dtype[np.int64]]
    """Number of the first document of each shard, and after the last the number of documents."""

    @classmethod
    def open(cls, shards: Sequence[Path], folder: Path, banding: Banding) -> SignatureFiles:
        files = [_signature_file(folder, number, shard, banding) for number, shard in enumerate(shards)]
        width = 3 + banding.bands
        counts = [file.stat().st_size // (8 * width) for file in files]
        return cls(files, width, np.cumsum([0, *counts], dtype=np.int64))

    @property
    def documents(self) -> int:
        return int(self.first_documents[-1])

    def blocks(self, memory: int) -> Iterator[tuple[int, int, Rows]]:
        """(shard, number of the first document, rows) for neighbouring documents, about `memory` bytes at a time."""
        size = max(1, memory // (8 * self.width)) * 8 * self.width
        for shard, path in enumerate(self.files):
            first = int(self.first_documents[shard])
            with open(path, "rb") as file:
                while raw := file.read(size):
                    rows = np.frombuffer(raw, np.uint64).reshape(-1, self.width)
                    yield shard, first, rows
                    first += len(rows)


def _signature_file(folder: Path, number: int, shard: Path, banding: Banding) -> Path:
    """The name holds all that the rows depend on, as far as it can be known without reading the shard."""
    try:
        status = os.stat(shard)
    except OSError as error:
        raise DataError(f"{shard}: cannot read: {error.strerror}") from error
    facts = repr((SIGNATURE_VERSION, shard.name, status.st_size, status.st_mtime_ns, banding))
    return folder / f"{number:05d}-{hashlib.blake2b(facts.encode(), digest_size=8).hexdigest()}.rows"
