"""`python -m megatron.tune [options] TRAINING FLAGS`: finds the fastest settings of this machine by real trials."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from data.cli import normalize_flag_names
from data.storage import DataError, make_folder, prefix_storage_errors, staged_file
from megatron.config.cli import is_dry_run, parse_args
from megatron.config.cli_help import CommandArgumentParser
from megatron.config.tree import require
from megatron.errors import EXIT_CONFIG, EXIT_DATA, EXIT_STORAGE, ConfigError, PeerError, StorageError
from megatron.plan.cli import with_vocabulary
from megatron.plan.footprint import PlannedRun, configured_placement
from megatron.plan.gpus import visible_gpus
from megatron.plan.machine_rates import MachineRates
from megatron.plan.memory import peak_memory
from megatron.plan.rate_cache import cached_or_measured_rates, num_local_ranks
from megatron.plan.step_time import step_time
from megatron.plan.time_forecast import forecast_notes
from megatron.train.input_checks import check_inputs
from megatron.tune.search import (Candidate, TrialOption, common_error, fastest_choice, next_repeat, next_trial,
                                  select_candidates, stop_reason)
from megatron.tune.space import MemoryBudget, TuningChoice, available_memory, legal_choices, samples_per_step
from megatron.tune.trial import TRIALS_FOLDER_FLAG as EXPS_FLAG, TrialRunner
from megatron.tune.trial_records import TrialRecords, open_trial_records, trial_key
from megatron.tune.tune_report import counted, format_metric, summarize_best, trials_table, tuning_page

ERROR_CLASSES = {EXIT_CONFIG: ConfigError, EXIT_DATA: DataError, EXIT_STORAGE: StorageError}
"""Errors of trials that every choice would have, by exit code."""

DRY_RUN_CHOICES = 10
"""Choices that a dry run prints."""

MAX_FAILED_REPEATS = 2
"""Failed repeats in a row that end the search: the machine fails then, not the choices."""


def plan_choices(requested: PlannedRun, rates: MachineRates) -> dict[TuningChoice, TrialOption]:
    size = requested.config.autotuning.autotuning_mp_size
    require(size is None or requested.ranks % size == 0,
            f"--autotuning-mp-size {size} does not divide --ranks {requested.ranks}: give one that does")
    options = {choice: TrialOption(Candidate(asdict(choice), step_time(run, rates)),
                                   MemoryBudget(peak_memory(run).total, run.offloaded_bytes.host))
               for choice, run in legal_choices(requested).items()}
    require(bool(options), f"--ranks {requested.ranks} and {samples_per_step(requested)} samples of a step leave no "
            "choice: samples have to be divisible by the data parallel size")
    return options


def print_dry_run(requested: PlannedRun, options: Mapping[TuningChoice, TrialOption], capacity: MemoryBudget) -> None:
    """Print the first choices of a search without trying them."""
    choices, values = list(options), list(options.values())
    kept = select_candidates(values, capacity, requested.config.autotuning.autotuning_num_tuning_micro_batch_sizes, {})
    print(f"{counted(len(choices), 'choice')}, {len(kept)} to try; a rank has {capacity}; nothing is tried (--dry-run)."
          " The fastest by prediction:")
    for number in kept[:DRY_RUN_CHOICES]:
        print(f"  {format_metric(requested, values[number].candidate.predicted.total)} | "
              f"{' '.join(choices[number].flags(requested, samples_per_step(requested)))}")


def run_search(requested: PlannedRun, options: Mapping[TuningChoice, TrialOption], capacity: MemoryBudget,
               trials: TrialRunner, results: TrialRecords) -> None:
    """Run trials until no more gain is expected, and print a line for each."""
    tuning, samples = requested.config.autotuning, samples_per_step(requested)
    choices, values = list(options), list(options.values())
    few, failed = tuning.autotuning_num_tuning_micro_batch_sizes, 0
    kept = select_candidates(values, capacity, few, {})
    print(f"{counted(len(choices), 'choice')}, {len(kept)} to try; a rank has {capacity}"
          + (f"; goes on after {counted(len(results.trials), 'trial')}" if results.trials else ""), flush=True)
    while True:
        known = {choices.index(choice): result for choice, result in results.trials.items() if choice in options}
        if error := common_error(known):
            results.remove(list(results.trials)[-2:])
            raise ERROR_CLASSES[error.code](f"{error.words.removeprefix('error: ')} (two trials in turn ended with "
                                            f"this; what they wrote is in {trials.folder})")
        kept = select_candidates(values, capacity, few, known)
        number = next_trial(values, kept, known, tuning)
        if number is None:
            number = next_repeat(known)
        if number is None:
            print(f"over: {stop_reason(values, kept, known, tuning)}", flush=True)
            return
        choice, predicted = choices[number], values[number].candidate.predicted.total
        before = results.trials.get(choice)
        trial = len(results.trials) + 1 if before is None else list(results.trials).index(choice) + 1
        result = trials.run(trial, choice.apply_to(requested, samples), predicted)
        results.add(choice, result if before is None else before.merge_repeat(result), predicted)
        failed = failed + 1 if before and result.seconds is None else 0
        result_text = (f"{result.state}: {result.words}" if result.seconds is None
                       else f"measured {format_metric(requested, result.seconds)}")
        print(f"trial {trial}{' again' if before else ''}: {' '.join(choice.flags(requested, samples))} | predicted "
              f"{format_metric(requested, predicted)} | {result_text}", flush=True)
        if failed == MAX_FAILED_REPEATS:
            print(f"over: what could be measured before cannot be any more ({result.words}); what counts is what was "
                  "measured", flush=True)
            return


MODULE = "python -m megatron.tune"
PAGE_FILE = "tuning.html"
FLAGS_FILE = "flags.txt"

EXAMPLES = """examples:
  python -m megatron.tune --ranks 2 --preset small --mock-data --vocab-size 8192 --global-batch-size 16 \\
      --tokenizer-type ByteLevelTokenizer
  python -m megatron.tune --ranks 8 --card-gb 80 --preset 1.5B --bf16 --mock-data --global-batch-size 512

