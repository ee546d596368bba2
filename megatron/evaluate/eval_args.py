"""What `evaluate` is asked for, checked before torch is imported: the model, the task, its protocol and its data.

A protocol is everything besides model and data that a result depends on: the context before a token, the
preparation of text, the definition of a word. Results of two protocols do not compare.
"""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from data.cli import StrictArgumentParser
from megatron.config.schema import ErrorList
from megatron.config.tree import require
from megatron.inference import model_args
from megatron.inference.model_args import ModelSource, model_parser, model_source_from_args


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
        "openai": Protocol(stride=0, starts_with_eod=True),  # docs/decisions/020
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
