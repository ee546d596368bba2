"""Which choice is tried next, and when the search stops: pure functions of the choices and the trials so far.

A Gaussian process models log(measured / predicted) with a correction for the machine, each part of a step, each
setting and each pair of settings. An out-of-memory trial rules out all choices that need at least as much memory on
device and host; other failures rule out only their own choice.
"""

from __future__ import annotations

import random
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
"""How large corrections are, as standard deviations of a logarithm: of the whole, of a part, of one setting's value, of
what two of them do together; and how exact a trial is. Of four grids that were measured whole (docs/benchmarks.md) the
likelihood is near its highest, and a machine of another kind is left room to be wrong by more."""


class StepEstimate(NamedTuple):
    """Of a step, in seconds."""

    seconds: float
    log_std: float
    """Standard deviation of its logarithm."""


@dataclass(frozen=True)
class Candidate:
    """What the model knows of a choice."""

    settings: Mapping[str, Any]
    predicted: StepTime

    @property
    def shares(self) -> list[float]:
        step = self.predicted
        parts = (step.products, step.attention, step.rest, step.optimizer, step.exchange - step.hidden)
        return [part / step.total for part in parts]


def estimate_steps(candidates: Sequence[Candidate], measured: Mapping[int, float]) -> list[StepEstimate]:
    """Of all, by the seconds that some of them (by number) have been measured to take."""
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
    """How alike the errors of each two are: a matrix."""
    shares = np.array([candidate.shares for candidate in candidates])
    names = list(candidates[0].settings)
    same = np.array([[one.settings[name] for name in names] for one in candidates], dtype=object)
    equal = (same[:, None, :] == same[None, :, :]).astype(float).sum(axis=2)
    pairs = equal * (equal - 1) / 2
    return MACHINE_STD**2 + PART_STD**2 * shares @ shares.T + SETTING_STD**2 * equal + PAIR_STD**2 * pairs


TrialState = Literal["done", "memory", "crash", "hang", "unclear"]

FINALISTS, REPEATS = 3, 2
"""So many of the best are measured again, so often at most."""
WORTHWHILE = 0.005
"""Share of a step that a trial has to save on average, before it is made."""
MIN_PROGRESS = 0.01
"""One that saved less was none."""
CHOICES_PER_TRIAL, MIN_MODELLED_TRIALS = 4, 8
"""No more than one choice of so many is measured by the model, where there are more than a few: of those that are
nearly the same any will do."""
NORMAL = NormalDist()


@dataclass(frozen=True)
class TrialOption:
    """A choice with what the planner says of it."""

    candidate: Candidate
    memory_needed: MemoryBudget

    @property
    def family(self) -> tuple[Any, ...]:
        """All but the micro-batch."""
        return tuple(value for name, value in self.candidate.settings.items() if name != "batch")


@dataclass(frozen=True)
class TrialResult:
    """Of one trial."""

    state: TrialState
    seconds: float | None = None
    """Of a step, where it was done; of several times the least, since what else a machine does makes steps longer."""
    words: str = ""
    """Why not."""
    code: int = 0
    """That its processes ended with."""
    times: tuple[float, ...] = ()
    """Seconds of each time, where it was measured again; infinite where that failed."""

    def merge_repeat(self, other: TrialResult) -> TrialResult:
        """With another measurement of the same choice. One that failed takes nothing back, for once; a second one is
        what there is to say of the choice."""
        if self.seconds is None:
            return other
        times = (*(self.times or (self.seconds,)), inf if other.seconds is None else other.seconds)
        if times.count(inf) > 1:
            return replace(other, seconds=None, times=times)
        return replace(self, seconds=min(times), times=times)


def select_candidates(options: Sequence[TrialOption], capacity: MemoryBudget, micro_batches: int,
                      trials: Mapping[int, TrialResult]) -> list[int]:
    """Numbers of those that fit, as far as is known, the fastest by prediction first."""
    order = sorted((number for number, option in enumerate(options)
                    if capacity.can_hold(option.memory_needed) and not _exceeds_known_oom(option, options, trials)),
                   key=lambda number: options[number].candidate.predicted.total)
    kept, seen = list[int](), dict[tuple[Any, ...], int]()
    for number in order:
        kind = options[number].family
        seen[kind] = seen.get(kind, 0) + 1
        if seen[kind] <= micro_batches:
            kept.append(number)
    return kept


