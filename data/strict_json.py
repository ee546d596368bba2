"""Strict JSON, for every file and request that holds documents: UTF-8, no duplicate keys, no NaN or Infinity.

A ValueError says what is wrong and where; the caller adds the file and the line.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NoReturn

from data.storage import parse_error_text

MULTILINE_JSON_HINT = "python -m data.webtext read --format json FILE --output DIR makes lines of an object or an array"


def decode_utf8(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: byte 0x{raw[error.start]:02x} at column {error.start + 1}") from error


def _reject(message: str) -> NoReturn:
    raise ValueError(message)


def object_of_pairs(pairs: list[tuple[str, Any]], report: Callable[[str], None] = _reject) -> dict[str, Any]:
    """An object of JSON; reports its first key that appears more than once. The last one counts."""
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        report(f"key {next(name for name in names if names.count(name) > 1)!r} appears twice")
    return value


# Shared: `json.loads` with hooks would create a decoder per line.
STRICT_DECODER = json.JSONDecoder(object_pairs_hook=object_of_pairs,
                                  parse_constant=lambda name: _reject(f"{name} is not a JSON number"))


def parse_json(text: str, decoder: json.JSONDecoder = STRICT_DECODER, *, hint_if_cut: str = "") -> Any:
    """The value of a JSON text; `hint_if_cut` ends the error about an object or an array that does not end."""
    try:
        return decoder.decode(text)
    except json.JSONDecodeError as error:
        is_cut = error.pos >= len(text.rstrip()) and text.lstrip()[:1] in ("{", "[")
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}{hint_if_cut * is_cut}") from error
    except (ValueError, RecursionError) as error:  # also an integer with thousands of digits
        raise ValueError(f"not JSON we can read: {parse_error_text(error)}") from error


def parse_text(line: str, *keys: str, hint: str = "") -> str:
    """The text under the first of `keys` that the JSON object has; `hint` ends the error if it has none. Refused as
    well: a value that is not text, and lone surrogates, which no tokenizer preserves."""
    value = parse_json(line, hint_if_cut=f" (is it JSON over several lines? {MULTILINE_JSON_HINT})")
    if not isinstance(value, dict):
        found = json_type_name(value) + f" ({MULTILINE_JSON_HINT})" * isinstance(value, list)
        raise ValueError(f"expected a JSON object, found {found}")
    key = next((key for key in keys if key in value), None)
    if key is None:
        found = ", ".join(map(repr, value)) or "no keys"
        raise ValueError(f"no key {' or '.join(map(repr, keys))}; found {found}{hint}")
    text = value[key]
    if not isinstance(text, str):
        raise ValueError(f"key {key!r}: expected text, found {json_type_name(text)}")
    try:
        if not text.isascii():
            text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"key {key!r}: lone surrogate U+{ord(text[error.start]):04X} "
                         f"at character {error.start + 1}") from error
    return text


def json_type_name(value: object) -> str:
    names = {dict: "an object", list: "an array", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
