"""What is wrong with a configuration, collected: one run reports every error, not the first.

Checks go from the keys of a file to the values of single settings, and on to settings together. One that an earlier
check has said something of is *in doubt*: what a later check says of it may follow from that, and is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megatron.config.setting import flag_name
from megatron.config.words import Words, flags_in
from megatron.errors import ConfigError, listed

SHOWN_AT_ONCE = 40
"""Errors in one message: a file with more is of another kind."""


class ConfigErrors(ConfigError):
    """Several errors in one, a line each."""

    def __init__(self, sentences: Sequence[str], name: str = "") -> None:
        self.sentences = tuple(dict.fromkeys(sentences))
        count, few = len(self.sentences), self.sentences[:SHOWN_AT_ONCE]
        head = f"{count} errors, of which the first {len(few)} are" if count > len(few) else f"{count} errors"
        text = few[0] if count == 1 else "\n".join([f"{head}:", *map(listed, range(1, count + 1), few)])
        super().__init__((f"{name}: " if name else "") + text)


def sentences_of(error: ConfigError) -> tuple[str, ...]:
    return error.sentences if isinstance(error, ConfigErrors) else (str(error),)


class Problems(list[str]):
    """Sentences, until `stop` raises them as one error."""

    def require(self, condition: bool, message: str) -> None:
        if not condition:
            self.append(message)

    def require_range(self, section: Any, names: str, low: float, high: float = math.inf, *,
                      open_low: bool = False) -> None:
        """Every named field that is set lies in [low, high] (or (low, high] with open_low), and is a number at all."""
        for name in names.split():
            value = getattr(section, name)
            if value is None:
                continue
            inside = (low < value if open_low else low <= value) and value <= high and math.isfinite(value)
            bounds = f"{'>' if open_low else '>='} {low:g}" + ("" if high == math.inf else f" and <= {high:g}")
            self.require(inside, f"{flag_name(name)} is {value}: expected a number {bounds}")

    def stop(self, name: str = "") -> None:
        """Raise what was found, as one error."""
        if self:
            raise ConfigErrors(self, name)


class Draft:
    """What is wrong so far, and with which settings."""

    def __init__(self) -> None:
        self.words = Words()
        """How what is noted from now on is said."""
        self.is_wrong = False
        self._sentences: list[str] = []
        self._doubtful: set[str] = set()
        self._file = ""

    def doubt(self, flags: Iterable[str]) -> None:
        self._doubtful.update(*map(flags_in, flags))

    def note(self, sentences: Iterable[str], file: str = "") -> None:
        """What one check has found, in the names of flags; `file`: in the words of this file."""
        told = [sentence for sentence in sentences if self._doubtful.isdisjoint(flags_in(sentence))]
        said = told if file else list(map(self.words.of, told))
        if file and told or said != told:
            self._file = file or self.words.file
        self._sentences += said
        self.doubt(told)
        self.is_wrong = bool(self._sentences)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """A ConfigError of the block is noted, and what comes after the block goes on."""
        try:
            yield
        except ConfigError as error:
            self.note(sentences_of(error))

    def stop(self) -> None:
        """Raise what was noted, as one error."""
        if self._sentences:
            raise ConfigErrors(self._sentences, self._file)
