"""The search, on synthetic cost surfaces (the seconds of a step of any choice, and which choices run out of memory),
beside the slow way: every choice tried."""

from __future__ import annotations

import math
import random
from dataclasses import asdict, dataclass
from functools import cache

import pytest

from megatron.plan import cli as plan
from megatron.plan.footprint import PlannedRun
from megatron.plan.memory import peak_memory
from megatron.plan.roofline import MachineRates, step_time
from megatron.tune import search
from megatron.tune.search import (FAMILY_SIZE, MEASURED_SHARE, MemoryBudget, TrialOption, TrialResult, TuningChoice,
                                  candidate_families, fastest_choice, legal_choices, next_trial, plan_choices,
                                  samples_per_step)

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
    steps = {choice: step_time(run, RATES).as_dict() for choice, run in legal_choices(planned(*flags)).items()}
    return {choice: {part: seconds for part, seconds in step.items() if part != "total"}
            for choice, step in steps.items()}


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


# ---- the search ----------------------------------------------------------------------------------------------------

MOST = 50
UNLIMITED = MemoryBudget(math.inf, math.inf)


def searched(surface: CostSurface) -> dict[TuningChoice, TrialResult]:
    options, trials = options_of(*surface.flags), dict[TuningChoice, TrialResult]()
    while isinstance(option := next_trial(options, MemoryBudget(surface.memory), trials, MOST), TrialOption):
        assert option.choice not in trials
        trials[option.choice] = surface.outcome(option)
    return trials


def share_of_best(surface: CostSurface, trials: dict[TuningChoice, TrialResult]) -> float:
    """The speed of the pick, as a share of that of the best of all choices."""
    outcomes = map(surface.outcome, options_of(*surface.flags))
    fastest = min(outcome.seconds for outcome in outcomes if outcome.seconds is not None)
    chosen = fastest_choice(trials)
    return 0.0 if chosen is None else fastest / (trials[chosen].seconds or math.inf)


@pytest.mark.parametrize("seeds", [range(12), pytest.param(range(12, 60), marks=pytest.mark.slow)], ids=str)
def test_the_pick_has_95_percent_of_the_best_after_a_third_of_the_trials(seeds: range) -> None:
    for seed in seeds:
        surface = CostSurface.of(seed)
        trials = searched(surface)
        assert len(trials) <= len(options_of()) / 3 and share_of_best(surface, trials) >= 0.95, seed


def test_rounds_halve_the_families_and_try_the_next_choice_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the prediction is right, the first round has one trial for each family, in their order."""
    options, trials, families = options_of(), dict[TuningChoice, TrialResult](), list[TuningChoice]()
    monkeypatch.setattr(search, "EARLY_STOPPING", math.inf)
    while isinstance(option := next_trial(options, UNLIMITED, trials, 1000), TrialOption):
        trials[option.choice] = TrialResult("done", option.predicted)
        families.append(option.family)
    first = candidate_families(options, UNLIMITED, {})
    count = len(first)
    assert families[:count] == [family[0].family for family in first]
    assert families[count:count + count // 2] == families[:count // 2]
    assert len(trials) == int(MEASURED_SHARE * len(options))


def test_what_does_not_fit_and_all_but_the_best_micro_batches_are_left_out() -> None:
    options = options_of("--global-batch-size", "128")
    capacity = sorted(option.memory_needed.device for option in options)[len(options) * 3 // 4]
    families = candidate_families(options, MemoryBudget(capacity), {})
    for family in families:
        alike = [option for option in options
                 if option.family == family[0].family and option.memory_needed.device <= capacity]
        assert family == sorted(alike, key=lambda option: option.predicted)[:FAMILY_SIZE]
    assert max(map(len, families)) == FAMILY_SIZE
    first = [family[0].predicted for family in families]
    assert first == sorted(first)


@pytest.mark.parametrize("flags", [(), ("--device", "cuda")])
def test_lack_of_memory_rules_out_what_needs_as_much_and_a_crash_only_itself(
        flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs both of the device and of the host: the host may have killed a trial that is small on the GPU."""
    options = options_of(*flags)
    monkeypatch.setattr(search, "FAMILY_SIZE", 100)
    failed = sorted(options, key=lambda option: option.memory_needed.device)[len(options) // 3]

    def kept(state: str) -> set[TuningChoice]:
        trials = {failed.choice: TrialResult(state)}  # type: ignore[arg-type]
        return {option.choice for family in candidate_families(options, UNLIMITED, trials) for option in family}

    needs = failed.memory_needed
    smaller = {option.choice for option in options
               if option.memory_needed.device < needs.device or option.memory_needed.host < needs.host}
    assert kept("memory") == smaller and kept("crash") == {option.choice for option in options}


def test_a_search_ends_when_every_trial_fails() -> None:
    options, trials = options_of(), dict[TuningChoice, TrialResult]()
    while isinstance(option := next_trial(options, UNLIMITED, trials, 10**6), TrialOption):
        trials[option.choice] = TrialResult("hang")
    assert option == "nothing is left to try" and len(trials) > 16 and fastest_choice(trials) is None


def test_it_ends_at_the_number_of_trials_and_a_round_after_some_that_were_no_faster(monkeypatch) -> None:
    options, trials = options_of(), dict[TuningChoice, TrialResult]()
    monkeypatch.setattr(search, "EARLY_STOPPING", 3)
    families = list[TuningChoice]()
    while isinstance(option := next_trial(options, UNLIMITED, trials, 7), TrialOption):
        trials[option.choice] = TrialResult("done", 0.5 if len(trials) == 5 else 1.0)
        families.append(option.family)
    assert option == "--autotuning-tuner-num-trials is 7"
    assert families == [*families[:4], *families[:2], families[1]], (
        "the first and three that were no faster, then half of these, then the faster of both: no gain in round 1")


# ---- what can be tried --------------------------------------------------------------------------------------------


def test_every_choice_keeps_the_samples_and_is_a_run_that_can_start() -> None:
    asked = planned()
    for choice, run in legal_choices(asked).items():
        assert choice.batch * run.dp * run.accumulation == samples_per_step(asked) == 64
        run.config.check_world(4)
        assert peak_memory(run).total > 0 and run.config.zero.zero_stage == choice.stage and run.tp == choice.tp


def test_what_makes_no_difference_is_not_tried_twice() -> None:
    alone = legal_choices(planned("--ranks", "1"))
    assert {(choice.stage, choice.tp) for choice in alone} == {(0, 1)}
    assert {choice.tp for choice in legal_choices(planned())} == {1, 2}  # 6 heads
    assert {choice.tp for choice in legal_choices(planned("--autotuning-mp-size", "2"))} == {2}
