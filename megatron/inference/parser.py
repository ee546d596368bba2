"""The command line of a program that uses a trained model: its first flags say which (source.py), and what is wrong
with one is a ConfigError, so that it ends like every other error: in one line."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import NoReturn, final

from megatron.config.flags import dashed
from megatron.config.help import typed
from megatron.errors import ConfigError
from megatron.inference import source


@final
class Parser(argparse.ArgumentParser):
    def __init__(self, module: str, description: str, examples: str) -> None:
        """`module` as it is run, `python -m megatron.NAME`; help and examples have what was typed in its place."""
        program = typed(module)
        super().__init__(prog=program, description=description, epilog=examples.replace(module, program),
                         allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
        source.add_flags(self)

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """Dashes and underscores are the same, before a `--` of its own; for a flag that is not known, the nearest one
        is named."""
        end = argv.index("--") if "--" in argv else len(argv)
        flags, unknown = self.parse_known_args([*map(dashed, argv[:end]), *argv[end:]])
        if unknown:
            flag = next((word.partition("=")[0] for word in unknown if word.startswith("-")), None)
            if flag is None:
                self.error(f"unexpected argument {unknown[0]}: flags begin with --")
            near = difflib.get_close_matches(flag, self._option_string_actions, n=1, cutoff=0.7)
            self.error(f"unknown flag {flag}" + (f": did you mean {near[0]}?" if near else ""))
        return flags

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")
