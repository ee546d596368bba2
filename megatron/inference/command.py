"""`python -m megatron.generate`: text from a trained model.

Prompts come from the command line, a file or standard input, one a line; answers go to standard output in the order of
the prompts, a text as it comes where there is one at a time. Everything else is said on standard error. Where a person
types the prompts, it is a session (session.py).
"""

from __future__ import annotations

import argparse
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import IO, TextIO

from data.storage import check_outputs_are_not_inputs, prefix_data_errors, prefix_storage_errors, staged_file
from megatron.checkpoint.manifest import LATEST, MANIFEST
from megatron.config.tree import require
from megatron.inference import former
from megatron.inference.prompts import Arriving, Given, Prompts, of_arguments, of_file, of_stream
from megatron.inference.request import Sampling, Wish
from megatron.inference.source import ModelParser, source_of, told
from megatron.inference.terminal import Terminal, is_at_hand

MODULE = "python -m megatron.generate"

OF_A_MODEL = {".json", ".safetensors", ".bin", ".model", ".txt"}
"""Suffixes in a folder of Hugging Face's."""

EXAMPLES = """examples:
  python -m megatron.generate --load runs/gpt2 "The meaning of life is"
  python -m megatron.generate --load runs/gpt2 --file prompts.txt --greedy --jsonl > answers.jsonl
  python -m megatron.launch --nproc-per-node 2 -m megatron.generate --load runs/gpt2 --model-parallel-size 2 "Once"

Without prompts they are read from standard input, one a line; at a terminal that is a session. docs/generate.md
explains the rest."""


def build_parser() -> ModelParser:
    parser = ModelParser(MODULE, "Text from a trained GPT-2.", EXAMPLES)
    add = parser.add_argument
    add("prompts", nargs="*", metavar="PROMPT", help="a text to go on from")
    former.add_flags(parser)
    add("--genfile", metavar="FILE", help=argparse.SUPPRESS)
    add("--file", "--sample-input-file", metavar="FILE", help="prompts, one a line; .jsonl: of "
        "objects with `prompt` or `text`; also .gz, .xz, .zst")
    add("--interactive", action="store_true", help="a session: each line that is typed is answered at once (where "
        "there are no prompts and standard input is a terminal)")
    add("--max-new-tokens", "--out-seq-length", type=int, default=128, metavar="N", help="tokens of an answer (128)")
    add("--num-samples", type=int, default=1, metavar="N", help="answers to each prompt (1)")
    add("--greedy", action="store_true", help="always the likeliest token")
    add("--temperature", type=float, default=0.8, help="below 1: likely tokens become likelier (0.8)")
    add("--top-k", "--top_k", type=int, default=40, help="draw from so many likeliest tokens; 0: all (40)")
    add("--top-p", "--top_p", type=float, default=1.0, help="draw from the likeliest tokens that have this much of the "
        "probability (1)")
    add("--min-p", type=float, default=0.0, help="leave out tokens less likely than this times the likeliest (0)")
    add("--repetition-penalty", type=float, default=1.0, help="above 1: tokens of the text become less likely (1)")
    add("--seed", type=int, default=1234, help="of the random numbers; each answer has a stream of its own (1234)")
    add("--stop", action="append", default=[], metavar="TEXT", help="an answer ends before this; may be given again")
    add("--past-the-end", choices=("stop", "slide"), default="stop", help="at the end of the position table: stop, or "
        "go on from the last tokens, each read anew")
    add("--batch-size", "--micro-batch-size", type=int, default=8, metavar="N", help="texts at a time (8)")
    add("--output", "--sample-output-file", metavar="FILE", help="answers go there, once all are there (default: "
        "standard output)")
    add("--jsonl", action="store_true", help="one object an answer: prompt, text, tokens, logprobs, ended")
    return parser


