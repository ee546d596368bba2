"""Readers of task data: a whole text file, or JSON lines. Errors name the file, the line and the key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from data.compressed import open_decompressed, read_errors_for
from data.input_files import JSON_LINES, kind_of
from data.storage import DataError, parse_error_text

BOM = "\ufeff"


@dataclass(frozen=True)
class JsonLine:
    location: str
    values: dict[str, Any]

    def get_text(self, *keys: str) -> str:
        """Of the first of these keys that it has."""
        return self._check_unicode(self._get(keys, str, "text"))

    def get_texts(self, key: str) -> list[str]:
        found: list[str] = self._get((key,), list, "a list of texts")
        if not found or not all(isinstance(text, str) for text in found):
            raise DataError(f"{self.location}: {key!r}: expected a list of texts")
        return [self._check_unicode(text) for text in found]

    def get_index(self, key: str, count: int) -> int:
        """Below `count`; as a text it will do as well."""
        found = self._get((key,), (int, str), "a number")
        if isinstance(found, bool) or not str(found).isdecimal() or int(found) >= count:
            raise DataError(f"{self.location}: {key!r}: expected a number from 0 to {count - 1}, found {found!r}")
        return int(found)

    def _check_unicode(self, text: str) -> str:
        """No tokenizer keeps half a surrogate pair."""
        if not text.isascii() and text.encode("utf-8", "replace").decode() != text:
            raise DataError(f"{self.location}: a lone surrogate (\\ud800 to \\udfff) is no text")
        return text

    def _get(self, keys: tuple[str, ...], kind: type | tuple[type, ...], what: str) -> Any:
        key = next((key for key in keys if key in self.values), None)
        if key is None:
            found = ", ".join(map(repr, self.values)) or "no keys"
            raise DataError(f"{self.location}: expected a key {' or '.join(map(repr, keys))}, found {found}")
        if not isinstance(self.values[key], kind):
            raise DataError(f"{self.location}: {key!r}: expected {what}, found {type(self.values[key]).__name__}")
        return self.values[key]


def is_json_lines(path: str) -> bool:
    """Whether a file is JSON lines, by its name."""
    return kind_of(path) == JSON_LINES


def read_text(path: str) -> str:
    """Of a text file, line ends as they are."""
    with read_errors_for(path), open_decompressed(path) as file:
        raw = file.read()
    text = _decode_utf8(raw, path).removeprefix(BOM)
    if not text.strip():
        raise DataError(f"{path}: the file is empty; expected text")
    return text


def read_json_lines(path: str) -> Iterator[JsonLine]:
    """The objects of a file of JSON lines, read one by one; blank lines are none."""
    is_empty = True
    with read_errors_for(path), open_decompressed(path) as file:
        for number, raw in enumerate(file, 1):
            where = f"{path}, line {number}"
            line = _decode_utf8(raw, where).removeprefix(BOM if number == 1 else "")
            if line.strip():
                is_empty = False
                yield JsonLine(where, _parse_object(line, where))
    if is_empty:
        raise DataError(f"{path}: the file is empty; expected a JSON object on each line")


def _parse_object(line: str, location: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{location}: not JSON ({parse_error_text(error)}); expected an object") from error
    if not isinstance(value, dict):
        raise DataError(f"{location}: expected a JSON object, found {type(value).__name__}")
    return value


def _decode_utf8(raw: bytes, location: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{location}: not UTF-8 text ({error})") from error
