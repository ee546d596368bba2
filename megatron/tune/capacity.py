"""The memory that a rank has on this machine: free on the GPUs that it may use, and on the host beside them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from megatron.errors import ConfigError
from megatron.plan.footprint import Run
from megatron.plan.report import USABLE
from megatron.tune.memory import Memory

LIBRARIES = 300 << 20
"""Bytes of a rank on a host beside its tensors."""
MEMINFO = Path("/proc/meminfo")
VISIBLE = "CUDA_VISIBLE_DEVICES"


def capacity_of(asked: Run, gb: float | None) -> Memory:
    """For tensors. `gb`: what is said of the device."""
    given = None if gb is None else gb * 2**30
    host = max(0.0, _available() / asked.ranks - LIBRARIES)
    if asked.device == "cpu":
        return Memory(host if given is None else given)
    return Memory((_free_of_gpus(asked.ranks) if given is None else given) * USABLE, host)


def _available() -> float:
    """Bytes of this machine that nobody uses, or could do without."""
    try:
        lines = MEMINFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    told = next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") if told is None else told


def _free_of_gpus(ranks: int) -> float:
    """Bytes of the fullest one of those that the ranks take, the first that are visible."""
    visible = os.environ.get(VISIBLE)
    query = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits",
             *([] if visible is None else [f"--id={visible}"])]
    try:
        told = subprocess.run(query, text=True, capture_output=True, check=True).stdout.split()
        return min(map(float, told[:ranks])) * 2**20
    except (OSError, subprocess.CalledProcessError, ValueError) as error:
        raise ConfigError("the memory of the GPUs is not known here: give --card-gb") from error
