"""Alternatives to a run: the same training at other ZeRO stages, offload placements, recomputation or micro-batches.

Every alternative is checked like a run that is started with these flags. `suggest_changes` lists single flag
changes that save memory, the cheapest first; `cheapest_fit` picks the least slowdown that fits a card. Slowdowns
are rough published percentages of a step: good enough to order choices, no forecast. `oom_hint` suggests changes to a
run that is out of memory.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import islice, product
from typing import Any

from megatron.config.schema import error_sentences
from megatron.config.tree import Config, RecomputeConfig, flag_name
from megatron.distributed.exit_codes import ExplainedMemoryError, is_out_of_memory
from megatron.errors import ConfigError
from megatron.plan.footprint import ALL_ON_DEVICE, Device, PlannedRun, StatePlacement
from megatron.plan.memory import peak_memory

# Placements that get a row in the table.
PLACEMENTS = (ALL_ON_DEVICE, StatePlacement("cpu"), StatePlacement("cpu", "cpu"), StatePlacement("nvme"),
              StatePlacement("nvme", "nvme"))
# NVMe is for models that need every part split: below stage 3 it gets a row only if the run has it.
STAGE_3_PLACEMENTS = PLACEMENTS[2:]

# no recomputation first
RECOMPUTATIONS = (RecomputeConfig(), RecomputeConfig(checkpoint_activations=True, recompute_granularity="selective"),
                  *(RecomputeConfig(checkpoint_activations=True, partition_activations=split, cpu_checkpointing=on_host)
                    for split, on_host in product((False, True), repeat=2)))

STAGE_COST = {0: 0, 1: 1, 2: 2, 3: 10}
RECOMPUTE_COST, PARTITION_COST, CPU_CHECKPOINTING_COST = {"full": 33, "selective": 5}, 5, 10
# Slowdown in percent of a step.
OFFLOAD_COST = {("optimizer", "cpu"): 40, ("optimizer", "nvme"): 200, ("params", "cpu"): 60, ("params", "nvme"): 200}


@dataclass(frozen=True)
class PlanChoice:
    run: PlannedRun
    device_bytes: int  # peak memory of the device
    slowdown_percent: int

    @property
    def flags(self) -> str:
        recompute = self.run.config.recompute
        words = [f"--zero-stage {self.run.config.zero.zero_stage}"]
        if recompute.checkpoint_activations:
            words.append("--checkpoint-activations")
            words += ["--recompute-granularity selective"] * recompute.is_selective
            if recompute.checkpoint_num_layers != 1:
                words.append(f"--checkpoint-num-layers {recompute.checkpoint_num_layers}")
            words += ["--partition-activations"] * recompute.partition_activations
            words += ["--cpu-checkpointing"] * recompute.cpu_checkpointing
        return " ".join([*words, self.run.placement.flags(self.run.config.offload)]).rstrip()


def plan_rows(requested: PlannedRun) -> tuple[list[PlannedRun], list[tuple[int, StatePlacement, str]]]:
    """The run at every stage with every placement that is useful there, and as requested; and (stage, placement, why)
    of the rows that the configuration does not allow."""
    config, rows, left_out = requested.config, list[PlannedRun](), list[tuple[int, StatePlacement, str]]()
    for stage, placement in product(range(4), PLACEMENTS):
        if stage >= placement.min_stage and (stage == 3 or placement not in STAGE_3_PLACEMENTS) and \
                (placement == ALL_ON_DEVICE or requested.device == "cuda"):
            try:
                rows.append(replace(requested, config=replace(
                    config, zero=replace(config.zero, zero_stage=stage), offload=placement.apply_to(config.offload))))
            except ConfigError as error:
                why = config.key_names.translate(error_sentences(error)[0]).partition(": ")[0]
                left_out.append((stage, placement, why))
    if requested not in rows:
        rows = sorted([*rows, requested], key=lambda run: run.config.zero.zero_stage)
    return rows, left_out


def all_choices(requested: PlannedRun) -> list[PlanChoice]:
    """Every combination, the cheapest first; among equals the smallest."""
    choices = []
    for run, choice in product(plan_rows(requested)[0], RECOMPUTATIONS):
        # the others change nothing
        if (run.tp > 1 or not choice.partition_activations) and (run.device == "cuda" or not choice.cpu_checkpointing):
            given = run.config.recompute
            recompute = replace(choice, recompute_modules=given.recompute_modules,
                                checkpoint_num_layers=1 if choice.is_selective else given.checkpoint_num_layers)
            with suppress(ConfigError):
                changed = replace(run, config=replace(run.config, recompute=recompute))
                choices.append(PlanChoice(changed, peak_memory(changed).total, _slowdown_percent(changed)))
    return sorted(choices, key=lambda choice: (choice.slowdown_percent, choice.device_bytes))


def cheapest_fit(choices: list[PlanChoice], capacity: float) -> PlanChoice | None:
    return next((choice for choice in choices if choice.device_bytes <= capacity), None)


def _slowdown_percent(run: PlannedRun) -> int:
    recompute = run.config.recompute
    total = STAGE_COST[run.config.zero.zero_stage]
    if recompute.checkpoint_activations:
        total += (RECOMPUTE_COST[recompute.recompute_granularity] + PARTITION_COST * recompute.partition_activations
                  + CPU_CHECKPOINTING_COST * recompute.cpu_checkpointing)
    return (total + OFFLOAD_COST.get(("optimizer", run.placement.optimizer), 0)
            + OFFLOAD_COST.get(("params", run.placement.params), 0))


MIN_SAVED_SHARE = 0.05  # a change that saves a smaller share of the memory is not suggested
MAX_SUGGESTIONS = 2

LARGEST_MICRO_BATCH = (1 << 17) - 1


def suggest_changes(run: PlannedRun) -> dict[str, int]:
    """Flags -> bytes of the device that they save, for the changes that help this run, the cheapest first."""
    saved_by_flags, now = dict[str, int](), peak_memory(run).total
    for flags, sections in _candidate_changes(run):
        with suppress(ConfigError):
            changed = replace(run, config=replace(run.config, **sections))
            changed.config.check_world(run.ranks)
            saved = now - peak_memory(changed).total
            if saved >= MIN_SAVED_SHARE * now:
                saved_by_flags[flags] = saved
    return saved_by_flags


def describe_suggestions(run: PlannedRun) -> str:
    """The two cheapest changes that help, as text; "" if there are none."""
    return " or ".join(f"{flags} (saves {format_bytes(saved)})"
                       for flags, saved in islice(suggest_changes(run).items(), MAX_SUGGESTIONS))


def _candidate_changes(run: PlannedRun) -> Iterator[tuple[str, dict[str, Any]]]:
    """(flags, changed sections of the configuration)"""
    config, batch = run.config, run.config.train.batch_size
    total = config.global_batch_size(run.dp)
    if batch > 1:
        smaller = max(size for size in range(1, batch) if batch % size == 0)
        train = replace(config.train, batch_size=smaller, global_batch_size=total)
        yield f"--batch-size {smaller} --global-batch-size {total}", {"train": train}
    switches = ["checkpoint_activations"]
    if config.recompute.recomputes_chunks:
        switches = ["partition_activations"] * (run.tp > run.sequence_shards)
        switches += ["cpu_checkpointing"] * (run.device == "cuda")
    elif config.recompute.is_selective:
        yield "--recompute-granularity full", {"recompute": replace(config.recompute, recompute_granularity="full")}
    for switch in switches:
        if not getattr(config.recompute, switch):
            changed: dict[str, Any] = {switch: True}
            yield flag_name(switch), {"recompute": replace(config.recompute, **changed)}
    for stage in range(config.zero.zero_stage + 1, 4) if run.dp > 1 else ():
        yield f"--zero-stage {stage}", {"zero": replace(config.zero, zero_stage=stage)}
    on_host = StatePlacement(optimizer="cpu")
    if run.device == "cuda" and run.placement == ALL_ON_DEVICE and config.zero.zero_stage >= on_host.min_stage:
        yield on_host.flags(), {"offload": on_host.apply_to(config.offload)}
    tp = 2 * run.tp
    if run.ranks % tp == 0:
        yield f"--model-parallel-size {tp}", {"parallel": replace(config.parallel, model_parallel_size=tp),
                                              "train": replace(config.train, global_batch_size=total)}


def largest_micro_batches(run: PlannedRun, capacities: Iterable[float]) -> list[int]:
    """For each capacity in bytes: the largest --batch-size whose peak fits, with the same number of micro-batches a
    step; 0: none."""
    @cache
    def needs(batch: int) -> int:
        train = replace(run.config.train, batch_size=batch, global_batch_size=batch * run.dp * run.accumulation)
        return peak_memory(replace(run, config=replace(run.config, train=train))).total

    return [bisect_right(range(1, LARGEST_MICRO_BATCH + 1), capacity, key=needs) for capacity in capacities]


def format_bytes(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


@contextmanager
def oom_hint(config: Config, rank: int, ranks: int, device: Device) -> Iterator[None]:
    """Turn an out-of-memory error of building or training into an ExplainedMemoryError that names the two cheapest flag
    changes, and print the memory of this rank to stderr. `config` has its vocab_size."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error) or isinstance(error, ExplainedMemoryError):
            raise
        run = PlannedRun(config, ranks, device)
        peak = peak_memory(run)
        parts = ", ".join(f"{name} {format_bytes(count)}" for name, count in asdict(peak).items() if name != "name")
        print(f" rank {rank} needs {format_bytes(peak.total)} at its fullest moment ({peak.name}): {parts}",
              file=sys.stderr, flush=True)
        reason = (str(error).strip() or "no more memory").splitlines()[0]
        suggestions = describe_suggestions(run)
        remedy = f"try {suggestions}" if suggestions else \
            "no flag makes this run much smaller: use a smaller model, or more ranks with a higher --zero-stage"
        raise ExplainedMemoryError(f"{reason}; {remedy}") from error
