"""The search of the tuner: legal choices, the memory of each and of this machine, successive halving over them.

A choice is a micro-batch, ZeRO stage, offload placement, recomputation and tensor parallel size. The samples of a step
and the model are fixed. Choices that differ in micro-batch alone are a *family*. In the first round each family has a
trial of its choice of the best predicted time; the faster half of the families goes on to the next round, with a trial
of the next best choice, until one family is left, whose choices are all tried. An out-of-memory trial rules out all
choices that need at least as much memory on device and host; other failures rule out only their own choice.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count, product
from math import inf
from typing import Literal

from megatron import host_memory
from megatron.config.tree import require
from megatron.errors import ConfigError
from megatron.plan.alternatives import PLACEMENTS, format_bytes
from megatron.plan.footprint import ALL_ON_DEVICE, PlannedRun, StatePlacement
from megatron.plan.memory import USABLE_FRACTION, peak_memory
from megatron.plan.roofline import MachineRates, step_time


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes of one rank, available or needed."""

    device: float  # bytes of the GPU, or of the host for a run on a CPU
    host: float = 0.0  # host memory of a run on a GPU

    def __str__(self) -> str:
        return format_bytes(int(self.device)) + (f" of the GPU and {format_bytes(int(self.host))} of the host"
                                                 if self.host else "")

    def can_hold(self, other: MemoryBudget) -> bool:
        return other.device <= self.device and other.host <= self.host


DRIVER_SECONDS = 60.0  # timeout of nvidia-smi, which takes some seconds a GPU if no process keeps the driver loaded
LIBRARY_BYTES = 300 << 20  # host memory of a rank beside its tensors


def available_memory(requested: PlannedRun, gb: float | None) -> MemoryBudget:
    """For tensors of one rank. `gb` overrides the free memory of the device."""
    given = None if gb is None else gb * 2**30
    if requested.device == "cpu" and given is not None:
        return MemoryBudget(given)
    if (available := host_memory.available_bytes()) is None:
        raise ConfigError("the memory of this machine is not known here: give --card-gb")
    host = max(0.0, available / requested.ranks - LIBRARY_BYTES)
    if requested.device == "cpu":
        return MemoryBudget(host)
    if given is None:  # of the fullest of the GPUs that the ranks use, the first visible ones
        try:
            given = min(map(float, free_gpu_memory()[:requested.ranks])) * 2**20
        except ValueError as error:
            raise ConfigError("the memory of the GPUs is not known here: give --card-gb") from error
    return MemoryBudget(given * USABLE_FRACTION, host)


