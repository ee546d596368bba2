"""`python -m megatron.evaluate`: scores a trained model on a task. Results go to standard output, messages to standard
error. What is asked for is checked before torch is imported: the model, the task, its protocol and its data.

A protocol is everything besides model and data that a result depends on: the context before a token, the
preparation of text, the definition of a word. Results of two protocols do not compare.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data.cli import StrictArgumentParser
from megatron.config.schema import ErrorList
from megatron.config.tree import require
from megatron.inference import model_args
from megatron.inference.model_args import ModelSource, flags_to_compare, model_parser, model_source_from_args

MODULE = "python -m megatron.evaluate"

EXAMPLES = """examples:
  python -m megatron.evaluate --load runs/gpt2 --task perplexity --data held_out.jsonl
  python -m megatron.evaluate --load-hf gpt2 --task wikitext --protocol lm-eval --data wiki.test.raw
  python -m megatron.launch --nproc-per-node 4 -m megatron.evaluate --load runs/gpt2 --task lambada --data lambada.jsonl

docs/evaluate.md says what the protocols are, and where the data comes from."""


def count_words(text: str) -> int:
    return sum(1 for _ in re.finditer(r"\S+", text))


@dataclass(frozen=True)
class Protocol:
    # Of text in one sequence: the default of --stride, where 0 is the window, so that windows do not overlap. None:
    # each document or example by itself.
    stride: int | None = None
    starts_with_eod: bool = False  # the sequence does; a document by itself always does
    count_words: Callable[[str], int] = count_words
    unscored_words: int = 0  # the adjusted perplexity does not divide by them
    max_loss: float = math.inf  # perplexities are capped at exp of this
    target: str | None = None  # the scored part of an example


# The protocols of each task by their names; the first is the default.
TASKS: dict[str, dict[str, Protocol]] = {
    "wikitext": {
        # a line end between two spaces is a word, as in the published counts
        "megatron": Protocol(stride=32, count_words=lambda text: len(text.strip().split(" ")), unscored_words=1,
                             max_loss=20.0),
        "openai": Protocol(stride=0, starts_with_eod=True),
        # counts the empty strings before the first word and after the last
        "lm-eval": Protocol(count_words=lambda text: len(re.split(r"\s+", text)))},
    "lambada": {"megatron": Protocol(target="last token"), "openai": Protocol(target="last token"),
                "lm-eval": Protocol(target="last word")},
    "perplexity": {"megatron": Protocol(stride=0), "lm-eval": Protocol()}}

PARTS = ("train", "valid", "test")


def task_name(word: str) -> str:
    """The task of a --task value; WIKITEXT103 is Megatron-LM's name."""
    name = word.lower()
    require(name != "hellaswag", "--task hellaswag is one of lm-eval's: python -m megatron.evaluate.harness --tasks "
            "hellaswag (docs/evaluate.md)")
    return "wikitext" if name == "wikitext103" else name


@dataclass(frozen=True, kw_only=True)
class EvalRequest:
    task: str
    protocol: str
    data: str  # a file; of perplexity also the prefix of a corpus, or a folder of text
    strict: bool = False  # LAMBADA: the whole last word, not its last token
    stride: int | None = None
    part: str | None = None  # only documents of this part of the training split

    def __post_init__(self) -> None:
        problems, known = ErrorList(), TASKS[self.task]
        is_known = self.protocol in known
        problems.require(is_known, f"--protocol {self.protocol}: --task {self.task} has {', '.join(known)}")
        problems.require(not self.strict or (self.task, self.protocol) == ("lambada", "megatron"),
                         "--strict belongs to --task lambada --protocol megatron; the lm-eval protocol always takes "
                         "the whole last word, the openai protocol never")
        problems.require(self.stride is None or is_known and known[self.protocol].stride is not None,
                         f"--stride: no windows overlap in --task {self.task} --protocol {self.protocol}; leave it out")
        problems.require(self.stride is None or self.stride >= 1, f"--stride is {self.stride}: expected 1 or more")
        problems.require(self.part is None or self.task == "perplexity", "--part belongs to --task perplexity")
        problems.raise_if_any()

    @property
    def rules(self) -> Protocol:
        rules = TASKS[self.task][self.protocol]
        return replace(rules, target="last word") if self.strict else rules


def is_corpus_prefix(name: str) -> bool:
    return os.path.lexists(f"{name}.idx") or os.path.lexists(f"{name}.bin")


# Accepted without effect.
IGNORED_TRAINING_OPTIONS = (
    "--activations-checkpoint-method", "--activations-checkpoint-num-layers", "--recompute-granularity",
    "--recompute-method", "--recompute-num-layers", "--seed", "--num-workers", "--epochs", "--keep-last",
    "--train-iters", "--lr", "--eval-iters", "--eval-interval")
IGNORED_TRAINING_SWITCHES = ("--recompute-activations", "--use-flash-attn", "--use-checkpoint-args",
                             "--sequence-parallel")


def build_model_parser(module: str, description: str, examples: str) -> StrictArgumentParser:
    parser = model_parser(module, description, examples)
    parser.add_argument("--batch-size", "--micro-batch-size", type=int, default=8, metavar="N",
                        help="windows at a time (8)")
    model_args.add_megatron_flags(parser, IGNORED_TRAINING_SWITCHES, IGNORED_TRAINING_OPTIONS)
    return parser


