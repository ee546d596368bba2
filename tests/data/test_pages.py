"""Rows of integers on a disk: each as it was written, or an error with the name of the file."""

from __future__ import annotations

import errno
import os
import pickle
import random
import sys
import threading
import tracemalloc
import zlib
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from data import stable_file
from data.stable_file import PAGE_BYTES, RowFile, write_row_file
from data.storage import DataError

TABLES = {"none": np.empty(0, np.int32), "none of two": np.empty((0, 2), np.int64), "one": np.array([7], np.int32),
          "a page": np.arange(1023, dtype=np.int32), "a page and one": np.arange(1024, dtype=np.int32),
          "large": np.arange(2000, dtype=np.int64) << 33, "negative": -np.arange(2000, dtype=np.int32),
          "pairs": np.arange(3000, dtype=np.int32).reshape(-1, 2),
          "pairs, large": np.arange(3000, dtype=np.int64).reshape(-1, 2), "the other order": np.arange(9, dtype=">i4")}


@pytest.mark.parametrize("values", TABLES.values(), ids=TABLES)
def test_rows_come_back_whatever_their_shape_type_and_order_of_reading(tmp_path: Path, values: np.ndarray) -> None:
    write_row_file(tmp_path / "rows", "name", values)
    assert (tmp_path / "rows").stat().st_size % PAGE_BYTES == 0
    found = RowFile(tmp_path / "rows", "name")
    assert found.shape == values.shape and len(found) == len(values)
    order = list(range(len(values)))
    for _ in range(2):
        for row in order:
            np.testing.assert_array_equal(found[row], values[row])
            assert found[row].dtype == values.dtype.newbyteorder("=")
        random.Random(0).shuffle(order)
    for outside in (-1, len(values)):
        with pytest.raises(IndexError):
            found[outside]
    pickled = pickle.dumps(found)
    del found, order[9:]  # and the open file with it
    again = pickle.loads(pickled)
    assert again.shape == values.shape and all((again[row] == values[row]).all() for row in order)


def page_by_page(name: str, values: np.ndarray) -> bytes:
    """The same file by a slow and obvious way."""
    dtype, columns = values.dtype.newbyteorder("<"), values.shape[1] if values.ndim > 1 else 0
    together = stable_file.PAGE_CONTENT_BYTES // (dtype.itemsize * max(1, columns))
    contents = [stable_file.ROW_FILE_HEADER.pack(stable_file.ROW_FILE_MAGIC, stable_file.ROW_FILE_VERSION,
                                                 dtype.str.encode(), len(values), columns)]
    contents += [values[at:at + together].astype(dtype).tobytes() for at in range(0, len(values), together)]
    filled = [content.ljust(stable_file.PAGE_CONTENT_BYTES, b"\0") for content in contents]
    return b"".join(content + zlib.crc32(content, zlib.crc32(f"{name} {number}".encode())).to_bytes(4, "little")
                    for number, content in enumerate(filled))


@pytest.mark.parametrize("at_a_time", [1, 2, 512])
@pytest.mark.parametrize("values", [*TABLES.values(), np.arange(9000).reshape(3, -1).T], ids=[*TABLES, "turned"])
def test_the_file_is_the_same_however_many_pages_are_written_together(tmp_path: Path, values: np.ndarray,
                                                                      at_a_time: int) -> None:
    with patch.object(stable_file, "PAGES_PER_WRITE", at_a_time):
        write_row_file(tmp_path / "rows", "name", values)
    assert (tmp_path / "rows").read_bytes() == page_by_page("name", values)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_row_file(tmp_path / "rows", "name", np.arange(2500).reshape(-1, 2))
    return tmp_path / "rows"


def read_all(path: Path, name: str = "name") -> None:
    rows = RowFile(path, name)
    for row in range(len(rows)):
        rows[row]


@pytest.mark.parametrize("fill", [0, 1])
def test_every_flipped_bit_is_refused(path: Path, fill: int) -> None:
    """Of every byte one, those of the header, of checksums and of what fills up the last page included."""
    good, draw = path.read_bytes(), random.Random(fill)
    rng = [place for start in range(0, len(good), PAGE_BYTES)
           for place in (*range(start, start + 40), start + PAGE_BYTES - 1)]
    for place in rng + [draw.randrange(len(good)) for _ in range(300)]:
        bad = bytearray(good)
        bad[place] ^= 1 << draw.randrange(8)
        path.write_bytes(bad)
        with pytest.raises(DataError,
                           match=rf"^{path}: damaged.* page {place // PAGE_BYTES} .*; delete it, and it is "):
            read_all(path)
    path.write_bytes(good)
    read_all(path)


def test_a_page_from_anywhere_else_is_refused(path: Path) -> None:
    good = path.read_bytes()
    write_row_file(path, "other", np.arange(2500).reshape(-1, 2) + 9)
    other = path.read_bytes()
    with pytest.raises(DataError, match=f"{path}: damaged, or made from something else: page 0 "):
        read_all(path)
    for to in range(len(good) // PAGE_BYTES):
        for source, page in [(good, page) for page in range(len(good) // PAGE_BYTES) if page != to] + [(other, to)]:
            path.write_bytes(good[:PAGE_BYTES * to] + source[PAGE_BYTES * page:PAGE_BYTES * (page + 1)] +
                             good[PAGE_BYTES * (to + 1):])
            with pytest.raises(DataError, match=f"^{path}: damaged, or made from something else: page {to} "):
                read_all(path)


@pytest.mark.parametrize("size", [0, 8, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1, 2 * PAGE_BYTES,
                                  6 * PAGE_BYTES - 1, 6 * PAGE_BYTES + 1, 7 * PAGE_BYTES])
def test_another_length_is_refused_when_it_is_opened(path: Path, size: int) -> None:
    os.truncate(path, size)
    with pytest.raises(DataError, match=f"^{path}: damaged: expected .* bytes.*, found {size}; delete it, and it is "):
        RowFile(path, "name")


def test_another_version_is_told_from_damage(path: Path) -> None:
    with patch.object(stable_file, "ROW_FILE_VERSION", 2):
        write_row_file(path, "name", np.arange(9))
    with pytest.raises(DataError, match=f"^{path}: expected rows of version 1, found version 2; delete it"):
        RowFile(path, "name")


@pytest.mark.parametrize("size", [0, 100, PAGE_BYTES, 2 * PAGE_BYTES, 6 * PAGE_BYTES - 1])
def test_a_file_that_is_cut_under_its_reader_is_an_error_and_no_signal(path: Path, size: int) -> None:
    rows = RowFile(path, "name")
    rows[0]
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


def test_threads_do_not_get_each_others_rows(path: Path) -> None:
    rows, wrong = RowFile(path, "name"), []

    def read(seed: int) -> None:
        draw = random.Random(seed)
        for row in [draw.randrange(1250) for _ in range(3000)]:
            if rows[row].tolist() != [2 * row, 2 * row + 1]:
                wrong.append(row)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    write_row_file(tmp_path / "rows", "name", np.arange(500_000))
    tracemalloc.start()
    try:
        rows = RowFile(tmp_path / "rows", "name")
        assert sum(int(rows[row]) for row in range(0, 500_000, 97)) == sum(range(0, 500_000, 97))
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
