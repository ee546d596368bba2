"""`python -m megatron.tune [options] TRAINING FLAGS`: finds the fastest settings of this machine by real trials.

With --steps-in it only measures the speed of the run as it is, for the scripts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from math import inf, isfinite
from pathlib import Path
from tempfile import TemporaryDirectory

from data.cli import StrictArgumentParser, format_count, normalize_flag_names
from data.storage import make_folder, prefix_storage_errors, staged_file
from megatron.config.cli import is_dry_run, parse_args
from megatron.config.cli_help import command_parser, require_positive
from megatron.config.ds_cross_keys import BATCH_SIZE_KEYS
from megatron.config.tree import require
from megatron.errors import PeerError
from megatron.plan.alternatives import format_bytes
from megatron.plan.cli import align_columns, num_visible_gpus, with_vocabulary
from megatron.plan.footprint import PlannedRun
from megatron.plan.roofline import measured_rates
from megatron.report.run_report import UNKNOWN
from megatron.train.input_checks import check_inputs
from megatron.tune.search import (MemoryBudget, TrialOption, TrialResult, TuningChoice, available_memory,
                                  candidate_families, fastest_choice, next_repeat, next_trial,
                                  plan_choices, samples_per_step)
from megatron.tune.trial import RESULTS_FLAG, TrialRunner

COLUMNS = ("trial", "micro-batch", "zero", "offload", "recomputed", "tp", "needs", "on the host", "predicted",
           "measured", "")
MEASURED_STEPS = (4, 12)  # of --steps-in, both ends included: the first steps are slower


def format_speed(requested: PlannedRun, seconds: float) -> str:
    return f"{samples_per_step(requested) / seconds:.4g} samples/s"


def recommended_flags(requested: PlannedRun, best: TuningChoice) -> list[str]:
    """The flags to append, and before them the keys of a DeepSpeed file that set the same, to be left out of it."""
    names, flags = requested.config.key_names, best.flags(requested)
    keys = [names.keys_of_given[flag] for flag in flags if flag in names.keys_of_given]
    if names.file:
        text = Path(names.file).read_text(encoding="utf-8")
        keys += [key for key in BATCH_SIZE_KEYS if key in text and key not in keys]
    return [*([f"leave out of {names.file}: {', '.join(keys)}"] if keys else []), "flags: " + " ".join(flags)]


def summarize_best(requested: PlannedRun, trials: Mapping[TuningChoice, TrialResult], num_choices: int,
                   best: TuningChoice) -> list[str]:
    seconds, times = trials[best].seconds, [seconds for seconds in trials[best].times if isfinite(seconds)]
    assert seconds is not None, "the best one was measured"
    all_times = f" (the least of {', '.join(f'{1e3 * one:.4g}' for one in times)})" if len(times) > 1 else ""
    lines = [f"fastest: {format_speed(requested, seconds)}, {1e3 * seconds:.4g} ms a step{all_times}, after "
             f"{format_count(len(trials), 'trial')} of {format_count(num_choices, 'choice')}"]
    # repeated choices whose least time is within the range of the fastest one
    ties = sum(len(trial.times) > 1 and trial.seconds is not None and trial.seconds <= max(times, default=0.0)
               for choice, trial in trials.items() if choice != best)
    if ties:
        lines.append(f"note: {format_count(ties, 'other choice')} cannot be told apart from it by these times; where "
                     "they are far apart, tune while the machine is idle")
    return lines + recommended_flags(requested, best)


DRY_RUN_CHOICES = 10  # choices that a dry run prints

MAX_FAILED_REPEATS = 2  # failed repeats in a row that end the search: the machine fails then, not the choices


def describe_search(options: Sequence[TrialOption], candidates: Sequence[TrialOption], capacity: MemoryBudget) -> str:
    return f"{format_count(len(options), 'choice')}, {len(candidates)} to try; a rank has {capacity}"


def run_search(requested: PlannedRun, options: Mapping[TuningChoice, TrialOption], capacity: MemoryBudget,
               runner: TrialRunner) -> dict[TuningChoice, TrialResult]:
    """Run trials until one kind of choice is left, repeat those of the fastest, and print a line for each. Returns them
    in the order of their first measurement."""
    failed, planned = 0, [*options.values()]
    candidates = sum(candidate_families(planned, capacity, {}), [])
    trials = dict[TuningChoice, TrialResult]()
    print(describe_search(planned, candidates, capacity), flush=True)
    while True:
        following = next_trial(planned, capacity, trials, requested.config.autotuning.autotuning_tuner_num_trials)
        choice = next_repeat(trials) if isinstance(following, str) else following.choice
        if choice is None:
            print(f"over: {following}", flush=True)
            return trials
        predicted, before = options[choice].predicted, trials.get(choice)
        trial = len(trials) + 1 if before is None else list(trials).index(choice) + 1
        result = runner.run(trial, choice.apply_to(requested), predicted)
        trials[choice] = result if before is None else before.merge_repeat(result)
        failed = failed + 1 if before and result.seconds is None else 0
        result_text = (f"{result.state}: {result.words}" if result.seconds is None
                       else f"measured {format_speed(requested, result.seconds)}")
        print(f"trial {trial}{' again' if before else ''}: {' '.join(choice.flags(requested))} | predicted "
              f"{format_speed(requested, predicted)} | {result_text}", flush=True)
        if failed == MAX_FAILED_REPEATS:
            print(f"over: what could be measured before cannot be any more ({result.words}); what counts is what was "
                  "measured", flush=True)
            return trials


EXAMPLES = """examples:
  python -m megatron.tune --ranks 2 --preset small --mock-data --vocab-size 8192 --global-batch-size 16 \\
      --tokenizer-type ByteLevelTokenizer
  python -m megatron.tune --ranks 8 --card-gb 80 --preset 1.5B --bf16 --mock-data --global-batch-size 512

