"""How long a trial is waited for: as training waits for its first step, and then by the predicted time."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from megatron.plan.footprint import Run

SPARE, LENIENCE = 180.0, 10.0
"""Seconds for what no prediction knows, after a first step; how many times longer than predicted steps may be."""


@dataclass(frozen=True)
class Patience:
    """Seconds."""

    start: float
    """Until a first step is told: libraries, the meeting of the ranks, the index, building, compiling."""
    steps: float
    """After that."""
    whole: float = inf
    """For all of it."""

    @classmethod
    def of(cls, run: Run, predicted: float, asked: float | None) -> Patience:
        """`predicted`: seconds of all steps; `asked`: a limit that was given, instead of ours."""
        if asked is not None:
            return cls(inf, inf, asked)
        return cls(run.config.parallel.startup_limit, SPARE + LENIENCE * predicted)

    def why_not(self, waited: float, stepped: float | None) -> str:
        """Why a trial is not waited for any longer; "" where it is. `stepped`: when the first step was told."""
        if waited >= self.whole:
            return f"not over after {self.whole:g} s"
        if stepped is None:
            return f"no step in {self.start:.0f} s" if waited >= self.start else ""
        return f"not over {self.steps:.0f} s after its first step" if waited - stepped >= self.steps else ""
