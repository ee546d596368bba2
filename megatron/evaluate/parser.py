"""The flags that both command lines of this room have: the model, and how it runs."""

from __future__ import annotations

import argparse
from typing import NoReturn

from megatron.config.tree import require
from megatron.errors import ConfigError
from megatron.inference.source import Source, add_flags, source_of


class Parser(argparse.ArgumentParser):
    """What it cannot read is a ConfigError."""

    def __init__(self, program: str, description: str, epilog: str) -> None:
        super().__init__(prog=program, description=description, epilog=epilog, allow_abbrev=False,
                         formatter_class=argparse.RawDescriptionHelpFormatter)
        add_flags(self)
        self.add_argument("--batch-size", "--micro-batch-size", type=int, default=8, metavar="N",
                          help="windows at a time (8)")

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def chosen(flags: argparse.Namespace) -> tuple[Source, int]:
    """The model, and how many windows at a time."""
    source = source_of(flags)
    require(flags.batch_size >= 1, f"--batch-size is {flags.batch_size}: expected 1 or more")
    return source, int(flags.batch_size)