def next_trial(options: Sequence[TrialOption], kept: Sequence[int], trials: Mapping[int, TrialResult],
               tuning: AutotuningConfig) -> int | None:
    """None: the search is over."""
    if len(trials) >= tuning.autotuning_tuner_num_trials or _has_stalled(trials,
                                                                         tuning.autotuning_tuner_early_stopping):
        return None
    left = _untried(options, kept, trials)
    if not left:
        return None
    if tuning.autotuning_tuner_type == "gridsearch":
        return left[0]
    if tuning.autotuning_tuner_type == "random":
        return random.Random(len(trials)).choice(left)
    return _most_promising(options, left, trials)


def _most_promising(options: Sequence[TrialOption], left: Sequence[int],
                    trials: Mapping[int, TrialResult]) -> int | None:
    measured = {number: outcome.seconds for number, outcome in trials.items() if outcome.seconds is not None}
    found = estimate_steps([option.candidate for option in options], measured)
    if not measured:
        return min(left, key=lambda number: found[number].seconds)
    gains = {number: expected_gain(found[number], min(measured.values())) for number in left}
    number = max(left, key=lambda number: gains[number])
    return number if gains[number] >= WORTHWHILE and len(measured) < _max_modelled_trials(options) else None


def _max_modelled_trials(options: Sequence[TrialOption]) -> int:
    """Choices that are measured by the model."""
    return max(MIN_MODELLED_TRIALS, len(options) // CHOICES_PER_TRIAL)


def expected_gain(estimate: StepEstimate, fastest: float) -> float:
    """By how much, as a share, a trial of it makes the best time better: on average, as nothing is lost where it turns
    out to be slower."""
    ratio, doubt = estimate.seconds / fastest, max(estimate.log_std, 1e-9)
    ahead = -log(ratio) / doubt
    return NORMAL.cdf(ahead) - ratio * exp(doubt**2 / 2) * NORMAL.cdf(ahead - doubt)


def stop_reason(options: Sequence[TrialOption], kept: Sequence[int], trials: Mapping[int, TrialResult],
                tuning: AutotuningConfig) -> str:
    """Where there is no next trial."""
    if not _untried(options, kept, trials):
        return "nothing is left to try"
    if len(trials) >= tuning.autotuning_tuner_num_trials:
        return f"--autotuning-tuner-num-trials is {tuning.autotuning_tuner_num_trials}"
    if _has_stalled(trials, tuning.autotuning_tuner_early_stopping):
        return (f"the last {tuning.autotuning_tuner_early_stopping} trials were no faster "
                "(--autotuning-tuner-early-stopping)")
    if sum(outcome.seconds is not None for outcome in trials.values()) >= _max_modelled_trials(options):
        return f"{_max_modelled_trials(options)} of {len(options)} choices were measured, and no other one stands out"
    return f"no other choice is expected to save {WORTHWHILE:.1%} of a step"


def _untried(options: Sequence[TrialOption], kept: Sequence[int], trials: Mapping[int, TrialResult]) -> list[int]:
    return [number for number in kept
            if number not in trials and not _exceeds_known_oom(options[number], options, trials)]


def _exceeds_known_oom(option: TrialOption, options: Sequence[TrialOption], trials: Mapping[int, TrialResult]) -> bool:
    """It needs as much as one that found no memory."""
    return any(outcome.state == "memory" and option.memory_needed.can_hold(options[number].memory_needed)
               for number, outcome in trials.items())


def _has_stalled(trials: Mapping[int, TrialResult], max_trials_without_gain: int) -> bool:
    """The last trials, in their order, were no faster than one before them."""
    fastest, since = inf, 0
    for outcome in trials.values():
        since += 1
        if outcome.seconds is not None and outcome.seconds < (1 - MIN_PROGRESS) * fastest:
            fastest, since = outcome.seconds, 0
    return 0 < max_trials_without_gain <= since and fastest < inf


def next_repeat(trials: Mapping[int, TrialResult]) -> int | None:
    """Of the best ones in turn, until every time of one is less than all of the others. None: that, or often enough."""
    times = {number: outcome.times or (outcome.seconds,)
             for number, outcome in trials.items() if outcome.seconds is not None}
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
    """What the last two trials ended with, if that is not of their choices: settings that nothing has run with, data
    that cannot be read, a disk that cannot be written."""
    if len(trials) < 2:
        return None
    *before, one, other = trials.values()
    is_common = (other.code in (EXIT_DATA, EXIT_STORAGE)
                 or other.code == EXIT_CONFIG and one.words == other.words and not before)
    return other if is_common and one.code == other.code else None


def fastest_choice(trials: Mapping[int, TrialResult]) -> int | None:
    done = {number: outcome.seconds for number, outcome in trials.items() if outcome.seconds is not None}
    return min(done, key=lambda number: done[number]) if done else None
