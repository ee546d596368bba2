"""`python -m megatron.generate`: text from a trained model.

Prompts come from the command line, a file or standard input, one a line. Answers go to standard output or --output
in the order of the prompts, messages to standard error. Prompts typed at a terminal start an interactive session.
"""

from __future__ import annotations

import argparse
import os
import stat
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from data.cli import StrictArgumentParser
from data.storage import check_outputs_are_not_inputs, prefix_data_errors, prefix_storage_errors, staged_file
from megatron.checkpoint.manifest import LATEST, MANIFEST
from megatron.config.tree import require
from megatron.inference import model_args
from megatron.inference.model_args import flags_to_compare, model_parser, model_source_from_args
from megatron.inference.prompts import (PromptSource, Terminal, prompts_from_args, prompts_from_file,
                                        prompts_from_stream)
from megatron.inference.request import GenerationConfig, Sampling

MODULE = "python -m megatron.generate"

MODEL_FILE_SUFFIXES = {".json", ".safetensors", ".bin", ".model", ".txt"}  # suffixes in a Hugging Face folder

EXAMPLES = """examples:
  python -m megatron.generate --load runs/gpt2 "The meaning of life is"
  python -m megatron.generate --load runs/gpt2 --file prompts.txt --greedy --jsonl > answers.jsonl
  python -m megatron.launch --nproc-per-node 2 -m megatron.generate --load runs/gpt2 --model-parallel-size 2 "Once"

Without prompts they are read from standard input, one a line; at a terminal that is a session. docs/generate.md
explains the rest."""


def build_parser() -> StrictArgumentParser:
    parser = model_parser(MODULE, "Text from a trained GPT-2.", EXAMPLES)
    add = parser.add_argument
    add("prompts", nargs="*", metavar="PROMPT", help="a text to go on from")
    model_args.add_megatron_flags(parser)
    add("--genfile", metavar="FILE", help=argparse.SUPPRESS)
    add("--file", "--sample-input-file", metavar="FILE", help="prompts, one a line; .jsonl: of "
        "objects with `prompt` or `text`; also .gz, .xz, .zst")
    add("--interactive", action="store_true", help="a session: each line that is typed is answered at once (where "
        "there are no prompts and standard input is a terminal)")
    add("--max-new-tokens", "--out-seq-length", type=int, default=128, metavar="N", help="tokens of an answer (128)")
    add("--num-samples", type=int, default=1, metavar="N", help="answers to each prompt (1)")
    add("--greedy", action="store_true", help="always the likeliest token")
    add("--temperature", type=float, default=0.8, help="below 1: likely tokens become likelier (0.8)")
    add("--top-k", "--top_k", type=int, default=40, help="draw from this many likeliest tokens; 0: all (40)")
    add("--top-p", "--top_p", type=float, default=1.0, help="draw from the likeliest tokens that have this much of the "
        "probability (1)")
    add("--min-p", type=float, default=0.0, help="leave out tokens less likely than this times the likeliest (0)")
    add("--repetition-penalty", type=float, default=1.0, help="above 1: tokens of the text become less likely (1)")
    add("--seed", type=int, default=1234, help="of the random numbers; each answer has a stream of its own (1234)")
    add("--stop", action="append", default=[], metavar="TEXT", help="an answer ends before this; may be given again")
    add("--past-the-end", choices=("stop", "slide"), default="stop", help="at the end of the position table: stop, or "
        "go on from the last tokens, read again for each new one")
    add("--batch-size", "--micro-batch-size", type=int, default=8, metavar="N", help="texts at a time (8)")
    add("--output", "--sample-output-file", metavar="FILE", help="answers go there, once all are there (default: "
        "standard output)")
    add("--jsonl", action="store_true", help="one object an answer: prompt, text, tokens, logprobs, ended")
    return parser


