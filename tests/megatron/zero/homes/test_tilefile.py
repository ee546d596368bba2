"""A tile that is read holds what was last written, or the read raises."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from data.storage import crc32
from megatron.errors import StorageError, format_bytes
from megatron.zero.offload import async_file
from megatron.zero.offload.async_file import AioSettings, AsyncSwapFile, SwapRequest
from megatron.zero.offload.direct_io import PAGE_SIZE, page_aligned_bytes
from megatron.zero.offload.swap_drive import IoThreadPool, SwapDrive
from tests.megatron.zero.homes.swap_files import content_of, open_swap_files
from tests.megatron.zero.test_interrupted import Line, at_lines

FLAG = "--offload-optimizer-nvme-path"
SIZES = (5 * PAGE_SIZE, 1, PAGE_SIZE, 3 * PAGE_SIZE + 17, 0, 40 * PAGE_SIZE - 3, PAGE_SIZE - 1)
SMALL = AioSettings(block_size=PAGE_SIZE, queue_depth=2)
"""Two pages a system call: even small tiles have several stretches."""

SETTINGS = (SMALL, AioSettings(), AioSettings(block_size=PAGE_SIZE, queue_depth=4, intra_op_parallelism=4),
            AioSettings(block_size=1000, queue_depth=9, single_submit=True, overlap_events=False))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[SwapDrive]:
    with SwapDrive(tmp_path, flag=FLAG) as found:
        yield found


def random_bytes(size: int, seed: int) -> Tensor:
    buffer = page_aligned_bytes(size, pinned=False)
    buffer.numpy()[:] = list(random.Random(seed).randbytes(size))
    return buffer


def content(file: AsyncSwapFile, tile: int, size: int) -> bytes:
    into = page_aligned_bytes(size, pinned=False)
    file.read(tile, into).wait()
    return bytes(into.numpy().data)


def slowed(call: Callable[..., int], gate: threading.Event,
           entered: threading.Event | None = None) -> Callable[..., int]:
    """The system call, made once the gate is open."""
    def wait(*args: Any) -> int:
        if entered:
            entered.set()
        assert gate.wait(20)
        return call(*args)
    return wait


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("rounded_up", [False, True])
def test_tiles_of_any_size_come_back(folder, settings, rounded_up):
    file = AsyncSwapFile(folder, "state", SIZES, settings=settings)
    sources = [
        random_bytes(-(-size // PAGE_SIZE) * PAGE_SIZE if rounded_up else size, tile) for tile, size in enumerate(SIZES)
    ]
    for write in [file.write(tile, source) for tile, source in enumerate(sources)]:
        write.wait()
    for tile, (size, source) in enumerate(zip(SIZES, sources)):
        assert content(file, tile, size) == bytes(source.numpy()[:size])


def test_memory_that_does_not_begin_a_page_will_do(folder):
    file = AsyncSwapFile(folder, "state", SIZES, settings=SMALL)
    source, into = torch.arange(6 * PAGE_SIZE).to(torch.uint8)[7:7 + 5 * PAGE_SIZE], torch.zeros(6 * PAGE_SIZE,
                                                                                                 dtype=torch.uint8)[9:]
    file.write(0, source).wait()
    file.read(0, into).wait()
    assert torch.equal(into[:5 * PAGE_SIZE], source)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_reads_and_writes_reads_what_was_written_last(folder, settings, seed):
    draw = random.Random(seed)
    file = AsyncSwapFile(folder, "state", SIZES, settings=settings)
    held = {tile: random_bytes(size, tile) for tile, size in enumerate(SIZES)}
    for tile, source in held.items():
        file.write(tile, source)
    expected = []
    for number in range(150):
        tile = draw.randrange(len(SIZES))
        if draw.random() < 0.5:
            held[tile] = random_bytes(SIZES[tile], 1000 + number)
            file.write(tile, held[tile])
        else:
            into = page_aligned_bytes(SIZES[tile], pinned=False)
            expected.append((file.read(tile, into), into, held[tile]))
    for pending, into, source in expected:
        pending.wait()
        assert torch.equal(into, source)
    file.wait_for_requests()
    assert file._cleanup.pending == set()


def test_a_read_of_a_tile_on_its_way_to_the_disk_waits_for_it(folder, monkeypatch):
    file = AsyncSwapFile(folder, "state", SIZES, settings=SMALL)
    old, new, into = random_bytes(SIZES[0], 1), random_bytes(SIZES[0], 2), page_aligned_bytes(SIZES[0], pinned=False)
    file.write(0, old).wait()
    gate = threading.Event()
    monkeypatch.setattr(os, "pwritev", slowed(os.pwritev, gate))
    write, read = file.write(0, new), file.read(0, into)
    assert not read.is_done()
    gate.set()
    read.wait()
    assert write.is_done()
    assert torch.equal(into, new)


def test_a_write_waits_for_the_reads_before_it(folder, monkeypatch):
    file = AsyncSwapFile(folder, "state", SIZES, settings=SMALL)
    old, into = random_bytes(SIZES[0], 1), page_aligned_bytes(SIZES[0], pinned=False)
    file.write(0, old).wait()
    gate = threading.Event()
    monkeypatch.setattr(os, "preadv", slowed(os.preadv, gate))
    read, write = file.read(0, into), file.write(0, random_bytes(SIZES[0], 2))
    assert not write.is_done()
    gate.set()
    write.wait()
    assert read.is_done()
    assert torch.equal(into, old)


@pytest.mark.parametrize("kind", ["read", "write"])
def test_ctrl_c_at_any_line_of_asking_leaves_no_request_half_queued(folder, kind):
    """Whether it took place or not, what comes later ends, and is right."""
    file = AsyncSwapFile(folder, "state", SIZES, settings=SMALL)
    tile, size = 5, SIZES[5]
    assert size > 2 * SMALL.bytes_per_call
    file.write(tile, random_bytes(size, 0)).wait()
    functions = (AsyncSwapFile._submit, AsyncSwapFile._enqueue, IoThreadPool.submit)
    lines: list[Line] = []
    with at_lines(functions, lines.append):
        ask(file, kind, tile, random_bytes(size, 0)).wait()
    for number in range(len(lines)):
        left, values = [number + 1], random_bytes(size, number + 1)

        def interrupt(here: Line) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt

        with at_lines(functions, interrupt), pytest.raises(KeyboardInterrupt):
            ask(file, kind, tile, values)
        again, values = torch.zeros(size, dtype=torch.uint8), random_bytes(size, number + 500)
        request = file.read(tile, again)
        assert request._done_event.wait(20), lines[number]
        request.wait()
        file.write(tile, values)
        assert content(file, tile, size) == bytes(values.numpy().data)


def ask(file: AsyncSwapFile, kind: str, tile: int, buffer: Tensor) -> SwapRequest:
    return file.read(tile, buffer) if kind == "read" else file.write(tile, buffer)


def test_settled_is_what_has_ended(folder, monkeypatch):
    file = AsyncSwapFile(folder, "state", SIZES, settings=SMALL)
    gate = threading.Event()
    monkeypatch.setattr(os, "pwritev", slowed(os.pwritev, gate))
    pending = file.write(0, random_bytes(SIZES[0], 0))
    threading.Timer(0.05, gate.set).start()
    file.wait_for_requests()
    assert pending.is_done()


def test_a_tile_never_written_cannot_be_read(folder):
    file = AsyncSwapFile(folder, "state", SIZES)
    with pytest.raises(StorageError, match="tile 3 was read before it was written"):
        file.read(3, page_aligned_bytes(SIZES[3], pinned=False)).wait()


def test_requests_and_bytes_are_counted(folder):
    file = AsyncSwapFile(folder, "state", SIZES, settings=SMALL)
    for tile in (0, 1, 3):
        file.write(tile, random_bytes(SIZES[tile], tile)).wait()
    for tile in (3, 3):
        content(file, tile, SIZES[tile])
    assert vars(file.traffic) == {"reads": 2, "writes": 3, "read_bytes": 2 * SIZES[3],
                                  "written_bytes": SIZES[0] + SIZES[1] + SIZES[3]}


def test_a_system_call_carries_the_blocks_of_the_queue(folder, monkeypatch):
    lengths: list[int] = []
    pwritev = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda *args: lengths.append(sum(map(len, args[1]))) or pwritev(*args))
    for number, settings in enumerate((AioSettings(block_size=PAGE_SIZE, queue_depth=4),
                                       AioSettings(block_size=PAGE_SIZE, queue_depth=4, single_submit=True))):
        AsyncSwapFile(folder, f"state{number}", [8 * PAGE_SIZE],
                      settings=settings).write(0, random_bytes(8 * PAGE_SIZE, 0)).wait()
    assert lengths == [4 * PAGE_SIZE] * 2 + [PAGE_SIZE] * 8


@pytest.mark.parametrize(("parallelism", "overlap"), [(1, True), (3, True), (1, False), (3, False)])
def test_no_more_system_calls_at_a_time_than_the_setting_says(folder, monkeypatch, parallelism, overlap):
    under_way, most, lock, met = 0, 0, threading.Lock(), threading.Barrier(parallelism)
    preadv = os.preadv

    def counted(*args: Any) -> int:
        nonlocal under_way, most
        with lock:
            under_way += 1
            most = max(most, under_way)
        met.wait(20)  # that many do come together,
        threading.Event().wait(0.01)  # and one more would have the time
        with lock:
            under_way -= 1
        return preadv(*args)

    file = AsyncSwapFile(folder, "state", [12 * PAGE_SIZE], settings=AioSettings(
        block_size=PAGE_SIZE, queue_depth=1, intra_op_parallelism=parallelism, overlap_events=overlap))
    file.write(0, random_bytes(12 * PAGE_SIZE, 0)).wait()
    monkeypatch.setattr(os, "preadv", counted)
    content(file, 0, 12 * PAGE_SIZE)
    assert most == parallelism


@pytest.mark.parametrize(("overlap", "patience"), [(True, 20), (False, 0.1)])
def test_the_disk_works_on_the_next_stretch_while_one_is_summed_if_so_set(folder, monkeypatch, overlap, patience):
    calls, begun, seen = itertools.count(), threading.Event(), []
    preadv = os.preadv

    def counted(*args: Any) -> int:
        if next(calls) == 1:
            begun.set()
        return preadv(*args)

    def wait(data: memoryview) -> int:
        seen.append(begun.wait(patience))
        return crc32(data)

    file = AsyncSwapFile(folder, "state", [2 * PAGE_SIZE], settings=AioSettings(
        block_size=PAGE_SIZE, queue_depth=1, overlap_events=overlap))
    file.write(0, random_bytes(2 * PAGE_SIZE, 0)).wait()
    monkeypatch.setattr(os, "preadv", counted)
    monkeypatch.setattr(async_file, "crc32", wait)
    content(file, 0, 2 * PAGE_SIZE)
    assert seen == [overlap, True]


@pytest.mark.parametrize("number, remedy", [
    (errno.ENOSPC, ", .* free; free space"), (errno.EIO, "; check the drive"), (errno.EDQUOT, ", .* free; free space")])
def test_a_write_that_fails_is_reported_by_the_next_read_and_at_the_end(folder, monkeypatch, number, remedy):
    file = AsyncSwapFile(folder, "state", SIZES, settings=SMALL)
    file.write(0, random_bytes(SIZES[0], 0)).wait()

    def fail(*args: Any) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", fail)
        write = file.write(0, random_bytes(SIZES[0], 1))
        read = file.read(0, page_aligned_bytes(SIZES[0], pinned=False))
        said = (
            f"{file.description}: cannot write tile 0 of {format_bytes(SIZES[0])}: {os.strerror(number)}{remedy}, or "
            f"choose .*{FLAG}")
        for report in (read.wait, write.wait, file.wait_for_requests):
            with pytest.raises(StorageError, match=said):
                report()
    file.write(0, random_bytes(SIZES[0], 2)).wait()
    assert content(file, 0, SIZES[0]) == bytes(random_bytes(SIZES[0], 2).numpy().data)
    file.close()  # what was lost has been written again


def test_a_read_that_fails_names_file_and_tile(folder, monkeypatch):
    file = AsyncSwapFile(folder, "state", SIZES)
    file.write(3, random_bytes(SIZES[3], 0)).wait()

    def fail(*args: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(StorageError, match=f"{file.description}: cannot read tile 3 .*; check the drive.*checkpoint"):
        content(file, 3, SIZES[3])


def test_calls_that_carry_less_than_asked_are_repeated(folder, monkeypatch):
    file = AsyncSwapFile(folder, "state", SIZES)
    preadv, pwritev = os.preadv, os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, parts, at: pwritev(fd, [parts[0][:PAGE_SIZE + 300]], at))
    monkeypatch.setattr(os, "preadv", lambda fd, parts, at: preadv(fd, [parts[0][:700]], at))
    source = random_bytes(SIZES[5], 5)
    file.write(5, source).wait()
    assert content(file, 5, SIZES[5]) == bytes(source.numpy().data)


def test_a_file_cut_short_is_an_error(folder):
    file = AsyncSwapFile(folder, "state", SIZES)
    file.write(5, random_bytes(SIZES[5], 5)).wait()
    os.truncate(content_of(file), 20 * PAGE_SIZE)
    with pytest.raises(StorageError, match="cannot read tile 5 .*the file ends"):
        content(file, 5, SIZES[5])


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_flipped_bit_is_an_error(folder, settings):
    file = AsyncSwapFile(folder, "state", SIZES, settings=settings)
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


def test_the_contents_of_two_files_exchanged_are_an_error(folder):
    files = [AsyncSwapFile(folder, name, SIZES) for name in ("state", "weights")]
    for seed, file in enumerate(files):
        file.write(5, random_bytes(SIZES[5], seed)).wait()
    contents = [content_of(file).read_bytes() for file in files]
    for file, other in zip(files, reversed(contents)):
        content_of(file).write_bytes(other)
    for file in files:
        with pytest.raises(StorageError, match=f"{file.description}: tile 5 is not what was written"):
            content(file, 5, SIZES[5])


def test_where_the_file_system_has_no_direct_way_tiles_come_back_as_well(folder, monkeypatch):
    opened, calls = os.open, []
    pwritev = os.pwritev

    def refuse(path: Any, flags: int, *args: Any, **named: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return opened(path, flags, *args, **named)

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(os, "pwritev", lambda *args: calls.append(args[0]) or pwritev(*args))
    file = AsyncSwapFile(folder, "state", SIZES, settings=SMALL)
    file.write(3, random_bytes(SIZES[3], 3)).wait()
    assert content(file, 3, SIZES[3]) == bytes(random_bytes(SIZES[3], 3).numpy().data)
    assert len(set(calls)) == 1


def test_a_full_disk_is_known_when_the_file_is_made(folder, monkeypatch):
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StorageError, match=f"swap file state in .*: cannot make a file of 12 kB: .* free; .*{FLAG}"):
        AsyncSwapFile(folder, "state", [PAGE_SIZE, 2 * PAGE_SIZE])


def test_a_drive_with_room_but_not_for_another_file_is_told_as_such(folder, monkeypatch):
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    found = SimpleNamespace(f_files=7, f_favail=0, f_bavail=9, f_frsize=PAGE_SIZE)
    monkeypatch.setattr(os, "statvfs", lambda path: found)
    with pytest.raises(StorageError, match="12 kB: No space left on device for another file; free space, or"):
        AsyncSwapFile(folder, "state", [PAGE_SIZE, 2 * PAGE_SIZE])


def test_the_limit_on_the_size_of_files_is_a_full_disk(folder):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(StorageError, match="cannot make a file of 2.1 MB: File too large; raise the limit"):
            AsyncSwapFile(folder, "state", [1 << 20] * 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_room_that_cannot_be_promised_is_missed_at_the_write(folder, monkeypatch):
    def unknown(*args: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", unknown)
    file = AsyncSwapFile(folder, "state", [PAGE_SIZE, 2 * PAGE_SIZE])
    file.write(1, random_bytes(2 * PAGE_SIZE, 1)).wait()
    assert content(file, 1, 2 * PAGE_SIZE) == bytes(random_bytes(2 * PAGE_SIZE, 1).numpy().data)


def test_a_file_has_the_room_and_is_nobody_elses(folder):
    file = AsyncSwapFile(folder, "state", SIZES)
    status = os.stat(content_of(file))
    assert status.st_size == sum(-(-size // PAGE_SIZE) * PAGE_SIZE for size in SIZES)
    assert status.st_blocks * 512 >= status.st_size
    assert status.st_mode & 0o777 == 0o600


def test_what_waits_for_its_turn_when_the_file_is_closed_fails(folder, monkeypatch):
    file = AsyncSwapFile(folder, "state", SIZES, settings=SMALL)
    gate, entered = threading.Event(), threading.Event()
    monkeypatch.setattr(os, "pwritev", slowed(os.pwritev, gate, entered))
    first, *others = [file.write(tile, random_bytes(SIZES[tile], tile)) for tile in (0, 5, 3)]
    assert entered.wait(20)
    threading.Timer(0.05, gate.set).start()
    file.close()
    for pending in others:
        with pytest.raises(StorageError, match="was closed before it could write tile"):
            pending.wait()
    file.close()


def test_a_closed_file_is_gone_and_takes_no_request(folder):
    file = AsyncSwapFile(folder, "state", SIZES)
    file.write(0, random_bytes(SIZES[0], 0)).wait()
    file.close()
    assert open_swap_files(folder.path) == []
    others = [os.open(os.devnull, os.O_RDONLY) for _ in range(4)]  # under the numbers that are free now
    file.close()
    for other in others:
        os.close(other)  # none was closed with it
    for ask in (file.read, file.write):
        with pytest.raises(StorageError, match=f"{file.description} was closed before it could {ask.__name__} tile 0"):
            ask(0, page_aligned_bytes(SIZES[0], pinned=False)).wait()


def test_a_file_is_closed_with_its_folder(folder):
    file = AsyncSwapFile(folder, "state", SIZES)
    file.write(0, random_bytes(SIZES[0], 0)).wait()
    folder.close()
    for descriptor in (file._cleanup.file.descriptor, file._cleanup.file._direct):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
    pending = file.write(0, random_bytes(SIZES[0], 0))
    assert pending._done_event.wait(20)
    with pytest.raises(StorageError, match="was closed before it could write tile 0"):
        pending.wait()
    file.close()


@pytest.fixture
def threads():
    """Names of the threads of tile files that the test has started: another one's may not have ended yet."""
    former = set(threading.enumerate())
    return lambda: sorted(thread.name for thread in set(threading.enumerate()) - former
                          if thread.name.startswith("tiles: "))


