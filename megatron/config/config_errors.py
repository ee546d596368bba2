"""Collect configuration errors, so that one run reports all of them, and name settings as the user wrote them.

Checks run from keys to single values to combinations. A setting that an earlier check complained about is doubtful:
later errors about it may only follow from that and are dropped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, cast

from megatron.config.schema import flag_name, setting_of
from megatron.errors import ConfigError, TrainerError, format_listed_error

_FLAG = r"--[a-z][\w-]*"


def flags_in(message: str) -> set[str]:
    """The flags in a message; --no-compile counts as --compile."""
    return {re.sub("^--no-", "--", flag) for flag in re.findall(_FLAG, message)}


@dataclass(frozen=True)
class FlagToKeyNames:
    """Rewrites flags in messages to the keys of the JSON file that set them."""

    keys_of_given: Mapping[str, str] = field(default_factory=dict)  # flag -> the key that was given in its place
    keys_of_others: Mapping[str, str] = field(default_factory=dict)  # flag that neither file nor command line set
    has_only_keys: bool = False  # the reader knows keys only (an engine without a command line)
    file: str = ""

    def translate(self, message: str) -> str:
        """The message with keys in place of flags, if any of these came from the file."""
        if not self.has_only_keys and self.keys_of_given.keys().isdisjoint(flags_in(message)):
            return message
        names = {**self.keys_of_others, **self.keys_of_given}
        names = {**{f"--no-{flag[2:]}": f"{key} false" for flag, key in names.items()}, **names}
        translated = re.sub(_FLAG, lambda match: names.get(match[0], match[0]), message)
        return translated.replace("optimizer.params. ", "optimizer.params.")  # --optimizer-params NAME

    @contextmanager
    def translate_errors(self) -> Iterator[None]:
        """Translate the message of a TrainerError in the block."""
        try:
            yield
        except TrainerError as error:
            error.args = (self.translate(str(error)),)
            raise


MAX_SHOWN_ERRORS = 40


class ConfigErrors(ConfigError):
    """Several errors in one, each on its own line."""

    def __init__(self, sentences: Sequence[str], name: str = "") -> None:
        self.sentences = tuple(dict.fromkeys(sentences))
        count, few = len(self.sentences), self.sentences[:MAX_SHOWN_ERRORS]
        head = f"{count} errors, of which the first {len(few)} are" if count > len(few) else f"{count} errors"
        text = few[0] if count == 1 else "\n".join([f"{head}:", *map(format_listed_error, range(1, count + 1), few)])
        super().__init__((f"{name}: " if name else "") + text)


def error_sentences(error: ConfigError) -> tuple[str, ...]:
    return error.sentences if isinstance(error, ConfigErrors) else (str(error),)


class ErrorList(list[str]):
    """Error texts, until `raise_if_any` raises them as one error."""

    def require(self, condition: bool, message: str) -> None:
        if not condition:
            self.append(message)

    def raise_if_any(self, name: str = "") -> None:
        if self:
            raise ConfigErrors(self, name)


class ConfigSection:
    """Base of the sections, which are frozen dataclasses: checks the ranges of the fields, then what `check` checks."""

    def __post_init__(self) -> None:
        errors, section = ErrorList(), cast(Any, self)
        for item in fields(section):
            value, allowed = getattr(section, item.name), setting_of(item).range
            errors.require(value is None or allowed is None or math.isfinite(value) and allowed.contains(value),
                           f"{flag_name(item.name)} is {value}: expected {allowed}")
        errors.raise_if_any()
        self.check(errors)
        errors.raise_if_any()

    def check(self, errors: ErrorList) -> None:
        """Add an error text for each rule that the fields break, or raise a ConfigError."""


class ErrorCollector(ErrorList):
    """Errors found so far, and the settings that they concern."""

    def __init__(self) -> None:
        super().__init__()
        self.key_names = FlagToKeyNames()  # translates the errors added from now on
        self._doubtful: set[str] = set()
        self._file = ""

    def ignore_later_errors_of(self, flags: Iterable[str]) -> None:
        self._doubtful.update(*map(flags_in, flags))

    def add_errors(self, sentences: Iterable[str], file: str = "") -> None:
        """Add one check's errors, which name flags; with `file` they already name its keys."""
        new_sentences = [sentence for sentence in sentences if self._doubtful.isdisjoint(flags_in(sentence))]
        translated = new_sentences if file else list(map(self.key_names.translate, new_sentences))
        if file and new_sentences or translated != new_sentences:
            self._file = file or self.key_names.file
        self += translated
        self.ignore_later_errors_of(new_sentences)

    def raise_if_any(self, name: str = "") -> None:
        super().raise_if_any(name or self._file)
