"""How near a search comes to the best of all choices: `python benchmarks/tuning.py --size small --ranks 2`.

Every choice that fits is tried, one after the other, round by round, and has its smallest median, also those that the
tuner takes for the same as others (all stages where one rank has all the data); then the search is replayed over
these times, so that both see the same machine. `--live`: the search runs its own trials in addition, as a user's
would.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = str(ROOT)  # of the ranks that measure, and of trials

from megatron.plan.footprint import PlannedRun  # noqa: E402
from megatron.plan.roofline import measured_rates  # noqa: E402
from megatron.tune import cli  # noqa: E402
from megatron.tune.search import (FINALISTS, REPEATS, TrialOption, TrialResult, TuningChoice,  # noqa: E402
                                  available_memory, fastest_choice, next_trial, plan_choices)
from megatron.tune.trial import TrialRunner  # noqa: E402

SIZES = {
    "tiny": ["--preset", "tiny", "--global-batch-size", "16"],
    "small": ["--preset", "small", "--tokenizer-type", "ByteLevelTokenizer", "--vocab-size", "8192",
              "--global-batch-size", "8"],
    "124M": ["--preset", "124M", "--tokenizer-type", "ByteLevelTokenizer", "--vocab-size", "50257", "--seq-length",
             "256", "--global-batch-size", "4"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--live", action="store_true")
    mine, others = parser.parse_known_args()
    flags = ["--device", "cpu", "--ranks", str(mine.ranks), *SIZES[mine.size], "--mock-data", "--attention-dropout",
             "0", "--hidden-dropout", "0", *others]
    with tempfile.TemporaryDirectory() as place:
        compare(flags, Path(place), mine.rounds)
        if mine.live:
            cli.main([*flags, "--autotuning-results-dir", f"{place}/results"])


def compare(flags: Sequence[str], place: Path, rounds: int) -> None:
    options, requested = cli.parse(flags)
    tuning = requested.config.autotuning
    planned = plan_choices(requested, measured_rates(requested))
    capacity = available_memory(requested, options.card_gb)
    trials = TrialRunner(place, tuning.autotuning_start_profile_step, tuning.autotuning_end_profile_step)
    own = {option.choice: option.predicted for option in planned if capacity.can_hold(option.memory_needed)}
    grid = {other: seconds for choice, seconds in own.items() for other in left_out(choice, requested)} | own
    outcomes, begin = dict[TuningChoice, TrialResult](), time.monotonic()

    def measure(choices: Sequence[TuningChoice]) -> None:
        for number, choice in enumerate(choices):
            outcome = trials.run(number, choice.apply_to(requested), grid[choice])
            before = outcomes.get(choice)
            if before is None or outcome.seconds is not None:
                outcomes[choice] = outcome if before is None else before.merge_repeat(outcome)
            words = outcome.words if outcome.seconds is None else f"{1e3 * outcome.seconds:.4g} ms"
            print(f"{number:4} of {len(choices)}: {' '.join(choice.flags(requested))} | predicted "
                  f"{1e3 * grid[choice]:.4g} ms | {outcome.state} {words}", flush=True)

    for _ in range(rounds):
        measure([*grid])
    seconds = time.monotonic() - begin
    searched, most = dict[TuningChoice, TrialResult](), tuning.autotuning_tuner_num_trials
    while isinstance(option := next_trial(planned, capacity, searched, most), TrialOption):
        searched[option.choice] = outcomes[option.choice]
    ordered = sorted((one for one in outcomes if outcomes[one].seconds), key=lambda one: seconds_of(outcomes, one))
    pick = fastest_choice(searched)
    if pick is None:
        sys.exit("no choice ran")
    print(f"the best {FINALISTS} and the pick again, in turn: a machine is not as fast all the time")
    for _ in range(REPEATS):
        measure([*dict.fromkeys([*ordered[:FINALISTS], pick])])
    first = min(outcomes, key=lambda one: seconds_of(outcomes, one))
    limit, found = seconds_of(outcomes, first), seconds_of(outcomes, pick)
    print(f"best of {len(outcomes)} choices, {len(planned)} that differ ({seconds:.0f} s): "
          f"{' '.join(first.flags(requested))}, "
          f"{1e3 * limit:.4g} ms; pick after {len(searched)} trials: {' '.join(pick.flags(requested))}, "
          f"{1e3 * found:.4g} ms: {limit / found:.1%} of the best, with {len(searched) / len(outcomes):.0%} of the "
          "trials")


def seconds_of(outcomes: Mapping[TuningChoice, TrialResult], choice: TuningChoice) -> float:
    return outcomes[choice].seconds or inf


def left_out(choice: TuningChoice, requested: PlannedRun) -> Iterator[TuningChoice]:
    """What the tuner takes for the same as a choice of its own: the other stages where one rank has all the data."""
    if requested.ranks == choice.tp:
        yield from (replace(choice, stage=stage) for stage in range(choice.placement.min_stage, 4)
                    if stage != choice.stage)


if __name__ == "__main__":
    main()
