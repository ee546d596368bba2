"""What is said of a drive before a run depends on it."""

from __future__ import annotations

import errno
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.errors import ConfigError, StorageError
from megatron.zero.offload import capacity_check
from megatron.zero.offload.capacity_check import NvmeProbe, probe_nvme
from megatron.zero.offload.direct_io import round_up_to_page

FLAG = "--offload-optimizer-nvme-path"


@pytest.fixture(autouse=True)
def little(monkeypatch):
    monkeypatch.setattr(capacity_check, "PROBE_BLOCK_BYTES", 1 << 20)
    monkeypatch.setattr(capacity_check, "MAX_PROBE_BYTES", 4 << 20)


def look(path: Path, needed: int = 8 << 20) -> NvmeProbe:
    return probe_nvme(path, contents="weights", needed=needed, read_per_step=10**9, written_per_step=10**9, flag=FLAG)


def test_one_line_tells_room_rates_and_the_cost_of_a_step():
    drive = NvmeProbe(path=Path("/nvme"), contents="weights", free=512_300_000_000, needed=38_000_000_000,
                      read_rate=3.1e9, write_rate=1.9e9, read_per_step=31_000_000_000, written_per_step=19_000_000_000)
    assert str(drive) == (" nvme /nvme for weights: 512 GB free, needs 38 GB; reads 3.1 GB/s, writes 1.9 GB/s: "
                          "about 20.0 s of a step")
    small = replace(drive, needed=1_440, read_per_step=1_440, written_per_step=2_900_000, write_rate=950e6)
    assert str(small) == (" nvme /nvme for weights: 512 GB free, needs 1.4 kB; reads 3.1 GB/s, writes 950 MB/s: "
                          "about 3.1 ms of a step")


def test_a_drive_that_will_do_is_measured_and_left_as_it_was(tmp_path):
    drive = look(tmp_path)
    status = os.statvfs(tmp_path)
    assert drive.free == pytest.approx(status.f_bavail * status.f_frsize, rel=0.2)
    assert drive.read_rate > 1e6 and drive.write_rate > 1e6
    assert drive.seconds_per_step == pytest.approx(1e9 / drive.read_rate + 1e9 / drive.write_rate)
    assert re.fullmatch(rf" nvme {tmp_path} for weights: .* free, needs .*; reads .*/s, writes .*/s: "
                        "about .* s of a step", str(drive))
    assert list(tmp_path.iterdir()) == []


def test_the_probe_is_written_and_read_as_far_as_it_goes(tmp_path, monkeypatch):
    places: dict[str, list[int]] = {"pwritev": [], "preadv": []}
    for name, seen in places.items():
        call = getattr(os, name)
        monkeypatch.setattr(os, name, lambda file, parts, at, call=call, seen=seen:
                            seen.append(at) or call(file, parts, at))
    look(tmp_path)
    assert places == {"pwritev": [0, 1 << 20, 2 << 20, 3 << 20], "preadv": [0, 1 << 20, 2 << 20, 3 << 20]}


class Small:
    """A drive on which so many bytes fit: of a file, what is written from its beginning on."""

    def __init__(self, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.size, self.most, self._write = size, 0, os.pwritev
        monkeypatch.setattr(capacity_check, "free_space", lambda path: size)
        monkeypatch.setattr(os, "pwritev", self.write)

    def write(self, descriptor: int, parts: Any, at: int) -> int:
        self.most = max(self.most, at + sum(map(len, parts)))
        if self.most > self.size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._write(descriptor, parts, at)


@pytest.mark.parametrize("needed", [1, 4096, 5000, 100_000, 1_500_000])
@pytest.mark.parametrize("beside", [0, 1, 4, 40])
def test_the_probe_needs_no_more_than_the_run(tmp_path, monkeypatch, needed, beside):
    drive = Small(max(round_up_to_page(needed), needed * (1 + beside)), monkeypatch)
    assert look(tmp_path, needed).read_rate > 0
    assert 0 < drive.most <= max(4096, min(needed, drive.size // 4))


def test_a_slow_drive_is_measured_for_a_while_only(tmp_path, monkeypatch):
    clock = iter((0.0, 0.1, 0.2, 9.0, 10.0, 20.0, 29.0, 30.0))
    monkeypatch.setattr(capacity_check.time, "perf_counter", lambda: next(clock))
    drive = look(tmp_path)
    assert drive.write_rate == 3 * (1 << 20) / 10  # three of four blocks were written until it was 9 o'clock,
    assert drive.read_rate == (1 << 20) / 10  # and one was read


def test_too_little_room_says_how_much_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(capacity_check, "free_space", lambda path: 12 * 10**9)
    with pytest.raises(StorageError, match=f"{FLAG} {tmp_path}: 12 GB free, but this run needs 38 GB there; "):
        look(tmp_path, 38 * 10**9)


def test_no_such_folder_is_the_settings_fault(tmp_path):
    with pytest.raises(ConfigError, match=f"{FLAG} {tmp_path}/nowhere: there is no such folder"):
        look(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["open", "pwritev", "fsync", "preadv"])
@pytest.mark.parametrize("number, remedy", [
    (errno.EROFS, "Read-only file system; make it"), (errno.EACCES, "Permission denied; make it"),
    (errno.ENOSPC, "No space left on device, .* free; free space"), (errno.EIO, "Input/output error; check the drive")])
def test_a_drive_that_fails_is_named_with_its_flag_and_left_as_it_was(tmp_path, monkeypatch, name, number, remedy):
    def fail(*args: Any, **named: Any) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, name, fail)
        with pytest.raises(StorageError, match=f"{FLAG} {tmp_path}: cannot write .*: {remedy}"):
            look(tmp_path)
    assert list(tmp_path.iterdir()) == []