def free_gpu_memory() -> list[str]:
    """MiB of the visible GPUs, by the driver's tool, which takes no memory of them; [] where it does not answer."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    command = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits",
               *([] if visible is None else [f"--id={visible}"])]
    try:
        return subprocess.run(command, text=True, capture_output=True, check=True,
                              timeout=DRIVER_SECONDS).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []


@dataclass(frozen=True)
class TuningChoice:
    batch: int  # the micro-batch
    stage: int
    recomputes: bool
    placement: StatePlacement
    tp: int

    def apply_to(self, requested: PlannedRun) -> PlannedRun:
        """The requested run with this choice; ConfigError if that is not allowed."""
        config = requested.config
        changed = replace(config, zero=replace(config.zero, zero_stage=self.stage),
                          parallel=replace(config.parallel, model_parallel_size=self.tp),
                          recompute=replace(config.recompute, checkpoint_activations=self.recomputes),
                          train=replace(config.train, batch_size=self.batch,
                                        global_batch_size=samples_per_step(requested)),
                          offload=self.placement.apply_to(config.offload))
        changed.check_world(requested.ranks)
        return replace(requested, config=changed)

    def flags(self, requested: PlannedRun) -> list[str]:
        """To append to the requested flags."""
        flags = ["--batch-size", str(self.batch), "--global-batch-size", str(samples_per_step(requested)),
                 "--zero-stage", str(self.stage)]
        flags += ["--checkpoint-activations" if self.recomputes else "--no-checkpoint-activations"]
        flags += self.placement.flags(requested.config.offload).split()
        for kind, was, place in (("optimizer", requested.placement.optimizer, self.placement.optimizer),
                                 ("param", requested.placement.params, self.placement.params)):
            flags += [f"--offload-{kind}-device", "none"] if place == "none" != was else []
        return flags + (["--model-parallel-size", str(self.tp)] if self.tp != requested.tp or self.tp > 1 else [])


def samples_per_step(requested: PlannedRun) -> int:
    return requested.config.global_batch_size(requested.dp)


def legal_choices(requested: PlannedRun) -> dict[TuningChoice, PlannedRun]:
    """Every legal choice, without stages that change nothing: those of a single data parallel rank with all state on
    the device."""
    samples, choices = samples_per_step(requested), dict[TuningChoice, PlannedRun]()
    given_tp = requested.config.autotuning.autotuning_mp_size
    # drives only if they are configured: they are slower than anything else
    devices = {"none", requested.placement.optimizer, requested.placement.params,
               *(["cpu"] if requested.device == "cuda" else [])}
    for tp in range(1, requested.ranks + 1) if given_tp is None else [given_tp]:
        dp = requested.ranks // tp
        if requested.ranks % tp or samples % dp:
            continue
        batches = [batch for batch in range(1, samples // dp + 1) if samples // dp % batch == 0]
        placements = [(stage, placement) for stage, placement in product(range(4), PLACEMENTS)
                      if stage >= placement.min_stage and {placement.optimizer, placement.params} <= devices
                      and (dp > 1 or stage == placement.min_stage or placement != ALL_ON_DEVICE and stage == 3)]
        for (stage, placement), recomputes, batch in product(placements, (False, True), batches):
            choice = TuningChoice(batch, stage, recomputes, placement, tp)
            with suppress(ConfigError):
                choices[choice] = choice.apply_to(requested)
    return choices


# ---- the order of trials ---------------------------------------------------------------------------------------------

TrialState = Literal["done", "memory", "crash", "hang"]

# A search measures at most this share of the choices, but at least MIN_MEASURED.
MEASURED_SHARE, MIN_MEASURED = 0.28, 8
# The number of best choices that are measured again, and the maximum number of repeats.
FINALISTS, REPEATS = 3, 2
EARLY_STOPPING = 12  # families in turn that were no faster, after which a round ends
MIN_PROGRESS = 0.01  # a smaller gain counts as none for it
FAMILY_SIZE = 5  # micro-batches of a family


@dataclass(frozen=True)
class TrialOption:
    """A choice as the planner predicts it."""

    choice: TuningChoice
    predicted: float  # seconds of a step
    memory_needed: MemoryBudget

    @property
    def family(self) -> TuningChoice:
        """All settings but the micro-batch."""
        return replace(self.choice, batch=0)


@dataclass(frozen=True)
class TrialResult:
    """All measurements of one choice."""

    state: TrialState
    # Of a step if done: the least of all measurements, since interference only makes steps longer.
    seconds: float | None = None
    words: str = ""  # the reason if not done
    times: tuple[float, ...] = ()  # seconds of each measurement of a repeated choice; infinite if it failed

    @property
    def first_seconds(self) -> float:
        """The first measurement: rounds do not change when a choice is measured again."""
        return inf if self.seconds is None else (self.times or (self.seconds,))[0]

    def merge_repeat(self, other: TrialResult) -> TrialResult:
        """The result including `other`, a repeat. One failed repeat is tolerated; after a second the choice failed."""
        if self.seconds is None:
            return other
        times = (*(self.times or (self.seconds,)), inf if other.seconds is None else other.seconds)
        if times.count(inf) > 1:
            return replace(other, seconds=None, times=times)
        return replace(self, seconds=min(times), times=times)


Trials = Mapping[TuningChoice, TrialResult]  # in the order of their first measurement


def plan_choices(requested: PlannedRun, rates: MachineRates) -> list[TrialOption]:
    size = requested.config.autotuning.autotuning_mp_size
    require(size is None or requested.ranks % size == 0,
            f"--autotuning-mp-size {size} does not divide --ranks {requested.ranks}: give one that does")
    options = [TrialOption(choice, step_time(run, rates).total,
                           MemoryBudget(peak_memory(run).total, run.offloaded_host_bytes))
               for choice, run in legal_choices(requested).items()]
    require(bool(options), f"--ranks {requested.ranks} and {samples_per_step(requested)} samples of a step leave no "
            "choice: samples have to be divisible by the data parallel size")
    return options


def candidate_families(options: Sequence[TrialOption], capacity: MemoryBudget,
                       trials: Trials) -> list[list[TrialOption]]:
    """The options that fit, by family, those of the best predicted time first; at most FAMILY_SIZE of a family."""
    too_much = [option.memory_needed for option in options
                if option.choice in trials and trials[option.choice].state == "memory"]
    families = dict[TuningChoice, list[TrialOption]]()
    for option in sorted(options, key=lambda option: option.predicted):
        if capacity.can_hold(option.memory_needed) \
                and not any(option.memory_needed.can_hold(needed) for needed in too_much):
            families.setdefault(option.family, []).append(option)
    return [family[:FAMILY_SIZE] for family in families.values()]


def next_trial(options: Sequence[TrialOption], capacity: MemoryBudget, trials: Trials,
               most_trials: int) -> TrialOption | str:
    """The option to try, or why the search is over. Replays the rounds so far."""
    most = max(MIN_MEASURED, int(MEASURED_SHARE * len(options)))
    families = candidate_families(options, capacity, trials)[:most * 2 // 3]
    for round_number in count():
        fastest, without_gain, finished, is_exhausted = inf, 0, list[tuple[float, list[TrialOption]]](), True
        for family in families:
            if without_gain >= EARLY_STOPPING:
                break  # the others are predicted to be slower still
            measured = [trials[option.choice].first_seconds for option in family if option.choice in trials
                        and trials[option.choice].seconds is not None][:round_number + 1]
            untried = [option for option in family if option.choice not in trials]
            if len(measured) <= round_number and untried:
                if len(trials) >= most_trials:
                    return f"--autotuning-tuner-num-trials is {most_trials}"
                if sum(trial.seconds is not None for trial in trials.values()) >= most:
                    return f"{most} of {len(options)} choices were measured"
                return untried[0]
            is_exhausted &= len(measured) <= round_number
            without_gain += 1
            if measured:
                if min(measured) < (1 - MIN_PROGRESS) * fastest:
                    fastest, without_gain = min(measured), 0
                finished.append((min(measured), family))
        if is_exhausted:
            return "nothing is left to try"
        finished.sort(key=lambda one: one[0])
        families = [family for _, family in finished[:(len(finished) + 1) // 2]]
    raise AssertionError("rounds end")


def next_repeat(trials: Trials) -> TuningChoice | None:
    """The finalist to measure again; None if one was faster than the others in every measurement, or after REPEATS."""
    times = {choice: trial.times or (trial.seconds,) for choice, trial in trials.items() if trial.seconds is not None}
    first = sorted(times, key=lambda choice: times[choice][0])[:FINALISTS]
    if len(first) < 2:
        return None
    fewest = min(len(times[choice]) for choice in first)
    lagging = [choice for choice in first if len(times[choice]) == fewest]
    pick = min(first, key=lambda choice: min(times[choice]))
    is_plain = all(max(times[pick]) < min(times[choice]) for choice in first if choice != pick)
    is_enough = fewest > REPEATS or (fewest > 1 and is_plain)
    return None if lagging == first and is_enough else lagging[0]


def fastest_choice(trials: Trials) -> TuningChoice | None:
    measured = {choice: trial.seconds for choice, trial in trials.items() if trial.seconds is not None}
    return min(measured, key=lambda choice: measured[choice]) if measured else None
