"""The flags that both command lines of this room have: the model, how it runs, and what a script for Megatron-LM's
`tasks/main.py` or `evaluate_gpt2.py` says besides, which means here what it means to `generate` (inference/former.py).
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NoReturn

from megatron.config.tree import require
from megatron.errors import ConfigError
from megatron.inference import former
from megatron.inference.source import Source, add_flags, source_of

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


class Parser(argparse.ArgumentParser):
    """What it cannot read is a ConfigError."""

    def __init__(self, program: str, description: str, epilog: str) -> None:
        super().__init__(prog=program, description=description, epilog=epilog, allow_abbrev=False,
                         formatter_class=argparse.RawDescriptionHelpFormatter)
        add_flags(self)
        self.add_argument("--batch-size", "--micro-batch-size", type=int, default=8, metavar="N",
                          help="windows at a time (8)")
        former.add_flags(self)
        self.set_defaults(num_samples=0, top_p=1.0)  # generate's, where `former` looks
        for name in SWITCHES:
            self.add_argument(name, action="append_const", const=name, dest="meaningless", help=argparse.SUPPRESS)
        for name in VALUES:
            self.add_argument(name, action="append", type=partial(_instead, name), dest="meaningless",
                              help=argparse.SUPPRESS)

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """Dashes and underscores are the same; for a flag that is not known, the nearest one is named."""
        flags, unknown = self.parse_known_args(former.dashed(argv))
        if unknown:
            flag = next((word.partition("=")[0] for word in unknown if word.startswith("-")), None)
            if flag is None:
                self.error(f"unexpected argument {unknown[0]}: flags begin with --")
            near = difflib.get_close_matches(flag, self._option_string_actions, n=1, cutoff=0.7)
            self.error(f"unknown flag {flag}" + (f": did you mean {near[0]}?" if near else ""))
        return flags

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def _instead(name: str, value: str) -> str:
    """The name of a flag is kept, not its value."""
    return name


def chosen(flags: argparse.Namespace) -> Chosen:
    """The model, and how it runs."""
    notes = former.translate(flags)
    require(flags.batch_size >= 1, f"--batch-size is {flags.batch_size}: expected 1 or more")
    shape = former.shape_of(flags) | ({} if flags.seq_length is None else {"seq_length": flags.seq_length})
    return Chosen(replace(source_of(flags), shape=shape), flags.batch_size, notes)
