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
from megatron.plan.footprint import ON_DEVICE, Homes, Run
from megatron.plan.memory import peak
from megatron.plan.ways import allowed, other_way, why_not, with_stage

HOMES = (ON_DEVICE, Homes("cpu"), Homes("cpu", "cpu"), Homes("nvme"), Homes("nvme", "nvme"))
"""Those worth a row of their own."""
AT_STAGE_3 = HOMES[2:]
"""NVMe is for models that need every part split; below stage 3 only who asks for it gets a row."""

STAGE_COST = {0: 0, 1: 1, 2: 2, 3: 10}
RECOMPUTE_COST, PARTITION_COST, WAIT_ON_HOST_COST = 33, 5, 10
HOME_COST = {("optimizer", "cpu"): 40, ("optimizer", "nvme"): 200, ("params", "cpu"): 60, ("params", "nvme"): 200}
"""Percent of a step, beside what it takes without."""


@dataclass(frozen=True)
class Choice:
    """One way to run it."""

    run: Run
    needs: int
    """Bytes of the device at the fullest moment."""
    cost: int

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
        return " ".join([*words, self.run.homes.flags(self.run.config.offload)]).rstrip()


def rows(asked: Run) -> list[Run]:
    """The run at every stage, with its state in the homes that are of use there, and as it was asked for."""
    found = [run for stage, homes in _places(asked) for run in allowed(partial(with_stage, asked, stage, homes))]
    return found if asked in found else sorted([*found, asked], key=lambda run: run.config.zero.zero_stage)


def left_out(asked: Run) -> list[tuple[int, Homes, str]]:
    """(stage, homes, why) of the rows that the configuration forbids."""
    return [(stage, homes, why) for stage, homes in _places(asked) if (why := why_not(asked, stage, homes))]


def _places(asked: Run) -> Iterator[tuple[int, Homes]]:
    for stage, homes in product(range(4), HOMES):
        if stage >= homes.least_stage and (stage == 3 or homes not in AT_STAGE_3) and \
                (homes == ON_DEVICE or asked.device == "cuda"):
            yield stage, homes


def choices(asked: Run) -> list[Choice]:
    """Every combination, the cheapest first; among equals the smallest."""
    found = []
    for run in rows(asked):
        for recompute in _recomputations(run):
            found += [Choice(changed, peak(changed).total, _cost(changed))
                      for changed in allowed(partial(other_way, run, recompute=recompute))]
    return sorted(found, key=lambda choice: (choice.cost, choice.needs))


def cheapest(found: list[Choice], capacity: float) -> Choice | None:
    """The first that fits."""
    return next((choice for choice in found if choice.needs <= capacity), None)


def _recomputations(run: Run) -> Iterator[RecomputeConfig]:
    """None, chunks kept as they are, and where it makes a difference: split, on the host, or both."""
    for on, split, on_host in ((False, False, False), (True, False, False), (True, True, False), (True, False, True),
                               (True, True, True)):
        if (run.tp > 1 or not split) and (run.device == "cuda" or not on_host):
            yield RecomputeConfig(checkpoint_activations=on, partition_activations=split, cpu_checkpointing=on_host,
                                  checkpoint_num_layers=run.config.recompute.checkpoint_num_layers)


def _cost(run: Run) -> int:
    recompute = run.config.recompute
    total = STAGE_COST[run.config.zero.zero_stage]
    if recompute.checkpoint_activations:
        total += (RECOMPUTE_COST + PARTITION_COST * recompute.partition_activations
                  + WAIT_ON_HOST_COST * recompute.cpu_checkpointing)
    return total + HOME_COST.get(("optimizer", run.homes.optimizer), 0) + HOME_COST.get(("params", run.homes.params), 0)
