"""What travels between stages: one document, one JSON line.

A line holds `text`, then `url` and `meta` where there are any; UTF-8 without escapes that are not needed, one "\\n" at
the end. `meta` is whatever else the source said; stages pass it on. `parse_json_line` reads any JSON object with a text in
it, ours and other people's; a `Fault` says what is wrong with a line that has none. With `mend` it repairs what can be
repaired (bytes that are not UTF-8, lone surrogates, raw control characters, duplicate keys, numbers JSON does not have,
a URL that is not text), and names each repair by the same word as the fault.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from data.storage import DataError, parse_error_text

_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)


@dataclass(frozen=True)
class Document:
    """One text and where it is from."""

    text: str
    url: str | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)

    def to_line(self) -> bytes:
        """The document as a line of a shard."""
        value: dict[str, Any] = {"text": self.text}
        if self.url is not None:
            value["url"] = self.url
        if self.meta:
            value["meta"] = self.meta
        return _ENCODER.encode(value).encode("utf-8") + b"\n"


@dataclass(frozen=True)
class DroppedDocument:
    """A stage does not keep the document. Reasons are few and fixed: they are counted."""

    reason: str


DocumentFunction = Callable[[Document], "Document | DroppedDocument"]
"""What a map stage does to one document."""


class DocumentError(Exception):
    """A line that holds no document: `reason` is a word or two to count by, the message says more."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class JsonKeys:
    """The keys of text and URL in the objects of a source."""

    text: str = "text"
    url: str = "url"


SHARD_KEYS = JsonKeys()
MAX_JSON_DEPTH = 100
"""What is nested deeper than this no stage passes on: each goes down it by calls."""
_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")


def parse_shard_line(line: bytes, location: str) -> Document:
    """A line of a shard. `where` (file and line) begins the error."""
    try:
        return parse_json_line(line)[0]
    except DocumentError as fault:
        raise DataError(f"{location}: {fault}") from fault


def parse_json_line(line: bytes, keys: JsonKeys = SHARD_KEYS, repair: bool = False) -> tuple[Document, tuple[str, ...]]:
    """The document in a line, and the names of the repairs made."""
    repairs: list[str] = []
    value = _load_json(decode_utf8(line, repairs if repair else None), repairs if repair else None)
    if not isinstance(value, dict):
        raise DocumentError("not an object", f"expected a JSON object, found {_json_type_name(value)}")
    if line.count(b"[") + line.count(b"{") > MAX_JSON_DEPTH and _json_depth(value) > MAX_JSON_DEPTH:
        raise DocumentError("not JSON", f"not JSON we can read: nested more than {MAX_JSON_DEPTH} deep")
    if _ESCAPED_SURROGATE.search(line):  # nothing else can put one into a string
        value = _repair_surrogates(value, repairs if repair else None)
    if keys.text not in value:
        found = ", ".join(map(repr, value)) or "no keys"
        raise DocumentError("no text", f"no key {keys.text!r}; found {found} (see --text-key)")
    text, url = value.pop(keys.text), value.pop(keys.url, None)
    if not isinstance(text, str):
        raise DocumentError("wrong type", f"key {keys.text!r}: expected text, found {_json_type_name(text)}")
    if not isinstance(url, str | None):
        if not repair:
            raise DocumentError("wrong type", f"key {keys.url!r}: expected text, found {_json_type_name(url)}")
        repairs.append("wrong type")
        url = None
    inner = value.get("meta")
    meta = inner if len(value) == 1 and isinstance(inner, dict) else value
    return Document(text, url, meta), tuple(dict.fromkeys(repairs))


def decode_utf8(raw: bytes, repairs: list[str] | None) -> str:
    """UTF-8; what is none becomes U+FFFD where repairs are allowed."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        if repairs is None:
            raise DocumentError("not UTF-8",
                                f"not UTF-8: byte 0x{raw[error.start]:02x} at column {error.start + 1}") from error
        repairs.append("not UTF-8")
        return raw.decode("utf-8", "replace")


def _load_json(text: str, repairs: list[str] | None) -> Any:
    """JSON, and only JSON: no key twice, no NaN, no number beyond a double."""
    def check_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            repair_or_raise("duplicate key", f"key {twice!r} appears twice")
        return value

    def parse_number(spelling: str) -> float | None:
        value = float(spelling)
        if not math.isfinite(value):
            repair_or_raise("not JSON", f"not JSON: {spelling} is not a number of JSON, or too large")
            return None
        return value

    def repair_or_raise(reason: str, message: str) -> None:
        if repairs is None:
            raise DocumentError(reason, message)
        repairs.append(reason)

    def load(strict: bool) -> Any:
        return json.loads(text,
                          object_pairs_hook=check_keys,
                          parse_float=parse_number,
                          parse_constant=parse_number,
                          strict=strict)

    try:
        try:
            return load(strict=True)
        except json.JSONDecodeError as error:
            if repairs is None or not error.msg.startswith("Invalid control character"):
                raise
            repairs.append("control character")
            return load(strict=False)
    except json.JSONDecodeError as error:
        raise DocumentError("not JSON", f"not JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits; nested too deeply
        raise DocumentError("not JSON", f"not JSON we can read: {parse_error_text(error)}") from error


def _json_depth(value: Any) -> int:
    """Of lists and objects in each other, one more than that at most."""
    level, depth = [value], 0
    while level and depth <= MAX_JSON_DEPTH:
        inner: list[Any] = []
        for item in level:
            inner += item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
        level, depth = inner, depth + 1
    return depth


def _repair_surrogates(value: Any, repairs: list[str] | None) -> Any:
    """Every string in `value` without lone surrogates."""
    if isinstance(value, str):
        lone = _SURROGATE.search(value)
        if lone is None:
            return value
        if repairs is None:
            raise DocumentError("lone surrogate",
                                f"lone surrogate U+{ord(lone[0]):04X} at character {lone.start() + 1} of a "
                                "string")
        repairs.append("lone surrogate")
        return _SURROGATE.sub("\ufffd", value)
    if isinstance(value, list):
        return [_repair_surrogates(item, repairs) for item in value]
    if isinstance(value, dict):
        return {_repair_surrogates(key, repairs): _repair_surrogates(item, repairs) for key, item in value.items()}
    return value


def _json_type_name(value: object) -> str:
    names = {dict: "an object", list: "an array", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
