"""Declare a configuration field, and report what is wrong with fields.

    clip_grad: float = setting(1.0, "largest global gradient norm; 0 turns clipping off",
                               json=JsonKey("gradient_clipping", NUMBER_FROM_0))
    errors.require(self.min_lr <= self.lr, "{min_lr=} is above {lr=}")

One line gives the default, help text, flag aliases and DeepSpeed JSON keys. The flag is the field's name with dashes.
Flags (cli.py), the table of JSON keys (ds_keys.py), `--help` and the reference pages are derived from it.

In an error text {lr} is the flag, or the key of the JSON file that set it; {lr=} also has its value; {no compile} is
the switch turned off. So one run reports all errors, in the user's own words. Checks run from keys to single values to
combinations. A setting that an earlier check complained about is doubtful: later errors about it may only follow from
that and are dropped.
"""

from __future__ import annotations

import json
import math
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import Field, dataclass, field, fields
from functools import partial
from string import Formatter
from typing import Any

from megatron.errors import ConfigError, TrainerError, format_listed_error


@dataclass(frozen=True)
class JsonType:
    """A type of JSON value; `convert` returns the Python value or raises ValueError if it is not `expected`."""

    expected: str
    convert: Callable[[Any], Any]
    choices: tuple[str, ...] = ()  # the allowed texts of a choice


def _boolean(value: Any) -> bool:
    if not isinstance(value, int) or value not in (0, 1):  # 1 and 0 are accepted, as in DeepSpeed
        raise ValueError
    return bool(value)


def _text(value: Any, shortest: int = 0) -> str:
    if not isinstance(value, str) or len(value) < shortest:
        raise ValueError
    return value


def _number(value: Any, low: float = -math.inf, high: float = math.inf) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max \
            or not low <= value <= high:
        raise ValueError  # NaN included
    return float(value)


def _integer(value: Any, low: float = -math.inf, high: float = math.inf) -> int:
    is_integer = isinstance(value, int) and not isinstance(value, bool) or _number(value).is_integer()
    if not is_integer or not low <= value <= high:  # 5e8 is accepted, 1.5 is not
        raise ValueError
    return int(value)


def _pair(value: Any) -> tuple[float, float]:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise ValueError
    return _number(value[0]), _number(value[1])


_BIT_NAMES = ("start_bits", "target_bits")


def _weight_group(value: Any) -> tuple[int, int, int]:
    """(start_bits, target_bits, quantization_period) of the one group of modules."""
    (group,) = value.values() if isinstance(value, dict) and len(value) == 1 else ({},)
    if not isinstance(group, dict) or group.get("modules", ["*"]) not in (["*"], "*") or \
            set(group) - {"params", "modules", "related_modules"} or group.get("related_modules") or \
            not isinstance(group.get("params"), dict) or set(group["params"]) - {*_BIT_NAMES, "quantization_period"}:
        raise ValueError
    start, target, period = (_integer(group["params"].get(name, default))
                             for name, default in (*zip(_BIT_NAMES, (16, 8)), ("quantization_period", 1)))
    return start, target, max(period, 1) if start == target else period  # the period is unused then; 0 is common


def one_of(*words: str) -> JsonType:
    """One of these texts, case-insensitive."""
    known = {word.lower(): word for word in words}

    def convert(value: Any) -> str:
        if not isinstance(value, str) or value.lower() not in known:
            raise ValueError
        return known[value.lower()]

    return JsonType(" or ".join(f'"{word}"' for word in words), convert, words)


MAX_INT64 = 2**63 - 1
BOOLEAN = JsonType("true or false", _boolean)
TEXT = JsonType("a text that is not empty", partial(_text, shortest=1))
ANY_TEXT = JsonType("a text", _text)
NUMBER = JsonType("a number", _number)
NUMBER_FROM_0 = JsonType("a number of at least 0", partial(_number, low=0))
FRACTION = JsonType("a number from 0 to 1", partial(_number, low=0, high=1))
INTEGER = JsonType("an integer", _integer)
COUNT = JsonType("an integer of at least 1", partial(_integer, low=1))
COUNT_FROM_0 = JsonType("an integer of at least 0", partial(_integer, low=0))
COUNT_FROM_0_OR_NULL = JsonType("an integer of at least 0",
                                lambda value: 0 if value is None else COUNT_FROM_0.convert(value))
ANY = JsonType("anything", lambda value: value)
EXPONENT = JsonType("an integer from 0 to 64", partial(_integer, low=0, high=64))
PAIR = JsonType("a list of two numbers", _pair)

