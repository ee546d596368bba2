"""The JSON object of a request, key by key: each is taken once with its type and range, and what is left over is
refused by name. Nothing that a client asks for is ignored in silence."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any, NoReturn, final

from megatron.serve.refusal import Refusal, wrong

SHOWN = 60
"""Characters of a name that is quoted back."""


def parse(body: bytes) -> dict[str, Any]:
    """A body that is a JSON object; none of Python's additions to JSON."""
    try:
        found = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_object)
    except UnicodeDecodeError:
        raise Refusal(400, "the body is not UTF-8") from None
    except RecursionError:
        raise Refusal(400, "the body is nested too deeply") from None
    except ValueError as error:  # also of a number with thousands of digits
        raise Refusal(400, f"the body is not JSON: {str(error)[:200]}") from None
    if not isinstance(found, dict):
        raise Refusal(400, "expected a JSON object")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON's")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is given twice")
    return found


@final
class Fields:
    def __init__(self, values: dict[str, Any]) -> None:
        """What is null is not given."""
        self._left = {name: value for name, value in values.items() if value is not None}

    def take(self, name: str) -> Any:
        """Whatever it is; None where it is not given."""
        return self._left.pop(name, None)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            raise wrong(name, "expected true or false")
        return default if value is None else value

    def integer(self, name: str, default: int, low: int, high: int) -> int:
        value = self.take(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise wrong(name, f"expected a whole number from {low} to {high}")
        return value

    def number(self, name: str, default: float, low: float, high: float) -> float:
        value = self.take(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise wrong(name, f"expected a number from {low:g} to {high:g}")
        return float(value)

    def text(self, name: str) -> str | None:
        value = self.take(name)
        return None if value is None else plain(value, name)

    def only(self, name: str, accepted: Collection[Any], why: str) -> None:
        """A key that is known, but only with values that change nothing."""
        value = self.take(name)
        if value is not None and not any(type(value) is type(one) and value == one for one in accepted):
            raise wrong(name, why)

    def finish(self) -> None:
        if self._left:
            first, *others = sorted(self._left)
            more = f" and {len(others)} more keys are" if others else " is"
            raise Refusal(400, f"{first[:SHOWN]!r}{more} not known here", name=ascii(first[:SHOWN])[1:-1])


def plain(value: Any, name: str) -> str:
    """A text of whole characters."""
    if not isinstance(value, str):
        raise wrong(name, "expected a text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise wrong(name, "expected Unicode text; half of a surrogate pair is none") from None
    return value
