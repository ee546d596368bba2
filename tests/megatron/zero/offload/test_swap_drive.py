"""Swap files: a tile that is read holds what was last written, or the read raises; files have no names, and their space
is free again when they are closed. A drive is probed for space and speed before the run. Host buffers begin at
a page, are page-locked while somebody has them, and are not inherited by forked children."""

from __future__ import annotations

import errno
import os
import random
import re
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron import host_memory
from megatron.errors import ConfigError, StorageError, format_bytes
from megatron.optim.adam import AdamW
from megatron.zero.api.offload_plan import check_host_memory, open_drives, probe_drives
from megatron.zero.offload import direct_io, swap_drive
from megatron.zero.offload.direct_io import PAGE_SIZE, page_aligned_bytes, page_aligned_zeros
from megatron.zero.offload.swap_drive import AioSettings, AsyncSwapFile, SwapDrive, measure_rates, probe_drive
from tests.megatron.zero.offload.swap_files import content_of, open_swap_files
from tests.megatron.zero.offload.test_equal import everywhere
from tests.megatron.zero.run import configure_gpt2

FLAG = "--offload-optimizer-nvme-path"
SIZES = (5 * PAGE_SIZE, 1, PAGE_SIZE, 3 * PAGE_SIZE + 17, 0, 40 * PAGE_SIZE - 3, PAGE_SIZE - 1)
SMALL = AioSettings(block_size=PAGE_SIZE, queue_depth=2)
"""Two pages a system call: even small tiles have several blocks."""
SETTINGS = (SMALL, AioSettings(), AioSettings(block_size=PAGE_SIZE, queue_depth=4, intra_op_parallelism=4),
            AioSettings(block_size=1000, queue_depth=9, single_submit=True, overlap_events=False))
MakeFile = Callable[..., AsyncSwapFile]


@pytest.fixture
def make_file(tmp_path: Path) -> Iterator[MakeFile]:
    """Makes a file, by default of SIZES in small blocks, on a drive of its own."""
    drives: list[SwapDrive] = []

    def make(settings: AioSettings = SMALL, sizes: Sequence[int] = SIZES) -> AsyncSwapFile:
        drives.append(SwapDrive(tmp_path, flag=FLAG, aio=settings))
        return AsyncSwapFile(drives[-1], "state", sizes)

    yield make
    for drive in drives:
        drive.close()


def fail_with(number: int) -> Callable[..., Any]:
    def fail(*args: Any, **named: Any) -> None:
        raise OSError(number, os.strerror(number))
    return fail


def random_bytes(size: int, seed: int) -> Tensor:
    buffer = page_aligned_bytes(size, pinned=False)
    buffer.numpy()[:] = list(random.Random(seed).randbytes(size))
    return buffer


def content(file: AsyncSwapFile, tile: int, size: int) -> bytes:
    into = page_aligned_bytes(size, pinned=False)
    file.read(tile, into).wait()
    return bytes(into.numpy().data)


def write_and_check(file: AsyncSwapFile, tile: int, seed: int = 7) -> None:
    source = random_bytes(SIZES[tile], seed)
    file.write(tile, source).wait()
    assert content(file, tile, SIZES[tile]) == bytes(source.numpy().data)


def delayed(call: Callable[..., int], gate: threading.Event,
            entered: threading.Event | None = None) -> Callable[..., int]:
    """The system call, made once the gate is open."""
    def wait(*args: Any) -> int:
        if entered:
            entered.set()
        assert gate.wait(20)
        return call(*args)
    return wait


