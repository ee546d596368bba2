"""The host is asked for room before memory is locked."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron import host_memory
from megatron.errors import ConfigError
from megatron.zero.offload.capacity_check import check_host_memory

GIB = 2**30


def test_what_a_node_cannot_hold_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "FILESYSTEM_ROOT", tmp_path)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: {16 * GIB // 1024} kB\nMemAvailable: {10 * GIB // 1024} kB\n")
    check_host_memory(5 * GIB, 2, "--offload")
    with pytest.raises(ConfigError, match="--offload: the 2 ranks of this node keep 12.0 GiB on the host, and it has "
                                          "10.0 GiB available"):
        check_host_memory(6 * GIB, 2, "--offload")
    monkeypatch.setattr(host_memory, "available_bytes", lambda: None)
    check_host_memory(6 * GIB, 2, "--offload")


def test_so_is_what_a_container_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 3 * GIB)
    monkeypatch.setattr(host_memory, "describe_owner", lambda otherwise: "this container or job")
    with pytest.raises(ConfigError, match="keep 4.0 GiB on the host, and this container or job has 3.0 GiB available"):
        check_host_memory(2 * GIB, 2, "--offload")
