"""What is said of a drive before a run depends on it."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Any

import pytest

from megatron.errors import ConfigError, StorageError
from megatron.zero.homes import preflight
from megatron.zero.homes.preflight import Drive, examine

FLAG = "--offload-optimizer-nvme-path"


@pytest.fixture(autouse=True)
def little(monkeypatch):
    monkeypatch.setattr(preflight, "BLOCK", 1 << 20)
    monkeypatch.setattr(preflight, "MOST", 4 << 20)


def look(path: Path, needed: int = 8 << 20) -> Drive:
    return examine(path, needed=needed, read_a_step=10**9, written_a_step=10**9, flag=FLAG)


def test_one_line_tells_room_rates_and_the_cost_of_a_step():
    drive = Drive(path=Path("/nvme"), free=512_300_000_000, needed=38_000_000_000, read_rate=3.1e9, write_rate=1.9e9,
                  read_a_step=31_000_000_000, written_a_step=19_000_000_000)
    assert str(drive) == (" nvme /nvme: 512 GB free, needs 38 GB; reads 3.1 GB/s, writes 1.9 GB/s: "
                          "about 20.0 s of a step")


def test_a_drive_that_will_do_is_measured_and_left_as_it_was(tmp_path):
    drive = look(tmp_path)
    status = os.statvfs(tmp_path)
    assert drive.free == pytest.approx(status.f_bavail * status.f_frsize, rel=0.2)
    assert drive.read_rate > 1e6 and drive.write_rate > 1e6
    assert drive.seconds_a_step == pytest.approx(1e9 / drive.read_rate + 1e9 / drive.write_rate)
    assert re.fullmatch(rf" nvme {tmp_path}: .* free, needs .*; reads .*/s, writes .*/s: about .* s of a step",
                        str(drive))
    assert list(tmp_path.iterdir()) == []


def test_the_probe_is_written_and_read_as_far_as_it_goes(tmp_path, monkeypatch):
    places: dict[str, list[int]] = {"pwritev": [], "preadv": []}
    for name, seen in places.items():
        call = getattr(os, name)
        monkeypatch.setattr(os, name, lambda file, parts, at, call=call, seen=seen:
                            seen.append(at) or call(file, parts, at))
    look(tmp_path)
    assert places == {"pwritev": [0, 1 << 20, 2 << 20, 3 << 20], "preadv": [0, 1 << 20, 2 << 20, 3 << 20]}


def test_a_slow_drive_is_measured_for_a_while_only(tmp_path, monkeypatch):
    clock = iter((0.0, 0.1, 0.2, 9.0, 10.0, 20.0, 29.0, 30.0))
    monkeypatch.setattr(preflight.time, "perf_counter", lambda: next(clock))
    drive = look(tmp_path)
    assert drive.write_rate == 3 * (1 << 20) / 10  # three of four blocks were written until it was 9 o'clock,
    assert drive.read_rate == (1 << 20) / 10  # and one was read


def test_too_little_room_says_how_much_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "_free", lambda path: 12 * 10**9)
    with pytest.raises(StorageError, match=f"{FLAG} {tmp_path}: 12 GB free, but this run needs 38 GB there; "):
        look(tmp_path, 38 * 10**9)


def test_no_such_folder_is_the_settings_fault(tmp_path):
    with pytest.raises(ConfigError, match=f"{FLAG} {tmp_path}/nowhere: there is no such folder"):
        look(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["open", "pwritev", "fsync", "preadv"])
@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EIO])
def test_a_drive_that_fails_is_named_with_its_flag_and_left_as_it_was(tmp_path, monkeypatch, name, number):
    def fail(*args: Any, **named: Any) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, name, fail)
        with pytest.raises(StorageError, match=f"{FLAG} {tmp_path}: cannot write .*: {os.strerror(number)}; make it"):
            look(tmp_path)
    assert list(tmp_path.iterdir()) == []
