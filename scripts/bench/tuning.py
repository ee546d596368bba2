"""How near a search comes to the best of all choices: `python scripts/bench/tuning.py --size small --ranks 2`.

Every choice that fits is tried, one after the other, round by round, and has its smallest median; then the search is
replayed over these times, so that both see the same machine. `--live`:
the search runs its own trials in addition, as a user's would.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megatron.plan.kept_rates import rates_for  # noqa: E402
from megatron.tune import command  # noqa: E402
from megatron.tune.capacity import capacity_of  # noqa: E402
from megatron.tune.loop import planned  # noqa: E402
from megatron.tune.search import Outcome, best, next_trial, pruned  # noqa: E402
from megatron.tune.space import samples_of  # noqa: E402
from megatron.tune.trial import Trials  # noqa: E402

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
            command.main([*flags, "--autotuning-results-dir", f"{place}/results", "--autotuning-exps-dir",
                          f"{place}/live"])


def compare(flags: Sequence[str], place: Path, rounds: int) -> None:
    asked_for, asked = command.parse(flags)
    tuning, samples = asked.config.autotuning, samples_of(asked)
    options = planned(asked, rates_for(asked, path=asked_for.rates))
    choices, values = list(options), list(options.values())
    capacity = capacity_of(asked, asked_for.card_gb)
    trials = Trials(place, tuning.autotuning_start_profile_step, tuning.autotuning_end_profile_step)
    fits = [number for number, option in enumerate(values) if capacity.holds(option.needs)]
    outcomes, begin = dict[int, Outcome](), time.monotonic()
    for _ in range(rounds):
        for number in fits:
            predicted = values[number].candidate.predicted.total
            outcome = trials.run(number, choices[number].of(asked, samples), predicted)
            before = outcomes.get(number)
            if before is None or (outcome.seconds or float("inf")) < (before.seconds or float("inf")):
                outcomes[number] = outcome
            words = outcome.words if outcome.seconds is None else f"{1e3 * outcome.seconds:.4g} ms"
            print(f"{number:4} of {len(values)}: {' '.join(choices[number].flags(asked, samples))} | predicted "
                  f"{1e3 * predicted:.4g} ms | {outcome.state} {words}", flush=True)
    seconds = time.monotonic() - begin
    kept = pruned(values, capacity, tuning.autotuning_num_tuning_micro_batch_sizes)
    searched = dict[int, Outcome]()
    while (following := next_trial(values, kept, searched, tuning)) is not None:
        searched[following] = outcomes[following]
    fastest, pick = best(outcomes), best(searched)
    if fastest is None or pick is None:
        sys.exit("no choice ran")
    limit, found = outcomes[fastest].seconds or 0.0, outcomes[pick].seconds or float("inf")
    print(f"best of {len(fits)} choices ({seconds:.0f} s): {' '.join(choices[fastest].flags(asked, samples))}, "
          f"{1e3 * limit:.4g} ms; pick after {len(searched)} trials: {' '.join(choices[pick].flags(asked, samples))}, "
          f"{1e3 * found:.4g} ms: {limit / found:.1%} of the best, with {len(searched) / len(fits):.0%} of the trials")


if __name__ == "__main__":
    main()