def check_args(args: argparse.Namespace) -> None:
    prompt_flags = {"prompts on the command line": args.prompts, "--file": args.file, "--interactive": args.interactive}
    both = [name for name, value in prompt_flags.items() if value]
    require(len(both) < 2, f"{' and '.join(both)}: give one of them")
    for flag in ("jsonl", "output"):
        require(not (args.interactive and getattr(args, flag)), f"--interactive is for a person, --{flag} for a "
                "program: give one of them")
    for name in ("max_new_tokens", "num_samples", "batch_size", "seq_length"):
        value = getattr(args, name)
        require(value is None or value >= 1, f"--{name.replace('_', '-')} is {value}: expected 1 or more")
    require(args.file is None or Path(args.file).is_file(), f"--file {args.file}: no such file")
    require("" not in args.stop, "--stop is empty: give a text")
    folder = Path(args.output or "x").absolute().parent
    require(folder.is_dir(), f"--output {args.output}: {folder} is no folder")
    if args.output:
        with prefix_data_errors("--output"):
            named = (args.file, args.vocab_file, args.merge_file, args.tokenizer_path)
            folder = Path(os.path.realpath(args.output)).parent
            tag = folder.iterdir() if (folder / MANIFEST).exists() else ()
            # of a Hugging Face folder only the files of a model: the output may lie there
            hub = (path for path in Path(args.load_hf or os.devnull).glob("*") if path.suffix in MODEL_FILE_SUFFIXES)
            latest = [os.path.join(args.load, LATEST)] if args.load else []
            inputs = [*filter(None, named), *latest, *map(str, tag), *map(str, hub)]
            check_outputs_are_not_inputs(inputs, [args.output], "choose another --output")


def open_prompts(args: argparse.Namespace, log: Callable[[str], None]) -> PromptSource:
    """A pipe streams: the program behind it may wait for each answer before it writes the next prompt."""
    if args.prompts:
        return PromptSource(prompts_from_args(args.prompts))
    if args.file is not None:
        return PromptSource(prompts_from_file(args.file, log))
    try:
        is_pipe = stat.S_ISFIFO(os.fstat(sys.stdin.fileno()).st_mode)
    except (OSError, ValueError):  # standard input has no file descriptor
        is_pipe = False
    return PromptSource(prompts_from_stream(sys.stdin, log), is_stream=is_pipe)


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(sys.argv[1:] if argv is None else argv)
    model_args.translate_generate_samples_flags(args)
    check_args(args)
    source = model_source_from_args(args)
    sampling = Sampling(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, min_p=args.min_p,
                        repetition_penalty=args.repetition_penalty, greedy=args.greedy)
    stops = tuple(stop.text for stop in prompts_from_args(args.stop, "--stop"))
    config = GenerationConfig(args.max_new_tokens, sampling, args.num_samples, args.seed, stops,
                              args.past_the_end == "slide", args.seq_length)
    from megatron.distributed import process_group
    from megatron.distributed.consistency import all_succeed_or_raise
    from megatron.inference import load
    from megatron.inference.frontends import run_session, write_answers
    from mpu.collectives import broadcast_json

    env = process_group.init_process_group(must_match=flags_to_compare(args))
    first, start = env.rank == 0, time.monotonic()
    groups = load.build_groups(source, env.world_size, MODULE)
    has_other_use = args.prompts or args.file or args.jsonl or args.output
    interactive = bool(broadcast_json(
        first and bool(args.interactive or not has_other_use and sys.stdin.isatty()), groups.world))
    terminal = Terminal() if first and interactive else None
    log = terminal.print_message if terminal is not None else process_group.rank_0_printer(env.rank)
    prompts = all_succeed_or_raise(lambda: open_prompts(args, log) if first and not interactive else PromptSource(()),
                                   groups.world)
    loaded = load.load_model(source, groups, process_group.device_for(env, None))
    log(f"{loaded.description}, loaded in {time.monotonic() - start:.1f} s")
    if interactive:
        run_session(loaded, groups, config, terminal)
    else:
        with ExitStack() as stack:
            out: IO[str] | None = sys.stdout if first else None
            if first and args.output:
                stack.enter_context(prefix_storage_errors("--output"))
                out = stack.enter_context(staged_file(args.output, "w"))
            speed = write_answers(loaded, groups, config, args.batch_size, prompts, out, jsonl=args.jsonl)
        log(speed)
    process_group.shutdown()
    return 0
