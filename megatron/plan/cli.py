"""`python -m megatron.plan FLAGS...` and `pretrain_gpt2.py --dry-run`: memory, traffic and time of a run before it
starts.

Nothing is built; torch is imported when the flags are right, for the shapes of the model's parameters.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from data.cli import StrictArgumentParser, normalize_flag_names
from megatron.config.cli import parse_args
from megatron.config.cli_help import command_parser
from megatron.config.tree import Config, require
from megatron.plan.footprint import PlannedRun
from megatron.plan.plan_report import TargetMachine, build_report, describe_requirements, format_forecast, format_table
from megatron.plan.roofline import KNOWN_GPUS, known_rates, measured_rates

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
  python -m megatron.plan --preset 1.5B --bf16 --ranks 8 --zero-stage 2 --time H100

Every flag of pretrain_gpt2.py is a training flag; its --help lists them. docs/plan.md explains the columns."""

MODULE = "python -m megatron.plan"
THIS_MACHINE = "here"
RETIRED = {"--probe": "--time measures this machine each time, in about 10 s",
           "--rates": f"--time measures this machine, and --time GPU reads a table of known ones "
                      f"({', '.join(KNOWN_GPUS)})"}


def refuse_retired(argv: Sequence[str], answers: Mapping[str, str]) -> None:
    for name in (word.partition("=")[0] for word in argv):
        require(name not in answers, f"{name} was retired: {answers.get(name)}")


def num_visible_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def parse(argv: Sequence[str], ranks: int = 1) -> tuple[argparse.Namespace, PlannedRun]:
    parser, argv = _parser(ranks), normalize_flag_names(argv)
    refuse_retired(argv, RETIRED)
    options, flags = parser.parse_known_args(argv)
    for name in ("ranks", "ranks_per_node"):
        count = getattr(options, name)
        require(count is None or count >= 1, f"--{name.replace('_', '-')} is {count}: expected 1 or more")
    require(min(options.card_gb) > 0, f"--card-gb is {min(options.card_gb):g}: expected more than 0")
    require(options.tflops is None or options.tflops > 0, f"--tflops is {options.tflops}: expected more than 0")
    config = parse_args(flags, options.ranks, other_options=parser.flag_names())
    config.check_world(options.ranks)
    if options.device is None:
        options.device = "cpu" if options.time == THIS_MACHINE and not num_visible_gpus() else "cuda"
    require(options.time in (None, THIS_MACHINE) or options.device == "cuda",
            f"--time {options.time} is a GPU, and --device is cpu: give --time alone, which measures this machine")
    return options, PlannedRun(with_vocabulary(config), options.ranks, options.device)


def _parser(ranks: int) -> StrictArgumentParser:
    parser = command_parser(MODULE, "The memory, the traffic and the time of a training run, before it starts.",
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
    parser.add_argument("--time", nargs="?", const=THIS_MACHINE, metavar="GPU",
                        help="predict the time of a step, from rates of this machine, which are measured in about 10 "
                             f"s, or of a known GPU: {', '.join(KNOWN_GPUS)}")
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
    the needs of the requested run."""
    options, requested = parse(argv, ranks)
    on_node = min(options.ranks_per_node or ranks_per_node, options.ranks)
    rates = None
    if options.time == THIS_MACHINE:
        rates = measured_rates(requested, on_node)
    elif options.time:
        rates = known_rates(options.time, requested.config)
    machine = TargetMachine(options.card_gb, on_node, options.tflops, rates)
    report = build_report(requested, machine)
    if options.json:
        print(json.dumps(report, indent=1))
        return 0
    lines = [*(describe_requirements(requested, machine) if summary else ()), *format_table(requested, machine, report)]
    if rates:
        lines += format_forecast(requested, rates, report["rows"])
    print("\n".join(lines))
    return 0


def main() -> int:
    return print_plan(sys.argv[1:])
