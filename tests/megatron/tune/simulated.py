"""Machines that are made up: what a step of any choice takes there, and which choices find no memory."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, replace

from megatron.plan import cli as plan
from megatron.plan.footprint import PlannedRun
from megatron.tune import cli
from megatron.tune.search import TrialOption, TrialResult
from megatron.tune.space import TuningChoice
from tests.megatron.plan.machines import machine, proportional

FLAGS = ["--preset", "small", "--vocab-size", "8192", "--device", "cpu", "--ranks", "4", "--batch-size", "8",
         "--global-batch-size", "64", "--attention-dropout", "0", "--hidden-dropout", "0"]


def planned(*flags: str) -> PlannedRun:
    return plan.parse([*FLAGS, *flags])[1]


def options_of(asked: PlannedRun) -> dict[TuningChoice, TrialOption]:
    rates = machine(asked.ranks, attention_forward=proportional(2e-6), attention_backward=proportional(4e-6),
                    block_forward=proportional(6e-9), block_backward=proportional(1e-8), replay=0.0,
                    loss=proportional(3e-9),
                    update=proportional(1e-9), a_pass=2e-3, a_step=1e-3, split_unit=2e-4, hides=0.4)
    return cli.plan_choices(asked, rates)


@dataclass(frozen=True)
class Simulated:
    """The planner is wrong here: by a factor for each part, for each value of each setting and for each choice; and by
    a factor of memory."""

    seed: int
    memory: float
    """Bytes of a device."""

    def outcome(self, option: TrialOption) -> TrialResult:
        rng = random.Random(self.seed)
        parts = {name: rng.lognormvariate(0.0, 0.4) for name in asdict(option.candidate.predicted)}
        memory = rng.uniform(0.97, 1.03)
        if option.memory_needed.device * memory > self.memory:
            return TrialResult("memory")
        step = option.candidate.predicted
        true = replace(step, **{name: value * parts[name] for name, value in asdict(step).items()})
        true = replace(true, hidden=min(true.hidden, true.exchange))
        seconds = true.total
        for setting in option.candidate.settings.items():
            seconds *= random.Random(f"{self.seed} {setting}").lognormvariate(0.0, 0.08)
        seconds *= random.Random(f"{self.seed} {sorted(option.candidate.settings.items())}").lognormvariate(0.0, 0.01)
        return TrialResult("done", seconds)