WEIGHT_GROUP = JsonType('one group with the params start_bits, target_bits and quantization_period, and with modules '
                        '["*"], as all weights have the same bits', _weight_group)
SWITCH_OR_OBJECT = JsonType("an object {...}", _boolean)  # a section that older files write as a switch
JSON_TYPE_OF: dict[type, JsonType] = {bool: BOOLEAN, int: INTEGER, float: NUMBER, str: TEXT, tuple: PAIR}


def json_text(value: Any) -> str:
    """A value as JSON, shortened if long."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


@dataclass(frozen=True)
class JsonKey:
    """A DeepSpeed key that has an effect here."""

    path: str  # Dotted path. A trailing dot names a section in which the key has the field's name.
    json_type: JsonType | None = None  # None: derived from the field's type; nullable if the field may be None
    convert: Callable[[Any], Any] = lambda value: value  # the key's value -> the field's
    nullable: bool = False  # null counts as absent
    refused: Mapping[str, str] = field(default_factory=dict)  # lower-case text that only DeepSpeed accepts -> reason
    is_independent: bool = True  # False: the field's value depends on further keys (ds_cross_keys.py)
    default: str | None = None  # default shown on the reference page, if it is not the field's
    help: str = ""  # text on the reference page in addition to the field's help
    field: str = ""  # the field it sets; filled in by ds_keys.py


class NumberRange:
    """The finite numbers from `least` to `most`."""

    def __init__(self, low: float = 0.0, high: float = math.inf, *, excludes_low: bool = False,
                 excludes_high: bool = False) -> None:
        self.least = math.nextafter(low, math.inf) if excludes_low else low
        self.most = math.nextafter(high, -math.inf) if excludes_high or high == math.inf else high
        above = f"a number {'>' if excludes_low else '>='} {low:g}"
        self.text = above if high == math.inf else f"{above} and {'<' if excludes_high else '<='} {high:g}"

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class FieldSetting:
    """What a field's declaration says beside its default."""

    help: str
    aliases: tuple[str, ...] = ()
    keys: tuple[JsonKey, ...] = ()
    metavar: str | None = None
    common: bool = False  # listed by `--help`; the others are listed by `--help-all` only
    is_location: bool = False  # a path, which may differ between nodes: ranks compare only whether it is given
    range: NumberRange | None = None  # of a number
    needs: Needs | None = None  # the settings without which it has no effect (tree.unused_settings says so)
    unread_because: str = ""  # why it is accepted and never read


# Field -> the values of which one is needed, none: any that is on. One of the fields suffices.
Needs = Mapping[str, tuple[Any, ...]]


def setting(default: Any, help: str, *aliases: str, json: str | JsonKey | tuple[JsonKey, ...] = (),
            metavar: str | None = None, common: bool = False, is_location: bool = False,
            ge: float | None = None, gt: float | None = None, le: float = math.inf,
            needs: str | Needs | None = None, is_unread: bool = False) -> Any:
    """A field that is also a flag: `aliases` are more spellings of it, `json` names the keys that set it, `ge` or `gt`
    and `le` bound its numbers (ConfigSection checks them); `needs` is a switch, or the values of a choice, without
    which it has no effect. With `is_unread` it is accepted and never read, and `help` says why."""
    allowed = NumberRange(gt, le, excludes_low=True) if gt is not None else None if ge is None else NumberRange(ge, le)
    keys = (JsonKey(json),) if isinstance(json, str) else (json,) if isinstance(json, JsonKey) else json
    needs = {needs: ()} if isinstance(needs, str) else needs
    declared = FieldSetting(f"accepted; {help}" if is_unread else help, aliases, keys, metavar, common, is_location,
                            allowed, needs, help if is_unread else "")
    return field(default=default, metadata={"setting": declared})


def setting_of(item: Field[Any]) -> FieldSetting:
    declared: FieldSetting = item.metadata["setting"]
    return declared


def location_presence(value: Any) -> str:
    """What ranks compare of a path: their control flow depends on whether it is given."""
    return "given" if value else "not given"


