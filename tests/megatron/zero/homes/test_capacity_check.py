"""Before a run depends on it, the host is asked for memory, and a drive for space and speed."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from megatron import host_memory
from megatron.config.tree import Config
from megatron.errors import ConfigError, StorageError
from megatron.optim.adam import AdamW
from megatron.zero.api.offload_plan import NvmeDrives, expected_nvme_usage
from megatron.zero.offload import capacity_check
from megatron.zero.offload.capacity_check import NvmeUsage, check_host_memory, measure_rates, probe_nvme
from megatron.zero.offload.direct_io import round_up_to_page
from tests.megatron.zero.homes.test_equal import everywhere
from tests.megatron.zero.run import configure_gpt2

FLAG, GIB = "--offload-optimizer-nvme-path", 2**30


def test_what_a_node_cannot_hold_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "FILESYSTEM_ROOT", tmp_path)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: {16 * GIB // 1024} kB\nMemAvailable: {10 * GIB // 1024} kB\n")
    check_host_memory(5 * GIB, 2, "--offload")
    with pytest.raises(ConfigError, match="--offload: the 2 ranks of this node keep 12.0 GiB on the host, and it has "
                                          "10.0 GiB available"):
        check_host_memory(6 * GIB, 2, "--offload")
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 3 * GIB)
    monkeypatch.setattr(host_memory, "describe_owner", lambda otherwise: "this container or job")
    with pytest.raises(ConfigError, match="keep 4.0 GiB on the host, and this container or job has 3.0 GiB available"):
        check_host_memory(2 * GIB, 2, "--offload")
    monkeypatch.setattr(host_memory, "available_bytes", lambda: None)
    check_host_memory(6 * GIB, 2, "--offload")


# ---- a drive --------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def small_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity_check, "PROBE_BLOCK_BYTES", 1 << 20)
    monkeypatch.setattr(capacity_check, "MAX_PROBE_BYTES", 4 << 20)


def probe(path: Path, stored: int = 8 << 20) -> str:
    return probe_nvme(path, FLAG, NvmeUsage("weights", stored, 31_000_000_000, 19_000_000_000))


def test_one_line_tells_room_rates_and_the_cost_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity_check, "free_space", lambda path: 512_300_000_000)
    monkeypatch.setattr(capacity_check, "measure_rates", lambda path, size: (3.1e9, 1.9e9))
    line = "512 GB free, needs 38 GB; reads 3.1 GB/s, writes 1.9 GB/s: about 20 s of a step"
    assert probe(tmp_path, 38_000_000_000) == f" nvme {tmp_path} for weights: {line}"
    with pytest.raises(StorageError, match=f"{FLAG} {tmp_path}: 512 GB free, but this run needs 600 GB there; "):
        probe(tmp_path, 600 * 10**9)
    with pytest.raises(ConfigError, match=f"{FLAG} {tmp_path}/nowhere: there is no such folder"):
        probe(tmp_path / "nowhere")


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch, limit: int = 1 << 40) -> Iterator[dict[str, list[int]]]:
    """Offsets of system calls; the drive is full at `limit` bytes."""
    offsets: dict[str, list[int]] = {"pwritev": [], "preadv": []}

    def wrap(name: str) -> Any:
        call = getattr(os, name)

        def checked(descriptor: int, parts: Any, at: int) -> int:
            offsets[name].append(at)
            if at + sum(map(len, parts)) > limit:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            count: int = call(descriptor, parts, at)
            return count

        return checked

    with monkeypatch.context() as patch:
        for name in offsets:
            patch.setattr(os, name, wrap(name))
        yield offsets


def test_the_probe_is_written_and_read_as_far_as_it_goes_and_leaves_nothing(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with recorded(monkeypatch) as offsets:
        assert min(measure_rates(tmp_path, 4 << 20)) > 1e6
    assert offsets == {"pwritev": [0, 1 << 20, 2 << 20, 3 << 20], "preadv": [0, 1 << 20, 2 << 20, 3 << 20]}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("needed", [1, 5000, 1_500_000])
@pytest.mark.parametrize("beside", [0, 1, 40])
def test_the_probe_needs_no_more_than_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, needed: int,
                                              beside: int) -> None:
    size = max(round_up_to_page(needed), needed * (1 + beside))
    monkeypatch.setattr(capacity_check, "free_space", lambda path: size)
    with recorded(monkeypatch, max(4096, min(needed, size // 4))):
        probe(tmp_path, needed)


def test_a_slow_drive_is_measured_for_a_while_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((0.0, 0.1, 0.2, 9.0, 10.0, 20.0, 29.0, 30.0))
    monkeypatch.setattr(capacity_check.time, "perf_counter", lambda: next(clock))
    assert measure_rates(tmp_path, 4 << 20) == ((1 << 20) / 10, 3 * (1 << 20) / 10)


@pytest.mark.parametrize("name", ["open", "pwritev", "fsync", "preadv"])
def test_a_drive_that_fails_is_named_with_its_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def fail(*args: Any, **named: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, name, fail)
        with pytest.raises(StorageError, match=f"{FLAG} {tmp_path}: cannot write .*: Input/output error; check"):
            probe(tmp_path)
    assert list(tmp_path.iterdir()) == []


# ---- what a configuration stores there ------------------------------------------------------------------------------


def configured(folder: Path, **cell: Any) -> Config:
    return configure_gpt2(**{"batch_size": 2, "zero_stage": 3, **everywhere(folder, 3), **cell})


def told(config: Config, kinds: tuple[str, ...] = ("optimizer", "param")) -> list[str]:
    """Of a model of 100 x 100 + 100 numbers."""
    drives = NvmeDrives(config)
    try:
        for kind in kinds:
            drives.drive(kind)
        return drives.probe(expected_nvme_usage(config, AdamW(), nn.Linear(100, 100), 1, 1))
    finally:
        drives.close()


def test_two_folders_of_one_drive_share_its_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "weights").mkdir()
    apart = configured(tmp_path, offload_param_nvme_path=str(tmp_path / "weights"))
    monkeypatch.setattr(capacity_check, "free_space", lambda path: 162_000)
    assert "needs 121 kB" in told(apart)[0]
    monkeypatch.setattr(capacity_check, "free_space", lambda path: 161_000)
    with pytest.raises(StorageError, match="161 kB free, but this run needs 121 kB there and 40 kB in other folders"):
        told(apart)


@pytest.mark.parametrize("kinds, cell, expected", [
    (("optimizer", "param"), {}, " for optimizer state and weights: .* free, needs 162 kB; .* s of a step"),
    (("param",), {"stage3_param_persistence_threshold": 101}, " for weights: .* free, needs 40 kB; .* s of a step"),
    (("optimizer", "param"), {"stage3_param_persistence_threshold": 9**6}, " for optimizer state: .*, needs 121 kB.*"),
    (("optimizer", "param"), {"offload_param_max_in_cpu": 10_100}, " for optimizer state: .* needs 121 kB; .*"),
    (("param",), {"offload_param_max_in_cpu": 10_100}, ": nothing of this run will be there"),
])
def test_a_drive_is_told_of_by_what_it_will_keep(tmp_path: Path, kinds: tuple[str, ...], cell: dict[str, Any],
                                                 expected: str) -> None:
    [line] = told(configured(tmp_path, **cell), kinds)
    assert re.fullmatch(f" nvme {tmp_path}{expected}", line)