Every flag of pretrain_gpt2.py is a training flag; those of the search begin with --autotuning. docs/tune.md says how it
searches."""


def _parser() -> CommandArgumentParser:
    parser = CommandArgumentParser(MODULE, "The fastest settings of this machine for a model and a batch, by a few "
                                   "real trials.", EXAMPLES, usage="%(prog)s [options] TRAINING FLAGS...")
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="ranks of the run, all on this machine (1)")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="where it is to run (GPUs, if there are any)")
    parser.add_argument("--card-gb", type=float, metavar="X",
                        help="memory of a GPU, or on a CPU of a rank (default: what is free)")
    parser.add_argument("--rates", metavar="FILE", help="measured rates (default: as in megatron.plan --time)")
    parser.add_argument("--trial-seconds", type=float, metavar="S",
                        help="the longest that a trial may take (default: --startup-timeout-seconds until it has "
                             "taken a step, then by the predicted time)")
    return parser


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, PlannedRun]:
    parser = _parser()
    options, flags = parser.parse_known_args(normalize_flag_names(argv))
    require(options.ranks >= 1, f"--ranks is {options.ranks}: expected 1 or more")
    for name in ("card_gb", "trial_seconds"):
        value = getattr(options, name)
        require(value is None or value > 0, f"--{name.replace('_', '-')} is {value}: expected more than 0")
    options.device = options.device or ("cuda" if visible_gpus() else "cpu")
    config = parse_args(flags, options.ranks,
                        other_options=parser.flag_names())  # its micro-batch need not fit: others are tried
    with config.key_names.translate_errors():
        check_inputs(config.data)  # what no trial could run without, as training checks it
        config = with_vocabulary(config)
    return options, PlannedRun(config, options.ranks, options.device, configured_placement(config))


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args, requested = parse(argv)
    tuning = requested.config.autotuning
    require(requested.device == "cpu" or num_local_ranks("cuda") > 0,
            "--device cuda needs a GPU that may be used: trials run here, and there is none; add --device cpu")
    require(args.ranks <= num_local_ranks(requested.device) or requested.device == "cpu", f"--ranks {args.ranks} is "
            f"more than the {num_local_ranks(requested.device)} GPUs of this machine: trials run here")
    if is_dry_run(_parser().parse_known_args(list(argv))[1]):
        print_dry_run(requested, plan_choices(requested, _rates_with_notes(requested, args.rates)),
                      available_memory(requested, args.card_gb))
        return 0
    with open_trial_records(tuning.autotuning_results_dir, trial_key(requested),
                            overwrite=tuning.autotuning_overwrite) as results:
        with prefix_storage_errors(EXPS_FLAG):
            folder = make_folder(tuning.autotuning_exps_dir)
        trials = TrialRunner(folder, tuning.autotuning_start_profile_step, tuning.autotuning_end_profile_step,
                             args.trial_seconds)
        options = plan_choices(requested, _rates_with_notes(requested, args.rates))
        capacity = available_memory(requested, args.card_gb)
        try:
            run_search(requested, options, capacity, trials, results)
        except (KeyboardInterrupt, SystemExit):
            done = counted(len(results.trials), "trial")
            print(f"the same command goes on after {done}", file=sys.stderr, flush=True)
            raise
        return _report_results(requested, options, results, capacity)


def _rates_with_notes(requested: PlannedRun, path: str | None) -> MachineRates:
    """The rates to predict with; prints the limits of the prediction."""
    rates = cached_or_measured_rates(requested, path=path)
    for sentence in forecast_notes(requested, rates, None):
        print(f"note: {sentence}", flush=True)
    return rates


def _report_results(requested: PlannedRun, options: Mapping[TuningChoice, TrialOption], results: TrialRecords,
                    capacity: MemoryBudget) -> int:
    trials = {choice: outcome for choice, outcome in results.trials.items() if choice in options}
    if not trials:
        least = min((option.memory_needed for option in options.values()), key=lambda need: need.usage_of(capacity))
        raise PeerError(f"no choice of {len(options)} fits, so nothing was tried: a rank has {capacity}, where the one "
                        f"that lacks least needs {least}; use more ranks or a smaller model")
    print("", *trials_table(trials, options), "", sep="\n", flush=True)
    names, fastest = list(trials), fastest_choice(dict(enumerate(trials.values())))
    if fastest is None:
        raise PeerError(f"no choice of {len(options)} ran: {counted(len(trials), 'trial')} failed, as the table says; "
                        f"what they wrote is in {requested.config.autotuning.autotuning_exps_dir}")
    summary = summarize_best(requested, trials, options, names[fastest])
    print(*summary, sep="\n", flush=True)
    with prefix_storage_errors("--autotuning-results-dir"):
        for name, text in ((PAGE_FILE, tuning_page(requested, trials, options, summary)),
                           (FLAGS_FILE, summary[-1].removeprefix("flags: ") + "\n")):
            with staged_file(results.folder / name, "w") as file:
                file.write(text)
    return 0
