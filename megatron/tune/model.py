"""A simple model of what the prediction of the planner is wrong by, refined with every trial. Pure.

The logarithm of measured / predicted is taken for a sum of unknown corrections: one of the machine, one for each part
of the predicted step (a machine that is slow at attention is wrong by more where attention is more), and one for each
value of each setting and of each two. Each is near 0 until trials say otherwise. With normal distributions the best
estimate and its doubt are those of a Gaussian process, a system of equations as large as the number of trials.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from megatron.plan.time import StepTime

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
