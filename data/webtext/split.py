"""Training, validation and test documents: folders `train`, `valid` and `test` of shards, in the order they came in.

By *hash*, a document's part depends on its text and the seed, alone: it stays where it is when the corpus grows, and
copies never end up in two parts. The shares are as exact as chance allows. By *count*, the first documents are for
training, the next for validation, the last for the test, to the document: for a corpus that is shuffled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import IO

from data.parallel import ordered_map
from data.sampling import parse_split, split_documents
from data.storage import make_folder, staged_file
from data.webtext.counts import DocumentCounts
from data.webtext.shards import machine_share, parse_document_at, read_lines, read_shard_lines, shard_name, whole_file

PARTS = ("train", "valid", "test")
SPLIT_METHODS = ("hash", "count")

ReportSplit = Callable[[DocumentCounts], None]


@dataclass(frozen=True)
class SplitOptions:
    shares: str = "949,50,1"
    method: str = SPLIT_METHODS[0]
    seed: int = 0
    part: tuple[int, int] = (0, 1)
    """(i, n): split the i-th n-th of the shards."""


@dataclass(frozen=True)
class SplitTask:
    """One shard to split."""

    path: Path
    output: Path
    name: str
    first: int
    """Number of its first document, where that is known."""


def run_split(inputs: Sequence[Path], output: Path, options: SplitOptions, workers: int, report: ReportSplit) -> None:
    """Write the parts of each shard. A part without documents has no file."""
    shares = parse_split(options.shares)
    firsts, ranges = [0] * len(inputs), []
    if options.method == "count":
        *firsts, total = accumulate(ordered_map(count_shard_lines, inputs, workers), initial=0)
        ranges = split_documents(shares, total)
    for part in PARTS:
        make_folder(output / part)
    tasks = [SplitTask(inputs[number], output, shard_name(number), firsts[number])
             for number in machine_share(len(inputs), *options.part)]
    for counts in ordered_map(partial(split_shard, shares=shares, ranges=ranges, seed=options.seed), tasks, workers):
        report(counts)


def split_shard(task: SplitTask, shares: Sequence[Fraction], ranges: Sequence[range], seed: int) -> DocumentCounts:
    """By the ranges of document numbers, or if there are none by hash."""
    counts = DocumentCounts()
    with ExitStack() as stack:
        files: dict[str, IO[bytes]] = {}
        for number, (offset, line) in enumerate(read_lines(whole_file(task.path)), start=task.first):
            if ranges:
                place = next(k for k, documents in enumerate(ranges) if number in documents)
            else:
                place = part_of_text_hash(parse_document_at(str(task.path), offset, line).text, shares, seed)
            part = PARTS[place]
            if part not in files:
                files[part] = stack.enter_context(staged_file(task.output / part / task.name))
            files[part].write(line)
            counts.add_kept(len(line), len(line))
    return counts


def part_of_text_hash(text: str, shares: Sequence[Fraction], seed: int) -> int:
    """Which part a text belongs to."""
    digest = hashlib.blake2b(text.encode(), digest_size=8, key=str(seed).encode()).digest()
    point = Fraction(int.from_bytes(digest, "big"), 1 << 64)
    return next(place for place, bound in enumerate(accumulate(shares)) if point < bound)


def count_shard_lines(path: Path) -> int:
    return sum(1 for _ in read_shard_lines(path))