def source_from_flags(flags: argparse.Namespace) -> ModelSource:
    """Rank 0 prints a note about flags without effect."""
    model_args.translate_megatron_flags(flags)
    require(flags.batch_size >= 1, f"--batch-size is {flags.batch_size}: expected 1 or more")
    source = model_source_from_args(flags)
    length = {} if flags.seq_length is None else {"seq_length": flags.seq_length}
    return replace(source, shape={**source.shape, **length})


def build_parser() -> StrictArgumentParser:
    parser = build_model_parser(MODULE, "What a trained GPT-2 scores.", EXAMPLES)
    add = parser.add_argument
    add("--task", type=task_name, choices=tuple(TASKS), required=True)
    add("--data", "--valid-data", metavar="FILE", required=True, help="what to score; of perplexity also the prefix of "
        "a corpus, or a folder of text")
    add("--protocol", choices=("megatron", "openai", "lm-eval"), help="whose rules (default: megatron)")
    add("--strict", "--strict-lambada", action="store_true", help="lambada: the whole last word, not its last token")
    add("--stride", "--overlapping-eval", type=int, metavar="N", help="tokens from one window to the next (32 for "
        "wikitext in the megatron protocol, otherwise no overlap)")
    add("--part", choices=PARTS, help="perplexity: only the documents that the run's --split put there")
    add("--json", action="store_true", help="one JSON object on standard output")
    return parser


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, ModelSource, EvalRequest]:
    """Does not import torch."""
    flags = build_parser().parse_args(argv)
    source = source_from_flags(flags)
    request = EvalRequest(task=flags.task, protocol=flags.protocol or next(iter(TASKS[flags.task])), data=flags.data,
                          strict=flags.strict, stride=flags.stride, part=flags.part)
    path, may_be_folder = Path(request.data), request.task == "perplexity"
    if not (may_be_folder and (is_corpus_prefix(request.data) or os.path.isdir(request.data))):
        require(path.is_file(), f"--data {request.data}: {'a folder' if path.is_dir() else 'no such file'}; give the "
                "path of a file that exists (docs/evaluate.md says where the files of the tasks come from)")
    return flags, source, request


def main(argv: Sequence[str] | None = None) -> int:
    flags, source, request = parse(sys.argv[1:] if argv is None else argv)
    from megatron.distributed import process_group
    from megatron.distributed.consistency import all_succeed_or_raise
    from megatron.evaluate.scoring import EvalContext
    from megatron.evaluate.tasks import prepare_task
    from megatron.inference import load

    start = time.monotonic()
    context = EvalContext(source, flags.batch_size, flags_to_compare(flags))
    log = process_group.rank_0_printer(context.groups.world.rank)
    # before the weights are read, because the data may be unusable
    task = all_succeed_or_raise(lambda: prepare_task(request, context.model_info), context.groups.world)
    description = load.describe(context.opened, context.dtype, context.model_info.tokenizer)
    window = context.model_info.max_positions
    log(f"{request.task}, protocol {request.protocol}: {len(task.requests):,} pieces of up to {window} tokens; "
        f"{description}")
    if task.num_truncated:
        log(f"warning: {task.num_truncated:,} examples are longer than the window of {window} tokens: their beginning "
            "is not read (truncated)")
    metrics = task.metrics(context.load_scorer()(task.requests))
    tokenizer = context.model_info.tokenizer.facts
    found: dict[str, Any] = {  # the table prints spaces for underscores
        "task": request.task, "protocol": request.protocol, "data": request.data, "model": context.opened.name,
        "dtype": context.dtype, "tokenizer": {"name": tokenizer.name, "fingerprint": tokenizer.fingerprint,
                                              "ids": tokenizer.vocab_size},
        "ranks": context.groups.world.size, "model_parallel_size": context.groups.tp.size,
        "target": request.rules.target, "part": request.part, "window": window, "stride": task.stride,
        "truncated": task.num_truncated}
    values = {name: value for name, value in found.items() if value is not None or name == "stride"} | {
        **metrics, "seconds": round(time.monotonic() - start, 3)}
    if context.groups.world.rank == 0:
        print(format_json(values) if flags.json else format_table(values), flush=True)
    process_group.shutdown()
    return 0


def format_json(values: Mapping[str, Any]) -> str:
    """Infinite and NaN values become null."""
    return json.dumps({name: None if isinstance(value, float) and not math.isfinite(value) else value
                       for name, value in values.items()})


def format_table(values: Mapping[str, Any]) -> str:
    if values["task"] == "perplexity":  # of any text: bits per byte say most, and the adjusted perplexity nothing
        values = {"bits_per_byte": values["bits_per_byte"],
                  **{name: value for name, value in values.items() if name != "adjusted_perplexity"}}
    shown = {**values, "tokenizer": "{name} {fingerprint} ({ids} ids)".format(**values["tokenizer"]),
             "seconds": f"{values['seconds']:.1f}"}
    for name, value in values.items():
        if value is None:
            shown[name] = "-"
        elif isinstance(value, int):
            shown[name] = f"{value:,}"
        elif isinstance(value, float) and name != "seconds":
            shown[name] = f"{value:.6g}"
    return "\n".join(f"{name.replace('_', ' '):20} {value}".rstrip() for name, value in shown.items())
