"""`python -m data.webtext`: each stage as a command, `run` for all of them, `merge` for what several machines did."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from data import tokenizer as tokenizers
from data.cli import StrictArgumentParser, run_command
from data.preprocess import add_tokenizer_arguments
from data.webtext import stages
from data.webtext.readers import WebReadOptions
from data.webtext.report import summary_line
from data.webtext.runner import StageRunOptions
from data.webtext.stage_folder import SINGLE_MACHINE, merge_shares


def build_parser() -> StrictArgumentParser:
    parser = StrictArgumentParser("data.webtext", "From pages of the web to a corpus. Each command reads files, or the "
                                  "folder of the stage before, and writes a folder of shards.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in stages.STAGES.items():
        stage = commands.add_parser(name, help=command.help, description=command.help)
        stages.add_flags(stage, command.flags)
        add_common_flags(stage, "IN")
        stages.add_flags(stage, stages.SHARD_FLAG)
    everything = commands.add_parser("run", help="all stages in order, then tokens and a report",
                                     description="All stages in order, then tokens and a report.")
    everything.set_defaults(shard=SINGLE_MACHINE)
    stages.add_flags(everything, {flag: settings for name in stages.STAGE_ORDER
                                  for flag, settings in stages.STAGES[name].flags.items()})
    everything.add_argument("--skip", nargs="+", choices=stages.STAGE_ORDER, default=[], metavar="STAGE",
                            help="leave these out")
    everything.add_argument("--output-prefix", type=Path, metavar="PREFIX", help="of the tokens (default: DIR/corpus)")
    add_tokenizer_arguments(everything)
    add_common_flags(everything, "RAW")
    merge = commands.add_parser("merge", help="one folder of the shares of several machines",
                                description="One folder of the shares of several machines.")
    merge.add_argument("inputs", nargs="+", type=Path, metavar="FOLDER")
    merge.add_argument("--output", type=Path, required=True, metavar="DIR")
    return parser


def add_common_flags(parser: StrictArgumentParser, what: str) -> None:
    parser.add_argument("inputs", nargs="+", metavar=what, help="files, folders of files, folders of stages")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    stages.add_flags(parser, stages.COMMON_FLAGS)


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    if args.command == "merge":
        print(summary_line(merge_shares(args.inputs, args.output)), file=sys.stderr)
        return
    reading = WebReadOptions(args.text_key, args.url_key, args.format, args.on_error, args.max_document_bytes,
                             args.charset)
    running = StageRunOptions(args.workers, args.shard, args.shard_bytes)
    if args.command == "run":
        left_out = {*args.skip, *(() if args.evaluation else ("decontaminate",))}
        selected = [stages.STAGES[name].build_stage(args) for name in stages.STAGE_ORDER if name not in left_out]
        prefix = args.output_prefix or args.output / "corpus"
        stages.check_outputs(filter(None, (args.vocab_file, args.merge_file, args.tokenizer_path,
                                           args.blacklist_domains, args.blacklist_extensions)), args.output, prefix)
        tokenizer = tokenizers.build(args.tokenizer_type, args.vocab_file, args.merge_file, args.tokenizer_path)
        stages.run_pipeline(args.inputs, args.output, selected, tokenizer, prefix, reading, running)
        print((args.output / "report.txt").read_text(encoding="utf-8"), end="")
        return
    stage = stages.STAGES[args.command].build_stage(args)
    record = stages.run_stage(stage, args.inputs, args.output, reading, running)
    print(summary_line(record) if record else f"{args.command}: share {args.shard[0]}/{args.shard[1]} is prepared",
          file=sys.stderr)


if __name__ == "__main__":
    run_command(main)
