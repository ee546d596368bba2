"""`python -m megatron.evaluate`: scores a trained model on a task. Results go to standard output, messages to standard
error.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from data.cli import StrictArgumentParser
from megatron.config.tree import require
from megatron.evaluate.tasks import PARTS, TASKS, EvalRequest, is_corpus_prefix, prepare_task, task_name
from megatron.inference import model_args
from megatron.inference.model_args import ModelSource, flags_to_compare, model_parser, model_source_from_args

MODULE = "python -m megatron.evaluate"

EXAMPLES = """examples:
  python -m megatron.evaluate --load runs/gpt2 --task perplexity --data held_out.jsonl
  python -m megatron.evaluate --load-hf gpt2 --task wikitext --protocol lm-eval --data wiki.test.raw
  python -m megatron.launch --nproc-per-node 4 -m megatron.evaluate --load runs/gpt2 --task lambada --data lambada.jsonl

docs/evaluate.md says what the protocols are, and where the data comes from."""


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
    from megatron.inference import load

    start = time.monotonic()
    context = EvalContext.open(source, flags.batch_size, flags_to_compare(flags))
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
