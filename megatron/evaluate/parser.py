"""The flags that both command lines of this room have: the model, how it runs, and what a script for Megatron-LM's
`tasks/main.py` or `evaluate_gpt2.py` says besides, which means here what it means to `generate` (inference/former.py).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from megatron.config.tree import require
from megatron.inference import former
from megatron.inference.source import ModelParser, Source, source_of, told

VALUES = (
    "--activations-checkpoint-method", "--activations-checkpoint-num-layers", "--recompute-granularity",
    "--recompute-method", "--recompute-num-layers", "--seed", "--num-workers", "--epochs", "--keep-last",
    "--train-iters", "--lr", "--eval-iters", "--eval-interval")
"""Without a meaning here."""
SWITCHES = ("--recompute-activations", "--use-flash-attn", "--use-checkpoint-args", "--sequence-parallel")


@dataclass(frozen=True)
class Chosen:
    source: Source
    batch_size: int
    """Windows at a time."""
    notes: Sequence[str] = ()
    """On flags without effect."""
    told: Mapping[str, object] = field(default_factory=dict)
    """All flags, which are the same on every rank."""


def parser_of(module: str, description: str, examples: str) -> ModelParser:
    parser = ModelParser(module, description, examples)
    parser.add_argument("--batch-size", "--micro-batch-size", type=int, default=8, metavar="N",
                        help="windows at a time (8)")
    former.add_flags(parser, SWITCHES, VALUES)
    return parser


def chosen(flags: argparse.Namespace) -> Chosen:
    """The model, and how it runs."""
    notes = former.translate(flags)
    require(flags.batch_size >= 1, f"--batch-size is {flags.batch_size}: expected 1 or more")
    shape = former.shape_of(flags) | ({} if flags.seq_length is None else {"seq_length": flags.seq_length})
    return Chosen(replace(source_of(flags), shape=shape), flags.batch_size, notes, told(flags))
