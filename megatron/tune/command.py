"""The fastest settings of this machine: `python -m megatron.tune [options] TRAINING FLAGS`.

The planner lists the legal choices, leaves out what does not fit, and predicts the rest; trials say how long steps
take; a model of the difference says what to try next. Not here: the choices (space.py), what is next (search.py), the
trials (trial.py), what is kept of them (results.py), and the words at the end (report.py).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from data.storage import named_by, staged_file
from megatron.config.flags import parse_args
from megatron.config.help import typed
from megatron.config.tree import AutotuningConfig, Config, LogConfig, SaveConfig, require
from megatron.errors import ConfigError, PeerError
from megatron.plan.command import with_vocabulary
from megatron.plan.footprint import Run, homes_of
from megatron.plan.kept_rates import places, rates_for
from megatron.plan.memory import peak
from megatron.plan.remedies import size
from megatron.plan.report import USABLE
from megatron.plan.time import step_time
from megatron.tune.model import Candidate
from megatron.tune.report import metric, page, table, verdict
from megatron.tune.results import Results
from megatron.tune.search import Option, best, next_trial, pruned
from megatron.tune.space import Choice, choices, samples_of
from megatron.tune.trial import Trials

MODULE = "python -m megatron.tune"
LIBRARIES = 300 << 20
"""Bytes of a rank on a CPU beside its tensors."""
PAGE = "tuning.html"
FLAGS_FILE = "flags.txt"

EXAMPLES = """examples:
  python -m megatron.tune --ranks 2 --preset small --mock-data --vocab-size 8192 --global-batch-size 16
  python -m megatron.tune --ranks 8 --card-gb 80 --preset 1.5B --bf16 --mock-data --global-batch-size 512

Every flag of pretrain_gpt2.py is a training flag; those of the search begin with --autotuning. docs/tune.md says how it
searches."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def _parser() -> _Parser:
    program = typed(MODULE)
    parser = _Parser(prog=program, allow_abbrev=False, usage="%(prog)s [options] TRAINING FLAGS...",
                     description="The fastest settings of this machine for a model and a batch, by a few real trials.",
                     epilog=EXAMPLES.replace(MODULE, program), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="ranks of the run, all on this machine (1)")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="where it is to run (GPUs, if there are any)")
    parser.add_argument("--card-gb", type=float, metavar="X",
                        help="memory of a GPU, or on a CPU of a rank (default: what there is)")
    parser.add_argument("--rates", metavar="FILE", help="measured rates (default: as in megatron.plan --time)")
    parser.add_argument("--trial-seconds", type=float, metavar="S",
                        help="the longest that a trial may take (default: by its predicted time)")
    return parser


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, Run]:
    options, flags = _parser().parse_known_args(list(argv))
    require(options.ranks >= 1, f"--ranks is {options.ranks}: expected 1 or more")
    for name in ("card_gb", "trial_seconds"):
        value = getattr(options, name)
        require(value is None or value > 0, f"--{name.replace('_', '-')} is {value}: expected more than 0")
    options.device = options.device or ("cuda" if Path("/proc/driver/nvidia/gpus").is_dir() else "cpu")
    config = with_vocabulary(parse_args(flags, options.ranks))  # its micro-batch need not fit: others are tried
    return options, Run(config, options.ranks, options.device, homes_of(config))


def main(argv: Sequence[str] | None = None) -> int:
    asked_for, asked = parse(sys.argv[1:] if argv is None else argv)
    tuning = asked.config.autotuning
    require(asked_for.ranks <= places(asked.device) or asked.device == "cpu",
            f"--ranks {asked_for.ranks} is more than the {places(asked.device)} GPUs of this machine: trials run here")
    results = Results(tuning.autotuning_results_dir, _subject(asked), overwrite=tuning.autotuning_overwrite)
    options = planned(asked, asked_for.rates)
    capacity = capacity_of(asked, asked_for.card_gb)
    trials = Trials(Path(tuning.autotuning_exps_dir), tuning.autotuning_start_profile_step,
                    tuning.autotuning_end_profile_step, asked_for.trial_seconds)
    search(asked, options, capacity, trials, results)
    return _tell(asked, options, results, capacity)


