"""Which choice is tried next, and when the search stops: pure functions of the choices and the trials so far.

A Gaussian process models log(measured / predicted) with a correction for the machine, each part of a step, each
setting and each pair of settings. An out-of-memory trial rules out all choices that need at least as much memory on
device and host; other failures rule out only their own choice.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, inf, log
from statistics import NormalDist
from typing import Any, Literal, NamedTuple

import numpy as np

from megatron.config.run_config import AutotuningConfig
from megatron.errors import EXIT_CONFIG, EXIT_DATA, EXIT_STORAGE
from megatron.plan.step_time import StepTime
from megatron.tune.space import MemoryBudget

MACHINE_STD, PART_STD, SETTING_STD, PAIR_STD, NOISE_STD = 0.4, 0.4, 0.1, 0.03, 0.03
"""Standard deviations of the logarithm: of the machine's correction, of a step's part, of a setting's value, of a pair
of settings, and of a measurement. They nearly maximize the likelihood of four fully measured grids (docs/benchmarks.md)
and allow for larger errors on other machines."""


class StepEstimate(NamedTuple):
    seconds: float
    log_std: float
    """Standard deviation of the logarithm of `seconds`."""


@dataclass(frozen=True)
class Candidate:
    """The features of a choice that the model uses."""

    settings: Mapping[str, Any]
    predicted: StepTime

    @property
    def shares(self) -> list[float]:
        step = self.predicted
        parts = (step.products, step.attention, step.rest, step.optimizer, step.exchange - step.hidden)
        return [part / step.total for part in parts]


def estimate_steps(candidates: Sequence[Candidate], measured: Mapping[int, float]) -> list[StepEstimate]:
    """Estimates for all candidates, from the measured seconds of some, by their index."""
    predicted = np.log([candidate.predicted.total for candidate in candidates])
    covariance = _covariance(candidates)
    tried = sorted(measured)
    if not tried:
        return [StepEstimate(float(np.exp(mean)), float(np.sqrt(own)))
                for mean, own in zip(predicted, covariance.diagonal(), strict=True)]
    wrong = np.log([measured[number] for number in tried]) - predicted[tried]
    known = covariance[np.ix_(tried, tried)] + NOISE_STD**2 * np.eye(len(tried))
    across = covariance[tried]
    solved = np.linalg.solve(known, across)
    means = predicted + wrong @ solved
    log_stds = np.sqrt(np.maximum(covariance.diagonal() - (across * solved).sum(axis=0), 0.0))
    return [StepEstimate(float(np.exp(mean)), float(doubt)) for mean, doubt in zip(means, log_stds, strict=True)]


def _covariance(candidates: Sequence[Candidate]) -> Any:
    """[candidate, candidate]: of the prediction errors."""
    shares = np.array([candidate.shares for candidate in candidates])
    values = np.array([list(candidate.settings.values()) for candidate in candidates], dtype=object)
    equal = (values[:, None, :] == values[None, :, :]).astype(float).sum(axis=2)
    pairs = equal * (equal - 1) / 2
    return MACHINE_STD**2 + PART_STD**2 * shares @ shares.T + SETTING_STD**2 * equal + PAIR_STD**2 * pairs


TrialState = Literal["done", "memory", "crash", "hang", "unclear"]

FINALISTS, REPEATS = 3, 2
"""The number of best choices that are measured again, and the maximum number of repeats."""
WORTHWHILE = 0.005
"""Minimum expected gain of a trial, as a share of a step."""
MIN_PROGRESS = 0.01
"""A smaller gain counts as none for early stopping."""
CHOICES_PER_TRIAL, MIN_MODELLED_TRIALS = 4, 8
"""The model measures at most one choice in CHOICES_PER_TRIAL, as many are nearly the same, but at least
MIN_MODELLED_TRIALS."""
NORMAL = NormalDist()


@dataclass(frozen=True)
class TrialOption:
    """A choice as the planner predicts it."""

    candidate: Candidate
    memory_needed: MemoryBudget

    @property
    def family(self) -> tuple[Any, ...]:
        """All settings but the micro-batch."""
        return tuple(value for name, value in self.candidate.settings.items() if name != "batch")


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

    def merge_repeat(self, other: TrialResult) -> TrialResult:
        """The result including `other`, a repeat. One failed repeat is tolerated; after a second the choice failed."""
        if self.seconds is None:
            return other
        times = (*(self.times or (self.seconds,)), inf if other.seconds is None else other.seconds)
        if times.count(inf) > 1:
            return replace(other, seconds=None, times=times)
        return replace(self, seconds=min(times), times=times)


def select_candidates(options: Sequence[TrialOption], capacity: MemoryBudget, micro_batches: int,
                      trials: Mapping[int, TrialResult]) -> list[int]:
    """Indices of the options that fit, the fastest by prediction first, with at most `micro_batches` per family."""
    order = sorted((number for number, option in enumerate(options)
                    if capacity.can_hold(option.memory_needed) and not _exceeds_known_oom(option, options, trials)),
                   key=lambda number: options[number].candidate.predicted.total)
    kept, seen = list[int](), Counter[tuple[Any, ...]]()
    for number in order:
        seen[options[number].family] += 1
        if seen[options[number].family] <= micro_batches:
            kept.append(number)
    return kept


def next_trial(options: Sequence[TrialOption], kept: Sequence[int], trials: Mapping[int, TrialResult],
               tuning: AutotuningConfig) -> int | None:
    """The index of the option to try; None: the search is over."""
    left = _untried(options, kept, trials)
    if (not left or len(trials) >= tuning.autotuning_tuner_num_trials
            or _has_stalled(trials, tuning.autotuning_tuner_early_stopping)):
        return None
    if tuning.autotuning_tuner_type == "gridsearch":
        return left[0]
    if tuning.autotuning_tuner_type == "random":
        return random.Random(len(trials)).choice(left)
    measured = _measured_seconds(trials)
    estimates = estimate_steps([option.candidate for option in options], measured)
    if not measured:
        return min(left, key=lambda number: estimates[number].seconds)
    gains = {number: expected_gain(estimates[number], min(measured.values())) for number in left}
    number = max(left, key=lambda number: gains[number])
    return number if gains[number] >= WORTHWHILE and len(measured) < _max_modelled_trials(options) else None


def _measured_seconds(trials: Mapping[int, TrialResult]) -> dict[int, float]:
    return {number: trial.seconds for number, trial in trials.items() if trial.seconds is not None}


def _max_modelled_trials(options: Sequence[TrialOption]) -> int:
    return max(MIN_MODELLED_TRIALS, len(options) // CHOICES_PER_TRIAL)


def expected_gain(estimate: StepEstimate, fastest: float) -> float:
    """Expected improvement of the best time by a trial, as a share; a slower result counts as 0."""
    ratio, doubt = estimate.seconds / fastest, max(estimate.log_std, 1e-9)
    ahead = -log(ratio) / doubt
    return NORMAL.cdf(ahead) - ratio * exp(doubt**2 / 2) * NORMAL.cdf(ahead - doubt)


def stop_reason(options: Sequence[TrialOption], kept: Sequence[int], trials: Mapping[int, TrialResult],
                tuning: AutotuningConfig) -> str:
    """Why there is no next trial."""
    if not _untried(options, kept, trials):
        return "nothing is left to try"
    if len(trials) >= tuning.autotuning_tuner_num_trials:
        return f"--autotuning-tuner-num-trials is {tuning.autotuning_tuner_num_trials}"
    if _has_stalled(trials, tuning.autotuning_tuner_early_stopping):
        return (f"the last {tuning.autotuning_tuner_early_stopping} trials were no faster "
                "(--autotuning-tuner-early-stopping)")
    if len(_measured_seconds(trials)) >= _max_modelled_trials(options):
        return f"{_max_modelled_trials(options)} of {len(options)} choices were measured, and no other one stands out"
    return f"no other choice is expected to save {WORTHWHILE:.1%} of a step"


def _untried(options: Sequence[TrialOption], kept: Sequence[int], trials: Mapping[int, TrialResult]) -> list[int]:
    return [number for number in kept
            if number not in trials and not _exceeds_known_oom(options[number], options, trials)]


def _exceeds_known_oom(option: TrialOption, options: Sequence[TrialOption], trials: Mapping[int, TrialResult]) -> bool:
    """It needs at least as much memory as an option that ran out of it."""
    return any(trial.state == "memory" and option.memory_needed.can_hold(options[number].memory_needed)
               for number, trial in trials.items())


def _has_stalled(trials: Mapping[int, TrialResult], max_trials_without_gain: int) -> bool:
    """The last trials were no faster than an earlier one."""
    fastest, since = inf, 0
    for trial in trials.values():
        since += 1
        if trial.seconds is not None and trial.seconds < (1 - MIN_PROGRESS) * fastest:
            fastest, since = trial.seconds, 0
    return 0 < max_trials_without_gain <= since and fastest < inf


def next_repeat(trials: Mapping[int, TrialResult]) -> int | None:
    """The finalist to measure again; None if one was faster than the others in every measurement, or after REPEATS."""
    times = {number: trials[number].times or (seconds,) for number, seconds in _measured_seconds(trials).items()}
    first = sorted(times, key=lambda number: times[number][0])[:FINALISTS]
    if len(first) < 2:
        return None
    fewest = min(len(times[number]) for number in first)
    lagging = [number for number in first if len(times[number]) == fewest]
    pick = min(first, key=lambda number: min(times[number]))
    is_plain = all(max(times[pick]) < min(times[number]) for number in first if number != pick)
    is_enough = fewest > REPEATS or (fewest > 1 and is_plain)
    return None if lagging == first and is_enough else lagging[0]


def common_error(trials: Mapping[Any, TrialResult]) -> TrialResult | None:
    """The error of the last two trials, if every choice would have it: settings that no trial has run with, data that
    cannot be read, a disk that cannot be written."""
    if len(trials) < 2:
        return None
    *before, one, other = trials.values()
    is_common = (other.code in (EXIT_DATA, EXIT_STORAGE)
                 or other.code == EXIT_CONFIG and one.words == other.words and not before)
    return other if is_common and one.code == other.code else None


def fastest_choice(trials: Mapping[int, TrialResult]) -> int | None:
    measured = _measured_seconds(trials)
    return min(measured, key=lambda number: measured[number]) if measured else None
