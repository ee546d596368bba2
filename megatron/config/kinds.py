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
class Kind:
    """A type of JSON value: `convert` gives the Python value, or raises ValueError for what is not `expected`."""

    expected: str
    convert: Callable[[Any], Any]
    words: tuple[str, ...] = ()
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


def _from(low: int, convert: Callable[[Any], Any], high: float = math.inf) -> Callable[[Any], Any]:
    def checked(value: Any) -> Any:
        number = convert(value)
        if not low <= number <= high:
            raise ValueError
        return number

    return checked


_BITS = ("start_bits", "target_bits")


def _weight_group(value: Any) -> tuple[int, int, int]:
    """(start_bits, target_bits, quantization_period) of the one group of modules."""
    (group,) = value.values() if isinstance(value, dict) and len(value) == 1 else ({},)
    if not isinstance(group, dict) or group.get("modules", ["*"]) not in (["*"], "*") or \
            set(group) - {"params", "modules", "related_modules"} or group.get("related_modules") or \
            not isinstance(group.get("params"), dict) or set(group["params"]) - {*_BITS, "quantization_period"}:
        raise ValueError
    start, target, period = (_integer(group["params"].get(name, default))
                             for name, default in (*zip(_BITS, (16, 8)), ("quantization_period", 1)))
    return start, target, max(period, 1) if start == target else period  # no bit falls, whatever it says: 0 is usual


def choice(*words: str) -> Kind:
    """One of these texts, in upper or lower case."""
    known = {word.lower(): word for word in words}

    def convert(value: Any) -> str:
        if not isinstance(value, str) or value.lower() not in known:
            raise ValueError
        return known[value.lower()]

    return Kind(" or ".join(f'"{word}"' for word in words), convert, words)


BOOLEAN = Kind("true or false", _boolean)
TEXT = Kind("a text that is not empty", _text)
ANY_TEXT = Kind("a text", lambda value: value if value == "" else _text(value))
NUMBER = Kind("a number", _number)
AT_LEAST_0 = Kind("a number of at least 0", _from(0, _number))
SHARE = Kind("a number from 0 to 1", _from(0, _number, 1))
INTEGER = Kind("an integer", _integer)
COUNT = Kind("an integer of at least 1", _from(1, _integer))
COUNT_0 = Kind("an integer of at least 0", _from(0, _integer))
COUNT_0_OR_NONE = Kind("an integer of at least 0", lambda value: 0 if value is None else COUNT_0.convert(value))
ANY = Kind("anything", lambda value: value)
EXPONENT = Kind("an integer from 0 to 64", _from(0, _integer, 64))
PAIR = Kind("a list of two numbers", _pair)

WEIGHT_GROUP = Kind('one group with the params start_bits, target_bits and quantization_period, and with modules '
                    '["*"], as all weights have the same bits', _weight_group)
"""Of compression_training: which bits which modules have; here all have the same."""
SWITCH_OR_OBJECT = Kind("an object {...}", _boolean)
"""A section that was a switch once."""

OF_TYPE: dict[type, Kind] = {bool: BOOLEAN, int: INTEGER, float: NUMBER, str: TEXT, tuple: PAIR}
"""The kind of a Python type, where nothing narrower is said."""


def shown(value: Any) -> str:
    """A value as JSON, shortened where it is long."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
