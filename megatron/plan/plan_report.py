"""The plan as records in bytes, as a table, and as a summary of what the requested run needs and what prevents it.

The summary compares with this machine (memory, free space of the NVMe folders); it only warns, because a plan may
be for another machine.
"""

from __future__ import annotations

import shutil
from collections.abc import Container, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megatron import host_memory
from megatron.config.tree import flag_name
from megatron.config.zero_config import unused_offload_settings
from megatron.plan.alternatives import (PlanChoice, all_choices, cheapest_fit, forbidden_rows, format_bytes,
                                        largest_micro_batches, plan_rows, suggest_changes)
from megatron.plan.footprint import PlannedRun
from megatron.plan.machine_rates import MachineRates
from megatron.plan.memory import peak_memory, persistent_memory
from megatron.plan.step_time import step_time
from megatron.train.flops import flops_per_token

USABLE_FRACTION = 0.92
"""Share of a card that tensors may take; the rest is for the CUDA context, NCCL, work space and fragmentation."""

SECONDS_PER_DAY = 86400


@dataclass(frozen=True)
class TargetMachine:
    """What the plan is to be compared with."""

    cards: Sequence[float]
    """Memory of cards in GB (of 2**30 bytes)."""
    ranks_per_node: int
    tflops: float | None = None
    """What a rank does in a second, as training reports it; None: not known."""
    rates: MachineRates | None = None
    """Those of a machine that was measured: every row then has the time of a step."""

    def usable_bytes(self) -> list[float]:
        return [card * 2**30 * USABLE_FRACTION for card in self.cards]


def build_report(requested: PlannedRun, machine: TargetMachine) -> dict[str, Any]:
    """Everything the table says, in bytes."""
    found = all_choices(requested)
    return {"ranks": requested.ranks, "ranks_per_node": machine.ranks_per_node,
            "tensor_parallel": requested.tp, "data_parallel": requested.dp,
            "accumulation": requested.accumulation, "parameters": requested.config.model.parameters(),
            "rows": [_row_record(run, requested, machine) for run in plan_rows(requested)],
            "left_out": [{"stage": stage, "offload": str(homes), "why": why}
                         for stage, homes, why in forbidden_rows(requested)],
            "cheapest": {f"{card:g}": _choice_record(cheapest_fit(found, capacity))
                         for card, capacity in zip(machine.cards, machine.usable_bytes(), strict=True)},
            "smallest": _choice_record(min(found, key=lambda choice: choice.device_bytes)),
            "time": _time_record(requested, machine.tflops), "config": settings_by_section(requested)}


def settings_by_section(requested: PlannedRun) -> dict[str, Any]:
    """The configuration by section, with the homes that a plan keeps apart from it."""
    tree = requested.config.as_dict()
    tree["offload"] |= {"offload_optimizer_device": requested.placement.optimizer,
                        "offload_param_device": requested.placement.params}
    return tree


def _row_record(run: PlannedRun, requested: PlannedRun, machine: TargetMachine) -> dict[str, Any]:
    lasts, fullest, traffic, offloaded = persistent_memory(run), peak_memory(run), run.traffic(), run.offloaded_bytes
    largest = largest_micro_batches(run, machine.usable_bytes())
    on_node = fullest.total if run.device == "cpu" else offloaded.host
    return {"stage": run.config.zero.zero_stage, "offload": str(run.placement), "chosen": run == requested,
            "lasting": {**_select(asdict(lasts), "parameters", "gradients", "optimizer"), "total": lasts.total},
            "peak": {"moment": fullest.name, "total": fullest.total,
                     **_select(asdict(fullest), "parameters", "gradients", "optimizer", "activations", "buffers")},
            "device": fullest.total, "host": offloaded.host, "nvme": offloaded.nvme,
            "node_host": on_node * machine.ranks_per_node, "node_nvme": offloaded.nvme * machine.ranks_per_node,
            **({} if machine.rates is None else {"step": step_time(run, machine.rates).as_dict()}),
            "sent_gradients": traffic.gradients,
            "sent_parameters": traffic.parameters, "sent_matrices": traffic.matrices,
            "cards": {f"{card:g}": {"fits": fullest.total <= capacity, "largest_micro_batch": count}
                      for card, capacity, count in zip(machine.cards, machine.usable_bytes(), largest, strict=True)}}


def _select(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: values[name] for name in names}


def _choice_record(choice: PlanChoice | None) -> dict[str, Any] | None:
    if choice is None:
        return None
    return {"flags": choice.flags, "device": choice.device_bytes, "slower_percent": choice.slowdown_percent}


def _time_record(run: PlannedRun, tflops: float | None) -> dict[str, float]:
    """Work of a step, and how long it takes at so many TFLOP/s a rank: means over the run."""
    train = run.config.train
    tokens = run.config.global_batch_size(run.dp) * run.config.seq_length
    flops = tokens * flops_per_token(run.config.model, run.config.seq_length, run.mean_active_blocks)
    found = {"tokens_per_step": float(tokens), "flops_per_step": flops}
    if tflops is not None:
        seconds = flops / (tflops * 1e12 * run.ranks)
        found |= {"seconds_per_step": seconds, "tokens_per_second": tokens / seconds,
                  "days": seconds * train.train_iters / SECONDS_PER_DAY}
    return found


