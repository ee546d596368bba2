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
from data.webtext.counts import Counts
from data.webtext.shards import document_at, lines, shard_lines, share, shard_name, whole

PARTS = ("train", "valid", "test")
METHODS = ("hash", "count")

Report = Callable[[Counts], None]


@dataclass(frozen=True)
class Options:
    shares: str = "949,50,1"
    method: str = METHODS[0]
    seed: int = 0
    part: tuple[int, int] = (0, 1)
    """(i, n): split the i-th n-th of the shards."""


@dataclass(frozen=True)
class Task:
    """One shard to split."""

    path: Path
    output: Path
    name: str
    first: int
    """Number of its first document, where that is known."""


def run(inputs: Sequence[Path], output: Path, options: Options, workers: int, report: Report) -> None:
    """Write the parts of each shard. A part without documents has no file."""
    shares = parse_split(options.shares)
    firsts, ranges = [0] * len(inputs), []
    if options.method == "count":
        *firsts, total = accumulate(ordered_map(count_lines, inputs, workers), initial=0)
        ranges = split_documents(shares, total)
    for part in PARTS:
        make_folder(output / part)
    tasks = [Task(inputs[number], output, shard_name(number), firsts[number])
             for number in share(len(inputs), *options.part)]
    for counts in ordered_map(partial(split_shard, shares=shares, ranges=ranges, seed=options.seed), tasks, workers):
        report(counts)


def split_shard(task: Task, shares: Sequence[Fraction], ranges: Sequence[range], seed: int) -> Counts:
    """By the ranges of document numbers, or if there are none by hash."""
    counts = Counts()
    with ExitStack() as stack:
        files: dict[str, IO[bytes]] = {}
        for number, (offset, line) in enumerate(lines(whole(task.path)), start=task.first):
            if ranges:
                place = next(k for k, documents in enumerate(ranges) if number in documents)
            else:
                place = part_by_hash(document_at(str(task.path), offset, line).text, shares, seed)
            part = PARTS[place]
            if part not in files:
                files[part] = stack.enter_context(staged_file(task.output / part / task.name))
            files[part].write(line)
            counts.keep(len(line), len(line))
    return counts


def part_by_hash(text: str, shares: Sequence[Fraction], seed: int) -> int:
    """Which part a text belongs to."""
    digest = hashlib.blake2b(text.encode(), digest_size=8, key=str(seed).encode()).digest()
    point = Fraction(int.from_bytes(digest, "big"), 1 << 64)
    return next(place for place, bound in enumerate(accumulate(shares)) if point < bound)


def count_lines(path: Path) -> int:
    return sum(1 for _ in shard_lines(path))