@pytest.mark.parametrize("settings", SETTINGS)
def test_requests_in_any_order_read_what_was_written_last(make_file: MakeFile, settings: AioSettings) -> None:
    """From larger buffers as well, and from memory that does not begin at a page."""
    draw, file = random.Random(3), make_file(settings)
    held: dict[int, Tensor] = {}
    expected = []
    for number in range(200):
        tile, shift = draw.randrange(len(SIZES)), draw.choice((0, 0, 7))
        if tile not in held or draw.random() < 0.5:
            held[tile] = random_bytes(SIZES[tile] + shift + draw.choice((0, 300)), number)[shift:]
            file.write(tile, held[tile])
        else:
            into = page_aligned_bytes(SIZES[tile] + shift, pinned=False)[shift:]
            expected.append((file.read(tile, into), into, held[tile][:SIZES[tile]]))
    assert len(expected) > 70
    for pending, into, source in expected:
        pending.wait()
        assert torch.equal(into, source)
    file.wait_for_requests()


@pytest.mark.parametrize("slow, first", [("pwritev", "write"), ("preadv", "read")])
def test_requests_for_one_tile_wait_for_the_ones_before(make_file: MakeFile, monkeypatch: pytest.MonkeyPatch,
                                                        slow: str, first: str) -> None:
    file = make_file()
    old, new, into = random_bytes(SIZES[0], 1), random_bytes(SIZES[0], 2), page_aligned_bytes(SIZES[0], pinned=False)
    file.write(0, old).wait()
    gate = threading.Event()
    monkeypatch.setattr(os, slow, delayed(getattr(os, slow), gate))
    asks = [lambda: file.write(0, new), lambda: file.read(0, into)]
    earlier, later = [ask() for ask in (asks if first == "write" else asks[::-1])]
    assert not later.is_done()
    gate.set()
    later.wait()
    assert earlier.is_done() and torch.equal(into, new if first == "write" else old)


def test_a_system_call_carries_the_blocks_of_the_queue(make_file: MakeFile, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    pwritev = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda *args: lengths.append(sum(map(len, args[1]))) or pwritev(*args))
    for single in (False, True):
        settings = AioSettings(block_size=PAGE_SIZE, queue_depth=4, single_submit=single)
        make_file(settings, [8 * PAGE_SIZE]).write(0, random_bytes(8 * PAGE_SIZE, 0)).wait()
    assert lengths == [4 * PAGE_SIZE] * 2 + [PAGE_SIZE] * 8


