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
from megatron.config.words import FlagToKeyNames, flags_in
from megatron.errors import ConfigError, format_listed_error

MAX_SHOWN_ERRORS = 40
"""Errors in one message: a file with more is of another kind."""


class ConfigErrors(ConfigError):
    """Several errors in one, a line each."""

    def __init__(self, sentences: Sequence[str], name: str = "") -> None:
        self.sentences = tuple(dict.fromkeys(sentences))
        count, few = len(self.sentences), self.sentences[:MAX_SHOWN_ERRORS]
        head = f"{count} errors, of which the first {len(few)} are" if count > len(few) else f"{count} errors"
        text = few[0] if count == 1 else "\n".join([f"{head}:", *map(format_listed_error, range(1, count + 1), few)])
        super().__init__((f"{name}: " if name else "") + text)


def error_sentences(error: ConfigError) -> tuple[str, ...]:
    return error.sentences if isinstance(error, ConfigErrors) else (str(error),)


class ErrorList(list[str]):
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

    def raise_if_any(self, name: str = "") -> None:
        """Raise what was found, as one error."""
        if self:
            raise ConfigErrors(self, name)


class ErrorCollector:
    """What is wrong so far, and with which settings."""

    def __init__(self) -> None:
        self.key_names = FlagToKeyNames()
        """How what is noted from now on is said."""
        self.has_errors = False
        self._sentences: list[str] = []
        self._doubtful: set[str] = set()
        self._file = ""

    def ignore_later_errors_of(self, flags: Iterable[str]) -> None:
        self._doubtful.update(*map(flags_in, flags))

    def add_errors(self, sentences: Iterable[str], file: str = "") -> None:
        """What one check has found, in the names of flags; `file`: in the words of this file."""
        new_sentences = [sentence for sentence in sentences if self._doubtful.isdisjoint(flags_in(sentence))]
        translated = new_sentences if file else list(map(self.key_names.translate, new_sentences))
        if file and new_sentences or translated != new_sentences:
            self._file = file or self.key_names.file
        self._sentences += translated
        self.ignore_later_errors_of(new_sentences)
        self.has_errors = bool(self._sentences)

    @contextmanager
    def collecting_errors(self) -> Iterator[None]:
        """A ConfigError of the block is noted, and what comes after the block goes on."""
        try:
            yield
        except ConfigError as error:
            self.add_errors(error_sentences(error))

    def raise_if_any(self) -> None:
        """Raise what was noted, as one error."""
        if self._sentences:
            raise ConfigErrors(self._sentences, self._file)
