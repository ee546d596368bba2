"""`lines`: leave out lines, or paragraphs, that an earlier document has: menus, notices and quotations of a crawl.

Compared exactly, but for white space; those of fewer than `min_words` words stay, and so do repetitions within a
document (`quality --rules repetition` sees these). The first document with a line keeps it. A document of which nothing
is left is dropped. Rows of (digest as two numbers, document) are exchanged (exchange.py) in memory of about `memory`.
"""

from __future__ import annotations

import re
import shutil
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path

import numpy as np

from data.storage import make_folder
from data.webtext.documents import DocumentCounts, ShardWriter, parse_shard_line, shard_name
from data.webtext.engines import Engine
from data.webtext.exchange import (KEYS, LINE_BITS, Partition, Rows, iterate_rows, merge_runs, partitions,
                                   write_runs)

UNITS = ("lines", "paragraphs")
_SEPARATORS = {"lines": re.compile(r"(\n)"), "paragraphs": re.compile(r"(\n\s*\n)")}
COPIED = "only copied lines"

Digest = tuple[int, int]  # 128 bits


def run_lines(inputs: Sequence[Path], output: Path, engine: Engine, *, unit: str, min_words: int,
              memory: int) -> Iterator[DocumentCounts]:
    """Write each input shard without the lines of earlier documents."""
    tasks, shards = LineTasks(output, make_folder(output / ".work"), unit, min_words, memory), [*enumerate(inputs)]
    list(engine.map(tasks.write_digests, shards))
    list(engine.map(tasks.find_copies, partitions(inputs, KEYS)))
    yield from engine.map(tasks.write_shard, shards)
    shutil.rmtree(tasks.work)


@dataclass(frozen=True)
class LineTasks:
    """What a task does with a shard or a partition, in the order of `run_lines`."""

    output: Path
    work: Path
    unit: str
    min_words: int
    memory: int

    def digested_parts(self, text: str) -> Iterator[tuple[str, Digest | None]]:
        """(part with the separator behind it, its digest) of each line or paragraph; None: it is too short."""
        parts = [*_SEPARATORS[self.unit].split(text), ""]
        for part, separator in zip(parts[::2], parts[1::2]):
            words, digest = part.split(), None
            if words and len(words) >= self.min_words:
                raw = blake2b(" ".join(words).encode("utf-8", "surrogatepass"), digest_size=16).digest()
                digest = int.from_bytes(raw[:8], "little"), int.from_bytes(raw[8:], "little")
            yield part + separator, digest

    def write_digests(self, shard: tuple[int, Path]) -> None:
        """Each digest once a document."""
        (number, path), rows = shard, array("Q")
        with open(path, "rb") as lines:
            for document, line in enumerate(lines, start=number << LINE_BITS):
                digests = {digest for _, digest in self.digested_parts(parse_shard_line(line, str(path)).text)}
                for digest in filter(None, digests):
                    rows.extend((*digest, document))
        write_runs(self.work / "digests", f"{number:05d}", [np.array(rows, np.uint64).reshape(-1, 3)], self.memory)

    def find_copies(self, partition: Partition) -> None:
        """Rows (document, digest) of the digests that an earlier document has."""
        number, low, high = partition
        blocks = merge_runs(self.work / "digests", 3, low, high, self.memory)
        write_runs(self.work / "copies", f"{number:05d}", copied_rows(blocks), self.memory)

    def write_shard(self, shard: tuple[int, Path]) -> DocumentCounts:
        number, path = shard
        first = number << LINE_BITS
        copied = defaultdict[int, set[Digest]](set)  # document -> digests of what it copies
        for document, *digest in iterate_rows(merge_runs(self.work / "copies", 3, first, first + (1 << LINE_BITS),
                                                         self.memory)):
            copied[document].add((digest[0], digest[1]))
        with ShardWriter(self.output / shard_name(number), "lines") as out, open(path, "rb") as lines:
            for document, line in enumerate(lines, start=first):
                kept = self._without(line, copied[document], str(path)) if document in copied else line
                if kept is None:
                    out.drop(COPIED, len(line), line)
                else:
                    out.keep(len(line), kept)
        return out.counts

    def _without(self, line: bytes, copied: set[Digest], path: str) -> bytes | None:
        document = parse_shard_line(line, path)
        text = "".join(part for part, digest in self.digested_parts(document.text) if digest not in copied).strip()
        return replace(document, text=text).to_line() if text else None


def copied_rows(blocks: Iterable[Rows]) -> Iterator[Rows]:
    """Sorted rows (digest, document) -> (document, digest) of those with the digest of the row before."""
    last = np.empty((0, 3), np.uint64)
    for block in blocks:
        rows = np.concatenate([last, block])
        yield rows[1:][(rows[1:, :2] == rows[:-1, :2]).all(axis=1)][:, [2, 0, 1]]
        last = rows[-1:]