def format_table(requested: PlannedRun, machine: TargetMachine, found: dict[str, Any]) -> Iterator[str]:
    """`found`: the report."""
    yield from _describe_run(requested, machine, found)
    unit, name = unit_for(max(row["peak"]["total"] for row in found["rows"]))
    yield from ("", f"{name}: lasting state and peak of a rank; host memory and NVMe of a node; sent by a rank a step")
    yield from align_columns([MEMORY_HEAD, *(_memory_cells(row, unit) for row in found["rows"])], left=(0, 1, 9))
    yield from _describe_forbidden(found["left_out"])
    yield from ("", "largest --batch-size by GB of the card ("
                f"{1 - USABLE_FRACTION:.0%} left for libraries; -: none; <: below {requested.config.train.batch_size})")
    cards = [f"{card:g}" for card in machine.cards]
    yield from align_columns([CARDS_HEAD + cards, *(_card_cells(row, requested) for row in found["rows"])], left=(0, 1))
    yield from ("", "cheapest way to fit each card")
    yield from align_columns([[f"  {card} GB", _describe_choice(found["cheapest"][card], found["smallest"])]
                              for card in cards], left=(1,))


def unit_for(largest: int) -> tuple[int, str]:
    return (2**30, "GiB") if largest >= 2**30 else (2**20, "MiB")


CARDS_HEAD = ["  zero", "offload"]
MEMORY_HEAD = [*CARDS_HEAD, "weights", "grads", "optim", "sum", "activ", "buffers", "peak", "moment", "host", "nvme",
               "sent"]


def _describe_run(requested: PlannedRun, machine: TargetMachine, found: dict[str, Any]) -> Iterator[str]:
    config, steps = requested.config, requested.accumulation
    ranks = f"{requested.ranks} rank{'s' * (requested.ranks > 1)}, {machine.ranks_per_node} per node"
    yield (f"{found['parameters']:,} parameters in {config.precision.name} on {ranks}: tensor parallel {requested.tp}, "
           f"data parallel {requested.dp}")
    yield (f"{steps} micro-batch{'es' * (steps > 1)} of {config.train.batch_size} x {config.seq_length} tokens per "
           f"step; {_describe_recomputation(requested)}")
    if requested.config.layer_drop.progressive_layer_drop:
        yield (f"{requested.mean_active_blocks:.1f} of {requested.num_layers} blocks run in a step, on average over "
               f"{config.train.train_iters} steps; memory is that of the first step, which runs all")
    time = found["time"]
    if "days" in time:
        yield (f"at {machine.tflops:g} TFLOP/s per rank: {time['seconds_per_step']:.3g} s per step, "
               f"{time['tokens_per_second']:,.0f} tokens/s, {time['days']:.3g} days for "
               f"{config.train.train_iters} steps")


def _describe_recomputation(run: PlannedRun) -> str:
    if run.chunk is None:
        return "nothing recomputed"
    acts = run.activations
    blocks = "every block" if run.chunk == 1 else f"every {run.chunk} blocks"
    split = f"split over {run.tp} ranks" if run.config.recompute.partition_activations and run.tp > 1 else "kept whole"
    return f"{blocks} recomputed from an input {split} on the {'host' if acts.inputs_are_on_host else 'device'}"


def _describe_forbidden(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The rows that these settings forbid, by stage and reason."""
    for stage, why in dict.fromkeys((row["stage"], row["why"]) for row in rows):
        places = ", ".join(row["offload"] for row in rows if (row["stage"], row["why"]) == (stage, why))
        yield f"left out: {stage} {places}: {why}"


def _memory_cells(row: dict[str, Any], unit: int) -> list[str]:
    lasts, fullest = row["lasting"], row["peak"]
    counts = [*lasts.values(), fullest["activations"], fullest["buffers"], fullest["total"]]
    ends = [row["node_host"], row["node_nvme"], row["sent_gradients"] + row["sent_parameters"] + row["sent_matrices"]]
    return [*row_label(row), *(format_number(count / unit) for count in counts), fullest["moment"],
            *(format_number(count / unit) for count in ends)]


def _card_cells(row: dict[str, Any], requested: PlannedRun) -> list[str]:
    counts = [entry["largest_micro_batch"] for entry in row["cards"].values()]
    return [*row_label(row), *("-" if count == 0 else f"{'<' * (count < requested.config.train.batch_size)}{count}"
                               for count in counts)]


def row_label(row: dict[str, Any]) -> list[str]:
    return [f"{'*' if row['chosen'] else ' '} {row['stage']}", row["offload"]]


def _describe_choice(choice: dict[str, Any] | None, smallest: dict[str, Any]) -> str:
    if choice is None:
        return (
            f"nothing at this --batch-size and --model-parallel-size: the least is {format_bytes(smallest['device'])}")
    flags: str = choice["flags"]
    return flags


def format_number(value: float) -> str:
    """Enough digits to tell rows apart, in at most six places up to a million."""
    return f"{value:.2f}" if value < 999.995 else f"{value:.0f}"


def align_columns(lines: Sequence[Sequence[str]], left: Container[int]) -> Iterator[str]:
    """Columns as wide as their widest cell, two blanks apart; numbers to the right, `left` columns of words not."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        yield "  ".join(cell.ljust(width) if number in left else cell.rjust(width)
                        for number, (cell, width) in enumerate(zip(line, widths, strict=True))).rstrip()


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
    both = " and ".join(f"{format_bytes(count)} of {what}"
                        for count, what in ((host, "host memory"), (nvme, "NVMe")) if count)
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
        yield (f"a node needs {format_bytes(host)} of memory, and {host_memory.describe_owner('this machine')} has "
               f"{format_bytes(memory)}")
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