Every flag of pretrain_gpt2.py is a training flag; those of the search begin with --autotuning. docs/tune.md says how it
searches."""


def _parser() -> StrictArgumentParser:
    parser = command_parser(
        "python -m megatron.tune", "The fastest settings of this machine for a model and a batch, by a few real "
        "trials.", EXAMPLES, usage="%(prog)s [options] TRAINING FLAGS...")
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="ranks of the run, all on this machine (1)")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="where it is to run (GPUs, if there are any)")
    parser.add_argument("--card-gb", type=float, metavar="X",
                        help="memory of a GPU, or on a CPU of a rank (default: what is free)")
    parser.add_argument("--trial-seconds", type=float, metavar="S",
                        help="the longest that a trial may take (default: --startup-timeout-seconds until it has "
                             "taken a step, then by the predicted time)")
    parser.add_argument("--steps-in", type=float, metavar="S",
                        help="try the run as it is, print how many steps it takes in S seconds, and search nothing")
    return parser


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, PlannedRun]:
    parser = _parser()
    options, flags = parser.parse_known_args(normalize_flag_names(argv))
    options.dry_run = is_dry_run(flags)
    require_positive(options, "ranks", "card_gb", "trial_seconds", "steps_in")
    options.device = options.device or ("cuda" if num_visible_gpus() else "cpu")
    config = parse_args(flags, options.ranks,
                        other_options=parser.flag_names())  # its micro-batch need not fit: others are tried
    with config.key_names.translate_errors():
        check_inputs(config.data)  # what no trial could run without, as training checks it
        config = with_vocabulary(config)
    return options, PlannedRun(config, options.ranks, options.device)


def main(argv: Sequence[str] | None = None) -> int:
    args, requested = parse(sys.argv[1:] if argv is None else argv)
    tuning = requested.config.autotuning
    if requested.device == "cuda":
        gpus = num_visible_gpus()
        require(gpus > 0, "--device cuda needs a GPU that may be used: trials run here, and there is none; add "
                "--device cpu")
        require(args.ranks <= gpus, f"--ranks {args.ranks} is more than the {gpus} GPUs of this machine: trials run "
                "here")
    if args.steps_in is not None:
        with TemporaryDirectory() as place:
            result = TrialRunner(Path(place), *MEASURED_STEPS, args.trial_seconds).run(1, requested, inf)
        if result.seconds is None:
            raise PeerError(f"the trial ended with {result.state}: {result.words}")
        print(max(1, round(args.steps_in / result.seconds)))
        return 0
    if args.dry_run:
        planned = plan_choices(requested, measured_rates(requested))
        capacity = available_memory(requested, args.card_gb)
        candidates = sum(candidate_families(planned, capacity, {}), [])
        print(f"{describe_search(planned, candidates, capacity)}; nothing is tried (--dry-run). The fastest by "
              "prediction:")
        for option in sorted(candidates, key=lambda option: option.predicted)[:DRY_RUN_CHOICES]:
            print(f"  {format_speed(requested, option.predicted)} | {' '.join(option.choice.flags(requested))}")
        return 0
    with prefix_storage_errors(RESULTS_FLAG):
        folder = make_folder(tuning.autotuning_results_dir)
    runner = TrialRunner(folder, tuning.autotuning_start_profile_step, tuning.autotuning_end_profile_step,
                         args.trial_seconds)
    options = {option.choice: option for option in plan_choices(requested, measured_rates(requested))}
    capacity = available_memory(requested, args.card_gb)
    trials = run_search(requested, options, capacity, runner)
    return _report_results(requested, options, trials, capacity, folder)


def _report_results(requested: PlannedRun, options: Mapping[TuningChoice, TrialOption],
                    trials: Mapping[TuningChoice, TrialResult], capacity: MemoryBudget, folder: Path) -> int:
    if not trials:
        # by the larger of both shares of the capacity
        least = min((option.memory_needed for option in options.values()), key=lambda need: max(
            need.device / max(capacity.device, 1.0), need.host / max(capacity.host, 1.0)))
        raise PeerError(f"no choice of {len(options)} fits, so nothing was tried: a rank has {capacity}, where the one "
                        f"that lacks least needs {least}; use more ranks or a smaller model")
    rows = [COLUMNS]
    for number, (choice, result) in sorted(enumerate(trials.items(), 1), key=lambda row: row[1][1].seconds or inf):
        predicted, needed = options[choice].predicted, options[choice].memory_needed
        rows.append((str(number), str(choice.batch), str(choice.stage), str(choice.placement),
                     "yes" if choice.recomputes else "no", str(choice.tp),
                     format_bytes(int(needed.device)), format_bytes(int(needed.host)) if needed.host else "",
                     f"{1e3 * predicted:.4g} ms",
                     UNKNOWN if result.seconds is None else f"{1e3 * result.seconds:.4g} ms",
                     "" if result.state == "done" else f"{result.state}: {result.words}"))
    print("", *align_columns(rows, left=(3, 10)), "", sep="\n", flush=True)
    fastest = fastest_choice(trials)
    if fastest is None:
        raise PeerError(f"no choice of {len(options)} ran: {format_count(len(trials), 'trial')} failed, as the table "
                        f"says; what they wrote is in {folder}")
    summary = summarize_best(requested, trials, len(options), fastest)
    print(*summary, sep="\n", flush=True)
    with prefix_storage_errors(RESULTS_FLAG), staged_file(folder / "flags.txt", "w") as file:
        file.write(summary[-1].removeprefix("flags: ") + "\n")
    return 0
