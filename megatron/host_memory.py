"""The host's memory, as a process may use it: what the machine has, or less where a container or a batch system limits
it. Such a limit is a control group's, of version 1 or 2, or that of a group around it; its processes see the memory of
the whole machine in /proc/meminfo, and one of them is ended when they reach the limit.

None where a system tells nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

KERNEL = Path("/")
"""Where its files are."""


def available() -> int | None:
    """Bytes that nobody uses, or could do without."""
    known = [max(0, limit.bytes - limit.used()) for limit in _limits()]
    return min([*known, *_of_machine("MemAvailable")], default=None)


def installed() -> int | None:
    """Bytes that could be used if nobody else used any."""
    return min([*(limit.bytes for limit in _limits()), *_total()], default=None)


def place(otherwise: str) -> str:
    """What has it, in words, and `otherwise` where nothing but the machine limits it."""
    is_limited = any(limit.bytes < total for limit in _limits() for total in _total() or [limit.bytes + 1])
    return "this container or job" if is_limited else otherwise


def _of_machine(line: str) -> list[int]:
    """Bytes, where it is told."""
    with suppress(OSError, ValueError):
        for one in (KERNEL / "proc/meminfo").read_text(encoding="utf-8").splitlines():
            if one.startswith(f"{line}:"):
                return [int(one.split()[1]) << 10]
    return []


def _total() -> list[int]:
    if told := _of_machine("MemTotal"):
        return told
    try:
        return [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    except (ValueError, OSError):
        return []


@dataclass(frozen=True)
class _Version:
    """Of control groups: its files, and names in `memory.stat`."""

    mounted: str
    limit: str
    used: str
    could_do_without: tuple[str, ...]
    """Pages of files, and what the kernel keeps for speed: it gives them up before it ends a process."""
    around: str | None
    """The least limit of the groups around, which a container may not see."""


FIRST = _Version("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
                 ("total_inactive_file", "total_active_file"), "hierarchical_memory_limit")
SECOND = _Version("sys/fs/cgroup", "memory.max", "memory.current", ("inactive_file", "active_file", "slab_reclaimable"),
                  None)


@dataclass(frozen=True)
class _Limit:
    version: _Version
    folder: Path
    bytes: int

    def used(self) -> int:
        try:
            used = int((self.folder / self.version.used).read_text())
        except (OSError, ValueError):
            return 0
        told = _stat(self.folder)
        return max(0, used - sum(told.get(name, 0) for name in self.version.could_do_without))


def _limits() -> Iterator[_Limit]:
    """Of the group of this process and those around it. In a container the path of a group may be that on the host,
    and the folder of its own then is where the groups are mounted."""
    for version, path in _groups():
        mounted = KERNEL / version.mounted
        group = mounted / path.lstrip("/")
        for folder in (group, *group.parents):
            with suppress(OSError, ValueError):  # no limit here: no such file, or "max"
                limit = int((folder / version.limit).read_text())
                yield _Limit(version, folder, min(limit, _stat(folder).get(version.around or "", limit)))
            if folder == mounted:
                break


def _groups() -> Iterator[tuple[_Version, str]]:
    with suppress(OSError):
        for line in os.fsdecode((KERNEL / "proc/self/cgroup").read_bytes()).split("\n"):
            _, controllers, path = (*line.split(":", 2), "", "", "")[:3]
            if path and ".." not in path.split("/"):  # that of a group outside of what can be seen here
                if not controllers:
                    yield SECOND, path
                elif "memory" in controllers.split(","):
                    yield FIRST, path


def _stat(folder: Path) -> dict[str, int]:
    with suppress(OSError, ValueError):
        lines = (folder / "memory.stat").read_text().splitlines()
        return {name: int(value) for name, _, value in (line.partition(" ") for line in lines)}
    return {}
