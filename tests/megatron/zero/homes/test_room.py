"""The host is asked for room before memory is locked."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.errors import ConfigError
from megatron.zero.homes.room import check_room_on_host

GIB = 2**30


def test_what_a_node_cannot_hold_is_refused(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal: {16 * GIB // 1024} kB\nMemAvailable: {10 * GIB // 1024} kB\n")
    check_room_on_host(5 * GIB, 2, "--offload", meminfo)
    with pytest.raises(ConfigError, match="--offload: the 2 ranks of this node keep 12.0 GiB on the host, which has "
                                          "10.0 GiB available"):
        check_room_on_host(6 * GIB, 2, "--offload", meminfo)
    check_room_on_host(6 * GIB, 2, "--offload", tmp_path / "none")
