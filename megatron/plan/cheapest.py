"""The cheapest way to make a run fit: over every ZeRO stage, home of the state and kind of recomputation.

Cost is a rough share of a step's time, as published for fast networks and PCIe (docs/plan.md has the table): good
enough to put choices in order, no forecast. The micro-batch, the number of ranks and tensor parallelism are left as
they are. Pure arithmetic over memory.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

from megatron.config.tree import RecomputeConfig
from megatron.plan.footprint import ALL_ON_DEVICE, PlannedRun, StatePlacement
from megatron.plan.memory import peak_memory
from megatron.plan.ways import if_legal, why_illegal, with_changes, with_stage

PLACEMENTS = (ALL_ON_DEVICE, StatePlacement("cpu"), StatePlacement("cpu", "cpu"), StatePlacement("nvme"),
              StatePlacement("nvme", "nvme"))
"""Those worth a row of their own."""
STAGE_3_PLACEMENTS = PLACEMENTS[2:]
"""NVMe is for models that need every part split; below stage 3 only who asks for it gets a row."""

STAGE_COST = {0: 0, 1: 1, 2: 2, 3: 10}
RECOMPUTE_COST, PARTITION_COST, CPU_CHECKPOINTING_COST = 33, 5, 10
OFFLOAD_COST = {("optimizer", "cpu"): 40, ("optimizer", "nvme"): 200, ("params", "cpu"): 60, ("params", "nvme"): 200}
"""Percent of a step, beside what it takes without."""


@dataclass(frozen=True)
class PlanChoice:
    """One way to run it."""

    run: PlannedRun
    device_bytes: int
    """Bytes of the device at the fullest moment."""
    slowdown_percent: int

    @property
    def flags(self) -> str:
        recompute = self.run.config.recompute
        words = [f"--zero-stage {self.run.config.zero.zero_stage}"]
        if recompute.checkpoint_activations:
            words.append("--checkpoint-activations")
            if recompute.checkpoint_num_layers != 1:
                words.append(f"--checkpoint-num-layers {recompute.checkpoint_num_layers}")
            words += ["--partition-activations"] * recompute.partition_activations
            words += ["--cpu-checkpointing"] * recompute.cpu_checkpointing
        return " ".join([*words, self.run.placement.flags(self.run.config.offload)]).rstrip()


def plan_rows(requested: PlannedRun) -> list[PlannedRun]:
    """The run at every stage, with its state in the homes that are of use there, and as it was asked for."""
    found = [
        run for stage, homes in _stage_placements(requested)
        for run in if_legal(partial(with_stage, requested, stage, homes))
    ]
    return found if requested in found else sorted([*found, requested], key=lambda run: run.config.zero.zero_stage)


def forbidden_rows(requested: PlannedRun) -> list[tuple[int, StatePlacement, str]]:
    """(stage, homes, why) of the rows that the configuration forbids."""
    return [(stage, homes, why) for stage, homes in _stage_placements(requested)
            if (why := why_illegal(requested, stage, homes))]


def _stage_placements(requested: PlannedRun) -> Iterator[tuple[int, StatePlacement]]:
    for stage, homes in product(range(4), PLACEMENTS):
        if stage >= homes.min_stage and (stage == 3 or homes not in STAGE_3_PLACEMENTS) and \
                (homes == ALL_ON_DEVICE or requested.device == "cuda"):
            yield stage, homes


def all_choices(requested: PlannedRun) -> list[PlanChoice]:
    """Every combination, the cheapest first; among equals the smallest."""
    found = []
    for run in plan_rows(requested):
        for recompute in _recompute_configs(run):
            found += [PlanChoice(changed, peak_memory(changed).total, _slowdown_percent(changed))
                      for changed in if_legal(partial(with_changes, run, recompute=recompute))]
    return sorted(found, key=lambda choice: (choice.slowdown_percent, choice.device_bytes))


def cheapest_fit(choices: list[PlanChoice], capacity: float) -> PlanChoice | None:
    """The first that fits."""
    return next((choice for choice in choices if choice.device_bytes <= capacity), None)


def _recompute_configs(run: PlannedRun) -> Iterator[RecomputeConfig]:
    """None, chunks kept as they are, and where it makes a difference: split, on the host, or both."""
    for on, split, on_host in ((False, False, False), (True, False, False), (True, True, False), (True, False, True),
                               (True, True, True)):
        if (run.tp > 1 or not split) and (run.device == "cuda" or not on_host):
            yield RecomputeConfig(checkpoint_activations=on, partition_activations=split, cpu_checkpointing=on_host,
                                  checkpoint_num_layers=run.config.recompute.checkpoint_num_layers)


def _slowdown_percent(run: PlannedRun) -> int:
    recompute = run.config.recompute
    total = STAGE_COST[run.config.zero.zero_stage]
    if recompute.checkpoint_activations:
        total += (RECOMPUTE_COST + PARTITION_COST * recompute.partition_activations
                  + CPU_CHECKPOINTING_COST * recompute.cpu_checkpointing)
    return total + OFFLOAD_COST.get(("optimizer", run.placement.optimizer), 0) + OFFLOAD_COST.get(
        ("params", run.placement.params), 0)
