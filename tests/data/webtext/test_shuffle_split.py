"""The order and the parts of a corpus depend on seed and documents alone; sorting outside memory equals that inside."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from itertools import combinations, islice
from pathlib import Path

import numpy as np
import pytest

from data.storage import DataError
from data.webtext import split
from data.webtext.dedup import RowSorter, iterate_rows, pairs_with_equal_keys
from data.webtext.documents import Document, DocumentCounts, shard_name
from data.webtext.minhash import Rows


def write_shards(folder: Path, sizes: Sequence[int]) -> list[Path]:
    """Documents that hold their numbers."""
    folder.mkdir()
    number, paths = 0, []
    for shard, size in enumerate(sizes):
        paths.append(folder / shard_name(shard))
        documents = (Document(f"{n} " + "x" * (n % 90)) for n in range(number, number + size))
        paths[-1].write_bytes(b"".join(document.to_line() for document in documents))
        number += size
    return paths


def numbers_of(folder: Path) -> list[int]:
    return [int(json.loads(line)["text"].split()[0]) for path in sorted(folder.glob("part-*"))
            for line in path.read_bytes().splitlines()]


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("part-*")}


def test_the_order_is_that_of_the_keys(tmp_path: Path) -> None:
    shards = write_shards(tmp_path / "in", [100, 0, 333, 67])
    counts: list[DocumentCounts] = []
    split.run_shuffle(shards, tmp_path / "out", split.ShuffleOptions(seed=5), 1, counts.append)
    keys = list(islice(split.shuffle_keys(5), 500))
    assert len(set(keys)) == 500
    assert numbers_of(tmp_path / "out") == sorted(range(500), key=keys.__getitem__) != list(range(500))
    assert sum(c.documents_kept for c in counts) == sum(c.documents_in for c in counts) == 500
    assert sorted(os.listdir(tmp_path / "out")) == [shard_name(k) for k in range(4)]


def test_memory_shards_and_machines_do_not_change_the_order(tmp_path: Path) -> None:
    shards = write_shards(tmp_path / "in", [200, 300])
    split.run_shuffle(shards, tmp_path / "a", split.ShuffleOptions(), 1, lambda _: None)
    split.run_shuffle(shards, tmp_path / "b", split.ShuffleOptions(memory=1000), 2, lambda _: None)
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")
    split.run_shuffle(shards, tmp_path / "c", split.ShuffleOptions(shards=7), 1, lambda _: None)
    assert numbers_of(tmp_path / "a") == numbers_of(tmp_path / "c")
    for machine in range(3):
        options = split.ShuffleOptions(shards=7, memory=9999)
        split.run_shuffle(shards, tmp_path / "d", options, 1, lambda _: None, (machine, 3))
    assert files_of(tmp_path / "c") == files_of(tmp_path / "d")


def test_nothing_to_shuffle_and_more_machines_than_shards(tmp_path: Path) -> None:
    split.run_shuffle([], tmp_path / "none", split.ShuffleOptions(), 1, lambda _: None)
    assert files_of(tmp_path / "none") == {shard_name(0): b""}
    shards = write_shards(tmp_path / "in", [5])
    for machine in range(3):
        split.run_shuffle(shards, tmp_path / "out", split.ShuffleOptions(), 1, lambda _: None, (machine, 3))
    assert sorted(numbers_of(tmp_path / "out")) == list(range(5))


def test_every_place_is_equally_likely_and_seeds_differ() -> None:
    places = np.array([np.argsort(np.argsort(list(islice(split.shuffle_keys(seed), 100)))) for seed in range(300)])
    assert len({tuple(row) for row in places.tolist()}) == 300
    # The mean place of each document over seeds: 49.5, deviation 28.9 / sqrt(300) = 1.67; five of them.
    assert abs(places.mean(axis=0) - 49.5).max() < 5 * 1.67
    # Neighbours before are not neighbours after: 2 in 100 by chance.
    assert 0.01 < (abs(np.diff(places, axis=1)) == 1).mean() < 0.03


@pytest.mark.parametrize("method", split.SPLIT_METHODS)
def test_every_document_is_in_one_part_in_order(method: str, tmp_path: Path) -> None:
    shards = write_shards(tmp_path / "in", [500, 0, 700])
    counts: list[DocumentCounts] = []
    split.run_split(shards, tmp_path / "out", split.SplitOptions("80,15,5", method), 1, counts.append)
    found = [numbers_of(tmp_path / "out" / part) for part in split.PARTS]
    assert sorted(sum(found, [])) == list(range(1200)) and all(part == sorted(part) for part in found)
    assert sum(c.documents_kept for c in counts) == 1200
    if method == "count":
        assert found == [list(range(960)), list(range(960, 1140)), list(range(1140, 1200))]
    else:
        for part, share in zip(found, (0.80, 0.15, 0.05)):
            assert abs(len(part) - 1200 * share) < 4 * (1200 * share * (1 - share)) ** 0.5


def test_workers_and_machines_make_the_same_files(tmp_path: Path) -> None:
    shards = write_shards(tmp_path / "in", [40, 50, 60, 70])
    for method in split.SPLIT_METHODS:
        split.run_split(shards, tmp_path / f"{method}1", split.SplitOptions("8,1,1", method), 1, lambda _: None)
        for machine in range(2):
            split.run_split(shards, tmp_path / f"{method}2", split.SplitOptions("8,1,1", method), 1 + machine,
                            lambda _: None, (machine, 2))
        assert files_of(tmp_path / f"{method}1") == files_of(tmp_path / f"{method}2")


def test_shares_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="expected up to three numbers"):
        split.run_split([], tmp_path / "out", split.SplitOptions("a,b"), 1, lambda _: None)


# ----------------------------------------------------------------------------------------------- sorting outside memory

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