def all_end(threads: set[threading.Thread]) -> bool:
    for thread in threads:
        thread.join(20)
    return not any(thread.is_alive() for thread in threads)


def test_a_file_keeps_its_folder(tmp_path):
    former = set(threading.enumerate())
    file = AsyncSwapFile(SwapDrive(tmp_path, flag=FLAG), "state", SIZES)
    file.write(0, random_bytes(SIZES[0], 0)).wait()
    assert content(file, 0, SIZES[0])
    threads = set(threading.enumerate()) - former
    del file  # one of its threads may have it for a moment longer
    assert all_end(threads) and open_swap_files(tmp_path) == []


def test_the_last_to_have_a_file_may_be_its_own_thread(tmp_path, monkeypatch):
    gate, entered, former = threading.Event(), threading.Event(), set(threading.enumerate())
    monkeypatch.setattr(os, "pwritev", slowed(os.pwritev, gate, entered))
    file = AsyncSwapFile(SwapDrive(tmp_path, flag=FLAG), "state", SIZES)
    file.write(0, random_bytes(SIZES[0], 0))
    assert entered.wait(20)
    threads = set(threading.enumerate()) - former  # engines of other tests may have some
    del file
    gate.set()
    assert all_end(threads) and open_swap_files(tmp_path) == []


