"""How long a trial is waited for: as training waits for its first step, and then by the predicted time."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from megatron.plan.footprint import PlannedRun

EXTRA_SECONDS, SLOWDOWN_LIMIT = 180.0, 10.0
"""Seconds for what no prediction knows, after a first step; how many times longer than predicted steps may be."""


@dataclass(frozen=True)
class TrialTimeout:
    """Seconds."""

    first_step: float
    """Until a first step is told: libraries, the meeting of the ranks, the index, building, compiling."""
    steps: float
    """After that."""
    total: float = inf
    """For all of it."""

    @classmethod
    def for_run(cls, run: PlannedRun, predicted: float, time_limit: float | None) -> TrialTimeout:
        """`predicted`: seconds of all steps; `asked`: a limit that was given, instead of ours."""
        if time_limit is not None:
            return cls(inf, inf, time_limit)
        return cls(run.config.parallel.startup_limit, EXTRA_SECONDS + SLOWDOWN_LIMIT * predicted)

    def expired_reason(self, waited: float, stepped: float | None) -> str:
        """Why a trial is not waited for any longer; "" where it is. `stepped`: when the first step was told."""
        if waited >= self.total:
            return f"not over after {self.total:g} s"
        if stepped is None:
            return f"no step in {self.first_step:.0f} s" if waited >= self.first_step else ""
        return f"not over {self.steps:.0f} s after its first step" if waited - stepped >= self.steps else ""