# ---- faults ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number, remedy", [(errno.ENOSPC, ", .* free; free space"), (errno.EIO, "; check the drive")])
def test_a_write_that_fails_is_reported_by_the_next_read_and_at_the_end(
        make_file: MakeFile, monkeypatch: pytest.MonkeyPatch, number: int, remedy: str) -> None:
    file = make_file()
    write_and_check(file, 0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", fail_with(number))
        write = file.write(0, random_bytes(SIZES[0], 1))
        read = file.read(0, page_aligned_bytes(SIZES[0], pinned=False))
        said = (f"{file.description}: cannot write tile 0 of {format_bytes(SIZES[0])}: {os.strerror(number)}{remedy}, "
                f"or choose .*{FLAG}")
        for report in (read.wait, write.wait, file.wait_for_requests, file.raise_if_lost):
            with pytest.raises(StorageError, match=said):
                report()
    write_and_check(file, 0, seed=2)
    file.wait_for_requests()  # what was lost has been written again


def test_bytes_that_were_not_written_are_not_read(make_file: MakeFile) -> None:
    """A tile never written, a bit that changed, and a file cut short."""
    file = make_file(AioSettings())
    with pytest.raises(StorageError, match="tile 3 was read before it was written"):
        content(file, 3, SIZES[3])
    for tile, size in enumerate(SIZES):
        file.write(tile, random_bytes(size, tile)).wait()
    with open(content_of(file), "r+b") as raw:
        raw.seek(7 * PAGE_SIZE + 9000)  # in tile 3
        byte = raw.read(1)[0]
        raw.seek(-1, os.SEEK_CUR)
        raw.write(bytes([byte ^ 16]))
    for tile, size in enumerate(SIZES):
        if tile != 3:
            content(file, tile, size)
    with pytest.raises(StorageError, match=f"{file.description}: tile 3 is not what was written.*{FLAG}.*checkpoint"):
        content(file, 3, SIZES[3])
    os.truncate(content_of(file), 20 * PAGE_SIZE)
    with pytest.raises(StorageError, match="cannot read tile 5 .*the file ends"):
        content(file, 5, SIZES[5])


def without(flag: int, number: int) -> Callable[..., int]:
    """`os.open`, which fails with this flag."""
    def open_file(path: Any, flags: int, *args: Any, **named: Any) -> int:
        if flags & flag == flag:
            raise OSError(number, os.strerror(number))
        return os_open(path, flags, *args, **named)
    return open_file


os_open, pwritev, preadv = os.open, os.pwritev, os.preadv


@pytest.mark.parametrize("patches", [
    {"open": without(os.O_DIRECT, errno.EINVAL)}, {"posix_fallocate": fail_with(errno.EOPNOTSUPP)},
    {"pwritev": lambda fd, parts, at: pwritev(fd, [parts[0][:PAGE_SIZE + 300]], at),
     "preadv": lambda fd, parts, at: preadv(fd, [parts[0][:700]], at)}],
    ids=["no O_DIRECT", "no reservation", "short calls"])
def test_a_file_system_that_can_do_less_keeps_tiles_as_well(make_file: MakeFile, monkeypatch: pytest.MonkeyPatch,
                                                            patches: dict[str, Any]) -> None:
    for name, call in patches.items():
        monkeypatch.setattr(os, name, call)
    file = make_file()
    for tile in range(len(SIZES)):
        write_and_check(file, tile)


def test_queued_requests_fail_when_the_file_is_closed(make_file: MakeFile, monkeypatch: pytest.MonkeyPatch) -> None:
    file = make_file()
    gate, entered = threading.Event(), threading.Event()
    monkeypatch.setattr(os, "pwritev", delayed(os.pwritev, gate, entered))
    _, *others = [file.write(tile, random_bytes(SIZES[tile], tile)) for tile in (0, 5, 3)]
    assert entered.wait(20)
    threading.Timer(0.05, gate.set).start()
    file.close()
    for pending in others:
        with pytest.raises(StorageError, match="was closed before it could write tile"):
            pending.wait()


def test_a_forked_child_neither_uses_nor_removes_what_its_parent_has(make_file: MakeFile,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    file = make_file()
    write_and_check(file, 0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda own=os.getpid(): own + 1)
        with pytest.raises(ConfigError, match="belongs to process"):
            content(file, 0, SIZES[0])
        file._drive.close()
    write_and_check(file, 0, seed=2)


@pytest.mark.parametrize("close", [lambda file: file.close(), lambda file: file._drive.close()])
def test_a_closed_file_is_gone_and_takes_no_request(make_file: MakeFile, tmp_path: Path,
                                                    close: Callable[[AsyncSwapFile], None]) -> None:
    file = make_file()
    write_and_check(file, 0)
    close(file)
    assert open_swap_files(tmp_path) == []
    other = os.open(os.devnull, os.O_RDONLY)  # under the number that is free now
    close(file)
    os.close(other)  # it was not closed with the file
    for ask in (file.read, file.write):
        with pytest.raises(StorageError, match=f"{file.description} was closed before it could {ask.__name__} tile 0"):
            ask(0, page_aligned_bytes(SIZES[0], pinned=False))


# ---- the folder -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_tmpfile", [True, False])
def test_a_file_has_no_name_and_no_other_user_reads_it(
        has_tmpfile: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_tmpfile:  # as on NFS
        monkeypatch.setattr(os, "open", without(os.O_TMPFILE, errno.EOPNOTSUPP))
    file = AsyncSwapFile(SwapDrive(tmp_path, flag=FLAG), "state", [PAGE_SIZE])
    status = os.fstat(file.file.descriptor)
    assert status.st_mode & 0o777 == 0o600 and status.st_nlink == 0 and len(open_swap_files(tmp_path)) == 1
    file.close()
    assert open_swap_files(tmp_path) == []


@pytest.mark.parametrize("path, number, error, said", [
    ("", errno.EACCES, StorageError, "cannot write there: Permission denied; make it writable, or"),
    ("", errno.EPERM, StorageError, "cannot write there: its file system takes no new"),
    ("", errno.ENOSPC, StorageError, "cannot write there: No space left on device, .* free; free space, or"),
    ("", errno.EIO, StorageError, "cannot write there: Input/output error; check"),
    ("nowhere", 0, ConfigError, "there is no such folder"), ("file", 0, ConfigError, "expected a folder, found a file"),
    ("/proc", 0, StorageError, "cannot write there: its file system takes no new files; choose a folder on a drive")])
def test_a_folder_that_cannot_be_written_is_named_with_its_flag(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, number: int, error: type[Exception],
        said: str) -> None:
    (tmp_path / "file").write_text("")
    if number:
        monkeypatch.setattr(os, "open", fail_with(number))  # root may write anywhere
    with pytest.raises(error, match=f"{FLAG} {tmp_path / path}: {said}"):
        SwapDrive(tmp_path / path, flag=FLAG)


# ---- the probe ------------------------------------------------------------------------------------------------------


def probe(path: Path, stored: int = 8 << 20) -> str:
    return probe_drive(SwapDrive(path, flag=FLAG), "weights", stored, 31_000_000_000, 19_000_000_000)


@pytest.fixture
def small_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap_drive, "PROBE_BLOCK_BYTES", 1 << 20)
    monkeypatch.setattr(swap_drive, "MAX_PROBE_BYTES", 4 << 20)


@pytest.mark.usefixtures("small_probe")
def test_the_probe_writes_and_reads_no_more_than_the_run_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offsets: dict[str, list[int]] = {"pwritev": [], "preadv": []}
    for name, call in (("pwritev", pwritev), ("preadv", preadv)):
        monkeypatch.setattr(os, name, lambda fd, parts, at, name=name, call=call: (
            offsets[name].append(at), call(fd, parts, at))[1])
    assert min(measure_rates(tmp_path, 4 << 20)) > 1e6
    assert offsets == {"pwritev": [0, 1 << 20, 2 << 20, 3 << 20], "preadv": [0, 1 << 20, 2 << 20, 3 << 20]}
    offsets["pwritev"].clear()
    monkeypatch.setattr(swap_drive.shutil, "disk_usage", lambda path: namedtuple("Usage", "free")(40 * 8192))
    probe(tmp_path, 8192)
    assert offsets["pwritev"] == [0] and list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("small_probe")
@pytest.mark.parametrize("name", ["open", "pwritev", "fsync", "preadv"])
def test_a_drive_that_fails_is_named_with_its_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(os, name, fail_with(errno.EIO))
    with pytest.raises(StorageError, match=f"{FLAG} {tmp_path}: cannot write .*: Input/output error; check"):
        probe(tmp_path)
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


MODEL = nn.Linear(100, 100)


@pytest.mark.parametrize("cell, expected", [
    ({}, " for optimizer state and weights: .* free, needs 162 kB; .* s of a step"),
    ({"offload_optimizer_device": "none", "stage3_param_persistence_threshold": 101},
     " for weights: .* free, needs 40 kB; .* s of a step"),
    ({"stage3_param_persistence_threshold": 9**6}, " for optimizer state: .*, needs 121 kB.*"),
    ({"offload_param_max_in_cpu": 10_100}, " for optimizer state: .* needs 121 kB; .*"),
    ({"offload_optimizer_device": "none", "offload_param_max_in_cpu": 10_100}, ": nothing of this run will be there"),
])
def test_a_drive_is_described_by_what_it_will_keep(tmp_path: Path, cell: dict[str, Any], expected: str) -> None:
    config = configure_gpt2(**{"batch_size": 2, "zero_stage": 3, **everywhere(tmp_path, 3), **cell})
    [line] = probe_drives(config, AdamW(), MODEL, 1, open_drives(config))
    assert re.fullmatch(f" nvme {tmp_path}{expected}", line)


def test_state_that_exceeds_the_memory_of_the_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """10,100 parameters at 4 bytes for each of three kinds of state, 4 for the gradient and 4 for the weight."""
    config = configure_gpt2(batch_size=2, zero_stage=3, offload_optimizer_device="cpu", offload_param_device="cpu")
    for available in (None, 20 * 10_100):
        monkeypatch.setattr(host_memory, "available_bytes", lambda: available)
        check_host_memory(config, AdamW(), MODEL, 1)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 20 * 10_100 - 1)
    monkeypatch.setattr(host_memory, "describe_owner", lambda otherwise: "this container or job")
    with pytest.raises(ConfigError, match="--offload-optimizer-device cpu --offload-param-device cpu: the 1 ranks of "
                                          "this node keep 0.0 GiB on the host, and this container or job has 0.0 GiB"):
        check_host_memory(config, AdamW(), MODEL, 1)


# ---- host buffers ----------------------------------------------------------------------------------------------------


def memory_ranges() -> list[tuple[int, int, list[str]]]:
    """(begin, end, flags) of each mapping of this process."""
    found = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) .*?^VmFlags: (.*?)$", Path("/proc/self/smaps").read_text(),
                       re.MULTILINE | re.DOTALL)
    return [(int(begin, 16), int(end, 16), flags.split()) for begin, end, flags in found]


