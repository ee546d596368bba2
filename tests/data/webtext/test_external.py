"""Sorting outside memory, against sorting inside."""

from __future__ import annotations

import os
import random
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from data.webtext.external_sort import Rows, RowSorter, iterate_rows, pairs_with_equal_keys
from data.webtext.split import LineBuckets


def random_rows(rng: np.random.Generator, count: int, width: int, high: int) -> Rows:
    return rng.integers(0, high, (count, width), dtype=np.uint64, endpoint=True)


@pytest.mark.parametrize("memory", [1, 2000, 20_000, 1 << 20])
@pytest.mark.parametrize("high", [0, 3, (1 << 64) - 1])  # all equal, mostly equal, all distinct
def test_rows_come_back_sorted_whatever_fits(memory: int, high: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(memory)
    for width in (1, 3):
        for count in (0, 1, 700):
            sorter, parts = RowSorter(tmp_path, width, memory), []
            for size in (count // 3, 0, count - count // 3):
                parts.append(random_rows(rng, size, width, high))
                sorter.add(parts[-1])
            expected = sorted(map(tuple, np.concatenate(parts).tolist()))
            assert [tuple(row) for row in iterate_rows(sorter.sorted())] == expected
    assert os.listdir(tmp_path) == []


def test_blocks_are_bounded_by_memory_even_if_all_rows_are_equal(tmp_path: Path) -> None:
    memory = 1 << 14
    sorter = RowSorter(tmp_path, 2, memory)
    for _ in range(10):
        sorter.add(np.ones((1000, 2), np.uint64))
    sizes = [block.nbytes for block in sorter.sorted()]
    assert sum(sizes) == 10 * 1000 * 16 and max(sizes) <= memory // 4


@pytest.mark.parametrize("crowd", [1, 3, 100])
@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_equals_are_paired_across_any_blocks(crowd: int, size: int) -> None:
    rng = random.Random(crowd)
    rows = sorted((rng.choice([0, 1, 1, 1, 7, document]), 0, document) for document in range(300))
    blocks = [np.array(rows[start:start + size], np.uint64) for start in range(0, len(rows), size)]
    expected = []
    for key in {row[:2] for row in rows}:
        group = [row[2] for row in rows if row[:2] == key]
        expected += [(later, earlier) for earlier, later in combinations(group, 2) if earlier in group[:crowd]]
    assert sorted(map(tuple, iterate_rows(pairs_with_equal_keys(blocks, crowd)))) == sorted(expected)


@pytest.mark.parametrize("memory", [1, 500, 1 << 20])
def test_lines_of_a_bucket_come_in_the_order_of_their_keys(memory: int, tmp_path: Path) -> None:
    rng = random.Random(memory)
    buckets = LineBuckets(tmp_path, 7, memory)
    keys = [rng.getrandbits(64) for _ in range(500)]
    for key in keys:
        buckets.add(key % 7, key, b"x" * (key % 50) + b"%d\n" % key)
    for bucket in range(7):
        assert list(buckets.lines(bucket)) == [
            b"x" * (key % 50) + b"%d\n" % key for key in sorted(keys) if key % 7 == bucket]
    assert os.listdir(tmp_path) == []
