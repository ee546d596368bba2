"""External sort of rows of 64-bit numbers in bounded memory: `RowSorter` spills to a file that vanishes with it."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data.storage import write_errors_for

Rows = NDArray[np.uint64]
"""[rows, numbers]."""


class RowSorter:
    """Takes rows in any order and returns them sorted. Merge sort: each full buffer becomes a sorted run in a file.
    Merging holds a block of every run, and emits all rows up to the smallest last row of these blocks. Memory does not
    depend on the distribution of rows, such as many equal ones."""

    def __init__(self, folder: Path, width: int, memory: int) -> None:
        self._folder, self._width = folder, width
        self._capacity = max(1, memory // (32 * width))  # rows; sorting needs twice as much again
        self._buffered: list[Rows] = []
        self._buffered_rows = 0
        self._runs: list[tuple[int, int]] = []  # (first row, end row) in the file
        with write_errors_for(folder):
            self._file = tempfile.TemporaryFile(dir=folder)
        weakref.finalize(self, self._file.close)

    def add(self, rows: Rows) -> None:
        for start in range(0, len(rows), self._capacity):
            part = rows[start:start + self._capacity]
            if self._buffered_rows + len(part) > self._capacity:
                self._spill()
            self._buffered.append(part)
            self._buffered_rows += len(part)

    def add_each(self, rows: Iterable[Sequence[int]]) -> None:
        """Add rows one by one."""
        iterator = iter(rows)
        while part := list(islice(iterator, 1024)):
            self.add(np.array(part, np.uint64))

    def sorted(self) -> Iterator[Rows]:
        """All rows in order, in blocks."""
        if self._runs:
            self._spill()
            yield from self._merged()
        elif self._buffered:
            yield _sort(np.concatenate(self._buffered))

    def _spill(self) -> None:
        first = self._runs[-1][1] if self._runs else 0
        self._runs.append((first, first + self._buffered_rows))
        with write_errors_for(self._folder):
            self._file.seek(first * self._width * 8)
            self._file.write(_sort(np.concatenate(self._buffered)).data)
        self._buffered, self._buffered_rows = [], 0

    def _merged(self) -> Iterator[Rows]:
        rows_per_run = max(1, self._capacity // len(self._runs))
        cursors = [first for first, _ in self._runs]
        buffered = [np.empty((0, self._width), np.uint64) for _ in self._runs]
        while True:
            # Refill every block each time; otherwise the emptiest one slows down all.
            for number, (_, stop) in enumerate(self._runs):
                count = min(rows_per_run - len(buffered[number]), stop - cursors[number])
                if count > 0:
                    self._file.seek(cursors[number] * self._width * 8)
                    rows = np.frombuffer(self._file.read(count * self._width * 8), np.uint64).reshape(count, -1)
                    buffered[number] = np.concatenate([buffered[number], rows])
                    cursors[number] += count
            # Rows still in the file come after the last buffered row of their run.
            lasts = [tuple(block[-1]) for block, at, (_, stop) in zip(buffered, cursors, self._runs) if at < stop]
            if not lasts:
                break
            bound = min(lasts)
            cuts = [_rows_up_to(block, bound) for block in buffered]
            yield _sort(np.concatenate([block[:cut] for block, cut in zip(buffered, cuts)]))
            buffered = [block[cut:] for block, cut in zip(buffered, cuts)]
        yield _sort(np.concatenate(buffered))


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