class FakeCudaRuntime:
    def __init__(self) -> None:
        self.error = 0
        self.locked: dict[int, int] = {}
        self.synchronized: list[int] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if not self.error:
            self.locked[address] = size
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        if any(begin <= address < end for begin, end, _ in memory_ranges()):  # before its memory is unmapped
            del self.locked[address]
        return 0

    def cudaGetErrorString(self, error: int) -> str:
        return f"error {error}: not permitted"


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCudaRuntime:
    runtime = FakeCudaRuntime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "synchronize", runtime.synchronized.append)
    direct_io._warn_not_pinned.cache_clear()
    return runtime


def test_a_buffer_begins_at_a_page_and_is_zero(cuda: FakeCudaRuntime) -> None:
    for pinned, nbytes in product((False, True), (0, 1, PAGE_SIZE - 1, PAGE_SIZE, 3 * PAGE_SIZE + 5, 3 << 20)):
        buffer = page_aligned_bytes(nbytes, pinned=pinned)
        assert (buffer.dtype, buffer.shape, buffer.data_ptr() % PAGE_SIZE) == (torch.uint8, (nbytes,), 0)
        assert not buffer.any()
        buffer.fill_(7)
        assert int(buffer.sum(dtype=torch.int64)) == 7 * nbytes


def test_memory_is_page_locked_as_long_as_somebody_has_it(cuda: FakeCudaRuntime) -> None:
    """Nothing is rounded up to a power of two."""
    several = [page_aligned_zeros(PAGE_SIZE + 1, torch.bfloat16, pinned=True) for _ in range(3)]
    assert cuda.locked == {buffer.data_ptr(): 3 * PAGE_SIZE for buffer in several}
    part = several[1][7:9]
    del several
    assert len(cuda.locked) == 1 and cuda.synchronized == [3, 3], "a copy may be under way"
    del part
    assert not cuda.locked


def test_one_line_says_that_memory_cannot_be_locked(cuda: FakeCudaRuntime, capfd: pytest.CaptureFixture[str]) -> None:
    cuda.error = 800
    for _ in range(3):
        assert page_aligned_bytes(PAGE_SIZE, pinned=True).data_ptr() % PAGE_SIZE == 0
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert "cannot be page-locked (error 800: not permitted)" in said and "ulimit -l" in said


def test_memory_that_cannot_be_allocated_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match=f"can't allocate memory: {1 << 60} bytes"):
        page_aligned_bytes(1 << 60, pinned=False)


def test_a_forked_child_does_not_inherit_it() -> None:
    """Otherwise the parent would copy every page that it writes from then on."""
    buffer = page_aligned_bytes(3 << 20, pinned=False)
    assert ["dc" in flags for begin, end, flags in memory_ranges() if begin <= buffer.data_ptr() < end] == [True]
