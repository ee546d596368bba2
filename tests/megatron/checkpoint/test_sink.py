import errno
import fcntl
import os
import random
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest

from megatron.checkpoint import safetensors_io
from megatron.checkpoint.manifest import FileEntry
from megatron.checkpoint.safetensors_io import O_DIRECT, ChecksummedWriter

BLOCK = 4096
CONTENT = random.Random(0).randbytes(5 * BLOCK + 77)


@pytest.fixture(autouse=True)
def small_blocks() -> Iterator[None]:
    with mock.patch.object(safetensors_io, "WRITE_BLOCK_BYTES", BLOCK):
        yield


def written(path: Path, sizes: list[int]) -> FileEntry:
    """CONTENT in a new file, handed over in parts of these sizes and a last one."""
    with open(path, "xb", buffering=0) as file, ChecksummedWriter(file) as new:
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
def test_the_parts_do_not_show(sizes: list[int], tmp_path: Path) -> None:
    check(tmp_path / "file", sizes)


@pytest.mark.parametrize("count", [0, 1, BLOCK - 1, BLOCK, 2 * BLOCK])
def test_any_length(count: int, tmp_path: Path) -> None:
    with mock.patch(f"{__name__}.CONTENT", CONTENT[:count]):
        check(tmp_path / "file", [])


def writes(path: Path) -> list[tuple[int, bool]]:
    """(bytes, past the page cache) of each call that wrote the file."""
    made, real = [], os.write

    def write(descriptor: int, data: bytes) -> int:
        made.append((len(data), bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & O_DIRECT)))
        return real(descriptor, data)

    with mock.patch.object(os, "write", write):
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
    with mock.patch.object(fcntl, "fcntl", refused):
        assert writes(tmp_path / "file") == [(BLOCK, False)] * 5 + [(77, False)]


def test_a_file_system_that_takes_the_flag_and_refuses_the_bytes(tmp_path: Path) -> None:
    real = os.write

    def write(descriptor: int, data: bytes) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(descriptor, data)

    with mock.patch.object(os, "write", write):
        check(tmp_path / "file", [])


def test_short_writes_are_gone_on_with(tmp_path: Path) -> None:
    """What is left after one is no longer aligned."""
    real = os.write
    with mock.patch.object(os, "write", lambda descriptor, data: real(descriptor, data[:1000])):
        check(tmp_path / "file", [])


@pytest.mark.parametrize("call", range(6))
def test_an_error_of_any_write_is_raised(call: int, tmp_path: Path) -> None:
    real, calls = os.write, iter(range(100))

    def write(descriptor: int, data: bytes) -> int:
        if next(calls) == call:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data)

    with mock.patch.object(os, "write", write), pytest.raises(OSError, match="No space left"):
        written(tmp_path / "file", [])
    assert next(calls) <= call + 2, "it went on writing"


def test_a_thread_that_cannot_be_had_once_costs_no_byte(tmp_path: Path) -> None:
    """The block that was handed to it is written here, and not again by a later thread."""
    with mock.patch.object(threading.Thread, "start", _fails_once(threading.Thread.start)):
        check(tmp_path / "file", [])


def _fails_once(starts: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    failures = iter([RuntimeError("can't start new thread")])

    def start(thread: threading.Thread) -> None:
        for error in failures:
            raise error
        starts(thread)

    return start
