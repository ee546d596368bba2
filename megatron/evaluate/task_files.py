"""Readers of task data: a whole text file, or JSON lines. Errors name the file, the line and the key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from data.compressed import open_decompressed, read_errors_for
from data.input_files import JSON_LINES, kind_of
from data.storage import DataError, parse_error_text
from megatron.inference.prompts import BOM, decode_utf8


@dataclass(frozen=True)
class JsonLine:
    location: str
    values: dict[str, Any]

    def get_text(self, *keys: str) -> str:
        """The value of the first of `keys` that is present."""
        return self._check_unicode(self._get(keys, str, "text"))

    def get_texts(self, key: str) -> list[str]:
        texts: list[str] = self._get((key,), list, "a list of texts")
        if not texts or not all(isinstance(text, str) for text in texts):
            raise DataError(f"{self.location}: {key!r}: expected a list of texts")
        return [self._check_unicode(text) for text in texts]

    def get_index(self, key: str, count: int) -> int:
        """A number below `count`, or its decimal digits as a string."""
        value = self._get((key,), (int, str), "a number")
        if isinstance(value, bool) or not str(value).isdecimal() or int(value) >= count:
            raise DataError(f"{self.location}: {key!r}: expected a number from 0 to {count - 1}, found {value!r}")
        return int(value)

    def _check_unicode(self, text: str) -> str:
        """Tokenizers change lone surrogates."""
        if not text.isascii() and text.encode("utf-8", "replace").decode() != text:
            raise DataError(f"{self.location}: a lone surrogate (\\ud800 to \\udfff) is no text")
        return text

    def _get(self, keys: tuple[str, ...], kind: type | tuple[type, ...], what: str) -> Any:
        key = next((key for key in keys if key in self.values), None)
        if key is None:
            known = ", ".join(map(repr, self.values)) or "no keys"
            raise DataError(f"{self.location}: expected a key {' or '.join(map(repr, keys))}, found {known}")
        if not isinstance(self.values[key], kind):
            raise DataError(f"{self.location}: {key!r}: expected {what}, found {type(self.values[key]).__name__}")
        return self.values[key]


def is_json_lines(path: str) -> bool:
    """By the name of the file."""
    return kind_of(path) == JSON_LINES


def read_text(path: str) -> str:
    """The content of a text file, with its line ends."""
    with read_errors_for(path), open_decompressed(path) as file:
        raw = file.read()
    text = decode_utf8(raw, path).removeprefix(BOM)
    if not text.strip():
        raise DataError(f"{path}: the file is empty; expected text")
    return text


def read_json_lines(path: str) -> Iterator[JsonLine]:
    """Skips blank lines."""
    is_empty = True
    with read_errors_for(path), open_decompressed(path) as file:
        for number, raw in enumerate(file, 1):
            where = f"{path}, line {number}"
            line = decode_utf8(raw, where).removeprefix(BOM if number == 1 else "")
            if line.strip():
                is_empty = False
                try:
                    value = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise DataError(f"{where}: not JSON ({parse_error_text(error)}); expected an object") from error
                if not isinstance(value, dict):
                    raise DataError(f"{where}: expected a JSON object, found {type(value).__name__}")
                yield JsonLine(where, value)
    if is_empty:
        raise DataError(f"{path}: the file is empty; expected a JSON object on each line")
