"""The memory that a rank has on this machine: free on the GPUs that it may use, and on the host beside them."""

from __future__ import annotations

import os
import subprocess

from megatron import host_memory
from megatron.errors import ConfigError
from megatron.plan.footprint import Run
from megatron.plan.gpus import DRIVER_SECONDS
from megatron.plan.report import USABLE
from megatron.tune.memory import Memory

LIBRARIES = 300 << 20
"""Bytes of a rank on a host beside its tensors."""
VISIBLE = "CUDA_VISIBLE_DEVICES"


def capacity_of(asked: Run, gb: float | None) -> Memory:
    """For tensors. `gb`: what is said of the device."""
    given = None if gb is None else gb * 2**30
    if asked.device == "cpu":
        return Memory(_host(asked.ranks) if given is None else given)
    return Memory((_free_of_gpus(asked.ranks) if given is None else given) * USABLE, _host(asked.ranks))


def _host(ranks: int) -> float:
    found = host_memory.available_bytes()
    if found is None:
        raise ConfigError("the memory of this machine is not known here: give --card-gb")
    return max(0.0, found / ranks - LIBRARIES)


def _free_of_gpus(ranks: int) -> float:
    """Bytes of the fullest one of those that the ranks take, the first that are visible."""
    visible = os.environ.get(VISIBLE)
    query = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits",
             *([] if visible is None else [f"--id={visible}"])]
    try:
        told = subprocess.run(query, text=True, capture_output=True, check=True, timeout=DRIVER_SECONDS).stdout
        return min(map(float, told.split()[:ranks])) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ConfigError("the memory of the GPUs is not known here: give --card-gb") from error