def test_the_files_of_a_folder_share_their_threads(folder, threads):
    for number in range(10):
        file = AsyncSwapFile(folder, f"state{number}", SIZES, settings=AioSettings(intra_op_parallelism=2))
        file.write(0, random_bytes(SIZES[0], 0)).wait()
        assert content(file, 0, SIZES[0])
    assert threads() == ["tiles: reads"] * 3 + ["tiles: writes"] * 3


def test_a_disk_that_hangs_does_not_hold_the_close_for_ever_nor_lose_its_descriptor(folder, monkeypatch):
    monkeypatch.setattr("megatron.zero.offload.swap_drive.CLOSE_TIMEOUT_SECONDS", 0.05)
    file = AsyncSwapFile(folder, "state", SIZES)
    gate, entered = threading.Event(), threading.Event()
    monkeypatch.setattr(os, "pwritev", slowed(os.pwritev, gate, entered))
    pending = file.write(0, random_bytes(SIZES[0], 0))
    assert entered.wait(20)
    descriptor = file._cleanup.file.descriptor
    number = os.fstat(descriptor).st_ino
    file.close()
    assert os.fstat(descriptor).st_ino == number
    gate.set()
    pending._done_event.wait(20)


def test_without_threads_the_caller_does_the_work(folder, monkeypatch):
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    file = AsyncSwapFile(folder, "state", SIZES, settings=SMALL)
    file.write(5, random_bytes(SIZES[5], 5)).wait()
    assert content(file, 5, SIZES[5]) == bytes(random_bytes(SIZES[5], 5).numpy().data)


