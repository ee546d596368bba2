"""Synthetic cost surfaces: the seconds of a step of any choice, and which choices run out of memory."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from functools import cache

from megatron.plan import cli as plan
from megatron.plan.footprint import PlannedRun
from megatron.plan.roofline import MachineRates, step_time
from megatron.tune.search import TrialOption, TrialResult, TuningChoice, legal_choices, plan_choices

FLAGS = ["--preset", "small", "--vocab-size", "8192", "--device", "cpu", "--ranks", "4", "--batch-size", "8",
         "--global-batch-size", "64", "--attention-dropout", "0", "--hidden-dropout", "0"]
RATES = MachineRates("made up", "cpu", 4, flops=1e11, memory=2e10, exchange=1e9, operation_seconds=1e-5,
                     collective_seconds=3e-4)


def planned(*flags: str) -> PlannedRun:
    return plan.parse([*FLAGS, *flags])[1]


@cache
def options_of(*flags: str) -> list[TrialOption]:
    return plan_choices(planned(*flags), RATES)


@cache
def steps_of(*flags: str) -> dict[TuningChoice, dict[str, float]]:
    return {choice: asdict(step_time(run, RATES)) for choice, run in legal_choices(planned(*flags)).items()}


@dataclass(frozen=True)
class CostSurface:
    """The planner is wrong here: by a factor for each part of a step, for each value of each setting and for each
    choice; and by a factor of memory."""

    seed: int
    memory: float
    """Bytes of a device."""
    flags: tuple[str, ...] = ()

    @staticmethod
    def of(seed: int, flags: tuple[str, ...] = ()) -> CostSurface:
        """One with room for a share of the choices."""
        needs = sorted(option.memory_needed.device for option in options_of(*flags))
        return CostSurface(seed, needs[int(len(needs) * random.Random(seed).uniform(0.3, 0.99))], flags)

    def outcome(self, option: TrialOption) -> TrialResult:
        rng, step = random.Random(self.seed), steps_of(*self.flags)[option.choice]
        parts = {name: rng.lognormvariate(0.0, 0.4) for name in step}
        if option.memory_needed.device * rng.uniform(0.97, 1.03) > self.memory:
            return TrialResult("memory")
        seconds = sum(parts[name] * value for name, value in step.items() if name != "hidden")
        for setting in asdict(option.choice).items():
            seconds *= random.Random(f"{self.seed} {setting}").lognormvariate(0.0, 0.08)
        seconds *= random.Random(f"{self.seed} {option.choice}").lognormvariate(0.0, 0.01)
        return TrialResult("done", seconds)
