"""The GPUs of this machine that a process may use, without importing torch: the driver's list filtered by
CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron.errors import ConfigError

DRIVER = Path("/proc/driver/nvidia/gpus")
DRIVER_SECONDS = 60.0
"""How long the driver's tool may take: some seconds a GPU where nothing else keeps the driver awake."""
MIG = "MIG-"
"""How the name of a part of a GPU begins; a process sees one of them at most."""


class Gpu(NamedTuple):
    model: str
    uuid: str


def visible_gpus() -> list[Gpu]:
    return apply_visible_devices(_gpus_from_proc() or _gpus_from_nvidia_smi(), os.environ.get("CUDA_VISIBLE_DEVICES"))


def apply_visible_devices(listed: Sequence[Gpu], variable: str | None) -> list[Gpu]:
    """As CUDA reads the variable: numbers, or beginnings of identifiers, up to the first that names nothing. (Its
    numbers may be in another order than the driver's where models differ.)"""
    if variable is None:
        return list(listed)
    found = list[Gpu]()
    for word in map(str.strip, variable.split(",")):
        gpu = _find_gpu(word, listed)
        if gpu is None:
            break
        found.append(gpu)
        if word.startswith(MIG):
            break
    return found


def _find_gpu(word: str, listed: Sequence[Gpu]) -> Gpu | None:
    if word.isdecimal():
        return listed[int(word)] if int(word) < len(listed) else None
    if word.startswith(MIG) and listed:
        return Gpu(word, word)
    return next((gpu for gpu in listed if word.startswith("GPU-") and gpu.uuid.startswith(word)), None)


def _gpus_from_proc() -> list[Gpu]:
    """In the order of the bus."""
    return [_parse_information(file.read_text(encoding="utf-8", errors="replace"))
            for file in sorted(DRIVER.glob("*/information"))]


def _parse_information(text: str) -> Gpu:
    lines = (line.partition(":") for line in text.splitlines())
    facts = {name.strip(): value.strip() for name, _, value in lines}
    return Gpu(facts.get("Model", ""), facts.get("GPU UUID", ""))


def _gpus_from_nvidia_smi() -> list[Gpu]:
    """Where the driver shows no files: some containers, and Linux inside of Windows."""
    return list(_parse_csv(_run_nvidia_smi()))


def _run_nvidia_smi() -> str:
    try:
        return subprocess.run(["nvidia-smi", "--query-gpu=name,uuid", "--format=csv,noheader"], text=True, check=True,
                              capture_output=True, timeout=DRIVER_SECONDS).stdout
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"nvidia-smi has not answered in {DRIVER_SECONDS:g} s: the driver of the GPUs hangs "
                          "(--device cpu does without)") from error
    except (OSError, subprocess.CalledProcessError):
        return ""


def _parse_csv(text: str) -> Iterator[Gpu]:
    for line in text.splitlines():
        model, _, uuid = line.partition(",")
        yield Gpu(model.strip(), uuid.strip())