def plain_type(hint: Any) -> tuple[Any, bool]:
    """(type without `| None`, whether it had one)."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        options = [member for member in typing.get_args(hint) if member is not type(None)]
        return options[0], True
    return hint, False


def flag_name(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


# ---- errors -------------------------------------------------------------------------------------------------------

_FLAG = r"--[a-z][\w-]*"


@dataclass(frozen=True)
class FlagToKeyNames:
    """The user's words for settings: flags, or the keys of the JSON file that set them."""

    keys_of_given: Mapping[str, str] = field(default_factory=dict)  # flag -> the key that was given in its place
    keys_of_others: Mapping[str, str] = field(default_factory=dict)  # flag that neither file nor command line set
    has_only_keys: bool = False  # the reader knows keys only (an engine without a command line)
    file: str = ""

    def translate(self, text: str) -> str:
        """The text with keys in place of flags, if one of them came from the file."""
        flags = {re.sub("^--no-", "--", flag) for flag in re.findall(_FLAG, text)}
        if not self.has_only_keys and self.keys_of_given.keys().isdisjoint(flags):
            return text
        keys = {**self.keys_of_others, **self.keys_of_given}
        words = {**{f"--no-{flag[2:]}": f"{key} false" for flag, key in keys.items()}, **keys}
        text = re.sub(_FLAG, lambda match: words.get(match[0], match[0]), text)
        return text.replace("optimizer.params. ", "optimizer.params.")  # `--optimizer-params NAME` is one key in a file

    @contextmanager
    def translate_errors(self) -> Iterator[None]:
        """Translate the message of a TrainerError in the block."""
        try:
            yield
        except TrainerError as error:
            error.args = (self.translate(str(error)),)
            raise


def format_settings(template: str, values: Mapping[str, Any], **others: Any) -> str:
    """The text of a `template` that names fields of `values` as the head of this file says, and `others` by their names
    there. It has flags; `FlagToKeyNames` translates them."""
    words = dict(others)
    for name in {name for _, name, _, _ in Formatter().parse(template) if name and name not in others}:
        field_name = name.removeprefix("no ").removesuffix("=")
        flag, value = flag_name(field_name), values[field_name]
        shown = f" {f'{value:g}' if isinstance(value, float) else value}" if name.endswith("=") else ""
        words[name] = f"--no-{flag[2:]}" if name.startswith("no ") else flag + shown
    return template.format_map(words)


def fields_of(error: str) -> frozenset[str]:
    """The settings that an error names."""
    flags = re.findall(_FLAG, error)
    return frozenset(flag.removeprefix(prefix).replace("-", "_") for flag in flags for prefix in ("--", "--no-"))


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


@dataclass(eq=False, repr=False)
class ErrorList(list[str]):
    """Error texts, until `raise_if_any` raises them as one error."""

    values: Mapping[str, Any] | None = None  # field -> value, of the settings that are checked

    def require(self, condition: bool, message: str, **others: Any) -> None:
        """Add an error unless the condition holds; with `values` the message is a template (`format_settings`)."""
        if not condition:
            self.append(message if self.values is None else format_settings(message, self.values, **others))

    def raise_if_any(self, name: str = "") -> None:
        if self:
            raise ConfigErrors(self, name)


class ConfigSection:
    """Base of the sections, which are frozen dataclasses: checks the ranges of the fields, then what `check` checks."""

    def __post_init__(self) -> None:
        errors = ErrorList(vars(self))
        for item in fields(self):  # type: ignore[arg-type]
            value, allowed = getattr(self, item.name), setting_of(item).range
            if value is not None and allowed is not None and not allowed.least <= value <= allowed.most:
                errors.require(False, f"{{{item.name}}} is {{found}}: expected {{allowed}}", found=value,
                               allowed=allowed)
        errors.raise_if_any()
        self.check(errors)
        errors.raise_if_any()

    def check(self, errors: ErrorList) -> None:
        """Add an error for each rule that the fields break."""


@dataclass(eq=False, repr=False)
class ErrorCollector(ErrorList):
    """Errors found so far, in the user's words, and the settings that they concern."""

    key_names: FlagToKeyNames = FlagToKeyNames()  # of the errors added from now on
    doubtful: set[str] = field(default_factory=set)  # fields that an earlier check complained about
    file: str = ""  # named by an error

    def add_errors(self, sentences: Iterable[str], file: str = "") -> None:
        """Add one check's errors; with `file` they already name its keys."""
        added = [error for error in sentences if self.doubtful.isdisjoint(fields_of(error))]
        translated = added if file else list(map(self.key_names.translate, added))
        if file and added or translated != added:
            self.file = file or self.key_names.file
        self += translated
        self.doubtful.update(*map(fields_of, added))

    def raise_if_any(self, name: str = "") -> None:
        super().raise_if_any(name or self.file)
