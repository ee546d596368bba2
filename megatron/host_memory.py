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
    known = [limit.bytes - limit.used() for limit in _limits()]
    told = _of_machine("MemAvailable", "SC_AVPHYS_PAGES")
    return min((max(0, one) for one in [*known, *([] if told is None else [told])]), default=None)


def installed() -> int | None:
    """Bytes that could be used if nobody else used any."""
    told = _of_machine("MemTotal", "SC_PHYS_PAGES")
    return min([*(limit.bytes for limit in _limits()), *([] if told is None else [told])], default=None)


def place(otherwise: str) -> str:
    """What has it, in words, and `otherwise` where nothing but the machine limits it."""
    told = _of_machine("MemTotal", "SC_PHYS_PAGES")
    is_limited = any(told is None or limit.bytes < told for limit in _limits())
    return "this container or job" if is_limited else otherwise


def _of_machine(line: str, setting: str) -> int | None:
    with suppress(OSError):
        for one in (KERNEL / "proc/meminfo").read_text(encoding="utf-8").splitlines():
            if one.startswith(f"{line}:"):
                return int(one.split()[1]) << 10
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf(setting)
    except (ValueError, OSError):  # macOS knows no SC_AVPHYS_PAGES
        return None


@dataclass(frozen=True)
class _Version:
    """Of control groups: its files."""

    mounted: str
    limit: str
    used: str
    could_do_without: str
    """Of `memory.stat`: pages of files that nobody has looked at lately."""


FIRST = _Version("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
SECOND = _Version("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")


@dataclass(frozen=True)
class _Limit:
    version: _Version
    folder: Path
    bytes: int

    def used(self) -> int:
        with suppress(OSError, ValueError):
            used = int((self.folder / self.version.used).read_text())
            for line in (self.folder / "memory.stat").read_text().splitlines():
                name, _, value = line.partition(" ")
                if name == self.version.could_do_without:
                    used -= int(value)
            return used
        return 0


def _limits() -> Iterator[_Limit]:
    """Of the group of this process and those around it. In a container the path of a group may be that on the host,
    and the folder of its own then is where the groups are mounted."""
    with suppress(OSError):
        for line in (KERNEL / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = (*line.split(":", 2), "", "", "")[:3]
            if not path or controllers not in ("", "memory"):
                continue
            version = FIRST if controllers else SECOND
            mounted = KERNEL / version.mounted
            group = mounted / path.lstrip("/")
            for folder in (group, *group.parents):
                with suppress(OSError, ValueError):  # no limit here: no such file, or "max"
                    yield _Limit(version, folder, int((folder / version.limit).read_text()))
                if folder == mounted:
                    break
