"""Parse a DeepSpeed JSON file (comments and trailing commas allowed) and check every key against ds_keys.py.

All errors of a file are collected. Objects are kept as lists of pairs while parsing, so that a key given twice is seen.
Not here: what keys mean together (ds_cross_keys.py), and with flags (ds_json.py).
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.config.config_errors import ErrorList
from megatron.config.ds_keys import (AUTO_VALUE, DS_KEYS, DS_OBJECTS, FixedValue, IgnoredKey, RenamedKey,
                                     UnsupportedSection)
from megatron.config.schema import JsonKey, JsonType, json_text
from megatron.errors import ConfigError

_STRING = r'"(?:[^"\\\n]|\\.)*"'
_COMMENT = re.compile(rf"({_STRING})|//[^\n]*|#[^\n]*|/\*.*?\*/", re.DOTALL)
_TRAILING = re.compile(rf'{_STRING}|(?<=[^\s\[{{,:])(\s*),(?=\s*[\]}}])', re.DOTALL)

_EXPECTED = {  # json's messages -> ours; others are clear enough
    "Expecting ',' delimiter": "expected ',' or a closing bracket",
    "Expecting ':' delimiter": "expected ':' after the key",
    "Expecting property name enclosed in double quotes": "expected a key in double quotes, or '}'",
    "Expecting value": 'expected a value (a number, "text", true, false, null, {...} or [...])',
    "Extra data": "expected the end of the file",
    "Unterminated string starting at": "expected a closing double quote for the text that starts here",
}


class JsonPairs(list[tuple[str, Any]]):
    """The (key, value) pairs of one JSON object, in the file's order."""


def parse_loose_json(text: str, name: str) -> Any:
    """Parse JSON with comments and trailing commas; ConfigError with line and column of file `name`."""
    # comments and commas become blanks, so that positions stay
    plain = _COMMENT.sub(lambda m: m[0] if m[1] else re.sub(r"[^\n]", " ", m[0]), text)
    plain = _TRAILING.sub(lambda m: m[0] if m[1] is None else m[1] + " ", plain)
    try:
        return json.loads(plain, object_pairs_hook=JsonPairs)
    except json.JSONDecodeError as error:
        word = re.match(r'[\w."+-]+|.', text[error.pos:])
        found = repr(word[0][:30]) if word else f"the end of the {'line' if text[error.pos:] else 'file'}"
        raise ConfigError(f"{name} line {error.lineno} column {error.colno}: {_EXPECTED.get(error.msg, error.msg)}, "
                          f"found {found}") from None
    except RecursionError:
        raise ConfigError(f"{name} is nested too deeply to be a configuration") from None
    except ValueError:  # Python refuses integers of more than 4300 digits, without a position
        raise ConfigError(f"{name} holds a number of too many digits") from None


@dataclass
class DsKeyValues:
    """The keys of one file by path, checked one by one."""

    name: str
    keys: dict[str, Any] = field(default_factory=dict)
    raw_values: dict[str, Any] = field(default_factory=dict)  # path -> unconverted value
    deprecated_names: dict[str, str] = field(default_factory=dict)  # path -> the deprecated name used in the file
    auto_keys: tuple[str, ...] = ()
    notices: list[str] = field(default_factory=list)
    engine_values: dict[str, Any] = field(default_factory=dict)  # that only the engine of `zero.initialize` honours
    invalid_keys: set[str] = field(default_factory=set)  # keys with an invalid value or a misspelt name

    def is_given(self, path: str) -> bool:
        return path in self.keys or path in self.auto_keys

    def raw_value(self, path: str) -> Any:
        """The unconverted value, also inside a key that holds an object."""
        value: Any = self.raw_values
        while path:
            key = next(key for key in value if f"{path}.".startswith(f"{key}."))
            value, path = value[key], path[len(key) + 1:]
        return value

    def is_absent(self, path: str) -> bool:
        """Whether the file does not contain the key, not even wrongly."""
        return not self.is_given(path) and path not in self.invalid_keys

    def first_given(self, *paths: str) -> str:
        """The first of `paths` that is given."""
        return next(path for path in paths if path in self.keys)

    def name_as_written(self, path: str, of: str | None = None) -> str:
        """The key as the user wrote it, and the file."""
        return self.deprecated_names.get(path, path) + (f" of {self.name}" if of is None else of)


