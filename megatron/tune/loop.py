"""The search as it runs: choices are planned, tried one after the other, and each trial is kept."""

from __future__ import annotations

from collections.abc import Mapping

from data.storage import DataError
from megatron.config.tree import require
from megatron.errors import EXIT_CONFIG, EXIT_DATA, EXIT_STORAGE, ConfigError, StorageError
from megatron.plan.footprint import PlannedRun
from megatron.plan.rates import MachineRates
from megatron.plan.time import step_time
from megatron.tune.memory import MemoryBudget, memory_needed_by
from megatron.tune.model import Candidate
from megatron.tune.report import counted, format_metric
from megatron.tune.results import TrialRecords
from megatron.tune.search import TrialOption, common_error, next_repeat, next_trial, select_candidates, stop_reason
from megatron.tune.space import TuningChoice, legal_choices, samples_per_step
from megatron.tune.trial import TrialRunner

ERROR_CLASSES = {EXIT_CONFIG: ConfigError, EXIT_DATA: DataError, EXIT_STORAGE: StorageError}
"""Of trials, where they are not of their choices."""


DRY_RUN_CHOICES = 10
"""Choices of a dry run."""

MAX_FAILED_REPEATS = 2
"""Of choices that are measured again: then it is not they that fail."""


def plan_choices(requested: PlannedRun, rates: MachineRates) -> dict[TuningChoice, TrialOption]:
    found = {choice: TrialOption(Candidate(choice.as_dict(), step_time(run, rates)), memory_needed_by(run))
             for choice, run in legal_choices(requested).items()}
    size = requested.config.autotuning.autotuning_mp_size
    require(size is None or requested.ranks % size == 0,
            f"--autotuning-mp-size {size} does not divide --ranks {requested.ranks}: give one that does")
    require(
        bool(found),
        f"--ranks {requested.ranks} and {samples_per_step(requested)} samples of a step leave no choice: samples "
        "have to be divisible by the data parallel size")
    return found


def print_dry_run(requested: PlannedRun, options: Mapping[TuningChoice, TrialOption], capacity: MemoryBudget) -> None:
    """What a search would begin with: nothing is tried."""
    names, values = list(options), list(options.values())
    kept = select_candidates(values, capacity, requested.config.autotuning.autotuning_num_tuning_micro_batch_sizes, {})
    print(f"{counted(len(names), 'choice')}, {len(kept)} to try; a rank has {capacity}; nothing is tried (--dry-run). "
          "The fastest by prediction:")
    for number in sorted(kept, key=lambda number: values[number].candidate.predicted.total)[:DRY_RUN_CHOICES]:
        print(f"  {format_metric(requested, values[number].candidate.predicted.total)} | "
              f"{' '.join(names[number].flags(requested, samples_per_step(requested)))}")


def run_search(requested: PlannedRun, options: Mapping[TuningChoice, TrialOption], capacity: MemoryBudget,
               trials: TrialRunner, results: TrialRecords) -> None:
    """Until there is nothing left to gain; a line for each trial."""
    tuning, samples = requested.config.autotuning, samples_per_step(requested)
    names, values = list(options), list(options.values())
    numbers = {choice: number for number, choice in enumerate(names)}
    few, failed = tuning.autotuning_num_tuning_micro_batch_sizes, 0
    kept = select_candidates(values, capacity, few, {})
    print(f"{counted(len(names), 'choice')}, {len(kept)} to try; a rank has {capacity}"
          + (f"; goes on after {counted(len(results.trials), 'trial')}" if results.trials else ""), flush=True)
    while True:
        known = {numbers[choice]: outcome for choice, outcome in results.trials.items() if choice in numbers}
        if error := common_error(known):
            results.remove(list(results.trials)[-2:])
            raise ERROR_CLASSES[error.code](
                f"{error.words.removeprefix('error: ')} (two trials in turn ended with this; what "
                f"they wrote is in {trials.folder})")
        kept = select_candidates(values, capacity, few, known)
        number = next_trial(values, kept, known, tuning)
        if number is None:
            number = next_repeat(known)
        if number is None:
            print(f"over: {stop_reason(values, kept, known, tuning)}", flush=True)
            return
        choice, predicted = names[number], values[number].candidate.predicted.total
        before = results.trials.get(choice)
        trial = len(results.trials) + 1 if before is None else list(results.trials).index(choice) + 1
        outcome = trials.run(trial, choice.apply_to(requested, samples), predicted)
        results.add(choice, outcome if before is None else before.merge_repeat(outcome), predicted)
        failed = failed + 1 if before and outcome.seconds is None else 0
        result_text = (f"{outcome.state}: {outcome.words}" if outcome.seconds is None
                       else f"measured {format_metric(requested, outcome.seconds)}")
        print(f"trial {trial}{' again' if before else ''}: {' '.join(choice.flags(requested, samples))} | predicted "
              f"{format_metric(requested, predicted)} | {result_text}", flush=True)
        if failed == MAX_FAILED_REPEATS:
            print(f"over: what could be measured before cannot be any more ({outcome.words}); what counts is what was "
                  "measured", flush=True)
            return
