"""The host's memory is what a process may use of it: the machine's, or that of the tightest group around it."""

from __future__ import annotations

import os
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

import pytest

from megatron import host_memory

MIB = 2**20
MEMINFO = f"MemTotal: {1000 << 10} kB\nMemFree: 1 kB\nMemAvailable: {600 << 10} kB\n"


@pytest.fixture(autouse=True)
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(host_memory, "FILESYSTEM_ROOT", tmp_path)
    put(tmp_path, {"proc/meminfo": MEMINFO})
    return tmp_path


def put(root: Path, files: dict[str, object]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")


def second(group: str, limit: object, used: int = 0, inactive: int = 0) -> dict[str, object]:
    """Files of a group of version 2."""
    folder = f"sys/fs/cgroup/{group}".rstrip("/")
    return {f"{folder}/memory.max": limit, f"{folder}/memory.current": used * MIB,
            f"{folder}/memory.stat": f"anon 5\ninactive_file {inactive * MIB}\nslab_unreclaimable 7"}


def first(group: str, limit: int, used: int = 0, inactive: int = 0) -> dict[str, object]:
    folder = f"sys/fs/cgroup/memory/{group}".rstrip("/")
    return {f"{folder}/memory.limit_in_bytes": limit, f"{folder}/memory.usage_in_bytes": used * MIB,
            f"{folder}/memory.stat": f"inactive_file 9\ntotal_inactive_file {inactive * MIB}\ntotal_active_file 0"}


def found() -> tuple[float | None, float | None, str]:
    """MiB available and installed, and whose."""
    sizes = (host_memory.available_bytes(), host_memory.total_bytes())
    return *(None if one is None else one / MIB for one in sizes), host_memory.describe_owner("the host")


def test_without_groups_it_is_the_machines() -> None:
    assert found() == (600, 1000, "the host")


JOB = "this container or job"


LIMITS: list[tuple[str, dict[str, object], tuple[float, float, str]]] = [
    ("0::/", {**second("", 100 * MIB, 80, 30)}, (50, 100, JOB)),  # in a container with groups of its own
    ("0::/a/b", {**second("a", 100 * MIB, 90), **second("a/b", "max", 10)}, (10, 100, JOB)),  # one around it
    ("0::/a/b", {**second("a", 300 * MIB, 90), **second("a/b", 200 * MIB, 10)}, (190, 200, JOB)),
    ("0::/a", {**second("a", "max", 90)}, (600, 1000, "the host")),
    ("0::/a", {**second("a", 5000 * MIB, 90)}, (600, 1000, "the host")),
    ("0::/a", {**second("a", 900 * MIB, 90)}, (600, 900, JOB)),  # limited, but the machine has less to give
    ("0::/a", {**second("a", 100 * MIB, 120)}, (0, 100, JOB)),
    ("0::/on/the/host", {**second("", 100 * MIB, 20)}, (80, 100, JOB)),  # a container that sees its path outside
    ("9:cpu:/x\n4:memory:/job\n0::/", {**first("job", 100 * MIB, 50, 20), **first("", 2**63 - 4096)}, (70, 100, JOB)),
    ("4:memory:/docker/123", {**first("", 100 * MIB, 50)}, (50, 100, JOB)),
    ("4:memory:/job", {**first("job", 2**63 - 4096, 50)}, (600, 1000, "the host")),
    ("7:memory,hugetlb:/job", {**first("job", 100 * MIB, 50)}, (50, 100, JOB)),
    ("4:memory:/job", {**first("job", 300 * MIB, 50), "sys/fs/cgroup/memory/job/memory.stat":
                       f"hierarchical_memory_limit {100 * MIB}"}, (50, 100, JOB)),  # of a group that is not seen here
    ("0::/../b", {**second("", 100 * MIB, 50)}, (600, 1000, "the host")),  # a group beside the one that is seen here
    ("0::/a", {**second("a", 100 * MIB, 1, 5)}, (100, 100, JOB)),
    ("1:cpu:/x:y\nsenseless", {}, (600, 1000, "the host"))]


def test_the_tightest_limit_around_a_process_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, (groups, files, expected) in enumerate(LIMITS):
        monkeypatch.setattr(host_memory, "FILESYSTEM_ROOT", tmp_path / str(number))
        put(tmp_path / str(number), {"proc/meminfo": MEMINFO, "proc/self/cgroup": groups, **files})
        assert found() == expected, groups


def test_a_system_without_these_files_is_asked_itself(kernel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (kernel / "proc/meminfo").unlink()
    told = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2048}

    def sysconf(name: str) -> int:
        if name not in told:
            raise ValueError("unrecognized configuration name")
        return told[name]

    monkeypatch.setattr(os, "sysconf", sysconf)
    assert found() == (None, 8, "the host")


def test_the_peak_of_a_process_is_in_bytes() -> None:
    block = b"x" * (64 * MIB)
    assert len(block) <= host_memory.peak_resident_bytes() <= getrusage(RUSAGE_SELF).ru_maxrss << 11
