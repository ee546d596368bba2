"""Which choice is tried next, by successive halving: pure functions of the choices and of the trials so far.

Choices that differ in micro-batch and bucket size alone are a *family*. In the first round each family has a trial of
its choice of the best predicted time; the faster half of the families goes on to the next round, with a trial of the
next best choice, until one family is left, whose choices are all tried. An out-of-memory trial rules out all choices
that need at least as much memory on device and host; other failures rule out only their own choice.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import inf
from typing import Literal

from megatron.config.run_config import AutotuningConfig
from megatron.errors import EXIT_CONFIG, EXIT_DATA, EXIT_STORAGE
from megatron.tune.space import MemoryBudget, TuningChoice

TrialState = Literal["done", "memory", "crash", "hang"]

MEASURED_SHARE, MIN_MEASURED = 0.28, 8
"""A search measures at most this share of the choices, but at least MIN_MEASURED."""
FINALISTS, REPEATS = 3, 2
"""The number of best choices that are measured again, and the maximum number of repeats."""
MIN_PROGRESS = 0.01
"""A smaller gain counts as none for early stopping."""


@dataclass(frozen=True)
class TrialOption:
    """A choice as the planner predicts it."""

    choice: TuningChoice
    predicted: float
    """Seconds of a step."""
    memory_needed: MemoryBudget

    @property
    def family(self) -> TuningChoice:
        """All settings but the micro-batch and the bucket size."""
        return replace(self.choice, batch=0, bucket=0)


@dataclass(frozen=True)
class TrialResult:
    """All measurements of one choice."""

    state: TrialState
    seconds: float | None = None
    """Of a step if done: the least of all measurements, since interference only makes steps longer."""
    words: str = ""
    """The reason if not done."""
    code: int = 0
    """Exit code."""
    times: tuple[float, ...] = ()
    """Seconds of each measurement of a repeated choice; infinite if it failed."""

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


Trials = Mapping[TuningChoice, TrialResult]
"""In the order of their first measurement."""


def candidate_families(options: Sequence[TrialOption], capacity: MemoryBudget, trials: Trials,
                       tuning: AutotuningConfig) -> list[list[TrialOption]]:
    """The options that fit, by family; --autotuning-tuner-type says in which order. A family has its micro-batches of
    the best predicted time, at most --autotuning-num-tuning-micro-batch-sizes."""
    too_much = [option.memory_needed for option in options
                if option.choice in trials and trials[option.choice].state == "memory"]
    order = [option for option in options if capacity.can_hold(option.memory_needed)
             and not any(option.memory_needed.can_hold(needed) for needed in too_much)]
    if tuning.autotuning_tuner_type == "random":
        random.Random(len(options)).shuffle(order)
    elif tuning.autotuning_tuner_type == "model_based":
        order.sort(key=lambda option: option.predicted)
    families, batches = dict[TuningChoice, list[TrialOption]](), dict[TuningChoice, set[int]]()
    for option in order:
        sizes = batches.setdefault(option.family, set())
        if option.choice.batch in sizes or len(sizes) < tuning.autotuning_num_tuning_micro_batch_sizes:
            sizes.add(option.choice.batch)
            families.setdefault(option.family, []).append(option)
    return list(families.values())


def next_trial(options: Sequence[TrialOption], capacity: MemoryBudget, trials: Trials,
               tuning: AutotuningConfig) -> TrialOption | str:
    """The option to try, or why the search is over. Replays the rounds so far, so that a killed search goes on."""
    most = max(MIN_MEASURED, int(MEASURED_SHARE * len(options)))
    families = candidate_families(options, capacity, trials, tuning)[:most * 2 // 3]
    for round_number in count():
        fastest, without_gain, finished, is_exhausted = inf, 0, list[tuple[float, list[TrialOption]]](), True
        for family in families:
            if 0 < tuning.autotuning_tuner_early_stopping <= without_gain:
                break  # the others are predicted to be slower still
            measured = [trials[option.choice].first_seconds for option in family if option.choice in trials
                        and trials[option.choice].seconds is not None][:round_number + 1]
            untried = [option for option in family if option.choice not in trials]
            if len(measured) <= round_number and untried:
                if len(trials) >= tuning.autotuning_tuner_num_trials:
                    return f"--autotuning-tuner-num-trials is {tuning.autotuning_tuner_num_trials}"
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


def common_error(trials: Trials) -> TrialResult | None:
    """The error of the last two trials, if every choice would have it: settings that no trial has run with, data that
    cannot be read, a disk that cannot be written."""
    if len(trials) < 2:
        return None
    *before, one, other = trials.values()
    is_common = (other.code in (EXIT_DATA, EXIT_STORAGE)
                 or other.code == EXIT_CONFIG and one.words == other.words and not before)
    return other if is_common and one.code == other.code else None


def fastest_choice(trials: Trials) -> TuningChoice | None:
    measured = {choice: trial.seconds for choice, trial in trials.items() if trial.seconds is not None}
    return min(measured, key=lambda choice: measured[choice]) if measured else None
