"""`python -m data.webtext`: each stage as a command, `run` for all of them, `merge` for what several machines did."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from data import tokenizer as tokenizers
from data.cli import StrictArgumentParser, run_command
from data.webtext import stages
from data.webtext.report import summary_line
from data.webtext.stage_folder import merge_shares


def build_parser() -> StrictArgumentParser:
    parser = StrictArgumentParser("data.webtext", "From pages of the web to a corpus. Each command reads files, or the "
                                  "folder of the stage before, and writes a folder of shards.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in stages.STAGES.items():
        stage = commands.add_parser(name, help=command.help, description=command.help)
        command.add_flags(stage)
        if name in stages.SEEDED_STAGES:
            stages.add_seed(stage)
        add_common_flags(stage, "IN")
    everything = commands.add_parser("run", help="all stages in order, then tokens and a report",
                                     description="All stages in order, then tokens and a report.")
    for name in stages.STAGE_ORDER:
        stages.STAGES[name].add_flags(everything)
    stages.add_seed(everything)
    add_pipeline_flags(everything)
    add_common_flags(everything, "RAW", shareable=False)
    merge = commands.add_parser("merge", help="one folder of the shares of several machines",
                                description="One folder of the shares of several machines.")
    merge.add_argument("inputs", nargs="+", type=Path, metavar="FOLDER")
    merge.add_argument("--output", type=Path, required=True, metavar="DIR")
    return parser


def add_common_flags(parser: StrictArgumentParser, what: str, *, shareable: bool = True) -> None:
    parser.add_argument("inputs", nargs="+", metavar=what, help="files, folders of files, folders of stages")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    stages.add_read_flags(parser)
    stages.add_run_flags(parser, shareable=shareable)


def add_pipeline_flags(parser: StrictArgumentParser) -> None:
    parser.add_argument("--skip", nargs="+", choices=stages.STAGE_ORDER, default=[], metavar="STAGE",
                        help="leave these out")
    parser.add_argument("--output-prefix", type=Path, metavar="PREFIX", help="of the tokens (default: DIR/corpus)")
    parser.add_argument("--tokenizer-type", default="GPT2BPETokenizer", help=f"one of {', '.join(tokenizers.KINDS)}")
    parser.add_argument("--vocab-file", help="GPT-2's vocab.json, or the text of a character vocabulary")
    parser.add_argument("--merge-file", help="GPT-2's merges; without it the packaged vocabulary is used")
    parser.add_argument("--tokenizer-path", help="a SentencePiece model")


def run_all_stages(args: argparse.Namespace) -> None:
    left_out = {*args.skip, *(() if args.evaluation else ("decontaminate",))}
    selected = tuple(stages.STAGES[name].build_stage(args) for name in stages.STAGE_ORDER if name not in left_out)
    prefix = args.output_prefix or args.output / "corpus"
    stages.check_outputs(filter(None, (args.vocab_file, args.merge_file, args.tokenizer_path, args.blacklist_domains,
                                       args.blacklist_extensions)), args.output, prefix)
    tokenizer = tokenizers.build(args.tokenizer_type, args.vocab_file, args.merge_file, args.tokenizer_path)
    plan = stages.PipelinePlan(selected, tokenizer, prefix)
    stages.run_pipeline(args.inputs, args.output, plan, stages.read_options_of(args), stages.run_options_of(args))
    print((args.output / "report.txt").read_text(encoding="utf-8"), end="")


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    if args.command == "run":
        run_all_stages(args)
        return
    if args.command == "merge":
        record = merge_shares(args.inputs, args.output)
    else:
        stage = stages.STAGES[args.command].build_stage(args)
        done = stages.run_stage(stage, args.inputs, args.output, stages.read_options_of(args),
                                stages.run_options_of(args))
        if done is None:
            print(f"{args.command}: share {args.shard[0]}/{args.shard[1]} is prepared", file=sys.stderr)
            return
        record = done
    print(summary_line(record), file=sys.stderr)


if __name__ == "__main__":
    run_command(main)
