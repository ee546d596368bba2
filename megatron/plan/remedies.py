"""What to change in a run that does not fit, and how a plan is put into words. Pure arithmetic over memory.py.

A *remedy* is one change of flags that keeps the samples of a step; they come in order of what they cost: a smaller
micro-batch costs efficiency, recomputation a third more arithmetic, a higher ZeRO stage traffic, offloading the speed
of the host, tensor parallelism traffic inside every block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache, partial

from megatron.config.tree import Config, RecomputeConfig
from megatron.errors import ConfigError
from megatron.plan.footprint import ALL_ON_DEVICE, PlannedRun, StatePlacement
from megatron.plan.memory import PhaseMemory, peak_memory
from megatron.plan.ways import if_legal, with_changes, with_stage

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