def to_plain_dicts(value: Any, problems: ErrorList, path: str = "") -> Any:
    """Turn objects into dicts; of a duplicate key the first value is kept."""
    if isinstance(value, (JsonPairs, Mapping)):
        result: dict[str, Any] = {}
        for key, inner in value if isinstance(value, JsonPairs) else value.items():
            where = f"{path}.{key}" if path else str(key)
            if not isinstance(key, str):
                problems.append(f"the key {key!r} is not a text")
            elif key in result:
                problems.append(f"{where} is given twice; leave one of them out")
            else:
                result[key] = to_plain_dicts(inner, problems, where)
        return result
    if isinstance(value, list):
        return [to_plain_dicts(inner, problems, f"{path}[{index}]") for index, inner in enumerate(value)]
    return value


class _InvalidKey(ValueError):
    """An error of one key."""


class _UnsupportedValue(_InvalidKey):
    """A value that DeepSpeed supports and this program does not."""


class DsKeyChecker:
    """Checks the keys of the file `name` one by one."""

    def __init__(self, name: str) -> None:
        self.values = DsKeyValues(name)
        # unsupported type -> (index of its error, parameters that no other type has)
        self.params_of_unsupported_types: dict[str, tuple[int, list[str]]] = {}
        self.errors = ErrorList()

    def check(self, tree: dict[str, Any]) -> tuple[DsKeyValues, ErrorList]:
        """The file's keys, and the errors of single keys."""
        renamed = []
        for path, value in self._leaves(tree, ""):
            if isinstance(DS_KEYS[path], RenamedKey):
                renamed.append((path, value))  # renamed keys come last, when all others are known
            else:
                self._collect_error(path, value)
        for path, value in renamed:
            self._collect_error(path, value)
        for place, names in self.params_of_unsupported_types.values():
            self.errors[place] += f", without {', '.join(names)}" if names else ""
        return self.values, self.errors

    def _collect_error(self, path: str, value: Any) -> None:
        try:
            self._add_value(path, value)
        except _InvalidKey as error:
            if isinstance(error, _UnsupportedValue):
                self.params_of_unsupported_types[path] = len(self.errors), []
            self.values.invalid_keys.add(path)
            self.errors.append(str(error))

    def _leaves(self, tree: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        """(path, value) of every key; `type` first, since it decides which others are accepted."""
        for key in sorted(tree, key=lambda key: key != "type"):
            path, value = prefix + key, tree[key]
            if key == "different_groups" and _is_off(tree):
                continue  # the section is switched off, like unsupported ones
            if path in DS_OBJECTS and isinstance(value, dict):
                yield from self._leaves(value, path + ".")
            elif path in DS_OBJECTS and value is None:
                continue
            elif path in DS_KEYS:
                yield path, value
            elif path in DS_OBJECTS:
                self.errors.append(f"{path} is {json_text(value)}: expected an object {{...}}")
            elif prefix.endswith(".params.") and (owner := f"{prefix[:-7]}type") in self.params_of_unsupported_types:
                self.params_of_unsupported_types[owner][1].append(key)  # part of the error of its type
            else:
                near, hint = _nearest_key(path)
                self.values.invalid_keys.add(near)
                self.errors.append(f"unknown key {path}; {hint}")

    def _add_value(self, path: str, value: Any) -> None:
        row = DS_KEYS[path]
        if value == AUTO_VALUE and not isinstance(row, UnsupportedSection):
            self.values.auto_keys += (path,)
        elif isinstance(row, RenamedKey):
            self._add_renamed_key(path, value, row)
        elif isinstance(row, JsonKey):
            if isinstance(value, str) and value.lower() in row.refused:
                raise _UnsupportedValue(f"{path} {json_text(value)} is not supported, {row.refused[value.lower()]}")
            if value is not None or not row.nullable:
                self.values.keys[path] = _convert_value(path, value, row.known_json_type)
                self.values.raw_values[path] = value
        elif isinstance(row, FixedValue):
            if not any(values_match(value, allowed) for allowed in row.values):
                raise _InvalidKey(f"{path} is {json_text(value)}: not supported, {row.reason}; "
                                  f"expected {json_text(row.values[0])}")
        elif isinstance(row, IgnoredKey):
            converted = _convert_value(path, value, row.json_type)
            if row.has_effect_in_engine:
                self.values.engine_values[path] = converted
            elif converted != row.default:
                self.values.notices.append(f"{path} {json_text(value)} has no effect: {row.reason}")
        elif isinstance(row, UnsupportedSection):
            if not _is_off(value) and value not in row.off:
                raise _InvalidKey(f"{path} is not supported, {row.reason}; leave it out")

    def _add_renamed_key(self, path: str, value: Any, row: RenamedKey) -> None:
        values, converted = self.values, row.convert(_convert_value(path, value, row.json_type))
        for new in () if converted is None else row.new_paths:
            if new not in values.raw_values:
                self._add_value(new, converted)
                values.deprecated_names[new] = path
                values.raw_values[new] = value
                continue
            # both names may be given, with the same value
            new_row, known = DS_KEYS[new], values.deprecated_names.get(new, new)
            assert isinstance(new_row, JsonKey)
            if not values_are_close(values.keys[new], _convert_value(new, converted, new_row.known_json_type)):
                raise _InvalidKey(f"{path} {json_text(value)} is the old name of {known} "
                                  f"{json_text(values.raw_values[new])}, and both are given with different values; "
                                  f"leave {path} out")
        if row.deprecated:
            values.notices.append(f"{path} is deprecated: read as {' and '.join(row.new_paths)} {json_text(converted)}")


def _is_off(value: Any) -> bool:
    """Whether a section is absent or switched off; compression_training nests the switch deeper."""
    if not isinstance(value, dict) or not value:
        return value is None or value is False or value == {}
    return value.get("enabled") is False or isinstance(value.get("shared_parameters"), dict) and \
        value["shared_parameters"].get("enabled") is False


def _convert_value(path: str, value: Any, kind: JsonType) -> Any:
    try:
        return kind.convert(value)
    except ValueError:
        near = difflib.get_close_matches(value, kind.choices, n=1, cutoff=0.5) if isinstance(value, str) else []
        hint = f'; did you mean "{near[0]}"?' if near else ""
        raise _InvalidKey(f"{path} is {json_text(value)}: expected {kind.expected}{hint}") from None


def values_match(value: Any, allowed: Any) -> bool:
    """Equality that ignores the case of text; 1 equals true, but true does not equal 1."""
    if isinstance(value, str) and isinstance(allowed, str):
        return value.lower() == allowed.lower()
    return bool(value == allowed) and (isinstance(allowed, bool) or not isinstance(value, bool))


def values_are_close(one: Any, other: Any) -> bool:
    """Equality up to rounding."""
    if isinstance(one, float) and isinstance(other, (int, float)):
        return one == other or abs(one - other) <= 1e-9 * max(abs(one), abs(other))
    return bool(one == other)


# common wrong names whose spelling is not similar to the right one
_MEANT = {"load_universal_checkpoint": "checkpoint.load_universal",
          "checkpoint.load_universal_checkpoint": "checkpoint.load_universal",
          "optimizer.params.learning_rate": "optimizer.params.lr"}


def _nearest_key(path: str) -> tuple[str, str]:
    """(the key that the user may have meant, a hint): another place for a section, a similar key beside it, the same
    words in another order, or the key's right section."""
    section, _, key = path.rpartition(".")
    if parents := sorted(other.rpartition(".")[0] for other in DS_OBJECTS if other.rpartition(".")[2] == key):
        return "", "move it " + " or ".join(f"into {parent}" if parent else "to the top level" for parent in parents)
    known = sorted({*DS_KEYS, *DS_OBJECTS})
    beside = [other.rpartition(".")[2] for other in known if other.rpartition(".")[0] == section]
    near = [other for other in beside if sorted(other.split("_")) == sorted(key.split("_"))]
    near = near or difflib.get_close_matches(key, beside, n=1, cutoff=0.72)
    elsewhere = [other for other in known if other.rpartition(".")[2] == key]
    meant = _MEANT.get(path) or (f"{section}.{near[0]}".lstrip(".") if near else next(iter(elsewhere), ""))
    return meant, f"did you mean {meant}?" if meant else "docs/ds_config.md lists every key"
