"""Declare a configuration field: one line gives its default, help text, flag aliases and DeepSpeed JSON keys.

    clip_grad: float = setting(1.0, "largest global gradient norm; 0 turns clipping off",
                               json=JsonKey("gradient_clipping", NUMBER_FROM_0))

The flag is the field's name with dashes. Flags (cli.py), the table of JSON keys (ds_keys.py), `--help` and the
reference pages are derived from these declarations.
"""

from __future__ import annotations

import json
import math
import sys
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field
from functools import partial
from typing import Any

from megatron.errors import ConfigError


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


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
        raise ValueError  # NaN included
    return float(value)


def _integer(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if not _number(value).is_integer():  # 5e8 is accepted, 1.5 is not
        raise ValueError
    return int(value)


def _pair(value: Any) -> tuple[float, float]:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise ValueError
    return _number(value[0]), _number(value[1])


def _in_range(low: int, convert: Callable[[Any], Any], value: Any, high: float = math.inf) -> Any:
    number = convert(value)
    if not low <= number <= high:
        raise ValueError
    return number


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
NUMBER_FROM_0 = JsonType("a number of at least 0", partial(_in_range, 0, _number))
FRACTION = JsonType("a number from 0 to 1", partial(_in_range, 0, _number, high=1))
INTEGER = JsonType("an integer", _integer)
COUNT = JsonType("an integer of at least 1", partial(_in_range, 1, _integer))
COUNT_FROM_0 = JsonType("an integer of at least 0", partial(_in_range, 0, _integer))
COUNT_FROM_0_OR_NULL = JsonType("an integer of at least 0",
                                lambda value: 0 if value is None else COUNT_FROM_0.convert(value))
ANY = JsonType("anything", lambda value: value)
EXPONENT = JsonType("an integer from 0 to 64", partial(_in_range, 0, _integer, high=64))
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


@dataclass(frozen=True)
class NumberRange:
    low: float = 0.0
    high: float = math.inf
    excludes_low: bool = False
    excludes_high: bool = False

    def contains(self, number: float) -> bool:
        return math.isfinite(number) and (number > self.low or number == self.low and not self.excludes_low) and \
            (number < self.high or number == self.high and not self.excludes_high)

    def __str__(self) -> str:
        above = f"a number {'>' if self.excludes_low else '>='} {self.low:g}"
        return above if self.high == math.inf else f"{above} and {'<' if self.excludes_high else '<='} {self.high:g}"


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
