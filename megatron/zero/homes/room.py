"""Whether the host has room for what it is to keep, before memory is locked for it: the system would end some process
of the node instead, and say nothing.
"""

from __future__ import annotations

from megatron import host_memory
from megatron.errors import ConfigError


def check_host_memory(needed: int, ranks: int, flags: str) -> None:
    """`needed` bytes for each of the ranks of a node. A system that does not tell what it has is not asked."""
    available = host_memory.available_bytes()
    if available is not None and needed * ranks > available:
        free_text = f"{host_memory.describe_owner('it')} has {available / 2**30:.1f} GiB available"
        raise ConfigError(f"{flags}: the {ranks} ranks of this node keep {needed * ranks / 2**30:.1f} GiB on the host, "
                          f"and {free_text}: use more nodes, or --offload-optimizer-device nvme")
