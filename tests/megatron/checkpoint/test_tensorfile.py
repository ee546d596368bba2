"""Our safetensors files are everyone's: the library reads them, and a damaged one is an error, not a crash."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import threading
import weakref
import zlib
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

from data.storage import crc32_file
from megatron.checkpoint import safetensors_io
from megatron.checkpoint.manifest import FileEntry
from megatron.checkpoint.safetensors_io import (DTYPES, O_DIRECT, READ_BYTES, ChecksummedWriter, FileTensor,
                                                SafetensorsReader, split_files, write_file)
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
    entry = write_file(path, batch)
    assert (entry.size, entry.crc32) == (path.stat().st_size, crc32_file(path))
    for read in (load_file(path), {key: SafetensorsReader(path, "f").tensor(key) for key in tensors()}):
        assert set(read) == set(tensors())
        for key, tensor in tensors().items():
            assert read[key].dtype == tensor.dtype and torch.equal(read[key], tensor), key


def test_we_read_what_the_library_writes(tmp_path: Path) -> None:
    made = {key: tensor.contiguous() for key, tensor in tensors().items()}
    save_file(made, tmp_path / "f.safetensors", metadata={"format": "pt"})
    file = SafetensorsReader(tmp_path / "f.safetensors", "f")
    assert all(torch.equal(file.tensor(key), tensor) for key, tensor in made.items())


def test_files_are_filled_up_to_the_limit_and_hold_everything_once() -> None:
    items = [item(str(index), torch.zeros(count)) for index, count in enumerate([10, 20, 100, 5, 5, 5])]
    batches = list(split_files(items, limit=120))
    assert [[entry.key for entry in batch] for batch in batches] == [["0", "1"], ["2"], ["3", "4", "5"]]
    assert list(split_files([])) == []


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path) -> None:
    fetched: list[weakref.ref[torch.Tensor]] = []

    def load() -> torch.Tensor:
        assert all(earlier() is None for earlier in fetched)
        tensor = torch.zeros(1013)
        fetched.append(weakref.ref(tensor))
        return tensor

    write_file(tmp_path / "f", [FileTensor(str(index), torch.float32, (1013,), load) for index in range(4)])
    assert len(fetched) == 4


def test_a_file_under_reading_has_little_memory(tmp_path: Path) -> None:
    wanted = torch.ones(4 * READ_BYTES // 4)
    write_file(tmp_path / "f", [item("w", wanted)])
    file = SafetensorsReader(tmp_path / "f", "f")
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.zeros(len(wanted), dtype=dtype)
        before = in_kilobytes("VmHWM")
        file.read("w", 0, out)
        assert in_kilobytes("VmHWM") - before < (out.nbytes + 2 * READ_BYTES) / 1024
        assert out.sum(dtype=torch.float64) == len(wanted)


def test_runs_of_any_length_and_dtype_are_read(tmp_path: Path) -> None:
    wanted = torch.arange(100.0)
    write_file(tmp_path / "f", [item("w", wanted)])
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


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_drive_that_fails_under_a_reader_is_an_error_with_the_file(tmp_path: Path, number: int) -> None:
    write_file(tmp_path / "f", [item("w", torch.zeros(9))])
    file = SafetensorsReader(tmp_path / "f", "tag t: file f")
    with patch.object(os, "preadv", side_effect=OSError(number, os.strerror(number))), \
            pytest.raises(CheckpointError, match=rf"^tag t: file f: cannot be read \({os.strerror(number)}\)$"):
        file.read("w", 0, torch.zeros(9))


def cut_off(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def overwrite(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4] + b"!!!!")


@pytest.mark.parametrize(("change", "later"), [(cut_off, 0), (empty, 0), (overwrite, 1)])
def test_a_file_that_changes_under_its_reader_is_an_error_and_no_signal(
        tmp_path: Path, change: Callable[[Path], None], later: int) -> None:
    write_file(tmp_path / "f", [item("w", torch.zeros(1 << 16))])
    file = SafetensorsReader(tmp_path / "f", "tag t: file f")
    change(tmp_path / "f")
    os.utime(tmp_path / "f", ns=(0, file._modified_ns + later))
    with pytest.raises(CheckpointError, match="^tag t: file f: was written to or cut off while it was read$"):
        file.read("w", 0, torch.zeros(1 << 16, dtype=torch.float64))


def in_kilobytes(what: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what))


def test_a_run_beyond_the_tensor_is_an_error(tmp_path: Path) -> None:
    write_file(tmp_path / "f", [item("w", torch.arange(4.0))])
    file = SafetensorsReader(tmp_path / "f", "file f")
    out = torch.empty(3, dtype=torch.float64)
    file.read("w", 1, out)
    assert out.tolist() == [1, 2, 3]
    with pytest.raises(CheckpointError, match="file f: "):
        file.read("w", 1, torch.empty(4))


@pytest.mark.parametrize("header", [
    b"[]", b"\x80\x04pickle", b"{}x",
    json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 9]}}).encode(),
    json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [16, 24]}}).encode(),
    json.dumps({"w": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}).encode(),
    json.dumps({"w": {"dtype": "PICKLE", "shape": [2], "data_offsets": [0, 8]}}).encode(),
    json.dumps({"w": {"dtype": "F32", "shape": [2]}}).encode(),
], ids=repr)
def test_a_header_that_does_not_fit_its_file_is_an_error(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "f").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(CheckpointError, match="file f"):
        SafetensorsReader(tmp_path / "f", "file f")
    (tmp_path / "f").write_bytes((1 << 62).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointError, match="header of 4611686018427387904 bytes"):
        SafetensorsReader(tmp_path / "f", "file f")


# ---- the checksummed writer ------------------------------------------------------------------------------------------

BLOCK = 4096
CONTENT = random.Random(0).randbytes(5 * BLOCK + 77)


def written(path: Path, sizes: list[int]) -> FileEntry:
    """CONTENT in a new file, handed over in parts of these sizes and a last one."""
    with patch.object(safetensors_io, "WRITE_BLOCK_BYTES", BLOCK), open(path, "xb", buffering=0) as file, \
            ChecksummedWriter(file) as new:
        start = 0
        for size in sizes:
            new.write(memoryview(CONTENT)[start:start + size])
            start += size
        new.write(CONTENT[start:])
        return new.finish()


def check(path: Path, sizes: list[int]) -> None:
    entry = written(path, sizes)
    assert path.read_bytes() == CONTENT
    assert entry == FileEntry(len(CONTENT), f"{zlib.crc32(CONTENT):08x}")


@pytest.mark.parametrize("sizes", [
    [], [0], [1], [BLOCK], [BLOCK - 1, 1], [BLOCK - 1, 2], [2 * BLOCK, 3], [5 * BLOCK], [len(CONTENT)], [7] * 2000],
    ids=str)
def test_neither_the_parts_nor_the_length_show(sizes: list[int], tmp_path: Path) -> None:
    check(tmp_path / "file", sizes)
    with patch(f"{__name__}.CONTENT", CONTENT[:sum(sizes)]):  # some end with a full block, or before the first
        check(tmp_path / "exact", sizes)


def writes(path: Path) -> list[tuple[int, bool]]:
    """(bytes, past the page cache) of each call that wrote the file."""
    made, real = [], os.write

    def write(descriptor: int, data: bytes) -> int:
        made.append((len(data), bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & O_DIRECT)))
        return real(descriptor, data)

    with patch.object(os, "write", write):
        check(path, [])
    return made


def refused(descriptor: int, command: int, flags: int = 0, real: Callable[..., int] = fcntl.fcntl) -> int:
    if command == fcntl.F_SETFL and flags & O_DIRECT:
        raise OSError(errno.EINVAL, "Invalid argument")
    return real(descriptor, command, flags)


def test_whole_blocks_go_past_the_page_cache(tmp_path: Path) -> None:
    with open(tmp_path / "trial", "wb") as file:
        if not safetensors_io._set_direct_io(file, True):
            pytest.skip("this file system has no O_DIRECT")
    assert writes(tmp_path / "file") == [(BLOCK, True)] * 5 + [(77, False)]


def test_a_file_system_without_the_flag(tmp_path: Path) -> None:
    with patch.object(fcntl, "fcntl", refused):
        assert writes(tmp_path / "file") == [(BLOCK, False)] * 5 + [(77, False)]


def test_a_file_system_that_takes_the_flag_and_refuses_the_bytes(tmp_path: Path) -> None:
    real = os.write

    def write(descriptor: int, data: bytes) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(descriptor, data)

    with patch.object(os, "write", write):
        check(tmp_path / "file", [])


def test_short_writes_are_gone_on_with(tmp_path: Path) -> None:
    """What is left after one is no longer aligned."""
    real = os.write
    with patch.object(os, "write", lambda descriptor, data: real(descriptor, data[:1000])):
        check(tmp_path / "file", [])


@pytest.mark.parametrize("call", range(6))
def test_an_error_of_any_write_is_raised(call: int, tmp_path: Path) -> None:
    real, calls = os.write, iter(range(100))

    def write(descriptor: int, data: bytes) -> int:
        if next(calls) == call:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data)

    with patch.object(os, "write", write), pytest.raises(OSError, match="No space left"):
        written(tmp_path / "file", [])
    assert next(calls) <= call + 2, "it went on writing"


def test_a_thread_that_cannot_be_had_once_costs_no_byte(tmp_path: Path) -> None:
    """The block that was handed to it is written here, and not again by a later thread."""
    real, failures = threading.Thread.start, iter([RuntimeError("can't start new thread")])

    def start(thread: threading.Thread) -> None:
        for error in failures:
            raise error
        real(thread)

    with patch.object(threading.Thread, "start", start):
        check(tmp_path / "file", [])
