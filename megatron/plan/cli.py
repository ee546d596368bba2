"""`python -m megatron.plan FLAGS...` and `pretrain_gpt2.py --dry-run`: memory, traffic and time of a run before it
starts.

Nothing is built; torch is imported only to read a tokenizer whose vocabulary size is not known.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from data.cli import normalize_flag_names
from megatron.config.cli import parse_args
from megatron.config.cli_help import CommandArgumentParser
from megatron.config.tree import Config, require
from megatron.plan.footprint import PlannedRun, configured_placement
from megatron.plan.gpus import visible_gpus
from megatron.plan.plan_report import TargetMachine, build_report, describe_requirements, format_table
from megatron.plan.rate_cache import cached_or_measured_rates
from megatron.plan.time_forecast import forecast_notes, format_forecast, read_measured_run
from megatron.report.history import MetricsFileReader

CARD_SIZES_GB = (16.0, 24.0, 32.0, 40.0, 80.0, 141.0)
"""GB of well-known cards: V100 and T4, RTX 4090 and L4, V100 and RTX 5090, A100, A100 and H100, H200."""

RANKS_PER_NODE = 8

VOCABULARIES = {"GPT2BPETokenizer": 50257, "ByteLevelTokenizer": 257}
"""Tokenizers whose size is known without their files."""

EXAMPLES = """examples:
  python -m megatron.plan --preset 1.5B --bf16 --batch-size 8 --ranks 8 --zero-stage 2
  python -m megatron.plan --preset 100B --fp16 --ranks 400 --model-parallel-size 16 --batch-size 32 --zero-stage 2 \\
      --checkpoint-activations --partition-activations --ranks-per-node 16 --tflops 38
  python -m megatron.plan --deepspeed_config ds_config.json --preset 10B --ranks 1 --card-gb 32 --json
  python -m megatron.plan --preset small --device cpu --ranks 2 --vocab-size 8192 --time

Every flag of pretrain_gpt2.py is a training flag; its --help lists them. One of them, --metrics-file FILE, does as
--time, and adds what the run of that file has measured. docs/plan.md explains the columns."""

MODULE = "python -m megatron.plan"


def parse(argv: Sequence[str], ranks: int = 1, *, summary: bool = False) -> tuple[argparse.Namespace, PlannedRun]:
    parser = _parser(ranks)
    options, flags = parser.parse_known_args(normalize_flag_names(argv))
    for name in ("ranks", "ranks_per_node"):
        count = getattr(options, name)
        require(count is None or count >= 1, f"--{name.replace('_', '-')} is {count}: expected 1 or more")
    require(min(options.card_gb) > 0, f"--card-gb is {min(options.card_gb):g}: expected more than 0")
    require(options.tflops is None or options.tflops > 0, f"--tflops is {options.tflops}: expected more than 0")
    config = parse_args(flags, options.ranks, other_options=parser.flag_names())
    config.check_world(options.ranks)
    is_timed_here = options.time or options.probe or config.log.metrics_file is not None and not summary
    options.device = options.device or ("cpu" if is_timed_here and not options.rates and not visible_gpus() else "cuda")
    placement = configured_placement(config)
    require(config.zero.zero_stage >= placement.min_stage,
            f"{placement.flags()} needs --zero-stage {placement.min_stage} or higher, not {config.zero.zero_stage}")
    offload = replace(config.offload, offload_optimizer_device="none", offload_param_device="none")  # in `placement`
    return options, PlannedRun(replace(with_vocabulary(config), offload=offload), options.ranks, options.device,
                               placement)


def _parser(ranks: int) -> CommandArgumentParser:
    parser = CommandArgumentParser(MODULE, "The memory, the traffic and the time of a training run, before it starts.",
                                   EXAMPLES, usage="%(prog)s [options] TRAINING FLAGS...")
    parser.add_argument("--ranks", type=int, default=ranks, metavar="N",
                        help=f"ranks of the run ({ranks}); none is started")
    parser.add_argument("--ranks-per-node", type=int, metavar="N",
                        help=f"ranks that share a host ({RANKS_PER_NODE}, or all of them)")
    parser.add_argument("--card-gb", type=float, nargs="+", default=CARD_SIZES_GB, metavar="X",
                        help=f"memory of the cards to compare with ({' '.join(f'{card:g}' for card in CARD_SIZES_GB)})")
    parser.add_argument("--device", choices=("cuda", "cpu"),
                        help="where the run is to be (cuda; where it is timed, cpu if there is no GPU here)")
    parser.add_argument("--tflops", type=float, metavar="X",
                        help="TFLOP/s of a rank, as training reports them: adds the time of a step and of the run")
    parser.add_argument("--time", action="store_true",
                        help="predict the time of a step from measured rates of this machine; they are measured once")
    parser.add_argument("--probe", action="store_true", help="the same, and measure the rates again")
    parser.add_argument("--rates", metavar="FILE", help="the same from rates that were measured elsewhere")
    parser.add_argument("--json", action="store_true", help="print the same numbers and more as JSON, in bytes")
    return parser


def with_vocabulary(config: Config) -> Config:
    """The config with vocab_size set, from the tokenizer if it is not given."""
    if config.model.vocab_size is not None:
        return config
    kind = config.data.tokenizer_type or "GPT2BPETokenizer"
    if config.data.vocab_file is None and kind in VOCABULARIES:
        return replace(config, model=replace(config.model, vocab_size=VOCABULARIES[kind]))
    from megatron.train import build  # imports torch

    return build.with_vocab_size(config, build.tokenizer(config))


def print_plan(argv: Sequence[str], ranks: int = 1, ranks_per_node: int = RANKS_PER_NODE, *,
               summary: bool = False) -> int:
    """Print the plan of these flags; options among them take precedence over the other arguments. `summary` starts with
    the needs of the requested run, and ignores its metrics file, which does not exist yet."""
    options, requested = parse(argv, ranks, summary=summary)
    on_node = min(options.ranks_per_node or ranks_per_node, options.ranks)
    metrics, rates = None if summary else requested.config.log.metrics_file, None
    if metrics:
        next(iter(MetricsFileReader(Path(metrics))), None)  # raises if it cannot be read, before a minute of measuring
    if options.time or options.probe or options.rates or metrics:
        rates = cached_or_measured_rates(requested, ranks_per_node=on_node, remeasure=options.probe, path=options.rates)
    machine = TargetMachine(options.card_gb, on_node, options.tflops, rates)
    report = build_report(requested, machine)
    measured_run = read_measured_run(metrics, requested, rates) if metrics and rates else None
    if options.json:
        if rates:
            report["notes"] = forecast_notes(requested, rates, measured_run)
        if measured_run:
            report["measured"] = asdict(measured_run)
        print(json.dumps(report, indent=1))
        return 0
    lines = [*(describe_requirements(requested, machine) if summary else ()), *format_table(requested, machine, report)]
    if rates:
        lines += format_forecast(requested, rates, report["rows"], measured_run)
    if metrics and measured_run is None:
        lines.append(f"note: {metrics} has no step yet")
    print("\n".join(lines))
    return 0


def main() -> int:
    return print_plan(sys.argv[1:])
