"""The memory that a rank has on this machine: free on the GPUs that it may use, and on the host beside them."""

from __future__ import annotations

import os
import subprocess

from megatron import host_memory
from megatron.errors import ConfigError
from megatron.plan.footprint import PlannedRun
from megatron.plan.gpus import DRIVER_SECONDS
from megatron.plan.report import USABLE_FRACTION
from megatron.tune.memory import MemoryBudget

LIBRARY_BYTES = 300 << 20
"""Bytes of a rank on a host beside its tensors."""
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


def available_memory(requested: PlannedRun, gb: float | None) -> MemoryBudget:
    """For tensors. `gb`: what is said of the device."""
    given = None if gb is None else gb * 2**30
    if requested.device == "cpu":
        return MemoryBudget(_host_bytes_per_rank(requested.ranks) if given is None else given)
    return MemoryBudget((_free_gpu_bytes(requested.ranks) if given is None else given) * USABLE_FRACTION,
                        _host_bytes_per_rank(requested.ranks))


def _host_bytes_per_rank(ranks: int) -> float:
    found = host_memory.available_bytes()
    if found is None:
        raise ConfigError("the memory of this machine is not known here: give --card-gb")
    return max(0.0, found / ranks - LIBRARY_BYTES)


def _free_gpu_bytes(ranks: int) -> float:
    """Bytes of the fullest one of those that the ranks take, the first that are visible."""
    visible = os.environ.get(VISIBLE_DEVICES)
    query = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits",
             *([] if visible is None else [f"--id={visible}"])]
    try:
        output = subprocess.run(query, text=True, capture_output=True, check=True, timeout=DRIVER_SECONDS).stdout
        return min(map(float, output.split()[:ranks])) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ConfigError("the memory of the GPUs is not known here: give --card-gb") from error
