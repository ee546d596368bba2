"""Alternatives to a run: the same training at other ZeRO stages, offload placements, recomputation or micro-batches.

Every alternative is checked like a run that is started with these flags. `suggest_changes` lists single flag
changes that save memory, the cheapest first; `cheapest_fit` picks the least slowdown that fits a card. Slowdowns
are rough published percentages of a step: good enough to order choices, no forecast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import product
from typing import Any

from megatron.config.config_errors import error_sentences
from megatron.config.tree import Config, RecomputeConfig
from megatron.errors import ConfigError
from megatron.plan.footprint import ALL_ON_DEVICE, PlannedRun, StatePlacement
from megatron.plan.memory import PhaseMemory, peak_memory

PLACEHOLDER_FOLDER = "DIR"


def with_changes(run: PlannedRun, placement: StatePlacement | None = None, **sections: Any) -> PlannedRun:
    """The run with these sections of its configuration, and these homes; ConfigError says what forbids it."""
    changed = replace(run, config=replace(run.config, **sections), placement=placement or run.placement)
    _check_legal(changed)
    return changed


def with_stage(run: PlannedRun, stage: int, placement: StatePlacement | None = None) -> PlannedRun:
    return with_changes(run, placement, zero=replace(run.config.zero, zero_stage=stage))


def if_legal(make_run: Callable[[], PlannedRun]) -> Iterator[PlannedRun]:
    """The run that this makes, where nothing forbids it."""
    with suppress(ConfigError):
        yield make_run()


def why_illegal(run: PlannedRun, stage: int, placement: StatePlacement) -> str:
    """What forbids this way, in short; "" where nothing does."""
    try:
        with_stage(run, stage, placement)
    except ConfigError as error:
        return run.config.translate(error_sentences(error)[0]).partition(": ")[0]
    return ""


def _check_legal(run: PlannedRun) -> Config:
    """Its homes are beside the configuration in a plan (footprint.py); here they are in it again."""
    offload, placement = run.config.offload, run.placement
    return replace(run.config, offload=replace(
        offload, offload_optimizer_device=placement.optimizer, offload_param_device=placement.params,
        offload_optimizer_nvme_path=offload.offload_optimizer_nvme_path or PLACEHOLDER_FOLDER,
        offload_param_nvme_path=offload.offload_param_nvme_path or PLACEHOLDER_FOLDER))


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
    found = [run for stage, homes in _stage_placements(requested)
             for run in if_legal(partial(with_stage, requested, stage, homes))]
    return found if requested in found else sorted([*found, requested], key=lambda run: run.config.zero.zero_stage)


def forbidden_rows(requested: PlannedRun) -> list[tuple[int, StatePlacement, str]]:
    """(stage, homes, why) of the rows that the configuration forbids."""
    return [(stage, homes, why)
            for stage, homes in _stage_placements(requested) if (why := why_illegal(requested, stage, homes))]


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
    return (total + OFFLOAD_COST.get(("optimizer", run.placement.optimizer), 0)
            + OFFLOAD_COST.get(("params", run.placement.params), 0))


MIN_SAVED_SHARE = 0.05
"""A change that saves a smaller share of the memory does not count as a remedy."""

LARGEST_MICRO_BATCH = 1 << 16


@dataclass(frozen=True)
class PlanSuggestion:
    flags: str
    saved_bytes: int
    """Bytes of the device."""


def suggest_changes(run: PlannedRun) -> list[PlanSuggestion]:
    """The changes that help this run, the cheapest first."""
    now = peak_memory(run).total
    found = [PlanSuggestion(flags, now - peak_memory(changed).total) for flags, changed in _candidate_changes(run)]
    return [remedy for remedy in found if remedy.saved_bytes >= MIN_SAVED_SHARE * now]


def _candidate_changes(run: PlannedRun) -> Iterator[tuple[str, PlannedRun]]:
    config, batch = run.config, run.config.train.batch_size
    total = config.global_batch_size(run.dp)
    if batch > 1:
        smaller = max(size for size in range(1, batch) if batch % size == 0)
        yield (f"--batch-size {smaller} --global-batch-size {total}",
               replace(run, config=with_batch(config, smaller, total)))
    for flags, recompute in next_recompute_configs(run):
        yield from ((flags, changed) for changed in if_legal(partial(with_changes, run, recompute=recompute)))
    for stage in range(config.zero.zero_stage + 1, 4) if run.dp > 1 else ():
        yield from ((f"--zero-stage {stage}", changed) for changed in if_legal(partial(with_stage, run, stage)))
    placement = StatePlacement(optimizer="cpu")
    if run.device == "cuda" and run.placement == ALL_ON_DEVICE and config.zero.zero_stage >= placement.min_stage:
        yield from ((placement.flags(), changed) for changed in if_legal(partial(with_changes, run, placement)))
    tp = 2 * run.tp
    if run.ranks % tp == 0:
        try:
            wider = replace(config, parallel=replace(config.parallel, model_parallel_size=tp))
            changed = replace(run, config=with_batch(wider, batch, total))
            changed.config.check_world(run.ranks)
        except ConfigError:  # heads, widths or batches that do not divide by it
            return
        yield f"--model-parallel-size {tp}", changed


def next_recompute_configs(run: PlannedRun) -> Iterator[tuple[str, RecomputeConfig]]:
    """One switch more of activation checkpointing."""
    now = run.config.recompute
    if not now.checkpoint_activations:
        yield "--checkpoint-activations", replace(now, checkpoint_activations=True)
        return
    if run.tp > 1 and not now.partition_activations:
        yield "--partition-activations", replace(now, partition_activations=True)
    if run.device == "cuda" and not now.cpu_checkpointing:
        yield "--cpu-checkpointing", replace(now, cpu_checkpointing=True)


def with_batch(config: Config, batch: int, total: int) -> Config:
    return replace(config, train=replace(config.train, batch_size=batch, global_batch_size=total))


def largest_micro_batches(run: PlannedRun, capacities: Iterable[float]) -> list[int]:
    """The largest --batch-size whose peak is at most so many bytes, with as many micro-batches a step; 0: none."""
    steps = run.accumulation

    @cache
    def needs(batch: int) -> int:
        return peak_memory(replace(run, config=with_batch(run.config, batch, batch * run.dp * steps))).total

    return [_largest_fitting(lambda batch: needs(batch) <= capacity) for capacity in capacities]


def _largest_fitting(fits: Callable[[int], bool]) -> int:
    low, high = 0, 1
    while high <= LARGEST_MICRO_BATCH and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def format_bytes(count: int) -> str:
    """Bytes for people."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def format_breakdown(moment: PhaseMemory) -> str:
    parts = ", ".join(f"{name} {format_bytes(count)}" for name, count in asdict(moment).items() if name != "name")
    return f"{format_bytes(moment.total)} at its fullest moment ({moment.name}): {parts}"