ENDS = {
    "pass": 0,
    "raise RuntimeError('on purpose')": 1,
    "sys.exit(3)": 3,
    "os.pwritev = lambda *args: threading.Event().wait(); file.write(1, buffer)": 0,
    "child = os.fork()\n"
    "if child == 0:\n"
    "    try: file.read(0, buffer)\n"
    "    except ConfigError: sys.exit(9)\n"
    "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9\n"
    "file.read(0, buffer).wait()\n"
    "assert file.read(1, buffer).wait() is None": 0,
}
"""The last lines of a program, and its exit code. The disk of the fourth one hangs; the fifth forks, and its child may
neither use what its parent has nor remove it."""

PROGRAM = """
import json, os, sys, threading
from megatron.errors import ConfigError
from megatron.zero.offload import async_file, swap_drive
from megatron.zero.offload.direct_io import page_aligned_bytes
from megatron.zero.offload.swap_drive import SwapDrive
swap_drive.CLOSE_TIMEOUT_SECONDS = 0.3
children = []
for rank, end in enumerate(json.loads(sys.argv[2])):
    children.append(os.fork())
    if children[-1] == 0:
        folder = SwapDrive(sys.argv[1], flag="--f")
        file = async_file.AsyncSwapFile(folder, "state", [8 << 20] * 4)
        buffer = page_aligned_bytes(8 << 20, pinned=False)
        for tile in range(4):
            file.write(tile, buffer)
            file.read(tile, page_aligned_bytes(8 << 20, pinned=False))
        exec(end)
        break
else:
    print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
"""


def test_a_process_ends_with_work_under_way_and_leaves_nothing(tmp_path):
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", PROGRAM, str(tmp_path), json.dumps(list(ENDS))],
                          timeout=100, capture_output=True, text=True)
    assert json.loads(done.stdout) == list(ENDS.values()), done.stderr
    assert done.stderr.count("Traceback") == 1 and "Fatal" not in done.stderr, done.stderr
    assert list(tmp_path.iterdir()) == []
