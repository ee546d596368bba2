"""The host's memory, as a process may use it: what the machine has, or less where a container or a batch system limits
it. Such a limit is a control group's, of version 1 or 2, or that of a group around it; its processes see the memory of
the whole machine in /proc/meminfo, and one of them is ended when they reach the limit.

None where a system tells nothing.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

FILESYSTEM_ROOT = Path("/")
"""Where its files are."""


def available_bytes() -> int | None:
    """Bytes that nobody uses, or could do without."""
    known = [max(0, limit.bytes - limit.used_bytes()) for limit in _cgroup_limits()]
    return min([*known, *_read_meminfo("MemAvailable")], default=None)


def peak_resident_bytes() -> int:
    """The most memory of the host that this process has had. Linux's getrusage would begin at the peak of whoever
    started it."""
    with suppress(OSError, ValueError, IndexError):
        with open("/proc/self/status", "rb") as status:
            return int(status.read().partition(b"VmHWM:")[2].split()[0]) << 10
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def total_bytes() -> int | None:
    """Bytes that could be used if nobody else used any."""
    return min([*(limit.bytes for limit in _cgroup_limits()), *_physical_bytes()], default=None)


def describe_owner(default: str) -> str:
    """What has it, in words, and `default` where nothing but the machine limits it."""
    is_limited = any(limit.bytes < total for limit in _cgroup_limits()
                     for total in _physical_bytes() or [limit.bytes + 1])
    return "this container or job" if is_limited else default


def _read_meminfo(line: str) -> list[int]:
    """Bytes, where it is told."""
    with suppress(OSError, ValueError):
        for one in (FILESYSTEM_ROOT / "proc/meminfo").read_text(encoding="utf-8").splitlines():
            if one.startswith(f"{line}:"):
                return [int(one.split()[1]) << 10]
    return []


def _physical_bytes() -> list[int]:
    if told := _read_meminfo("MemTotal"):
        return told
    try:
        return [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    except (ValueError, OSError):
        return []


@dataclass(frozen=True)
class _CgroupVersion:
    """Of control groups: its files, and names in `memory.stat`."""

    mount_point: str
    limit_file: str
    usage_file: str
    reclaimable: tuple[str, ...]
    """Pages of files, and what the kernel keeps for speed: it gives them up before it ends a process."""
    hierarchical_limit: str | None
    """The least limit of the groups around, which a container may not see."""


CGROUP_V1 = _CgroupVersion("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
                           ("total_inactive_file", "total_active_file"), "hierarchical_memory_limit")
CGROUP_V2 = _CgroupVersion("sys/fs/cgroup", "memory.max", "memory.current",
                           ("inactive_file", "active_file", "slab_reclaimable"), None)


@dataclass(frozen=True)
class _CgroupLimit:
    version: _CgroupVersion
    folder: Path
    bytes: int

    def used_bytes(self) -> int:
        try:
            used = int((self.folder / self.version.usage_file).read_text())
        except (OSError, ValueError):
            return 0
        told = _read_memory_stat(self.folder)
        return max(0, used - sum(told.get(name, 0) for name in self.version.reclaimable))


def _cgroup_limits() -> Iterator[_CgroupLimit]:
    """Of the group of this process and those around it. In a container the path of a group may be that on the host,
    and the folder of its own then is where the groups are mounted."""
    for version, path in _process_cgroups():
        mounted = FILESYSTEM_ROOT / version.mount_point
        group = mounted / path.lstrip("/")
        for folder in (group, *group.parents):
            with suppress(OSError, ValueError):  # no limit here: no such file, or "max"
                limit = int((folder / version.limit_file).read_text())
                yield _CgroupLimit(version, folder,
                                   min(limit, _read_memory_stat(folder).get(version.hierarchical_limit or "", limit)))
            if folder == mounted:
                break


def _process_cgroups() -> Iterator[tuple[_CgroupVersion, str]]:
    with suppress(OSError):
        for line in os.fsdecode((FILESYSTEM_ROOT / "proc/self/cgroup").read_bytes()).split("\n"):
            _, controllers, path = (*line.split(":", 2), "", "", "")[:3]
            if path and ".." not in path.split("/"):  # that of a group outside of what can be seen here
                if not controllers:
                    yield CGROUP_V2, path
                elif "memory" in controllers.split(","):
                    yield CGROUP_V1, path


def _read_memory_stat(folder: Path) -> dict[str, int]:
    with suppress(OSError, ValueError):
        lines = (folder / "memory.stat").read_text().splitlines()
        return {name: int(value) for name, _, value in (line.partition(" ") for line in lines)}
    return {}
