"""`shuffle` and `split`: a seeded random order of all documents, and training, validation and test parts.

Shuffle: each document has a key, a bijection of its number. Shard k of n holds the k-th n-th of all keys: tasks over
input shards sort lines by key, tasks over output shards gather their ranges. Split: a document's part depends on its
text and the seed, so copies stay together.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from fractions import Fraction
from functools import partial
from itertools import accumulate, count
from pathlib import Path
from typing import IO

import numpy as np

from data.sampling import PARTS, parse_split
from data.storage import make_folder, staged_file
from data.webtext.documents import DocumentCounts, parse_shard_line, shard_name
from data.webtext.engines import Engine
from data.webtext.exchange import read_rows, rows_between, runs_in, write_run
from data.webtext.minhash import splitmix64

LINE_COLUMNS = 3  # of an index: key, offset and size of a line in a file of sorted lines


def run_shuffle(inputs: Sequence[Path], output: Path, engine: Engine, *, seed: int = 0, shards: int | None = None,
                memory: int = 1 << 30) -> Iterator[DocumentCounts]:
    """Write the shuffled shards, as many as the input has unless `shards` says how many."""
    work, total = make_folder(output / ".work"), shards or max(1, len(inputs))
    first = accumulate(engine.map(count_lines, inputs), initial=0)
    list(engine.map(partial(sort_lines, work=work, seed=seed, memory=memory // 4), list(zip(inputs, count(), first))))
    size = sum(path.stat().st_size for path in inputs)
    ranges = max(1, -(-4 * size // (memory * total)))  # of a shard's keys, each with a quarter of the memory
    yield from engine.map(partial(gather_lines, work=work, output=output, total=total, ranges=ranges), range(total))
    shutil.rmtree(work)


def count_lines(path: Path) -> int:
    with open(path, "rb") as lines:
        return sum(1 for _ in lines)


def sort_lines(task: tuple[Path, int, int], work: Path, seed: int, memory: int) -> None:
    """Write the lines of a shard, given as (path, number, number of its first document), in files sorted by key."""
    path, shard, first = task
    keys = shuffle_keys(seed, first)
    with open(path, "rb") as file:
        for part in count():
            if not (lines := file.readlines(memory)):
                break
            found = sorted((key, line) for line, key in zip(lines, keys))  # the keys are distinct
            # Of sorted lines a range of keys is a range of bytes, which the tasks of output shards find by the index.
            run = work / f"{shard:05d}.{part:05d}.rows"
            with staged_file(run.with_suffix(".lines")) as target:
                target.writelines(line for _, line in found)
            sizes = [len(line) for _, line in found]
            write_run(run, np.array([*zip((key for key, _ in found), accumulate(sizes, initial=0), sizes)], np.uint64))


def gather_lines(shard: int, work: Path, output: Path, total: int, ranges: int) -> DocumentCounts:
    """Write the shard of the k-th of `total` ranges of keys."""
    counts = DocumentCounts()
    with staged_file(output / shard_name(shard)) as target:
        for part in range(shard * ranges, (shard + 1) * ranges):
            low, high = (-(-(edge << 64) // (total * ranges)) for edge in (part, part + 1))
            found: list[tuple[int, bytes]] = []
            for run in runs_in(work):
                start, stop = rows_between(run, LINE_COLUMNS, low, high)
                with open(run.with_suffix(".lines"), "rb") as lines:
                    for key, offset, size in read_rows(run, LINE_COLUMNS, start, stop - start).tolist():
                        lines.seek(offset)
                        found.append((key, lines.read(size)))
            for _, line in sorted(found):
                target.write(line)
                counts.add_kept(len(line), line)
    return counts


def shuffle_keys(seed: int, first: int = 0) -> Iterator[int]:
    """The distinct keys of documents first, first + 1, ..."""
    start = splitmix64(np.array([seed % (1 << 64)], np.uint64))
    for block in count(first, 4096):
        yield from splitmix64(np.arange(block, block + 4096, dtype=np.uint64) ^ start).tolist()


def run_split(inputs: Sequence[Path], output: Path, engine: Engine, *, shares: str = "949,50,1",
              seed: int = 0) -> Iterator[DocumentCounts]:
    """Write the parts of each shard. A part without documents has no file."""
    for part in PARTS:
        make_folder(output / part)
    split_one = partial(split_shard, output=output, bounds=list(accumulate(parse_split(shares))), seed=seed)
    yield from engine.map(split_one, [(path, shard_name(number)) for number, path in enumerate(inputs)])


def split_shard(task: tuple[Path, str], output: Path, bounds: Sequence[Fraction], seed: int) -> DocumentCounts:
    """Split a shard, given as (path, output name): a part begins where the one before it ends in `bounds`."""
    path, name = task
    counts = DocumentCounts()
    with ExitStack() as stack:
        files: dict[str, IO[bytes]] = {}
        for line in stack.enter_context(open(path, "rb")):
            text = parse_shard_line(line, str(path)).text
            digest = hashlib.blake2b(text.encode(), digest_size=8, key=str(seed).encode()).digest()
            point = Fraction(int.from_bytes(digest, "big"), 1 << 64)
            part = PARTS[next(k for k, bound in enumerate(bounds) if point < bound)]
            if part not in files:
                files[part] = stack.enter_context(staged_file(output / part / name))
            files[part].write(line)
            counts.add_kept(len(line), line)
    return counts
