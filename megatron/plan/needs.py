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
from megatron.plan.footprint import Run
from megatron.plan.memory import peak
from megatron.plan.remedies import remedies, size
from megatron.plan.report import Machine
from megatron.plan.table import aligned, number, unit_for

KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers")
SHOWN_REMEDIES = 2

_DEVICE = {"cuda": "planned for GPUs, whether or not there are any here; --device cpu plans for the CPU",
           "cpu": "planned for the CPU; without --device cpu: for GPUs"}
"""The device of a plan is what is said, and never what is found."""


def needs(asked: Run, machine: Machine) -> Iterator[str]:
    """Lines for a person; the last is empty."""
    yield _DEVICE[asked.device]
    fullest, away = peak(asked), asked.elsewhere
    places = {"device": asdict(fullest)}
    if away.host:
        places["host"] = {**asked.host_by_kind, "activations": asked.activations.waiting_on_host}
    if away.nvme:
        places["nvme"] = asked.nvme_by_kind
    unit, name = unit_for(max(fullest.total, away.host, away.nvme))
    counts = {place: [by_kind.get(kind, 0) for kind in KINDS] for place, by_kind in places.items()}
    rows = [[f"  {place}", *(number(count / unit) for count in (*row, sum(row)))] for place, row in counts.items()]
    yield f"{name} that a rank needs, on the device at its fullest moment ({fullest.name})"
    yield from aligned([["", *KINDS, "sum"], *rows], left=(0,))
    on_node = machine.ranks_per_node
    host, nvme = (fullest.total if asked.device == "cpu" else away.host) * on_node, away.nvme * on_node
    both = " and ".join(f"{size(count)} of {what}" for count, what in ((host, "host memory"), (nvme, "NVMe")) if count)
    if both:
        yield f"a node of {on_node} rank{'s' * (on_node > 1)} needs {both}"
    if not machine.tflops:
        yield "with --tflops X: the time of a step and of the run"
    yield from (f"problem: {sentence}" for sentence in problems(asked, machine, host, nvme))
    offload = replace(asked.config.offload, offload_optimizer_device=asked.homes.optimizer,
                      offload_param_device=asked.homes.params)
    yield from (asked.config.translate(f"note: {sentence}")
                for sentence in unused_offload_settings(offload, asked.config.key_names.keys_of_given))
    yield ""


def problems(asked: Run, machine: Machine, host: int, nvme: int) -> Iterator[str]:
    """`host`, `nvme`: what a node needs."""
    small = [f"{card:g}" for card, capacity in zip(machine.cards, machine.capacities(), strict=True)
             if peak(asked).total > capacity]
    if asked.device == "cuda" and small:
        smaller = " or ".join(f"{remedy.flags} (saves {size(remedy.saves)})"
                              for remedy in remedies(asked)[:SHOWN_REMEDIES])
        yield f"a card of {', '.join(small)} GB is too small" + (f"; try {smaller}" if smaller else "")
    memory = host_memory.total_bytes()
    if memory is not None and host > memory:
        yield f"a node needs {size(host)} of memory, and {host_memory.describe_owner('this machine')} has {size(memory)}"
    for folder, flags in _folders(asked).items():
        named = asked.config.translate(f"{' and '.join(flags)} {folder}")
        if not Path(folder).is_dir():
            yield f"{named}: there is no such folder on this machine; the run needs it"
        free = shutil.disk_usage(_existing(Path(folder))).free
        if nvme > free:
            yield f"a node needs {size(nvme)} of NVMe, and {folder} has {size(free)} free"


def _folders(asked: Run) -> dict[str, list[str]]:
    """Folder on a drive -> the flags that name it."""
    found: dict[str, list[str]] = {}
    for place, name in ((asked.away.optimizer, "offload_optimizer_nvme_path"),
                        (asked.away.params, "offload_param_nvme_path")):
        path = getattr(asked.config.offload, name)
        if place == "nvme" and path:
            found.setdefault(path, []).append(flag_name(name))
    return found


def _existing(path: Path) -> Path:
    """The folder itself, or the nearest above it."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
