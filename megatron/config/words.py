"""The names of settings in a message: flags, or the keys of the file or dict that said them in the flags' place."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from megatron.errors import TrainerError

_FLAG = r"--[a-z][\w-]*"
SECTION = "\0"
"""Ends a name that the next word of the message belongs to: "optimizer.params.", and then a parameter."""


def flags_in(message: str) -> set[str]:
    """The settings that a message names by their flags; --no-compile is --compile."""
    return {re.sub("^--no-", "--", flag) for flag in re.findall(_FLAG, message)}


@dataclass(frozen=True)
class Words:
    """A message that names a setting of the file names all its settings as the file does."""

    given: Mapping[str, str] = field(default_factory=dict)
    """Flag -> what was written instead of it."""
    others: Mapping[str, str] = field(default_factory=dict)
    """Flag that neither the file nor the command line gave -> its key."""
    no_flags: bool = False
    """Whoever reads it has keys only."""
    file: str = ""
    """Where the keys are."""

    def of(self, message: str) -> str:
        """A message that speaks of flags, in these words."""
        if not self.no_flags and self.given.keys().isdisjoint({*re.findall(_FLAG, message), *flags_in(message)}):
            return message
        names = {**self.others, **self.given}
        names = {**{f"--no-{flag[2:]}": f"{key} false" for flag, key in names.items()}, **names}
        said = re.sub(_FLAG, lambda match: names.get(match[0], match[0]), message)
        return said.replace(SECTION + " ", SECTION).replace(SECTION, "")

    @contextmanager
    def speaking(self) -> Iterator[None]:
        """An error of the block is in these words."""
        try:
            yield
        except TrainerError as error:
            error.args = (self.of(str(error)),)
            raise