def planned(asked: Run, rates_file: str | None) -> dict[Choice, Option]:
    rates = rates_for(asked, path=rates_file)
    found = {choice: Option(Candidate(choice.as_dict(), step_time(run, rates)), peak(run).total)
             for choice, run in choices(asked).items()}
    require(bool(found), f"--ranks {asked.ranks} and {samples_of(asked)} samples of a step leave no choice: samples "
            "have to be divisible by the data parallel size")
    return found


def search(asked: Run, options: Mapping[Choice, Option], capacity: float, trials: Trials, results: Results) -> None:
    """Until there is nothing left to gain; a line for each trial."""
    tuning, samples = asked.config.autotuning, samples_of(asked)
    names, values = list(options), list(options.values())
    numbers = {choice: number for number, choice in enumerate(names)}
    kept = pruned(values, capacity, tuning.autotuning_num_tuning_micro_batch_sizes)
    _say(f"{len(names)} choices, {len(kept)} of them to try; {size(int(capacity))} for a rank"
         + (f"; goes on after {len(results.trials)} trials" if results.trials else ""))
    while True:
        known = {numbers[choice]: outcome for choice, outcome in results.trials.items() if choice in numbers}
        number = next_trial(values, kept, known, tuning)
        if number is None:
            return
        choice, predicted = names[number], values[number].candidate.predicted.total
        outcome = trials.run(len(results.trials) + 1, choice.of(asked, samples), predicted)
        results.add(choice, outcome, predicted)
        said = metric(asked, outcome.seconds) if outcome.seconds is not None else f"{outcome.state}: {outcome.words}"
        _say(f"trial {len(results.trials)}: {' '.join(choice.flags(asked, samples))} | predicted "
             f"{metric(asked, predicted)} | {said}")


def _tell(asked: Run, options: Mapping[Choice, Option], results: Results, capacity: float) -> int:
    trials = {choice: outcome for choice, outcome in results.trials.items() if choice in options}
    names = list(trials)
    fastest = best(dict(enumerate(trials.values())))
    _say("\n".join(["", *table(trials, options), ""]) if trials else "nothing was tried")
    if fastest is None:
        least = min(option.needs for option in options.values())
        raise PeerError(f"no choice of {len(options)} ran: {len(trials)} trials failed, and a rank has "
                        f"{size(int(capacity))} where the smallest needs {size(least)}; see {results.folder}")
    words = verdict(asked, trials, names[fastest], len(options))
    _say("\n".join(words))
    with named_by("--autotuning-results-dir"):
        for name, text in ((PAGE, page(asked, trials, options, words)),
                           (FLAGS_FILE, words[-1].removeprefix("flags: ") + "\n")):
            with staged_file(results.folder / name, "w") as file:
                file.write(text)
    return 0


def _subject(asked: Run) -> dict[str, Any]:
    """What trials belong to: all that is not tuned."""
    config = asked.config
    same = replace(
        config, save=SaveConfig(), log=LogConfig(), autotuning=AutotuningConfig(),
        parallel=replace(config.parallel, model_parallel_size=1), zero=replace(
            config.zero, zero_stage=0, reduce_bucket_size=1, allgather_bucket_size=1),
        recompute=replace(config.recompute, checkpoint_activations=False),
        offload=replace(config.offload, offload_optimizer_device="none", offload_param_device="none"),
        train=replace(config.train, batch_size=1, global_batch_size=samples_of(asked), train_iters=1))
    return {"settings": _digest(same), "ranks": asked.ranks, "device": asked.device, "samples": samples_of(asked)}


def _digest(config: Config) -> str:
    return hashlib.sha256(json.dumps(config.as_dict(), sort_keys=True).encode()).hexdigest()[:16]


def capacity_of(asked: Run, gb: float | None) -> float:
    """Bytes of tensors that a rank has room for."""
    if gb is not None:
        return gb * 2**30 * (USABLE if asked.device == "cuda" else 1.0)
    if asked.device == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") / asked.ranks - LIBRARIES
    try:
        told = subprocess.run(["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"], text=True,
                              capture_output=True, check=True).stdout.split()
        return min(map(float, told)) * 2**20 * USABLE
    except (OSError, subprocess.CalledProcessError, ValueError) as error:
        raise ConfigError("the memory of the GPUs is not known here: give --card-gb") from error


def _say(text: str) -> None:
    print(text, flush=True)
