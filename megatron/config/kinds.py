"""Kinds of JSON values: which values a key may have, in words, and what Python value each becomes.

A kind has a range only where its value is converted; other ranges are checked by the section that owns the field.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class JsonType:
    """A type of JSON value: `convert` gives the Python value, or raises ValueError for what is not `expected`."""

    expected: str
    convert: Callable[[Any], Any]
    choices: tuple[str, ...] = ()
    """The texts it can be, where it is one of a few."""


def _boolean(value: Any) -> bool:
    """1 and 0 are true and false, as in DeepSpeed."""
    if not isinstance(value, int) or value not in (0, 1):
        raise ValueError
    return bool(value)


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > sys.float_info.max:
        raise ValueError
    if math.isnan(value):
        raise ValueError
    return float(value)


def _integer(value: Any) -> int:
    """5e8 is an integer, 1.5 is not."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if not _number(value).is_integer():
        raise ValueError
    return int(value)


def _pair(value: Any) -> tuple[float, float]:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise ValueError
    return _number(value[0]), _number(value[1])


def _in_range(low: int, convert: Callable[[Any], Any], high: float = math.inf) -> Callable[[Any], Any]:
    def checked(value: Any) -> Any:
        number = convert(value)
        if not low <= number <= high:
            raise ValueError
        return number

    return checked


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
    return start, target, max(period, 1) if start == target else period  # no bit falls, whatever it says: 0 is usual


def one_of(*words: str) -> JsonType:
    """One of these texts, in upper or lower case."""
    known = {word.lower(): word for word in words}

    def convert(value: Any) -> str:
        if not isinstance(value, str) or value.lower() not in known:
            raise ValueError
        return known[value.lower()]

    return JsonType(" or ".join(f'"{word}"' for word in words), convert, words)


BOOLEAN = JsonType("true or false", _boolean)
TEXT = JsonType("a text that is not empty", _text)
ANY_TEXT = JsonType("a text", lambda value: value if value == "" else _text(value))
NUMBER = JsonType("a number", _number)
NUMBER_FROM_0 = JsonType("a number of at least 0", _in_range(0, _number))
FRACTION = JsonType("a number from 0 to 1", _in_range(0, _number, 1))
INTEGER = JsonType("an integer", _integer)
COUNT = JsonType("an integer of at least 1", _in_range(1, _integer))
COUNT_FROM_0 = JsonType("an integer of at least 0", _in_range(0, _integer))
COUNT_FROM_0_OR_NULL = JsonType("an integer of at least 0", lambda value: 0
                                if value is None else COUNT_FROM_0.convert(value))
ANY = JsonType("anything", lambda value: value)
EXPONENT = JsonType("an integer from 0 to 64", _in_range(0, _integer, 64))
PAIR = JsonType("a list of two numbers", _pair)

WEIGHT_GROUP = JsonType('one group with the params start_bits, target_bits and quantization_period, and with modules '
                        '["*"], as all weights have the same bits', _weight_group)
"""Of compression_training: which bits which modules have; here all have the same."""
SWITCH_OR_OBJECT = JsonType("an object {...}", _boolean)
"""A section that was a switch once."""

JSON_TYPE_OF: dict[type, JsonType] = {bool: BOOLEAN, int: INTEGER, float: NUMBER, str: TEXT, tuple: PAIR}
"""The kind of a Python type, where nothing narrower is said."""


def json_text(value: Any) -> str:
    """A value as JSON, shortened where it is long."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
