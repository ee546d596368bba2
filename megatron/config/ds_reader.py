"""One walk over a DeepSpeed-style configuration: every key is judged by the table of ds_keys.py.

All that is wrong with the keys is collected, so that one run reports every error of a file. Not here: what keys mean
together (ds_together.py), and with flags (ds_file.py).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.config.ds_keys import AUTO, OBJECTS, TABLE, Absent, NoEffect, Old, Only
from megatron.config.kinds import Kind, shown
from megatron.config.loose_json import Pairs
from megatron.config.problems import Problems
from megatron.config.setting import Key


@dataclass(frozen=True)
class Found:
    """The keys of one file, by path, judged one by one."""

    name: str
    keys: Mapping[str, Any]
    raw: Mapping[str, Any]
    """Path -> the value as the file has it."""
    origins: Mapping[str, str]
    """Path -> the deprecated name that was written."""
    autos: tuple[str, ...]
    notices: tuple[str, ...]
    of_engine: Mapping[str, Any]
    """What only the engine of `zero.initialize` does, by path."""
    refused: frozenset[str] = frozenset()
    """Keys whose value is an error, or whose name was misspelt."""

    def given(self, path: str) -> bool:
        return path in self.keys or path in self.autos

    def said(self, path: str) -> Any:
        """The value as the file has it, also inside of a key that holds an object."""
        key = next(key for key in self.raw if f"{path}.".startswith(f"{key}."))
        return _inside(self.raw[key], path[len(key) + 1:])

    def lacks(self, path: str) -> bool:
        """Nobody has tried to give it."""
        return not self.given(path) and path not in self.refused

    def first(self, *paths: str) -> str:
        """The first of these keys that is given."""
        return next(path for path in paths if path in self.keys)

    def written(self, path: str, of: str | None = None) -> str:
        """The key as the user wrote it, and where."""
        return self.origins.get(path, path) + (f" of {self.name}" if of is None else of)


def _inside(value: Any, path: str) -> Any:
    if not path:
        return value
    name = next(name for name in value if f"{path}.".startswith(f"{name}."))
    return _inside(value[name], path[len(name) + 1:])


def walk(tree: dict[str, Any], name: str) -> tuple[Found, Problems]:
    """What the file says, and what is wrong with its keys one by one."""
    return _Reader(name).read(tree)


def plain(value: Any, problems: Problems, path: str = "") -> Any:
    """Objects become dicts; of a key that is given twice the first is kept."""
    if isinstance(value, (Pairs, Mapping)):
        result: dict[str, Any] = {}
        for key, inner in value if isinstance(value, Pairs) else value.items():
            where = f"{path}.{key}" if path else str(key)
            if not isinstance(key, str):
                problems.append(f"the key {key!r} is not a text")
            elif key in result:
                problems.append(f"{where} is given twice; leave one of them out")
            else:
                result[key] = plain(inner, problems, where)
        return result
    if isinstance(value, list):
        return [plain(inner, problems, f"{path}[{index}]") for index, inner in enumerate(value)]
    return value


class _Refused(ValueError):
    """What is wrong with one key."""


class _Unsupported(_Refused):
    """A value that DeepSpeed knows and this program does not."""


class _Reader:
    def __init__(self, name: str) -> None:
        self.name = name
        self.keys: dict[str, Any] = {}
        self.raw: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self.autos: list[str] = []
        self.notices: list[str] = []
        self.of_engine: dict[str, Any] = {}
        self.refused: set[str] = set()
        self.strangers: dict[str, tuple[int, list[str]]] = {}
        """Type that is not supported -> its place in `problems`, and its parameters that no other type has."""
        self.problems = Problems()

    def read(self, tree: dict[str, Any]) -> tuple[Found, Problems]:
        olds = []
        for path, value in self._leaves(tree, ""):
            if isinstance(TABLE[path], Old):
                olds.append((path, value))  # their turn comes when all others are known
            else:
                self._attempt(self._take, path, value)
        for path, value in olds:
            self._attempt(self._take_old, path, value)
        for place, names in self.strangers.values():
            self.problems[place] += f", without {', '.join(names)}" if names else ""
        found = Found(self.name, self.keys, self.raw, self.origins, tuple(self.autos), tuple(self.notices),
                      self.of_engine, frozenset(self.refused))
        return found, self.problems

    def _attempt(self, take: Any, path: str, value: Any) -> None:
        try:
            take(path, value)
        except _Refused as refused:
            if isinstance(refused, _Unsupported):
                self.strangers[path] = len(self.problems), []
            self.refused.add(path)
            self.problems.append(str(refused))

    def _leaves(self, tree: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        """(path, value) of every key; `type` comes first, because what else is accepted depends on it."""
        for key in sorted(tree, key=lambda key: key != "type"):
            path, value = prefix + key, tree[key]
            if key == "different_groups" and _is_off(tree):
                continue  # of a section that is switched off, like those that do not exist here
            if path in OBJECTS and isinstance(value, dict):
                yield from self._leaves(value, path + ".")
            elif path in OBJECTS and value is None:
                continue
            elif path in TABLE:
                yield path, value
            elif path in OBJECTS:
                self.problems.append(f"{path} is {shown(value)}: expected an object {{...}}")
            elif prefix.endswith(".params.") and (owner := f"{prefix[:-7]}type") in self.strangers:
                self.strangers[owner][1].append(key)  # goes with its type: no error of its own
            else:
                near, hint = _nearest(path)
                self.refused.add(near)
                self.problems.append(f"unknown key {path}; {hint}")

    def _take(self, path: str, value: Any) -> None:
        row = TABLE[path]
        if value == AUTO and not isinstance(row, Absent):
            self.autos.append(path)
        elif isinstance(row, Key):
            self._take_key(path, value, row)
        elif isinstance(row, Only):
            if not any(same(value, allowed) for allowed in row.values):
                raise _Refused(f"{path} is {shown(value)}: not supported, {row.reason}; "
                               f"expected {shown(row.values[0])}")
        elif isinstance(row, NoEffect):
            converted = _converted(path, value, row.kind)
            if row.in_engine:
                self.of_engine[path] = converted
            elif converted != row.default:
                self.notices.append(f"{path} {shown(value)} has no effect: {row.reason}")
        elif isinstance(row, Absent):
            if not _is_off(value) and value not in row.off:
                raise _Refused(f"{path} is not supported, {row.reason}; leave it out")

    def _take_key(self, path: str, value: Any, row: Key) -> None:
        if value is None and row.nullable:
            return
        if isinstance(value, str) and value.lower() in row.refused:
            raise _Unsupported(f"{path} {shown(value)} is not supported, {row.refused[value.lower()]}")
        self.keys[path] = _converted(path, value, row.expects)
        self.raw[path] = value

    def _take_old(self, path: str, value: Any) -> None:
        row = TABLE[path]
        assert isinstance(row, Old)
        if value == AUTO:
            self.autos.append(path)
            return
        converted = row.to(_converted(path, value, row.kind))
        for new in row.new:
            if converted is not None and new in self.raw:
                self._compare(path, value, new, converted)
            elif converted is not None:
                self._take(new, converted)
                self.origins[new] = path
                self.raw[new] = value
        if row.deprecated:
            self.notices.append(f"{path} is deprecated: read as {' and '.join(row.new)} {shown(converted)}")

    def _compare(self, path: str, value: Any, new: str, converted: Any) -> None:
        """Both names may be given if they say the same."""
        row, known = TABLE[new], self.origins.get(new, new)
        assert isinstance(row, Key)
        if not agree(self.keys[new], _converted(new, converted, row.expects)):
            raise _Refused(f"{path} {shown(value)} is the old name of {known} {shown(self.raw[new])}, and both are "
                           f"given with different values; leave {path} out")


def _is_off(value: Any) -> bool:
    """A section that is not there, or is switched off; those of compression_training are so further in."""
    if not isinstance(value, dict) or not value:
        return value is None or value is False or value == {}
    return value.get("enabled") is False or isinstance(value.get("shared_parameters"), dict) and \
        value["shared_parameters"].get("enabled") is False


def _converted(path: str, value: Any, kind: Kind) -> Any:
    try:
        return kind.convert(value)
    except ValueError:
        near = difflib.get_close_matches(value, kind.words, n=1, cutoff=0.5) if isinstance(value, str) else []
        hint = f'; did you mean "{near[0]}"?' if near else ""
        raise _Refused(f"{path} is {shown(value)}: expected {kind.expected}{hint}") from None


def same(value: Any, allowed: Any) -> bool:
    """Equal, whatever the case of a text; 1 is true, and true is not 1."""
    if isinstance(value, str) and isinstance(allowed, str):
        return value.lower() == allowed.lower()
    return bool(value == allowed) and (isinstance(allowed, bool) or not isinstance(value, bool))


def agree(one: Any, other: Any) -> bool:
    """Equal, up to rounding."""
    if isinstance(one, float) and isinstance(other, (int, float)):
        return one == other or abs(one - other) <= 1e-9 * max(abs(one), abs(other))
    return bool(one == other)


_MEANT = {"load_universal_checkpoint": "checkpoint.load_universal",
          "checkpoint.load_universal_checkpoint": "checkpoint.load_universal",
          "optimizer.params.learning_rate": "optimizer.params.lr"}
"""Names that people write whose spelling is not near the key's."""


def _nearest(path: str) -> tuple[str, str]:
    """The key that the user may have meant, and a hint: another place for a section, a similar key beside it, the same
    words in another order, or another section for a key."""
    section, _, key = path.rpartition(".")
    if parents := sorted(other.rpartition(".")[0] for other in OBJECTS if other.rpartition(".")[2] == key):
        return "", "move it " + " or ".join(f"into {parent}" if parent else "to the top level" for parent in parents)
    known = sorted({*TABLE, *OBJECTS})
    beside = [other.rpartition(".")[2] for other in known if other.rpartition(".")[0] == section]
    near = [other for other in beside if sorted(other.split("_")) == sorted(key.split("_"))]
    near = near or difflib.get_close_matches(key, beside, n=1, cutoff=0.72)
    elsewhere = [other for other in known if other.rpartition(".")[2] == key]
    meant = _MEANT.get(path) or (f"{section}.{near[0]}".lstrip(".") if near else next(iter(elsewhere), ""))
    return meant, f"did you mean {meant}?" if meant else "docs/ds_config.md lists every key"
