"""A tile that is read holds what was last written, or the read raises."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from data.storage import crc32
from megatron.errors import StorageError, format_bytes
from megatron.zero.offload import async_file
from megatron.zero.offload.async_file import AsyncSwapFile
from megatron.zero.offload.direct_io import PAGE_SIZE, page_aligned_bytes
from megatron.zero.offload.swap_drive import AioSettings, SwapDrive
from tests.megatron.zero.homes.swap_files import content_of, open_swap_files

FLAG = "--offload-optimizer-nvme-path"
SIZES = (5 * PAGE_SIZE, 1, PAGE_SIZE, 3 * PAGE_SIZE + 17, 0, 40 * PAGE_SIZE - 3, PAGE_SIZE - 1)
SMALL = AioSettings(block_size=PAGE_SIZE, queue_depth=2)
"""Two pages a system call: even small tiles have several stretches."""

SETTINGS = (SMALL, AioSettings(), AioSettings(block_size=PAGE_SIZE, queue_depth=4, intra_op_parallelism=4),
            AioSettings(block_size=1000, queue_depth=9, single_submit=True, overlap_events=False))


Made = Callable[..., AsyncSwapFile]


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Made]:
    """Makes a file, by default of SIZES in small blocks, on a drive of its own."""
    with ExitStack() as drives:
        def make(settings: AioSettings = SMALL, sizes: Sequence[int] = SIZES) -> AsyncSwapFile:
            drive = drives.enter_context(SwapDrive(tmp_path, flag=FLAG, aio=settings))
            return AsyncSwapFile(drive, "state", sizes)

        yield make


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
@pytest.mark.parametrize("shift, more", [(0, 0), (0, 300), (7, 9)])
def test_tiles_of_any_size_come_back(made, settings, shift, more):
    """Also from larger buffers, and from memory that does not begin at a page."""
    file = made(settings)
    sources = [random_bytes(shift + size + more, tile)[shift:] for tile, size in enumerate(SIZES)]
    for write in [file.write(tile, source) for tile, source in enumerate(sources)]:
        write.wait()
    for tile, (size, source) in enumerate(zip(SIZES, sources)):
        into = page_aligned_bytes(shift + size + more, pinned=False)[shift:]
        file.read(tile, into).wait()
        assert torch.equal(into[:size], source[:size])


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_reads_and_writes_reads_what_was_written_last(made, settings, seed):
    draw = random.Random(seed)
    file = made(settings)
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


def test_a_read_of_a_tile_on_its_way_to_the_disk_waits_for_it(made, monkeypatch):
    file = made()
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


def test_a_write_waits_for_the_reads_before_it(made, monkeypatch):
    file = made()
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


def test_a_tile_never_written_cannot_be_read(made):
    file = made(AioSettings())
    with pytest.raises(StorageError, match="tile 3 was read before it was written"):
        file.read(3, page_aligned_bytes(SIZES[3], pinned=False)).wait()


def test_a_system_call_carries_the_blocks_of_the_queue(made, monkeypatch):
    lengths: list[int] = []
    pwritev = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda *args: lengths.append(sum(map(len, args[1]))) or pwritev(*args))
    for settings in (AioSettings(block_size=PAGE_SIZE, queue_depth=4),
                     AioSettings(block_size=PAGE_SIZE, queue_depth=4, single_submit=True)):
        made(settings, [8 * PAGE_SIZE]).write(0, random_bytes(8 * PAGE_SIZE, 0)).wait()
    assert lengths == [4 * PAGE_SIZE] * 2 + [PAGE_SIZE] * 8


@pytest.mark.parametrize(("parallelism", "overlap"), [(1, True), (3, True), (1, False), (3, False)])
def test_no_more_system_calls_at_a_time_than_the_setting_says(made, monkeypatch, parallelism, overlap):
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

    file = made(AioSettings(block_size=PAGE_SIZE, queue_depth=1, intra_op_parallelism=parallelism,
                            overlap_events=overlap), [12 * PAGE_SIZE])
    file.write(0, random_bytes(12 * PAGE_SIZE, 0)).wait()
    monkeypatch.setattr(os, "preadv", counted)
    content(file, 0, 12 * PAGE_SIZE)
    assert most == parallelism


@pytest.mark.parametrize(("overlap", "patience"), [(True, 20), (False, 0.1)])
def test_the_disk_works_on_the_next_stretch_while_one_is_summed_if_so_set(made, monkeypatch, overlap, patience):
    calls, begun, seen = itertools.count(), threading.Event(), []
    preadv = os.preadv

    def counted(*args: Any) -> int:
        if next(calls) == 1:
            begun.set()
        return preadv(*args)

    def wait(data: memoryview) -> int:
        seen.append(begun.wait(patience))
        return crc32(data)

    file = made(AioSettings(block_size=PAGE_SIZE, queue_depth=1, overlap_events=overlap), [2 * PAGE_SIZE])
    file.write(0, random_bytes(2 * PAGE_SIZE, 0)).wait()
    monkeypatch.setattr(os, "preadv", counted)
    monkeypatch.setattr(async_file, "crc32", wait)
    content(file, 0, 2 * PAGE_SIZE)
    assert seen == [overlap, True]


@pytest.mark.parametrize("number, remedy", [
    (errno.ENOSPC, ", .* free; free space"), (errno.EIO, "; check the drive"), (errno.EDQUOT, ", .* free; free space")])
def test_a_write_that_fails_is_reported_by_the_next_read_and_at_the_end(made, monkeypatch, number, remedy):
    file = made()
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
        for report in (read.wait, write.wait, file.wait_for_requests, file.raise_if_lost):
            with pytest.raises(StorageError, match=said):
                report()
    file.write(0, random_bytes(SIZES[0], 2)).wait()
    assert content(file, 0, SIZES[0]) == bytes(random_bytes(SIZES[0], 2).numpy().data)
    file.wait_for_requests()  # what was lost has been written again


def test_calls_that_carry_less_than_asked_are_repeated(made, monkeypatch):
    file = made(AioSettings())
    preadv, pwritev = os.preadv, os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, parts, at: pwritev(fd, [parts[0][:PAGE_SIZE + 300]], at))
    monkeypatch.setattr(os, "preadv", lambda fd, parts, at: preadv(fd, [parts[0][:700]], at))
    source = random_bytes(SIZES[5], 5)
    file.write(5, source).wait()
    assert content(file, 5, SIZES[5]) == bytes(source.numpy().data)


def test_a_file_cut_short_is_an_error(made):
    file = made(AioSettings())
    file.write(5, random_bytes(SIZES[5], 5)).wait()
    os.truncate(content_of(file), 20 * PAGE_SIZE)
    with pytest.raises(StorageError, match="cannot read tile 5 .*the file ends"):
        content(file, 5, SIZES[5])


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_flipped_bit_is_an_error(made, settings):
    file = made(settings)
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


def test_where_the_file_system_has_no_direct_way_tiles_come_back_as_well(made, monkeypatch):
    opened, calls = os.open, []
    pwritev = os.pwritev

    def refuse(path: Any, flags: int, *args: Any, **named: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return opened(path, flags, *args, **named)

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(os, "pwritev", lambda *args: calls.append(args[0]) or pwritev(*args))
    file = made()
    file.write(3, random_bytes(SIZES[3], 3)).wait()
    assert content(file, 3, SIZES[3]) == bytes(random_bytes(SIZES[3], 3).numpy().data)
    assert len(set(calls)) == 1


def test_a_full_disk_is_known_when_the_file_is_made(made, monkeypatch):
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StorageError, match=f"swap file state in .*: cannot make a file of 12 kB: .* free; .*{FLAG}"):
        made(sizes=[PAGE_SIZE, 2 * PAGE_SIZE])


def test_room_that_cannot_be_promised_is_missed_at_the_write(made, monkeypatch):
    def unknown(*args: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", unknown)
    file = made(sizes=[PAGE_SIZE, 2 * PAGE_SIZE])
    file.write(1, random_bytes(2 * PAGE_SIZE, 1)).wait()
    assert content(file, 1, 2 * PAGE_SIZE) == bytes(random_bytes(2 * PAGE_SIZE, 1).numpy().data)


def test_what_waits_for_its_turn_when_the_file_is_closed_fails(made, monkeypatch):
    file = made()
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


@pytest.mark.parametrize("how", [lambda file: file.close(), lambda file: file._drive.close()])
def test_a_closed_file_is_gone_and_takes_no_request(made, tmp_path, how):
    file = made()
    file.write(0, random_bytes(SIZES[0], 0)).wait()
    how(file)
    assert open_swap_files(tmp_path) == []
    others = [os.open(os.devnull, os.O_RDONLY) for _ in range(4)]  # under the numbers that are free now
    how(file)
    for other in others:
        os.close(other)  # none was closed with it
    for ask in (file.read, file.write):
        with pytest.raises(StorageError, match=f"{file.description} was closed before it could {ask.__name__} tile 0"):
            ask(0, page_aligned_bytes(SIZES[0], pinned=False))


def test_a_file_that_is_dropped_with_a_write_under_way_is_gone_with_its_threads(tmp_path, monkeypatch):
    gate, entered, former = threading.Event(), threading.Event(), set(threading.enumerate())
    monkeypatch.setattr(os, "pwritev", slowed(os.pwritev, gate, entered))
    file = AsyncSwapFile(SwapDrive(tmp_path, flag=FLAG), "state", SIZES)
    file.write(0, random_bytes(SIZES[0], 0))
    assert entered.wait(20)
    del file  # its thread has it for a moment longer
    gate.set()
    for thread in set(threading.enumerate()) - former:
        thread.join(20)
        assert not thread.is_alive()
    assert open_swap_files(tmp_path) == []


def test_an_interrupted_write_is_an_error_until_the_next_one(made, monkeypatch):
    file = made()
    submit, left = file._drive.writes.threads.submit, [3]

    def interrupt(*args: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return submit(*args)

    file.write(5, random_bytes(SIZES[5], 0)).wait()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(file._drive.writes.threads, "submit", interrupt)
        file.write(5, random_bytes(SIZES[5], 1))
    with pytest.raises(StorageError, match="tile 5 was read before it was written"):
        content(file, 5, SIZES[5])
    file.write(5, random_bytes(SIZES[5], 2))
    assert content(file, 5, SIZES[5]) == bytes(random_bytes(SIZES[5], 2).numpy().data)


ENDS = {
    "pass": 0,
    "raise RuntimeError('on purpose')": 1,
    "sys.exit(3)": 3,
    "child = os.fork()\n"
    "if child == 0:\n"
    "    try: file.read(0, buffer)\n"
    "    except ConfigError: folder.close(); sys.exit(9)\n"
    "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9\n"
    "file.read(0, buffer).wait()\n"
    "assert file.read(1, buffer).wait() is None": 0,
}
"""The last lines of a program, and its exit code. The last one forks, and its child may neither use what its parent has
nor remove it."""

PROGRAM = """
import json, os, sys
from megatron.errors import ConfigError
from megatron.zero.offload import async_file
from megatron.zero.offload.direct_io import page_aligned_bytes
from megatron.zero.offload.swap_drive import SwapDrive
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
