"""The search as it runs: choices are planned, tried one after the other, and each trial is kept."""

from __future__ import annotations

from collections.abc import Mapping

from data.storage import DataError
from megatron.config.tree import require
from megatron.errors import EXIT_CONFIG, EXIT_DATA, EXIT_STORAGE, ConfigError, StorageError
from megatron.plan.footprint import Run
from megatron.plan.rates import Rates
from megatron.plan.time import step_time
from megatron.tune.memory import Memory, needed_by
from megatron.tune.model import Candidate
from megatron.tune.report import counted, metric
from megatron.tune.results import Results
from megatron.tune.search import Option, common_error, next_repeat, next_trial, worth_a_look, why_over
from megatron.tune.space import Choice, choices, samples_of
from megatron.tune.trial import Trials

ERRORS = {EXIT_CONFIG: ConfigError, EXIT_DATA: DataError, EXIT_STORAGE: StorageError}
"""Of trials, where they are not of their choices."""


FORETOLD = 10
"""Choices of a dry run."""

FAILED_IN_TURN = 2
"""Of choices that are measured again: then it is not they that fail."""


def planned(asked: Run, rates: Rates) -> dict[Choice, Option]:
    found = {choice: Option(Candidate(choice.as_dict(), step_time(run, rates)), needed_by(run))
             for choice, run in choices(asked).items()}
    size = asked.config.autotuning.autotuning_mp_size
    require(size is None or asked.ranks % size == 0,
            f"--autotuning-mp-size {size} does not divide --ranks {asked.ranks}: give one that does")
    require(bool(found), f"--ranks {asked.ranks} and {samples_of(asked)} samples of a step leave no choice: samples "
            "have to be divisible by the data parallel size")
    return found


def foretell(asked: Run, options: Mapping[Choice, Option], capacity: Memory) -> None:
    """What a search would begin with: nothing is tried."""
    names, values = list(options), list(options.values())
    kept = worth_a_look(values, capacity, asked.config.autotuning.autotuning_num_tuning_micro_batch_sizes, {})
    print(f"{counted(len(names), 'choice')}, {len(kept)} to try; a rank has {capacity}; nothing is tried (--dry-run). "
          "The fastest by prediction:")
    for number in sorted(kept, key=lambda number: values[number].candidate.predicted.total)[:FORETOLD]:
        print(f"  {metric(asked, values[number].candidate.predicted.total)} | "
              f"{' '.join(names[number].flags(asked, samples_of(asked)))}")


def search(asked: Run, options: Mapping[Choice, Option], capacity: Memory, trials: Trials, results: Results) -> None:
    """Until there is nothing left to gain; a line for each trial."""
    tuning, samples = asked.config.autotuning, samples_of(asked)
    names, values = list(options), list(options.values())
    numbers = {choice: number for number, choice in enumerate(names)}
    few, failed = tuning.autotuning_num_tuning_micro_batch_sizes, 0
    kept = worth_a_look(values, capacity, few, {})
    print(f"{counted(len(names), 'choice')}, {len(kept)} to try; a rank has {capacity}"
          + (f"; goes on after {counted(len(results.trials), 'trial')}" if results.trials else ""), flush=True)
    while True:
        known = {numbers[choice]: outcome for choice, outcome in results.trials.items() if choice in numbers}
        if error := common_error(known):
            results.forget(list(results.trials)[-2:])
            raise ERRORS[error.code](f"{error.words.removeprefix('error: ')} (two trials in turn ended with this; what "
                                     f"they wrote is in {trials.folder})")
        kept = worth_a_look(values, capacity, few, known)
        number = next_trial(values, kept, known, tuning)
        if number is None:
            number = next_repeat(known)
        if number is None:
            print(f"over: {why_over(values, kept, known, tuning)}", flush=True)
            return
        choice, predicted = names[number], values[number].candidate.predicted.total
        before = results.trials.get(choice)
        trial = len(results.trials) + 1 if before is None else list(results.trials).index(choice) + 1
        outcome = trials.run(trial, choice.of(asked, samples), predicted)
        results.add(choice, outcome if before is None else before.again(outcome), predicted)
        failed = failed + 1 if before and outcome.seconds is None else 0
        said = (f"{outcome.state}: {outcome.words}" if outcome.seconds is None
                else f"measured {metric(asked, outcome.seconds)}")
        print(f"trial {trial}{' again' if before else ''}: {' '.join(choice.flags(asked, samples))} | predicted "
              f"{metric(asked, predicted)} | {said}", flush=True)
        if failed == FAILED_IN_TURN:
            print(f"over: what could be measured before cannot be any more ({outcome.words}); what counts is what was "
                  "measured", flush=True)
            return
