"""Errors of settings. Each names its settings as data, so that one run reports all errors, in the user's own words.

    errors.require(self.min_lr <= self.lr, "{min_lr=} is above {lr=}")

In such a text {lr} is the flag, or the key of the JSON file that set it; {lr=} also has its value; {no compile} is the
switch turned off. Checks run from keys to single values to combinations. A setting that an earlier check complained
about is doubtful: later errors about it may only follow from that and are dropped.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from string import Formatter
from typing import Any

from megatron.config.schema import flag_name, setting_of
from megatron.errors import ConfigError, TrainerError, format_listed_error

_FLAG = r"--[a-z][\w-]*"


@dataclass(frozen=True)
class FlagToKeyNames:
    """The user's words for settings: flags, or the keys of the JSON file that set them."""

    keys_of_given: Mapping[str, str] = field(default_factory=dict)  # flag -> the key that was given in its place
    keys_of_others: Mapping[str, str] = field(default_factory=dict)  # flag that neither file nor command line set
    has_only_keys: bool = False  # the reader knows keys only (an engine without a command line)
    file: str = ""

    def keys(self, flags: Collection[str]) -> dict[str, str]:
        """Flag -> key, for a text that names these flags; empty if none of them came from the file."""
        in_keys = self.has_only_keys or not self.keys_of_given.keys().isdisjoint(flags)
        return {**self.keys_of_others, **self.keys_of_given} if in_keys else {}

    def translate(self, text: str) -> str:
        """The text with keys in place of flags. A SettingError knows its settings; other texts, such as the engine's,
        are searched for flags."""
        if isinstance(text, SettingError):
            return SettingError(*text.parts, self)
        keys = self.keys({re.sub("^--no-", "--", flag) for flag in re.findall(_FLAG, text)})
        words = {**{f"--no-{flag[2:]}": f"{key} false" for flag, key in keys.items()}, **keys}
        return _join_name(re.sub(_FLAG, lambda match: words.get(match[0], match[0]), text))

    @contextmanager
    def translate_errors(self) -> Iterator[None]:
        """Translate the message of a TrainerError in the block."""
        try:
            yield
        except TrainerError as error:
            error.args = (self.translate(str(error)),)
            raise


def _join_name(text: str) -> str:
    """`--optimizer-params NAME` is one key in a file."""
    return text.replace("optimizer.params. ", "optimizer.params.")


class SettingError(str):
    """An error text that knows the settings it names: `fields`. `template` names fields of `values` as the head of this
    file says, and anything in `others` by its name there."""

    fields: frozenset[str]
    parts: tuple[str, Mapping[str, Any], Mapping[str, Any]]  # what it is made of, but for the names

    def __new__(cls, template: str, values: Mapping[str, Any], others: Mapping[str, Any] = {},
                names: FlagToKeyNames = FlagToKeyNames()) -> SettingError:
        named = {name.removeprefix("no ").removesuffix("=") for _, name, _, _ in Formatter().parse(template)
                 if name and name not in others}
        keys, words = names.keys(set(map(flag_name, named))), dict(others)
        for name in named:
            flag, value = flag_name(name), values[name]
            word = keys.get(flag, flag)
            words |= {name: word, f"{name}=": f"{word} {f'{value:g}' if isinstance(value, float) else value}",
                      f"no {name}": f"{word} false" if flag in keys else f"--no-{flag[2:]}"}
        error = super().__new__(cls, _join_name(template.format_map(words)))
        error.fields, error.parts = frozenset(named), (template, values, others)
        return error


def fields_of(error: str) -> frozenset[str]:
    """The settings that an error names."""
    return error.fields if isinstance(error, SettingError) else frozenset()


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


class SettingErrors(ErrorList):
    """Errors of the settings in `values` (field -> value)."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__()
        self._values = values

    def require(self, condition: bool, message: str, **others: Any) -> None:
        """Add an error unless the condition holds; `message` is the template of a SettingError."""
        if not condition:
            self.append(SettingError(message, self._values, others))


class ConfigSection:
    """Base of the sections, which are frozen dataclasses: checks the ranges of the fields, then what `check` checks."""

    def __post_init__(self) -> None:
        errors = SettingErrors(vars(self))
        for item in fields(self):  # type: ignore[arg-type]
            value, allowed = getattr(self, item.name), setting_of(item).range
            if value is not None and allowed is not None and not allowed.contains(value):
                errors.require(False, f"{{{item.name}}} is {{found}}: expected {{allowed}}", found=value,
                               allowed=allowed)
        errors.raise_if_any()
        self.check(errors)
        errors.raise_if_any()

    def check(self, errors: SettingErrors) -> None:
        """Add an error for each rule that the fields break."""


class ErrorCollector(ErrorList):
    """Errors found so far, in the user's words, and the settings that they concern."""

    def __init__(self) -> None:
        super().__init__()
        self.key_names = FlagToKeyNames()  # of the errors added from now on
        self.doubtful: set[str] = set()  # fields that an earlier check complained about
        self._file = ""

    def add_errors(self, sentences: Iterable[str], file: str = "") -> None:
        """Add one check's errors; with `file` they already name its keys."""
        added = [error for error in sentences if self.doubtful.isdisjoint(fields_of(error))]
        translated = added if file else list(map(self.key_names.translate, added))
        if file and added or translated != added:
            self._file = file or self.key_names.file
        self += translated
        self.doubtful.update(*map(fields_of, added))

    def raise_if_any(self, name: str = "") -> None:
        super().raise_if_any(name or self._file)
