"""The search, on machines that are made up, beside the slow way: every choice tried."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from megatron.config.run_config import AutotuningConfig
from megatron.errors import ConfigError
from megatron.plan.memory import peak_memory
from megatron.plan.step_time import StepTime
from megatron.tune import search
from megatron.tune.search import (Candidate, TrialOption, TrialResult, estimate_steps, expected_gain, fastest_choice,
                                  next_trial, select_candidates, stop_reason)
from megatron.tune.space import MemoryBudget, legal_choices, samples_per_step
from tests.megatron.tune.simulated import Simulated, options_of, planned

TUNING = AutotuningConfig()


@cache
def options(*flags: str) -> list[TrialOption]:
    return list(options_of(planned(*flags)).values())


def searched(found: Sequence[TrialOption],
             machine: Simulated,
             tuning: AutotuningConfig = TUNING) -> dict[int, TrialResult]:
    trials: dict[int, TrialResult] = {}
    few = tuning.autotuning_num_tuning_micro_batch_sizes
    while (number := next_trial(
            found, select_candidates(found, MemoryBudget(machine.memory), few, trials), trials, tuning)) is not None:
        assert number not in trials
        trials[number] = machine.outcome(found[number])
    return trials


def simulated(seed: int, found: Sequence[TrialOption]) -> Simulated:
    """One with room for a share of the choices."""
    needs = sorted(option.memory_needed.device for option in found)
    return Simulated(seed, needs[int(len(needs) * random.Random(seed).uniform(0.3, 0.99))])


@pytest.mark.parametrize("seeds", [range(12), pytest.param(range(12, 60), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("flags", [(), ("--no-autotuning-fast",)], ids=["fast", "with buckets"])
def test_the_pick_is_near_the_best_of_all_choices_after_a_quarter_of_their_trials(flags: tuple[str, ...],
                                                                                  seeds: range) -> None:
    found = options(*flags)
    for seed in seeds:
        machine = simulated(seed, found)
        trials = searched(found, machine)
        chosen = fastest_choice(trials)
        assert chosen is not None and len(trials) <= len(found) / 4
        fastest = min(outcome.seconds for outcome in map(machine.outcome, found) if outcome.seconds is not None)
        assert fastest / (trials[chosen].seconds or math.inf) >= 0.95, seed


def test_fewer_trials_than_the_predicted_order_needs_for_as_much() -> None:
    """Negative control: the order of the prediction alone misses more often, and so does any order."""
    found, missed = options(), dict[str, int]()
    for kind in ("model_based", "gridsearch", "random"):
        tuning = replace(TUNING, autotuning_tuner_type=kind)
        missed[kind] = 0
        for seed in range(40):
            machine = simulated(seed, found)
            trials = searched(found, machine, tuning)
            fastest = min(outcome.seconds for outcome in map(machine.outcome, found) if outcome.seconds is not None)
            missed[kind] += fastest / min(one.seconds or math.inf for one in trials.values()) < 0.95
    assert missed["model_based"] < missed["gridsearch"] < missed["random"]


def test_what_does_not_fit_and_all_but_the_best_micro_batches_are_left_out() -> None:
    found = options()
    capacity = sorted(option.memory_needed.device for option in found)[len(found) // 2]
    kept = select_candidates(found, MemoryBudget(capacity), 2, {})
    assert [found[number].candidate.predicted.total for number in kept] == sorted(
        found[number].candidate.predicted.total for number in kept)
    for number, option in enumerate(found):
        alike = [one for one in found if one.family == option.family and one.memory_needed.device <= capacity]
        faster = sum(one.candidate.predicted.total < option.candidate.predicted.total for one in alike)
        assert (number in kept) == (option.memory_needed.device <= capacity and faster < 2)


def test_smaller_micro_batches_take_the_place_of_those_that_found_no_memory() -> None:
    found, few, capacity = options(), 2, MemoryBudget(math.inf)
    before = select_candidates(found, capacity, few, {})
    kind = found[before[0]].family
    alike = [number for number in before if found[number].family == kind]
    failed = min(alike, key=lambda number: found[number].memory_needed.device)
    after = select_candidates(found, capacity, few, {failed: TrialResult("memory")})
    fresh = {number for number in after if found[number].family == kind}
    assert fresh and not fresh & set(alike)
    assert all(found[number].memory_needed.device < found[failed].memory_needed.device for number in fresh)


def test_what_the_host_has_no_room_for_is_left_out_as_well() -> None:
    found = options("--device", "cuda")
    host = sorted(option.memory_needed.host for option in found if option.memory_needed.host)[3]
    kept = select_candidates(found, MemoryBudget(math.inf, host), len(found), {})
    assert sorted(kept) == [number for number, option in enumerate(found) if option.memory_needed.host <= host]
    assert 0 < len(kept) < len(found)
    assert not any(found[number].memory_needed.host
                   for number in select_candidates(found, MemoryBudget(math.inf), len(found), {}))


def test_lack_of_memory_rules_out_what_needs_as_much_and_a_crash_only_itself() -> None:
    found, tuning = options(), replace(TUNING, autotuning_tuner_type="gridsearch")
    kept = sorted(range(len(found)), key=lambda number: -found[number].memory_needed.device)
    middle = kept[len(kept) // 2]
    assert next_trial(found, kept, {middle: TrialResult("crash")}, tuning) == kept[0]
    after = next_trial(found, kept, {middle: TrialResult("memory")}, tuning)
    assert after is not None and found[after].memory_needed.device < found[middle].memory_needed.device
    assert next_trial(found, kept, {kept[-1]: TrialResult("memory")}, tuning) is None


def test_an_offloaded_choice_that_found_no_memory_says_nothing_of_those_that_keep_less_on_the_host() -> None:
    """The host may have killed it: one that is all on the GPU needs more there, and still runs."""
    found, tuning = options("--device", "cuda"), replace(TUNING, autotuning_tuner_type="gridsearch")
    failed = min((number for number, option in enumerate(found) if option.memory_needed.host),
                 key=lambda number: found[number].memory_needed.device)
    needs = found[failed].memory_needed
    for number, option in enumerate(found):
        as_much = option.memory_needed.device >= needs.device and option.memory_needed.host >= needs.host
        left = next_trial(found, [number], {failed: TrialResult("memory")}, tuning)
        assert left == (None if as_much else number)
    assert any(option.memory_needed.device > needs.device and not option.memory_needed.host for option in found)


@pytest.mark.parametrize("kind", ["model_based", "gridsearch", "random"])
def test_a_search_ends_when_every_trial_fails(kind: str) -> None:
    found, trials = options(), dict[int, TrialResult]()
    tuning = replace(TUNING, autotuning_tuner_type=kind, autotuning_tuner_num_trials=10**6)
    while (number := next_trial(found, range(len(found)), trials, tuning)) is not None:
        trials[number] = TrialResult("hang")
    assert len(trials) == len(found) and fastest_choice(trials) is None


def test_it_ends_at_the_number_of_trials_and_after_some_that_were_no_faster() -> None:
    found = options()
    tuning = AutotuningConfig(autotuning_tuner_type="gridsearch", autotuning_tuner_num_trials=6,
                              autotuning_tuner_early_stopping=3)
    slower = {number: TrialResult("done", 1.0 + number) for number in range(4)}
    assert next_trial(found, range(20), slower, tuning) is None
    assert stop_reason(found, range(20), slower, tuning).startswith("the last ")
    assert stop_reason(found, list(slower), slower, tuning) == "nothing is left to try"
    assert next_trial(found, range(20), {number: slower[number] for number in range(3)}, tuning) == 3
    faster = {number: TrialResult("done", 10.0 - number) for number in range(5)}
    assert next_trial(found, range(20), faster, tuning) == 5
    assert next_trial(found, range(20), faster | {5: TrialResult("done", 1.0)}, tuning) is None


# ---- the model ----------------------------------------------------------------------------------------------------


def candidate(rng: random.Random) -> Candidate:
    parts = [rng.uniform(0.01, 1) for _ in range(5)]
    return Candidate({"stage": rng.randrange(4), "batch": rng.randrange(3)}, StepTime(*parts, hidden=0.0))


@pytest.mark.parametrize("seed", range(5))
def test_the_estimate_is_that_of_corrections_fitted_by_least_squares(seed: int) -> None:
    """Reference: one unknown for the machine, each part, each value and each pair of values, all drawn to 0 by their
    own weight: the minimum of a sum of squares, solved in the space of unknowns and not of trials."""
    rng = random.Random(seed)
    found = [candidate(rng) for _ in range(12)]
    measured = {number: rng.uniform(0.1, 5) for number in range(6)}
    values = sorted({item for one in found for item in one.settings.items()})
    pairs = sorted({tuple(sorted(one.settings.items())) for one in found})
    rows = np.array([[search.MACHINE_STD, *(search.PART_STD * share for share in one.shares),
                      *(search.SETTING_STD * (value in one.settings.items()) for value in values),
                      *(search.PAIR_STD * (pair == tuple(sorted(one.settings.items()))) for pair in pairs)]
                     for one in found])
    known = rows[list(measured)] / search.NOISE_STD
    wrong = np.array([math.log(seconds / found[number].predicted.total) for number, seconds in measured.items()])
    precision = known.T @ known + np.eye(rows.shape[1])
    weights = np.linalg.solve(precision, known.T @ (wrong / search.NOISE_STD))
    doubts = np.sqrt((rows * np.linalg.solve(precision, rows.T).T).sum(axis=1))
    for one, row, doubt, estimate in zip(found, rows, doubts, estimate_steps(found, measured), strict=True):
        assert estimate.seconds == pytest.approx(one.predicted.total * math.exp(row @ weights), rel=1e-6)
        assert estimate.log_std == pytest.approx(doubt, rel=1e-4, abs=1e-6)


def test_without_trials_the_estimate_is_the_prediction() -> None:
    found = [candidate(random.Random(seed)) for seed in range(4)]
    assert [one.seconds for one in estimate_steps(found, {})] == pytest.approx([one.predicted.total for one in found])


def test_a_machine_that_is_twice_as_slow_at_everything_is_known_after_one_trial() -> None:
    found = [candidate(random.Random(seed)) for seed in range(10)]
    after = estimate_steps(found, {0: 2 * found[0].predicted.total})
    assert all(1.5 < estimate.seconds / one.predicted.total < 2.3 for one, estimate in zip(found, after, strict=True))


def test_doubt_is_what_makes_it_look_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    found = options()
    curious = sum(len(searched(found, simulated(seed, found))) for seed in range(5))
    monkeypatch.setattr(search, "expected_gain", lambda estimate, fastest: 1 - estimate.seconds / fastest)
    assert sum(len(searched(found, simulated(seed, found))) for seed in range(5)) < curious


@pytest.mark.parametrize("seconds, doubt", [(1.0, 0.1), (0.9, 0.05), (1.2, 0.1), (1.2, 0.01), (0.5, 0.0)])
def test_the_expected_gain_is_the_mean_of_what_is_saved(seconds: float, doubt: float) -> None:
    """Of a trial whose logarithm is normal, beside a fastest step of 1 s."""
    draws = np.random.default_rng(0).normal(math.log(seconds), doubt, 10**6)
    assert expected_gain(search.StepEstimate(seconds, doubt), 1.0) == pytest.approx(
        float(np.maximum(0.0, 1.0 - np.exp(draws)).mean()), abs=2e-4)


def test_no_more_than_a_quarter_of_the_choices_is_measured_or_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where any choice may still be the best: each takes as long as every other one. Failures do not count."""
    monkeypatch.setattr(search, "WORTHWHILE", 0.0)
    for flags in ((), ("--no-autotuning-fast",), ("--model-parallel-size", "1", "--autotuning-mp-size", "1")):
        found, trials = options(*flags), dict[int, TrialResult]()
        tuning = AutotuningConfig(autotuning_tuner_num_trials=10**6, autotuning_tuner_early_stopping=0)
        while (number := next_trial(found, range(len(found)), trials, tuning)) is not None:
            trials[number] = TrialResult("crash") if len(trials) % 2 else TrialResult("done", 1.0)
        measured = sum(outcome.seconds is not None for outcome in trials.values())
        assert measured == max(8, len(found) // 4)
        assert stop_reason(found, range(len(found)), trials, tuning) == (
            f"{measured} of {len(found)} choices were measured, and no other one stands out")


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


def test_buckets_are_tried_where_numbers_travel_in_pieces() -> None:
    """A GPU's wire sends a block as a whole."""
    for device, sizes in (("cpu", 3), ("cuda", 1)):
        found = legal_choices(planned("--no-autotuning-fast", "--device", device))
        assert len({choice.bucket for choice in found}) == sizes


def test_the_flags_of_a_choice_make_the_run_that_is_tried() -> None:
    given = ["--no-autotuning-fast", "--allgather-bucket-size", "1000"]
    asked = planned(*given)
    for choice, run in legal_choices(asked).items():
        typed = planned(*given, *choice.flags(asked, 64)).config
        assert (typed.zero, typed.recompute, typed.parallel, typed.train) == (
            run.config.zero, run.config.recompute, run.config.parallel, run.config.train)


def test_the_samples_of_a_step_are_those_of_the_flags_or_the_largest_that_are_allowed() -> None:
    assert samples_per_step(planned()) == 64
    asked = planned()
    loose = replace(asked, config=replace(asked.config, train=replace(asked.config.train, global_batch_size=None)))
    assert samples_per_step(loose) == 32
    limited = replace(loose.config, autotuning=AutotuningConfig(autotuning_max_train_batch_size=48))
    assert samples_per_step(replace(loose, config=limited)) == 48


def test_steps_that_end_before_they_begin_are_refused() -> None:
    with pytest.raises(ConfigError, match="-end-profile-step 2 is before --autotuning-start-profile-step 3"):
        AutotuningConfig(autotuning_end_profile_step=2)