def check(asked: argparse.Namespace) -> None:
    given = {"prompts on the command line": asked.prompts, "--file": asked.file, "--interactive": asked.interactive}
    both = [name for name, value in given.items() if value]
    require(len(both) < 2, f"{' and '.join(both)}: give one of them")
    for flag in ("jsonl", "output"):
        require(not (asked.interactive and getattr(asked, flag)), f"--interactive is for a person, --{flag} for a "
                "program: give one of them")
    for name in ("max_new_tokens", "num_samples", "batch_size", "seq_length"):
        value = getattr(asked, name)
        require(value is None or value >= 1, f"--{name.replace('_', '-')} is {value}: expected 1 or more")
    require(asked.file is None or Path(asked.file).is_file(), f"--file {asked.file}: no such file")
    require("" not in asked.stop, "--stop is empty: give a text")
    folder = Path(asked.output or "x").absolute().parent
    require(folder.is_dir(), f"--output {asked.output}: {folder} is no folder")
    if asked.output:
        with prefix_data_errors("--output"):
            check_outputs_are_not_inputs(files_read(asked), [asked.output], "choose another --output")


def files_read(asked: argparse.Namespace) -> list[str]:
    """Of a model's folder, those that its program reads; another file there is anybody's."""
    named = (asked.file, asked.vocab_file, asked.merge_file, asked.tokenizer_path)
    folder = Path(os.path.realpath(asked.output)).parent
    tag = folder.iterdir() if (folder / MANIFEST).exists() else ()
    hub = (path for path in Path(asked.load_hf or os.devnull).glob("*") if path.suffix in OF_A_MODEL)
    latest = [os.path.join(asked.load, LATEST)] if asked.load else []
    return [*filter(None, named), *latest, *map(str, tag), *map(str, hub)]


def wish_of(asked: argparse.Namespace) -> Wish:
    sampling = Sampling(temperature=asked.temperature, top_k=asked.top_k, top_p=asked.top_p, min_p=asked.min_p,
                        repetition_penalty=asked.repetition_penalty, greedy=asked.greedy)
    return Wish(asked.max_new_tokens, sampling, asked.num_samples, asked.seed,
                tuple(stop.text for stop in of_arguments(asked.stop, "--stop")), asked.past_the_end == "slide",
                asked.seq_length)


def is_session(asked: argparse.Namespace) -> bool:
    return bool(asked.interactive or not (asked.prompts or asked.file or asked.jsonl or asked.output) and is_at_hand())


def prompts_of(asked: argparse.Namespace, say: Callable[[str], None]) -> Prompts:
    """A pipe may be that of a program which waits for its answers."""
    if asked.prompts:
        return Given(of_arguments(asked.prompts))
    if asked.file is not None:
        return Given(of_file(asked.file, say))
    lasts = stat.S_ISFIFO(_mode(sys.stdin))
    return (Arriving if lasts else Given)(of_stream(sys.stdin, say))


def _mode(stream: TextIO) -> int:
    try:
        return os.fstat(stream.fileno()).st_mode
    except (OSError, ValueError):  # no file of the system's
        return 0


@contextmanager
def output_of(asked: argparse.Namespace) -> Iterator[IO[str]]:
    if asked.output:
        with prefix_storage_errors("--output"), staged_file(asked.output, "w") as file:
            yield file
    else:
        yield sys.stdout


def main(argv: Sequence[str] | None = None) -> int:
    asked = build_parser().parse_args(sys.argv[1:] if argv is None else argv)
    notes = former.translate_samples(asked)
    check(asked)
    model, wish = replace(source_of(asked), shape=former.shape_of(asked)), wish_of(asked)
    from megatron.checkpoint.agree import all_succeed_or_raise
    from megatron.inference import loading
    from megatron.inference.answers import Answers
    from megatron.inference.session import Session
    from megatron.launch import distributed
    from mpu.collectives import broadcast_json

    env = distributed.init(must_match=told(asked))
    first, began = env.rank == 0, time.monotonic()
    groups = loading.groups_of(model, env.world_size, MODULE)
    session = bool(broadcast_json(first and is_session(asked), groups.world))
    terminal = Terminal() if first and session else None
    say = terminal.say if terminal is not None else distributed.rank_0_printer(env.rank)
    for note in notes:
        say(note)
    prompts = all_succeed_or_raise(lambda: prompts_of(asked, say) if first and not session else Given(()), groups.world)
    loaded = loading.load(model, groups, distributed.device_for(env, None))
    say(f"{loaded.described}, loaded in {time.monotonic() - began:.1f} s")
    if session:
        Session(loaded, groups, wish, terminal).run()
    else:
        answers = Answers(loaded, groups, wish, asked.batch_size)
        with output_of(asked) if first else nullcontext() as out:
            answers.write(prompts, out, jsonl=asked.jsonl)
        say(answers.speed())
    distributed.shutdown()
    return 0
