"""Lines of shards, for stages that look at all documents: by ranges that workers share, or by their place.

Documents are numbered from 0 through all shards in order. Shards are what the stages write: every line is a document.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from data.storage import DataError
from data.webtext.document import Document, parse_shard_line

RANGE_BYTES = 1 << 20


@dataclass(frozen=True)
class LineRange:
    """The lines of a file that begin in [start, stop)."""

    path: str
    start: int
    stop: int


def whole_file(path: Path) -> LineRange:
    """All lines of a file."""
    try:
        return LineRange(str(path), 0, path.stat().st_size)
    except OSError as error:
        raise DataError(f"{path}: cannot read: {error.strerror}") from error


def split_into_ranges(path: Path, size: int = RANGE_BYTES) -> list[LineRange]:
    """Ranges of about `size` bytes; together they hold every line once."""
    stop = whole_file(path).stop
    return [LineRange(str(path), start, min(start + size, stop)) for start in range(0, stop, size)]


def read_lines(line_range: LineRange) -> Iterator[tuple[int, bytes]]:
    """(offset, line) of each; a line end that is missing at the end of the file is added."""
    with open(line_range.path, "rb") as file:
        offset = line_range.start
        if offset:  # the line that reaches over `start` belongs to the range before
            file.seek(offset - 1)
            offset += len(file.readline()) - 1
        while offset < line_range.stop and (line := file.readline()):
            yield offset, line if line.endswith(b"\n") else line + b"\n"
            offset += len(line)


def parse_document_at(path: str, offset: int, line: bytes) -> Document:
    """The document in a line, or an error that names the place."""
    return parse_shard_line(line, f"{path} (byte {offset})")


def read_shard_lines(path: Path) -> Iterator[bytes]:
    """Every line of a shard."""
    return (line for _, line in read_lines(whole_file(path)))


def shard_name(number: int) -> str:
    return f"part-{number:05d}.jsonl"


def machine_share(count: int, index: int, machines: int) -> range:
    """Which of `count` shards the index-th machine processes (from 0): neighbours."""
    return range(count * index // machines, count * (index + 1) // machines)
