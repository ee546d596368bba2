"""Rows of integers on a disk: each as it was written, or an error with the name of the file."""

from __future__ import annotations

import errno
import os
import pickle
import random
import tracemalloc
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from data import stable_file
from data.stable_file import RowFile, write_row_file
from data.storage import DataError

TABLES = {"none": np.empty(0, np.int32), "none of two": np.empty((0, 2), np.int64), "one": np.array([7], np.int32),
          "large": np.arange(2000, dtype=np.int64) << 33, "negative": -np.arange(2000, dtype=np.int32),
          "pairs": np.arange(3000, dtype=np.int32).reshape(-1, 2), "transposed": np.arange(9000).reshape(3, -1).T,
          "pairs, large": np.arange(3000, dtype=np.int64).reshape(-1, 2), "big endian": np.arange(9, dtype=">i4")}


@pytest.mark.parametrize("values", TABLES.values(), ids=TABLES)
def test_rows_come_back_whatever_their_shape_and_type(tmp_path: Path, values: np.ndarray) -> None:
    write_row_file(tmp_path / "rows", "name", values)
    found = pickle.loads(pickle.dumps(RowFile(tmp_path / "rows", "name")))
    assert found.shape == values.shape and len(found) == len(values)
    for row in range(len(values)):
        np.testing.assert_array_equal(found[row], values[row])
        assert found[row].dtype == values.dtype.newbyteorder("=")
    for outside in (-1, len(values)):
        with pytest.raises(IndexError):
            found[outside]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_row_file(tmp_path / "rows", "name", np.arange(2500).reshape(-1, 2))
    return tmp_path / "rows"


def test_every_flipped_bit_is_refused(path: Path) -> None:
    good, draw = path.read_bytes(), random.Random(0)
    for place in [*range(stable_file.ROW_FILE_HEADER.size), *draw.sample(range(len(good)), 300), len(good) - 1]:
        bad = bytearray(good)
        bad[place] ^= 1 << draw.randrange(8)
        path.write_bytes(bad)
        with pytest.raises(DataError, match=f"^{path}: damaged, or made from something else: .*; delete it, and it is"):
            RowFile(path, "name")
    path.write_bytes(good)
    assert RowFile(path, "name")[1249].tolist() == [2498, 2499]


@pytest.mark.parametrize("size", [0, 8, stable_file.ROW_FILE_HEADER.size, 20_000, 20_040])
def test_another_length_or_another_name_is_refused_when_it_is_opened(path: Path, size: int) -> None:
    with pytest.raises(DataError, match=f"^{path}: damaged, or made from something else: "):
        RowFile(path, "other")
    os.truncate(path, size)
    with pytest.raises(DataError, match=f"^{path}: damaged, or made from something else: .*; delete it, and it is"):
        RowFile(path, "name")


@pytest.mark.parametrize("size", [0, 100, 20_000])
def test_a_file_that_is_cut_under_its_reader_is_an_error_and_no_signal(path: Path, size: int) -> None:
    rows = RowFile(path, "name")
    os.truncate(path, size)
    with pytest.raises(DataError, match=f"^{path}: size: .* bytes when it was opened, {size} now; delete it, "):
        rows[len(rows) - 1]


def test_a_file_that_is_deleted_or_made_anew_is_read_on(path: Path) -> None:
    rows = RowFile(path, "name")
    path.unlink()
    assert rows[1249].tolist() == [2498, 2499]
    write_row_file(path, "name", np.zeros((1250, 2), np.int64))
    assert rows[3].tolist() == [6, 7] and RowFile(path, "name")[3].tolist() == [0, 0]


def test_a_disk_that_cannot_read_is_named_without_the_advice_to_delete(path: Path) -> None:
    with patch("data.stable_file.os.preadv", side_effect=OSError(errno.EIO, "Input/output error")):
        with pytest.raises(DataError, match=f"^{path}: cannot read: Input/output error$"):
            RowFile(path, "name")
    with pytest.raises(DataError, match="nowhere: cannot read: No such file"):
        RowFile(path.with_name("nowhere"), "name")


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    write_row_file(tmp_path / "rows", "name", np.arange(500_000))
    tracemalloc.start()
    try:
        rows = RowFile(tmp_path / "rows", "name")
        assert sum(int(rows[row]) for row in range(0, 500_000, 97)) == sum(range(0, 500_000, 97))
        assert tracemalloc.get_traced_memory()[1] < 2_500_000
    finally:
        tracemalloc.stop()
