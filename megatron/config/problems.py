"""What is wrong with a configuration, collected: one run reports every error, not the first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megatron.config.setting import flag_name
from megatron.errors import ConfigError

SHOWN_AT_ONCE = 12
"""Errors in one message; the rest is counted."""


class ConfigErrors(ConfigError):
    """Several errors in one."""

    def __init__(self, sentences: Sequence[str], name: str = "") -> None:
        self.sentences = tuple(dict.fromkeys(sentences))
        few = self.sentences[:SHOWN_AT_ONCE]
        text = few[0] if len(self.sentences) == 1 else f"{len(self.sentences)} errors: " + "; ".join(
            f"({number}) {sentence}" for number, sentence in enumerate(few, 1))
        more = len(self.sentences) - len(few)
        super().__init__((f"{name}: " if name else "") + text + (f"; and {more} more" if more else ""))


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

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """A ConfigError of the block is noted, and what comes after the block goes on."""
        try:
            yield
        except ConfigErrors as errors:
            self.extend(errors.sentences)
        except ConfigError as error:
            self.append(str(error))

    def stop(self, name: str = "") -> None:
        """Raise what was found, as one error."""
        if self:
            raise ConfigErrors(self, name)
