"""The names of settings in a message: flags, or the keys of the file or dict that said them in the flags' place."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from megatron.errors import TrainerError

_FLAG = r"--[a-z][\w-]*"
NAME_PREFIX_END = "\0"
"""Ends a name that the next word of the message belongs to: "optimizer.params.", and then a parameter."""


def flags_in(message: str) -> set[str]:
    """The settings that a message names by their flags; --no-compile is --compile."""
    return {re.sub("^--no-", "--", flag) for flag in re.findall(_FLAG, message)}


@dataclass(frozen=True)
class FlagToKeyNames:
    """A message that names a setting of the file names all its settings as the file does."""

    keys_of_given: Mapping[str, str] = field(default_factory=dict)
    """Flag -> what was written instead of it."""
    keys_of_others: Mapping[str, str] = field(default_factory=dict)
    """Flag that neither the file nor the command line gave -> its key."""
    has_only_keys: bool = False
    """Whoever reads it has keys only."""
    file: str = ""
    """Where the keys are."""

    def translate(self, message: str) -> str:
        """A message that speaks of flags, in these words."""
        if not self.has_only_keys and self.keys_of_given.keys().isdisjoint(
            {*re.findall(_FLAG, message), *flags_in(message)}):
            return message
        names = {**self.keys_of_others, **self.keys_of_given}
        names = {**{f"--no-{flag[2:]}": f"{key} false" for flag, key in names.items()}, **names}
        said = re.sub(_FLAG, lambda match: names.get(match[0], match[0]), message)
        return said.replace(NAME_PREFIX_END + " ", NAME_PREFIX_END).replace(NAME_PREFIX_END, "")

    @contextmanager
    def translate_errors(self) -> Iterator[None]:
        """An error of the block is in these words."""
        try:
            yield
        except TrainerError as error:
            error.args = (self.translate(str(error)),)
            raise
