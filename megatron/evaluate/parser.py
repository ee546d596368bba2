"""The flags that both command lines of this room have: the model, how it runs, and what a script for Megatron-LM's
`tasks/main.py` or `evaluate_gpt2.py` says besides, which means here what it means to `generate` (inference/former.py).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from megatron.config.tree import require
from megatron.inference import former
from megatron.inference.source import ModelArgumentParser, ModelSource, flags_to_compare, model_source_from_args

IGNORED_TRAINING_OPTIONS = (
    "--activations-checkpoint-method", "--activations-checkpoint-num-layers", "--recompute-granularity",
    "--recompute-method", "--recompute-num-layers", "--seed", "--num-workers", "--epochs", "--keep-last",
    "--train-iters", "--lr", "--eval-iters", "--eval-interval")
"""Without a meaning here."""
IGNORED_TRAINING_SWITCHES = ("--recompute-activations", "--use-flash-attn", "--use-checkpoint-args",
                             "--sequence-parallel")


@dataclass(frozen=True)
class EvalModelArgs:
    source: ModelSource
    batch_size: int
    """Windows at a time."""
    notes: Sequence[str] = ()
    """On flags without effect."""
    compared_flags: Mapping[str, object] = field(default_factory=dict)
    """All flags, which are the same on every rank."""


def build_model_parser(module: str, description: str, examples: str) -> ModelArgumentParser:
    parser = ModelArgumentParser(module, description, examples)
    parser.add_argument("--batch-size", "--micro-batch-size", type=int, default=8, metavar="N",
                        help="windows at a time (8)")
    former.add_megatron_flags(parser, IGNORED_TRAINING_SWITCHES, IGNORED_TRAINING_OPTIONS)
    return parser


def model_args_from_flags(flags: argparse.Namespace) -> EvalModelArgs:
    """The model, and how it runs."""
    notes = former.translate_megatron_flags(flags)
    require(flags.batch_size >= 1, f"--batch-size is {flags.batch_size}: expected 1 or more")
    shape = former.shape_from_flags(flags) | ({} if flags.seq_length is None else {"seq_length": flags.seq_length})
    return EvalModelArgs(replace(model_source_from_args(flags), shape=shape), flags.batch_size, notes,
                         flags_to_compare(flags))
