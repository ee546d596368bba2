"""Partitioned exchange of rows of 64-bit integers: tasks over shards write sorted runs of them, tasks over partitions
merge those whose first column lies in their range.

A folder holds the runs of one exchange. A run is a file of sorted rows, named by its task, so a task that runs again
replaces its runs. Memory is bounded by `memory` per task, whatever the distribution of rows, such as many equal ones.
A *document* is `shard << LINE_BITS | line`, both from 0, so documents in order are numbers in order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data.storage import make_folder, staged_file

Rows = NDArray[np.uint64]  # [rows, numbers]

Partition = tuple[int, int, int]  # (number, first value, end) of the first column

KEYS = 1 << 64  # end of the values of a column
LINE_BITS = 32
LINE_MASK = (1 << LINE_BITS) - 1
PARTITION_BYTES = 1 << 26  # of shards, for each partition; more of them cost more than they divide
MAX_PARTITIONS = 256  # each reads a little of every run


def partitions(shards: Sequence[Path], end: int) -> list[Partition]:
    """Equal ranges of the values from 0 to below `end`."""
    size = sum(path.stat().st_size for path in shards)
    number = max(1, min(len(shards), MAX_PARTITIONS, size // PARTITION_BYTES))
    return [(part, end * part // number, end * (part + 1) // number) for part in range(number)]


def write_runs(folder: Path, task: str, blocks: Iterable[Rows], memory: int) -> None:
    """Write rows in any order as sorted runs, each as large as the memory allows."""
    name, buffered, size, runs = make_folder(folder) / task, list[Rows](), 0, count()
    for block in blocks:
        capacity = max(1, memory // (32 * block.shape[1]))  # rows; sorting needs twice as much again
        for part in (block[start:start + capacity] for start in range(0, len(block), capacity)):
            if size + len(part) > capacity:
                write_run(name.with_suffix(f".{next(runs):05d}.rows"), _sort(np.concatenate(buffered)))
                buffered, size = [], 0
            buffered.append(part)
            size += len(part)
    if buffered:
        write_run(name.with_suffix(f".{next(runs):05d}.rows"), _sort(np.concatenate(buffered)))


def write_run(path: Path, rows: Rows) -> None:
    with staged_file(path) as file:
        file.write(np.ascontiguousarray(rows).data)


def runs_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.rows"))


def rows_between(run: Path, width: int, low: int, high: int) -> tuple[int, int]:
    """(first, end) of the rows of a run whose first column is at least `low` and below `high`."""
    column = np.memmap(run, np.uint64, "r").reshape(-1, width)[:, 0]
    return bisect_left(column, low), bisect_left(column, high)


def read_rows(run: Path, width: int, first: int, count: int) -> Rows:
    return np.fromfile(run, np.uint64, count * width, offset=8 * first * width).reshape(-1, width)


def merge_runs(folder: Path, width: int, low: int, high: int, memory: int) -> Iterator[Rows]:
    """The rows of all runs with a first column from `low` to below `high`, in order, in blocks. Holds a block of each
    run, and emits all rows up to the smallest last row of these blocks."""
    runs = [(run, *found) for run in runs_in(folder) if (found := rows_between(run, width, low, high))[0] < found[1]]
    rows_per_run = max(1, memory // (32 * width * max(1, len(runs))))
    cursors = [first for _, first, _ in runs]
    buffered = [np.empty((0, width), np.uint64) for _ in runs]
    while runs:
        # Refill every block each time; otherwise the emptiest one slows down all.
        for number, (run, _, stop) in enumerate(runs):
            wanted = min(rows_per_run - len(buffered[number]), stop - cursors[number])
            if wanted > 0:
                rows = read_rows(run, width, cursors[number], wanted)
                buffered[number] = np.concatenate([buffered[number], rows])
                cursors[number] += wanted
        # Rows still in a file come after the last buffered row of their run.
        lasts = [tuple(block[-1]) for block, at, (_, _, stop) in zip(buffered, cursors, runs) if at < stop]
        if not lasts:
            yield _sort(np.concatenate(buffered))
            break
        bound = min(lasts)
        cuts = [_rows_up_to(block, bound) for block in buffered]
        yield _sort(np.concatenate([block[:cut] for block, cut in zip(buffered, cuts)]))
        buffered = [block[cut:] for block, cut in zip(buffered, cuts)]


def iterate_rows(blocks: Iterable[Rows]) -> Iterator[list[int]]:
    """Rows one by one as Python integers, which need ten times the memory, so not all at once."""
    for block in blocks:
        for start in range(0, len(block), 1024):
            yield from block[start:start + 1024].tolist()


def pairs_with_equal_keys(blocks: Iterable[Rows], max_earlier: int) -> Iterator[Rows]:
    """Sorted rows (key ..., document) -> pairs (document, one of the first `max_earlier` documents with its key)."""
    head: Rows | None = None  # first rows of the last key so far
    for block in blocks:
        old = 0 if head is None else len(head)
        rows = block if head is None else np.concatenate([head, block])
        starts = np.flatnonzero(np.append(True, (rows[1:, :-1] != rows[:-1, :-1]).any(axis=1)))
        start = np.repeat(starts, np.diff(starts, append=len(rows)))
        later = np.arange(old, len(rows))
        for place in range(max_earlier):
            later = later[later - start[later] > place]
            if not len(later):
                break
            yield np.stack([rows[later, -1], rows[start[later] + place, -1]], axis=1)
        head = rows[starts[-1]:starts[-1] + max_earlier]


def _sort(rows: Rows) -> Rows:
    return rows[np.lexsort(rows.T[::-1])]


def _rows_up_to(rows: Rows, last: tuple[np.uint64, ...]) -> int:
    """Number of sorted rows that are not after `last`."""
    low, high = 0, len(rows)  # rows before low are smaller; rows from low to high are equal in the columns so far
    for column, number in zip(np.ascontiguousarray(rows.T), last):
        column = column[low:high]
        low, high = (low + int(np.searchsorted(column, number, side)) for side in ("left", "right"))
    return high
