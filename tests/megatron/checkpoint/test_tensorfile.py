"""Our safetensors files are everyone's: the library reads them, and a damaged one is an error, not a crash."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import weakref
import zlib
from itertools import accumulate, pairwise
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from data.storage import crc32_file
from megatron.checkpoint import safetensors_io
from megatron.checkpoint.manifest import FileEntry
from megatron.checkpoint.safetensors_io import (DTYPES, O_DIRECT, READ_BYTES, FileTensor, SafetensorsReader,
                                                file_parts, split_files, write_file, write_parts)
from megatron.errors import CheckpointError


def item(key: str, tensor: torch.Tensor) -> FileTensor:
    return FileTensor(key, tensor.dtype, tuple(tensor.shape), lambda: tensor)


def tensors() -> dict[str, torch.Tensor]:
    """One of each dtype, with odd lengths; one empty, one scalar, one not contiguous."""
    made = {name: (torch.arange(7) % 2).to(dtype) for name, dtype in DTYPES.items()}
    return made | {"empty": torch.empty(0, 3), "scalar": torch.tensor(2.5), "turned": torch.arange(6.0).view(2, 3).T}


def test_the_library_reads_what_we_write(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    (batch,) = split_files([item(key, tensor) for key, tensor in tensors().items()])
    entry = write_file(path, file_parts(batch))
    assert (entry.size, entry.crc32) == (path.stat().st_size, crc32_file(path))
    for read in (load_file(path), {key: SafetensorsReader(path, "f").tensor(key) for key in tensors()}):
        assert set(read) == set(tensors())
        for key, tensor in tensors().items():
            assert read[key].dtype == tensor.dtype and torch.equal(read[key], tensor), key


def test_a_tensor_is_freed_before_the_next_one_is_loaded(tmp_path: Path) -> None:
    loaded: list[weakref.ref[np.ndarray]] = []

    def load() -> torch.Tensor:
        assert not any(other() is not None for other in loaded)
        memory = np.zeros(4, np.float32)
        loaded.append(weakref.ref(memory))
        return torch.from_numpy(memory)

    write_file(tmp_path / "f", file_parts([FileTensor(key, torch.float32, (4,), load) for key in "abc"]))
    assert len(loaded) == 3


def test_a_file_under_reading_has_little_memory(tmp_path: Path) -> None:
    wanted = torch.ones(4 * READ_BYTES // 4)
    write_file(tmp_path / "f", file_parts([item("w", wanted)]))
    file = SafetensorsReader(tmp_path / "f", "f")
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.zeros(len(wanted), dtype=dtype)
        before = in_kilobytes("VmHWM")
        file.read("w", 0, out)
        assert in_kilobytes("VmHWM") - before < (out.nbytes + 2 * READ_BYTES) / 1024
        assert out.sum(dtype=torch.float64) == len(wanted)


def test_runs_of_any_length_and_dtype_are_read(tmp_path: Path) -> None:
    wanted = torch.arange(100.0)
    write_file(tmp_path / "f", file_parts([item("w", wanted)]))
    file = SafetensorsReader(tmp_path / "f", "f")
    with patch.object(safetensors_io, "READ_BYTES", 7 * 4):
        for start, count in ((0, 100), (3, 7), (3, 8), (99, 1), (50, 0)):
            for dtype in (torch.float32, torch.float64, torch.int64):
                spread = torch.full((2 * count,), -1, dtype=dtype)
                file.read("w", start, spread[::2])
                dense = torch.empty(count, dtype=dtype)
                file.read("w", start, dense)
                assert torch.equal(dense, wanted[start:start + count].to(dtype)) and torch.equal(spread[::2], dense)
                assert (spread[1::2] == -1).all()


def test_a_drive_that_fails_under_a_reader_is_an_error_with_the_file(tmp_path: Path) -> None:
    write_file(tmp_path / "f", file_parts([item("w", torch.zeros(9))]))
    file = SafetensorsReader(tmp_path / "f", "tag t: file f")
    with patch.object(os, "preadv", side_effect=OSError(errno.EIO, os.strerror(errno.EIO))), \
            pytest.raises(CheckpointError, match=r"^tag t: file f: cannot be read \(Input/output error\)$"):
        file.read("w", 0, torch.zeros(9))


def test_a_file_that_changes_under_its_reader_is_an_error_and_no_signal(tmp_path: Path) -> None:
    """Cut off by a byte or to nothing, with its old time; overwritten, with a new one."""
    path = tmp_path / "f"
    for kept, end, later in ((-1, b"", 0), (0, b"", 0), (-4, b"!!!!", 1)):
        write_file(path, file_parts([item("w", torch.zeros(1 << 16))]))
        file, before = SafetensorsReader(path, "tag t: file f"), path.stat().st_mtime_ns
        with open(path, "r+b") as changed:
            changed.truncate(path.stat().st_size + kept if kept else 0)
            changed.seek(0, os.SEEK_END)
            changed.write(end)
        os.utime(path, ns=(0, before + later))
        with pytest.raises(CheckpointError, match="^tag t: file f: was written to or cut off while it was read$"):
            file.read("w", 0, torch.zeros(1 << 16, dtype=torch.float64))
        path.unlink()


def in_kilobytes(what: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what))


HEADERS = [
    b"[]", b"\x80\x04pickle", b"{}x",
    json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 9]}}).encode(),
    json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [16, 24]}}).encode(),
    json.dumps({"w": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}).encode(),
    json.dumps({"w": {"dtype": "PICKLE", "shape": [2], "data_offsets": [0, 8]}}).encode(),
    json.dumps({"w": {"dtype": "F32", "shape": [2]}}).encode()]


def test_a_run_beyond_the_tensor_and_a_header_that_does_not_fit_its_file_are_errors(tmp_path: Path) -> None:
    write_file(tmp_path / "f", file_parts([item("w", torch.arange(4.0))]))
    with pytest.raises(CheckpointError, match="file f: "):
        SafetensorsReader(tmp_path / "f", "file f").read("w", 1, torch.empty(4))
    for header in HEADERS:
        (tmp_path / "f").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
        with pytest.raises(CheckpointError, match="file f"):
            SafetensorsReader(tmp_path / "f", "file f")
    (tmp_path / "f").write_bytes((1 << 62).to_bytes(8, "little") + HEADERS[-1])
    with pytest.raises(CheckpointError, match="header of 4611686018427387904 bytes"):
        SafetensorsReader(tmp_path / "f", "file f")


# ---- the checksummed writer ------------------------------------------------------------------------------------------

BLOCK = 4096
CONTENT = random.Random(0).randbytes(5 * BLOCK + 77)


def written(path: Path, sizes: list[int]) -> FileEntry:
    """CONTENT in a new file, handed over in parts of these sizes and a last one."""
    bounds = list(accumulate(sizes, initial=0))
    with patch.object(safetensors_io, "WRITE_BLOCK_BYTES", BLOCK), open(path, "xb", buffering=0) as file:
        return write_parts(file, [*(memoryview(CONTENT)[start:end] for start, end in pairwise(bounds)),
                                  CONTENT[bounds[-1]:]])


def check(path: Path, sizes: list[int]) -> None:
    entry = written(path, sizes)
    assert path.read_bytes() == CONTENT
    assert entry == FileEntry(len(CONTENT), f"{zlib.crc32(CONTENT):08x}")


def test_neither_the_parts_nor_the_length_show(tmp_path: Path) -> None:
    for number, sizes in enumerate([[], [0], [1], [BLOCK], [BLOCK - 1, 1], [BLOCK - 1, 2], [2 * BLOCK, 3], [5 * BLOCK],
                                    [len(CONTENT)], [7] * 2000]):
        check(tmp_path / f"{number}", sizes)
        with patch(f"{__name__}.CONTENT", CONTENT[:sum(sizes)]):  # some end with a full block, or before the first
            check(tmp_path / f"{number} exact", sizes)


def writes(path: Path) -> list[tuple[int, bool]]:
    """(bytes, past the page cache) of each call that wrote the file."""
    made, real = [], os.write

    def write(descriptor: int, data: bytes) -> int:
        made.append((len(data), bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & O_DIRECT)))
        return real(descriptor, data)

    with patch.object(os, "write", write):
        check(path, [])
    return made


def test_whole_blocks_go_past_the_page_cache(tmp_path: Path) -> None:
    made = writes(tmp_path / "file")
    if not any(direct for _, direct in made):
        pytest.skip("this file system has no O_DIRECT")
    assert made == [(BLOCK, True)] * 5 + [(77, False)]


def test_a_file_system_without_the_flag(tmp_path: Path) -> None:
    real = fcntl.fcntl

    def without(descriptor: int, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL and flags & O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(descriptor, command, flags)

    with patch.object(fcntl, "fcntl", without):
        assert writes(tmp_path / "file") == [(BLOCK, False)] * 5 + [(77, False)]


def test_a_file_system_that_takes_the_flag_and_refuses_the_bytes(tmp_path: Path) -> None:
    real = os.write

    def write(descriptor: int, data: bytes) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(descriptor, data[:1000])  # short: what is left is no longer aligned

    with patch.object(os, "write", write):
        check(tmp_path / "file", [])


def test_an_error_of_any_write_is_raised(tmp_path: Path) -> None:
    real = os.write
    for call in range(6):
        calls = iter(range(100))

        def write(descriptor: int, data: bytes) -> int:
            if next(calls) == call:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(descriptor, data)

        with patch.object(os, "write", write), pytest.raises(OSError, match="No space left"):
            written(tmp_path / f"{call}", [])
        assert next(calls) <= call + 2, "it went on writing"
