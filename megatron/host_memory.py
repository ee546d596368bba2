"""The host memory that a process may use: the machine's, or less if a container or a batch system limits it.

The limit is that of a control group (version 1 or 2) or of one around it. /proc/meminfo shows the whole machine, and
the kernel kills a process when the group reaches its limit. Functions return None if the system does not tell.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

FILESYSTEM_ROOT = Path("/")  # root of proc and sys; tests replace it


def available_bytes() -> int | None:
    """Bytes that are free or reclaimable."""
    under_limits = [max(0, limit - used) for limit, used in _cgroup_limits()]
    return min([*under_limits, *_read_meminfo("MemAvailable")], default=None)


def peak_resident_bytes() -> int:
    """Peak resident bytes of this process. (On Linux getrusage starts from the peak of the parent process.)"""
    with suppress(OSError, ValueError, IndexError):
        with open("/proc/self/status", "rb") as status:
            return int(status.read().partition(b"VmHWM:")[2].split()[0]) << 10
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def total_bytes() -> int | None:
    """Bytes that this process could use if no other process used any."""
    return min([*(limit for limit, _ in _cgroup_limits()), *_physical_bytes()], default=None)


def describe_owner(default: str) -> str:
    """What the memory belongs to, in words; `default` if only the machine limits it."""
    is_limited = any(limit < total for limit, _ in _cgroup_limits() for total in _physical_bytes() or [limit + 1])
    return "this container or job" if is_limited else default


def _read_meminfo(line: str) -> list[int]:
    """[bytes], or [] if it is not known."""
    with suppress(OSError, ValueError):
        for one in (FILESYSTEM_ROOT / "proc/meminfo").read_text(encoding="utf-8").splitlines():
            if one.startswith(f"{line}:"):
                return [int(one.split()[1]) << 10]
    return []


def _physical_bytes() -> list[int]:
    if total := _read_meminfo("MemTotal"):
        return total
    try:
        return [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    except (ValueError, OSError):
        return []


@dataclass(frozen=True)
class _CgroupVersion:
    """Files of a control group, and names in its `memory.stat`."""

    mount_point: str
    limit_file: str
    usage_file: str
    reclaimable: tuple[str, ...]  # file pages and caches, which the kernel frees before it kills a process
    hierarchical_limit: str | None  # the lowest limit of the groups around, which a container may not see


CGROUP_V1 = _CgroupVersion("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
                           ("total_inactive_file", "total_active_file"), "hierarchical_memory_limit")
CGROUP_V2 = _CgroupVersion("sys/fs/cgroup", "memory.max", "memory.current",
                           ("inactive_file", "active_file", "slab_reclaimable"), None)


def _cgroup_limits() -> Iterator[tuple[int, int]]:
    """(limit, used bytes) of this process's group and those around it. In a container the path may be that on the
    host; the group's own folder is then the mount point."""
    for version, path in _process_cgroups():
        mounted = FILESYSTEM_ROOT / version.mount_point
        group = mounted / path.lstrip("/")
        for folder in (group, *group.parents):
            with suppress(OSError, ValueError):  # no limit here: no such file, or "max"
                limit, stat, used = int((folder / version.limit_file).read_text()), _read_memory_stat(folder), 0
                with suppress(OSError, ValueError):
                    used = int((folder / version.usage_file).read_text())
                yield (min(limit, stat.get(version.hierarchical_limit or "", limit)),
                       max(0, used - sum(stat.get(name, 0) for name in version.reclaimable)))
            if folder == mounted:
                break


def _process_cgroups() -> Iterator[tuple[_CgroupVersion, str]]:
    with suppress(OSError):
        for line in os.fsdecode((FILESYSTEM_ROOT / "proc/self/cgroup").read_bytes()).split("\n"):
            _, controllers, path = (*line.split(":", 2), "", "", "")[:3]
            if path and ".." not in path.split("/"):  # with "..": a group that is not visible here
                if not controllers:
                    yield CGROUP_V2, path
                elif "memory" in controllers.split(","):
                    yield CGROUP_V1, path


def _read_memory_stat(folder: Path) -> dict[str, int]:
    with suppress(OSError, ValueError):
        lines = (folder / "memory.stat").read_text().splitlines()
        return {name: int(value) for name, _, value in (line.partition(" ") for line in lines)}
    return {}
