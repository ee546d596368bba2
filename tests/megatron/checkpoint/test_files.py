"""The files of a checkpoint. Our safetensors files are everyone's: the library reads them, and a damaged one is an
error, not a crash. The manifest is strict: what it does not know, lacks or cannot be is an error with the field."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import weakref
import zlib
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from data.storage import crc32_file
from megatron.checkpoint import safetensors_io
from megatron.checkpoint.file_formats import checksum_ending
from megatron.checkpoint.manifest import (Ancestor, FileEntry, Manifest, TensorEntry, check_safe_name, iteration_of_tag,
                                          parse_manifest, read_manifest_end)
from megatron.checkpoint.reshard import DPSharding, TPSharding
from megatron.checkpoint.safetensors_io import (DTYPES, O_DIRECT, READ_BYTES, FileTensor, SafetensorsReader, file_parts,
                                                split_files, write_file, write_parts)
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


def test_a_file_that_fails_or_changes_under_its_reader_is_an_error_and_no_signal(tmp_path: Path) -> None:
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
        with patch.object(os, "preadv", side_effect=OSError(errno.EIO, os.strerror(errno.EIO))), \
                pytest.raises(CheckpointError, match=r"^tag t: file f: cannot be read \(Input/output error\)$"):
            file.read("w", 0, torch.zeros(9))
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


def check(path: Path, sizes: list[int], write: Callable[[int, bytes], int] = os.write) -> None:
    """CONTENT in a new file, handed over in parts of these sizes and a last one."""
    bounds = list(accumulate(sizes, initial=0))
    with patch.object(safetensors_io, "WRITE_BLOCK_BYTES", BLOCK), patch.object(os, "write", write), \
            open(path, "xb", buffering=0) as file:
        entry = write_parts(file, [*(memoryview(CONTENT)[start:end] for start, end in pairwise(bounds)),
                                   CONTENT[bounds[-1]:]])
    assert path.read_bytes() == CONTENT
    assert entry == FileEntry(len(CONTENT), f"{zlib.crc32(CONTENT):08x}")


def test_neither_the_parts_nor_the_length_show(tmp_path: Path) -> None:
    for number, sizes in enumerate([[], [0], [1], [BLOCK], [BLOCK - 1, 1], [BLOCK - 1, 2], [2 * BLOCK, 3], [5 * BLOCK],
                                    [len(CONTENT)], [7] * 2000]):
        check(tmp_path / f"{number}", sizes)
        with patch(f"{__name__}.CONTENT", CONTENT[:sum(sizes)]):  # some end with a full block, or before the first
            check(tmp_path / f"{number} exact", sizes)


@pytest.mark.parametrize("has_flag", [True, False])
def test_whole_blocks_go_past_the_page_cache_where_the_file_system_can(has_flag: bool, tmp_path: Path) -> None:
    made, write, real = list[tuple[int, bool]](), os.write, fcntl.fcntl

    def noted(descriptor: int, data: bytes) -> int:
        made.append((len(data), bool(real(descriptor, fcntl.F_GETFL) & O_DIRECT)))
        return write(descriptor, data)

    def limited(descriptor: int, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL and flags & O_DIRECT and not has_flag:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(descriptor, command, flags)

    with patch.object(fcntl, "fcntl", limited):
        check(tmp_path / "file", [], noted)
    if has_flag and not any(direct for _, direct in made):
        pytest.skip("this file system has no O_DIRECT")
    assert made == [(BLOCK, has_flag)] * 5 + [(77, False)]


def test_a_file_system_that_takes_the_flag_and_refuses_the_bytes(tmp_path: Path) -> None:
    real = os.write

    def write(descriptor: int, data: bytes) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(descriptor, data[:1000])  # short: what is left is no longer aligned

    check(tmp_path / "file", [], write)


def test_an_error_of_any_write_is_raised(tmp_path: Path) -> None:
    real = os.write
    for call in range(6):
        calls = iter(range(100))

        def write(descriptor: int, data: bytes) -> int:
            if next(calls) == call:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(descriptor, data)

        with pytest.raises(OSError, match="No space left"):
            check(tmp_path / f"{call}", [], write)
        assert next(calls) <= call + 2, "it went on writing"


# ---- the manifest ----------------------------------------------------------------------------------------------------

CUT = TPSharding((4, 2), 0, 1, None, 2)


MANIFEST = Manifest("global_step7", 7, "run", "0d", 12, (Ancestor("0c", 9, "global_step5"),),
                    layout={"tp": 2, "dp": 3}, config={"a": [1, None, "x"]},
                    tensors=(TensorEntry("weight", "w", "F32", CUT, DPSharding(3, 5)),),
                    saved_at=1_800_000_000_000_000, nbytes=100)
MANIFEST = replace(MANIFEST, save_id=f"0123-{MANIFEST.digest()}")


def test_it_comes_back_as_it_went_as_long_for_any_number_of_ranks(tmp_path: Path) -> None:
    data = MANIFEST.to_bytes()
    assert parse_manifest(data) == MANIFEST
    assert len(replace(MANIFEST, layout={"tp": 2, "dp": 9}).to_bytes()) == len(data)
    assert read_manifest_end(tmp_path) == (0, None)
    for content, commit in ((data, MANIFEST.commit), (b"{}", 0)):
        (tmp_path / "manifest.json").write_bytes(content)
        assert read_manifest_end(tmp_path)[0] == commit


def test_every_flipped_bit_every_truncation_and_anything_else_is_an_error() -> None:
    data = MANIFEST.to_bytes()
    damaged = [data[:size] for size in range(len(data))]
    damaged += [(int.from_bytes(data) ^ 1 << bit).to_bytes(len(data)) for bit in range(len(data) * 8)]
    for text in (b"", b"{}", b"[1]", b"[" * 100_000, b"\x80\x04\x95", b'{"a":1,"a":2}'):
        damaged += [text, text + checksum_ending(text)]
    for found in damaged:
        with pytest.raises(CheckpointError):
            parse_manifest(found)


def sealed(change: Callable[[dict[str, Any]], object]) -> bytes:
    """The manifest with a change and a good checksum."""
    value = json.loads(MANIFEST.to_bytes())
    del value["crc32"]
    change(value)
    text = json.dumps(value).encode()[:-1]
    return text + checksum_ending(text)


CHANGES: list[tuple[str, Callable[[dict[str, Any]], object]]] = [
    ("'run_id' is missing", lambda m: m.pop("run_id")),
    ("unknown field 'extra'", lambda m: m.update(extra=1)),
    ("'iteration' must be int, found 'x'", lambda m: m.update(iteration="x")),
    ("'iteration' must be int, found True", lambda m: m.update(iteration=True)),
    ("'iteration' must not be negative, found -1", lambda m: m.update(iteration=-1)),
    ("'iteration' must be below", lambda m: m.update(iteration=10**30)),
    ("format 6, this program reads format 5; load it with the version", lambda m: m.update(format=6)),
    ("format 4, this program reads format 5", lambda m: m.update(format=4)),
    ("'saved_at' is missing", lambda m: m.pop("saved_at")),
    ("tag '/tmp' is not a plain name", lambda m: m.update(tag="/tmp")),
    ("weight 'w': sharding: unknown field 'x'", lambda m: m["tensors"][0]["sharding"].update(x=1)),
    ("weight 'w' is listed twice", lambda m: m["tensors"].append(m["tensors"][0])),
    ("no such cut", lambda m: m["tensors"][0]["sharding"].update(stride=3)),
    ("its save_id '' was given for other content", lambda m: m.update(save_id="")),
    ("unknown field 'files'", lambda m: m.update(files={})),
    ("weight 'w': field 'start' is missing", lambda m: m["tensors"][0].pop("start")),
    ("weight 'w': field 'each' must not be negative", lambda m: m["tensors"][0].update(each=-1)),
    ("8 elements from 8 on are not in 3 shards of 5", lambda m: m["tensors"][0].update(start=8)),
    ("8 elements from 3 on are not in 2 shards of 5", lambda m: m["layout"].update(dp=2)),
    ("cut over 2 tensor-parallel ranks of 4", lambda m: m["layout"].update(tp=4)),
    ("layout expected with sizes tp and dp", lambda m: m["layout"].update(tp="2")),
]


def test_a_wrong_field_is_named() -> None:
    for message, change in CHANGES:
        with pytest.raises(CheckpointError, match=message):
            parse_manifest(sealed(change))


def test_names_that_are_more_than_names_are_refused() -> None:
    for name in ("", ".", "..", ".hidden", "a/b", "../a", "/a", "a\\b", "a b", "a\n", "$(touch x)", "a\0b", "x" * 201,
                 "latest", "manifest.json", "global_stepé"):
        with pytest.raises(CheckpointError, match="not a plain name"):
            check_safe_name(name, "tag")
    assert check_safe_name("x" * 200, "tag") == "x" * 200


def test_the_step_of_a_tag() -> None:
    assert [iteration_of_tag(tag) for tag in ("global_step10", "global_step007", "global_step", "best", "global_step1x",
                                              "global_step" + "9" * 5000)] == [10, 7, None, None, None, None]
