"""The fastest settings of this machine: `python -m megatron.tune [options] TRAINING FLAGS`.

What is asked for, and what is told at the end. Not here: the search itself (loop.py), and the memory that there is
(capacity.py).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence

from data.cli import normalize_flag_names
from data.storage import make_folder, prefix_storage_errors, staged_file
from megatron.config.flags import is_dry_run, parse_args
from megatron.config.help import CommandArgumentParser
from megatron.config.tree import require
from megatron.errors import PeerError
from megatron.plan.command import with_vocabulary
from megatron.plan.footprint import PlannedRun, configured_placement
from megatron.plan.forecast import forecast_notes
from megatron.plan.gpus import visible_gpus
from megatron.plan.kept_rates import cached_or_measured_rates, num_local_ranks
from megatron.plan.rates import MachineRates
from megatron.train.inputs import check_inputs
from megatron.tune.capacity import available_memory
from megatron.tune.loop import plan_choices, print_dry_run, run_search
from megatron.tune.memory import MemoryBudget, least_exceeding
from megatron.tune.report import counted, summarize_best, trials_table, tuning_page
from megatron.tune.results import TrialRecords, open_trial_records
from megatron.tune.search import TrialOption, fastest_choice
from megatron.tune.space import TuningChoice
from megatron.tune.subject import trial_key
from megatron.tune.trial import TRIALS_FOLDER_FLAG as EXPS_FLAG, TrialRunner

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
    parser = CommandArgumentParser(MODULE,
                                   "The fastest settings of this machine for a model and a batch, by a few real "
                                   "trials.",
                                   EXAMPLES,
                                   usage="%(prog)s [options] TRAINING FLAGS...")
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
    require(
        args.ranks <= num_local_ranks(requested.device) or requested.device == "cpu",
        f"--ranks {args.ranks} is more than the {num_local_ranks(requested.device)} GPUs of this machine: trials run here"
    )
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
    """Of this machine, and in words what they do not know."""
    rates = cached_or_measured_rates(requested, path=path)
    for sentence in forecast_notes(requested, rates, None):
        print(f"note: {sentence}", flush=True)
    return rates


def _report_results(requested: PlannedRun, options: Mapping[TuningChoice, TrialOption], results: TrialRecords,
                    capacity: MemoryBudget) -> int:
    trials = {choice: outcome for choice, outcome in results.trials.items() if choice in options}
    if not trials:
        least = least_exceeding((option.memory_needed for option in options.values()), capacity)
        raise PeerError(f"no choice of {len(options)} fits, so nothing was tried: a rank has {capacity}, where the one "
                        f"that lacks least needs {least}; use more ranks or a smaller model")
    print("", *trials_table(trials, options), "", sep="\n", flush=True)
    names, fastest = list(trials), fastest_choice(dict(enumerate(trials.values())))
    if fastest is None:
        raise PeerError(f"no choice of {len(options)} ran: {counted(len(trials), 'trial')} failed, as the table says; "
                        f"what they wrote is in {requested.config.autotuning.autotuning_exps_dir}")
    words = summarize_best(requested, trials, options, names[fastest])
    print(*words, sep="\n", flush=True)
    with prefix_storage_errors("--autotuning-results-dir"):
        for name, text in ((PAGE_FILE, tuning_page(requested, trials, options, words)),
                           (FLAGS_FILE, words[-1].removeprefix("flags: ") + "\n")):
            with staged_file(results.folder / name, "w") as file:
                file.write(text)
    return 0
