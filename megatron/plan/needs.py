"""The run that was asked for: what it needs where, by kind, and what is in its way. Not here: other ways to run it
(table.py).

The machine is looked at: its memory, and the room on the drive that the configuration names. A plan may be for another
machine, so this is said and refuses nothing.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from megatron import host_memory
from megatron.config.offload import unused_offload_settings
from megatron.config.tree import flag_name
from megatron.plan.footprint import PlannedRun
from megatron.plan.memory import peak_memory
from megatron.plan.remedies import format_bytes, suggest_changes
from megatron.plan.report import TargetMachine
from megatron.plan.table import align_columns, format_number, unit_for

KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers")
MAX_SUGGESTIONS = 2

_DEVICE_NOTE = {"cuda": "planned for GPUs, whether or not there are any here; --device cpu plans for the CPU",
                "cpu": "planned for the CPU; without --device cpu: for GPUs"}
"""The device of a plan is what is said, and never what is found."""


def describe_requirements(requested: PlannedRun, machine: TargetMachine) -> Iterator[str]:
    """Lines for a person; the last is empty."""
    yield _DEVICE_NOTE[requested.device]
    fullest, offloaded = peak_memory(requested), requested.offloaded_bytes
    bytes_by_place = {"device": asdict(fullest)}
    if offloaded.host:
        bytes_by_place["host"] = {**requested.host_by_kind, "activations": requested.activations.host_input_bytes}
    if offloaded.nvme:
        bytes_by_place["nvme"] = requested.nvme_by_kind
    unit, name = unit_for(max(fullest.total, offloaded.host, offloaded.nvme))
    counts = {place: [by_kind.get(kind, 0) for kind in KINDS] for place, by_kind in bytes_by_place.items()}
    rows = [[f"  {place}", *(format_number(count / unit) for count in (*row, sum(row)))]
            for place, row in counts.items()]
    yield f"{name} that a rank needs, on the device at its fullest moment ({fullest.name})"
    yield from align_columns([["", *KINDS, "sum"], *rows], left=(0,))
    on_node = machine.ranks_per_node
    host, nvme = (fullest.total if requested.device == "cpu" else offloaded.host) * on_node, offloaded.nvme * on_node
    both = " and ".join(f"{format_bytes(count)} of {what}" for count, what in ((host, "host memory"), (nvme, "NVMe"))
                        if count)
    if both:
        yield f"a node of {on_node} rank{'s' * (on_node > 1)} needs {both}"
    if not machine.tflops:
        yield "with --tflops X: the time of a step and of the run"
    yield from (f"problem: {sentence}" for sentence in find_problems(requested, machine, host, nvme))
    offload = replace(requested.config.offload, offload_optimizer_device=requested.placement.optimizer,
                      offload_param_device=requested.placement.params)
    yield from (requested.config.translate(f"note: {sentence}")
                for sentence in unused_offload_settings(offload, requested.config.key_names.keys_of_given))
    yield ""


def find_problems(requested: PlannedRun, machine: TargetMachine, host: int, nvme: int) -> Iterator[str]:
    """`host`, `nvme`: what a node needs."""
    small = [f"{card:g}" for card, capacity in zip(machine.cards, machine.usable_bytes(), strict=True)
             if peak_memory(requested).total > capacity]
    if requested.device == "cuda" and small:
        smaller = " or ".join(f"{remedy.flags} (saves {format_bytes(remedy.saved_bytes)})"
                              for remedy in suggest_changes(requested)[:MAX_SUGGESTIONS])
        yield f"a card of {', '.join(small)} GB is too small" + (f"; try {smaller}" if smaller else "")
    memory = host_memory.total_bytes()
    if memory is not None and host > memory:
        yield f"a node needs {format_bytes(host)} of memory, and {host_memory.describe_owner('this machine')} has {format_bytes(memory)}"
    for folder, flags in _nvme_folders(requested).items():
        named = requested.config.translate(f"{' and '.join(flags)} {folder}")
        if not Path(folder).is_dir():
            yield f"{named}: there is no such folder on this machine; the run needs it"
        free = shutil.disk_usage(_nearest_existing(Path(folder))).free
        if nvme > free:
            yield f"a node needs {format_bytes(nvme)} of NVMe, and {folder} has {format_bytes(free)} free"


def _nvme_folders(requested: PlannedRun) -> dict[str, list[str]]:
    """Folder on a drive -> the flags that name it."""
    found: dict[str, list[str]] = {}
    for place, name in ((requested.offload_placement.optimizer, "offload_optimizer_nvme_path"),
                        (requested.offload_placement.params, "offload_param_nvme_path")):
        path = getattr(requested.config.offload, name)
        if place == "nvme" and path:
            found.setdefault(path, []).append(flag_name(name))
    return found


def _nearest_existing(path: Path) -> Path:
    """The folder itself, or the nearest above it."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
