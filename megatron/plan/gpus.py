"""The GPUs that this process may use, without torch: the driver's list filtered by CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megatron.errors import ConfigError

DRIVER = Path("/proc/driver/nvidia/gpus")
DRIVER_SECONDS = 60.0
"""Timeout of nvidia-smi, which takes some seconds a GPU if no process keeps the driver loaded."""
MIG = "MIG-"
"""Prefix of MIG instances; a process sees at most one."""


class Gpu(NamedTuple):
    model: str
    uuid: str


def visible_gpus() -> list[Gpu]:
    return apply_visible_devices(_gpus_from_proc() or _gpus_from_nvidia_smi(), os.environ.get("CUDA_VISIBLE_DEVICES"))


def apply_visible_devices(listed: Sequence[Gpu], variable: str | None) -> list[Gpu]:
    """As CUDA reads the variable: numbers, or prefixes of UUIDs, up to the first without a match. (CUDA may number
    GPUs of different models in another order than the driver.)"""
    if variable is None:
        return list(listed)
    gpus = list[Gpu]()
    for word in map(str.strip, variable.split(",")):
        if word.startswith(MIG):
            return [*gpus, Gpu(word, word)] if listed else gpus
        matches = [gpu for number, gpu in enumerate(listed)
                   if (int(word) == number if word.isdecimal() else
                       word.startswith("GPU-") and gpu.uuid.startswith(word))]
        if not matches:
            break
        gpus.append(matches[0])
    return gpus


def _gpus_from_proc() -> list[Gpu]:
    """In the order of the bus."""
    gpus = list[Gpu]()
    for file in sorted(DRIVER.glob("*/information")):
        lines = (line.partition(":") for line in file.read_text(encoding="utf-8", errors="replace").splitlines())
        fields = {name.strip(): value.strip() for name, _, value in lines}
        gpus.append(Gpu(fields.get("Model", ""), fields.get("GPU UUID", "")))
    return gpus


def _gpus_from_nvidia_smi() -> list[Gpu]:
    """For drivers without files in /proc: some containers, and Linux inside of Windows."""
    try:
        rows = subprocess.run(["nvidia-smi", "--query-gpu=name,uuid", "--format=csv,noheader"], text=True, check=True,
                              capture_output=True, timeout=DRIVER_SECONDS).stdout.splitlines()
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"nvidia-smi has not answered in {DRIVER_SECONDS:g} s: the driver of the GPUs hangs "
                          "(--device cpu does without)") from error
    except (OSError, subprocess.CalledProcessError):
        return []
    return [Gpu(model.strip(), uuid.strip()) for model, _, uuid in (row.partition(",") for row in rows)]
