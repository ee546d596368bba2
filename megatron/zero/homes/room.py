"""Whether the host has room for what it is to keep, before memory is locked for it: the system would end some process
of the node instead, and say nothing.
"""

from __future__ import annotations

from pathlib import Path

from megatron.errors import ConfigError


def check_room_on_host(needed: int, ranks: int, flags: str, meminfo: Path = Path("/proc/meminfo")) -> None:
    """`needed` bytes for each of the ranks of a node. A system that does not tell what it has is not asked."""
    available = _available(meminfo)
    if available is not None and needed * ranks > available:
        raise ConfigError(
            f"{flags}: the {ranks} ranks of this node keep {needed * ranks / 2**30:.1f} GiB on the host, which has "
            f"{available / 2**30:.1f} GiB available: use more nodes, or --offload-optimizer-device nvme")


def _available(meminfo: Path) -> int | None:
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
