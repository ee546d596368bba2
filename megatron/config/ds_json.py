"""A DeepSpeed JSON configuration (file or dict), together with the flags that were given -> a Config.

    read_ds_json(source)          every key checked against the table of ds_keys.py
    build_ds_config(source, ...)  the Config; a key and a flag that are both given must agree

Comments and trailing commas are accepted. An absent key leaves the preset's value or the default; `"auto"` does the
same, with a note. All errors of a file are collected. What keys mean together is in ds_cross_keys.py.
"""

from __future__ import annotations

import base64
import difflib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from itertools import chain
from pathlib import Path
from typing import Any

from megatron.config import ds_cross_keys
from megatron.config.ds_cross_keys import (BATCH_FIELDS, BATCH_SIZE_KEYS, FREEZE_STEP, OPTIMIZER_PARAMS, WARMUP_STEPS,
                                           FieldValue, solve_batch_sizes)
from megatron.config.ds_keys import (AUTO_VALUE, DS_KEYS, DS_OBJECTS, DsKeyValues, FixedValue, IgnoredKey, RenamedKey,
                                     UnsupportedSection, keys_of_fields)
from megatron.config.optimizer_config import OPTIMIZERS, ScheduleConfig
from megatron.config.schema import (ErrorCollector, ErrorList, FlagToKeyNames, JsonKey, JsonType, error_sentences,
                                    flag_name, json_text, require)
from megatron.config.tree import Config, build_config, data_parallel_size, unused_settings
from megatron.errors import ConfigError

STEPS_PER_PRINT = "steps_per_print"  # a flag with another value wins, with a note; for other keys that is an error


def build_ds_config(source: str | os.PathLike[str] | Mapping[str, Any] | DsKeyValues, *,
                    flags: Mapping[str, Any] | None = None, fallback: Mapping[str, Any] | None = None,
                    world_size: int = 1, in_engine: bool = False, argument: str = "config",
                    collector: ErrorCollector | None = None) -> Config:
    """The Config of a JSON file (or a dict, or parsed keys) and flags, which must agree; `fallback` (a preset) yields
    to both. `in_engine` selects the engine's notes; `argument` names the parameter that held `source`. Errors are
    raised, or added to `collector`; then the Config leaves out the wrong values."""
    flags, fallback = flags or {}, fallback or {}
    errors = ErrorCollector() if collector is None else collector
    ds_values = source if isinstance(source, DsKeyValues) else parse_ds_json(source, argument)
    # An engine gets no warm-up flags: "auto" means DeepSpeed's default then.
    in_effect = replace(ds_values, auto_keys=tuple(
        path for path in ds_values.auto_keys if not in_engine or path != WARMUP_STEPS))
    errors.doubtful.update(_fields_of_keys(ds_values.invalid_keys))
    found = list(_field_values(in_effect, flags, fallback.get("lr", ScheduleConfig.lr)))
    errors.add_errors(ds_values.errors, ds_values.name)
    errors.add_errors(_flag_conflicts(in_effect, found, flags))
    values = {**{name: value for name, value, _ in found}, **flags}
    if not values.get("fp16"):  # as in DeepSpeed, its other keys are ignored then
        ignored = {name for name, _, path in found if path.startswith("fp16.") and path != "fp16.enabled"}
        values = {name: value for name, value in values.items() if name in flags or name not in ignored}
    key_of = {name: path for name, _, path in found if name not in flags}
    others = _keys_of_other_flags(flags if in_engine else {**fallback, **flags}, values.get("optimizer"))
    keys_of_given = {flag_name(name): OPTIMIZER_PARAMS if name == "optimizer_params"
                     else in_effect.name_as_written(path) for name, path in key_of.items()}
    errors.key_names = FlagToKeyNames(keys_of_given, others, in_engine, ds_values.name)
    dp = 1
    try:
        tp = flags.get("model_parallel_size", 1)
        dp = data_parallel_size(world_size, max(1, tp))  # an invalid size is reported by its section
        values |= _batch_sizes(in_effect, flags, dp)
    except ConfigError as error:
        errors.add_errors(error_sentences(error))
    config = build_config({**fallback, **values}, errors)
    if collector is None:
        errors.raise_if_any()
    if errors:
        return config
    config = replace(config, key_names=errors.key_names)
    # an engine's blocks are recomputed by calls, not by --checkpoint-activations
    read = {item.name for item in fields(config.recompute)} if in_engine else set[str]()
    unread = (f" {ds_values.name}: {config.key_names.translate(line)}"
              for line in unused_settings(config, [name for name in key_of if name not in read], {*key_of, *flags}))
    return replace(config, notes=(*ds_notes(ds_values, config, dp, in_engine), *unread))


def read_ds_json(source: str | os.PathLike[str] | Mapping[str, Any], argument: str = "config") -> DsKeyValues:
    """The file's keys, checked one by one and together. `argument` names the parameter that held it, and a dict."""
    ds_values = parse_ds_json(source, argument)
    list(_field_values(ds_values, {}))  # adds the errors of keys together
    ds_values.errors.raise_if_any(ds_values.name)
    return ds_values


def parse_ds_json(source: str | os.PathLike[str] | Mapping[str, Any], argument: str = "config") -> DsKeyValues:
    """The file's keys, with the errors of single keys."""
    name = argument if isinstance(source, Mapping) else os.fspath(source)
    text = None if isinstance(source, Mapping) else _read_text(name, argument)
    if text is not None and not os.path.exists(name):
        name = "the base64 configuration"
    values = DsKeyValues(name)
    try:
        tree = to_plain_dicts(source, values.errors) if text is None else parse_loose_json(text, name, values.errors)
    except RecursionError:
        raise ConfigError(f"{name} is nested too deeply to be a configuration") from None
    require(isinstance(tree, dict), f"{name}: expected an object {{...}}, found {json_text(tree)}")
    renamed = []  # checked last, when all other keys are known
    for path, value in _leaves(values, tree, ""):
        if isinstance(DS_KEYS[path], RenamedKey):
            renamed.append((path, value))
        else:
            _add_value(values, path, value)
    for path, value in renamed:
        _add_value(values, path, value)
    return values


def _read_text(name: str, argument: str) -> str:
    """The file's text, or the text that `name` itself encodes in base64."""
    given = f"{argument}{' ' if argument.startswith('--') else '='}{name}"
    try:
        return Path(name).read_text(encoding="utf-8-sig")
    except OSError as error:
        with suppress(ValueError):  # a JSON object in base64, as launchers pass it on a command line
            text = base64.urlsafe_b64decode(name.encode()).decode("utf-8").lstrip()
            if text.startswith("{"):
                return text
        raise ConfigError(f"{given} cannot be read: {error.strerror or error}; give the path of a JSON file") from None
    except ValueError as error:  # not UTF-8, or a path with a null byte
        raise ConfigError(f"{given} is not a text file: {error}; give the path of a JSON file") from None


# ---- from text to keys: each checked by itself -------------------------------------------------------------------

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


class _JsonPairs(list[tuple[str, Any]]):
    """The (key, value) pairs of one JSON object, in the file's order."""


def parse_loose_json(text: str, name: str, problems: ErrorList) -> Any:
    """Parse JSON with comments and trailing commas; ConfigError with line and column of file `name`. A key that is
    given twice is added to `problems`."""
    # comments and commas become blanks, so that positions stay
    plain = _COMMENT.sub(lambda m: m[0] if m[1] else re.sub(r"[^\n]", " ", m[0]), text)
    plain = _TRAILING.sub(lambda m: m[0] if m[1] is None else m[1] + " ", plain)
    try:
        return to_plain_dicts(json.loads(plain, object_pairs_hook=_JsonPairs), problems)
    except json.JSONDecodeError as error:
        word = re.match(r'[\w."+-]+|.', text[error.pos:])
        found = repr(word[0][:30]) if word else f"the end of the {'line' if text[error.pos:] else 'file'}"
        raise ConfigError(f"{name} line {error.lineno} column {error.colno}: {_EXPECTED.get(error.msg, error.msg)}, "
                          f"found {found}") from None
    except ValueError:  # Python refuses integers of more than 4300 digits, without a position
        raise ConfigError(f"{name} holds a number of too many digits") from None


def to_plain_dicts(value: Any, problems: ErrorList, path: str = "") -> Any:
    """Turn objects into dicts; of a duplicate key the first value is kept."""
    if isinstance(value, (_JsonPairs, Mapping)):
        result: dict[str, Any] = {}
        for key, inner in value if isinstance(value, _JsonPairs) else value.items():
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


def _leaves(values: DsKeyValues, tree: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """(path, value) of every key; `type` first, since it decides which others are accepted."""
    for key in sorted(tree, key=lambda key: key != "type"):
        path, value = prefix + key, tree[key]
        if key == "different_groups" and _is_off(tree):
            continue  # the section is switched off, like unsupported ones
        if path in DS_OBJECTS and isinstance(value, dict):
            yield from _leaves(values, value, path + ".")
        elif path in DS_OBJECTS and value is None:
            continue
        elif path in DS_KEYS:
            yield path, value
        elif path in DS_OBJECTS:
            values.errors.append(f"{path} is {json_text(value)}: expected an object {{...}}")
        elif not (prefix.endswith(".params.") and f"{prefix[:-7]}type" in values.invalid_keys):
            near, hint = _nearest_key(path)
            values.invalid_keys.add(near)
            values.errors.append(f"unknown key {path}; {hint}")


def _add_value(values: DsKeyValues, path: str, value: Any) -> None:
    try:
        if value == AUTO_VALUE and not isinstance(DS_KEYS[path], UnsupportedSection):
            values.auto_keys += (path,)
        else:
            _add_checked_value(values, path, value)
    except ConfigError as error:
        values.invalid_keys.add(path)
        values.errors.append(str(error))


def _add_checked_value(values: DsKeyValues, path: str, value: Any) -> None:
    row = DS_KEYS[path]
    if isinstance(row, RenamedKey):
        _add_renamed_key(values, path, value, row)
    elif isinstance(row, JsonKey):
        if isinstance(value, str) and value.lower() in row.refused:
            raise ConfigError(f"{path} {json_text(value)} is not supported, {row.refused[value.lower()]}")
        if value is not None or not row.nullable:
            values.keys[path] = _convert_value(path, value, row.json_type)
            values.raw_values[path] = value
    elif isinstance(row, FixedValue):
        if not any(values_match(value, allowed) for allowed in row.values):
            raise ConfigError(f"{path} is {json_text(value)}: not supported, {row.reason}; "
                              f"expected {json_text(row.values[0])}")
    elif isinstance(row, IgnoredKey):
        converted = _convert_value(path, value, row.json_type)
        if row.has_effect_in_engine:
            values.engine_values[path] = converted
        elif converted != row.default:
            values.notices.append(f"{path} {json_text(value)} has no effect: {row.reason}")
    elif not _is_off(value) and value not in row.off:
        raise ConfigError(f"{path} is not supported, {row.reason}; leave it out")


def _add_renamed_key(values: DsKeyValues, path: str, value: Any, row: RenamedKey) -> None:
    converted = row.convert(_convert_value(path, value, row.json_type))
    for new in () if converted is None else row.new_paths:
        if new not in values.raw_values:
            _add_checked_value(values, new, converted)
            values.deprecated_names[new] = path
            values.raw_values[new] = value
            continue
        # both names may be given, with the same value
        new_row, known = DS_KEYS[new], values.deprecated_names.get(new, new)
        assert isinstance(new_row, JsonKey)
        if not values_are_close(values.keys[new], _convert_value(new, converted, new_row.json_type)):
            raise ConfigError(f"{path} {json_text(value)} is the old name of {known} "
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


def _convert_value(path: str, value: Any, kind: JsonType | None) -> Any:
    assert kind is not None, "the table fills it in"
    try:
        return kind.convert(value)
    except ValueError:
        near = difflib.get_close_matches(value, kind.choices, n=1, cutoff=0.5) if isinstance(value, str) else []
        hint = f'; did you mean "{near[0]}"?' if near else ""
        raise ConfigError(f"{path} is {json_text(value)}: expected {kind.expected}{hint}") from None


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


# ---- from keys to fields -----------------------------------------------------------------------------------------


def _flag_conflicts(ds_values: DsKeyValues, found: Iterable[FieldValue], flags: Mapping[str, Any]) -> Iterator[str]:
    """An error for each key and flag that differ."""
    for name, value, path in found:
        if name in flags and not values_are_close(flags[name], value) and path != STEPS_PER_PRINT:
            raw = ds_values.raw_value(path)
            meant = "" if values_match(raw, value) else f" (that is {flag_name(name)} {value_text(value)})"
            yield (f"{flag_name(name)} is {value_text(flags[name])}, but {ds_values.name_as_written(path)} of "
                   f"{ds_values.name} is {json_text(raw)}{meant}: give one of them, or the same value")


def _fields_of_keys(paths: Iterable[str]) -> Iterator[str]:
    """The fields that these keys set."""
    for row in map(DS_KEYS.get, paths):
        if isinstance(row, RenamedKey):
            yield from _fields_of_keys(row.new_paths)
        elif isinstance(row, JsonKey) and row.field:
            yield row.field


def _field_values(ds_values: DsKeyValues, flags: Mapping[str, Any], peak: float = ScheduleConfig.lr,
                  ) -> Iterator[FieldValue]:
    """(field, value, path of the key) for all but the batch sizes; keys that contradict each other are errors."""
    rows = ((DS_KEYS[path], value, path) for path, value in ds_values.keys.items())
    alone = ((row.field, row.convert(value), path)
             for row, value, path in rows if isinstance(row, JsonKey) and row.is_independent)
    seen: dict[str, tuple[Any, str]] = {}
    for name, value, path in chain(alone, ds_cross_keys.weight_group_fields(ds_values, flags)):
        other, where = seen.setdefault(name, (value, path))
        if not values_are_close(other, value):
            one, two = (f"{ds_values.name_as_written(key)} {json_text(ds_values.raw_value(key))}"
                        for key in (where, path))
            ds_values.errors.append(f"{one} and {two} disagree on {flag_name(name)}; leave one out")
        yield name, value, path
    yield from ds_cross_keys.optimizer_fields(ds_values, flags)
    yield from ds_cross_keys.scheduler_fields(ds_values, flags, peak)
    yield from ds_cross_keys.monitor_fields(ds_values)
    yield from ds_cross_keys.layer_drop_fields(ds_values, flags)


def _batch_sizes(ds_values: DsKeyValues, flags: Mapping[str, Any], dp_size: int) -> dict[str, int]:
    """Batch sizes of the file and the flags, with missing ones computed; {} if the file has none."""
    if not ds_values.invalid_keys.isdisjoint(BATCH_SIZE_KEYS):
        return {}
    given = {key: (ds_values.keys[key], f"{ds_values.name_as_written(key)} of {ds_values.name}")
             for key in BATCH_SIZE_KEYS if key in ds_values.keys}
    if not given:
        return {}
    problems = ErrorList(flags)
    for key, name in BATCH_FIELDS.items():
        if name in flags:
            value = flags[name]
            was, where = given.setdefault(key, (value, flag_name(name)))
            problems.require(value >= 1, f"{{{name}}} is {value}: expected a number >= 1")
            problems.require(was == value, f"{{{name}}} is {value}, but {{where}} is {was}: give one of them, or the "
                             "same value", where=where)
    problems.raise_if_any()
    total, micro, accumulation = (given.get(key) for key in BATCH_SIZE_KEYS)
    return dict(
        zip(("global_batch_size", "batch_size"), solve_batch_sizes(total, micro, accumulation, dp_size), strict=True))


# ---- words -------------------------------------------------------------------------------------------------------


def _keys_of_other_flags(flags: Mapping[str, Any], optimizer: str | None) -> dict[str, str]:
    """Flag that is not given -> the key that sets the same field, if a single key does."""
    paths: dict[str, list[JsonKey]] = {}
    for key in keys_of_fields():
        paths.setdefault(key.field, []).append(key)
    of_optimizer = {field: OPTIMIZER_PARAMS + name
                    for name, field in OPTIMIZERS[optimizer].fields.items()} if optimizer else {}
    return {flag_name(name): of_optimizer.get(name, keys[0].path) for name, keys in paths.items()
            if name not in flags and (keys[0].is_independent or len(keys) == 1)}


def ds_notes(ds_values: DsKeyValues, config: Config, dp_size: int, in_engine: bool = False) -> tuple[str, ...]:
    """Notes for the user: deprecated keys, keys without effect, the values chosen for "auto"."""
    lines = list(ds_values.notices)
    for path, value in () if in_engine else ds_values.engine_values.items():
        row = DS_KEYS[path]
        assert isinstance(row, IgnoredKey)
        if value != row.default:
            lines.append(f"{path} {json_text(value)} has no effect: {row.reason}")
    steps, in_force = ds_values.keys.get(STEPS_PER_PRINT), config.log.log_interval
    if steps is not None and steps != in_force:
        lines.append(f"{STEPS_PER_PRINT} {steps} has no effect: --log-interval {value_text(in_force)} is given")
    lines += [f'{path} "auto": {_value_of_auto(path, config, dp_size)}' for path in ds_values.auto_keys]
    if not config.precision.fp16:
        unused = [path for path in ds_values.keys if path.startswith("fp16.") and path != "fp16.enabled"]
        if unused and "fp16.enabled" not in ds_values.keys:
            lines.append(f"{', '.join(unused)} without effect: fp16.enabled is not true")
    if ds_values.keys.get("scheduler.type", "").startswith("Warmup") and ds_values.keys.get(WARMUP_STEPS) != 0:
        lines.append("the warm-up starts at once; DeepSpeed's has a learning rate of 0 in its first two steps")
    return tuple(f" {ds_values.name}: {line}" for line in lines)


def value_text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "not set" if value is None else " ".join(value) if isinstance(value, (tuple, list)) else str(value)


def _value_of_auto(path: str, config: Config, dp_size: int) -> str:
    """The value used for a key that is "auto"."""
    if path in BATCH_SIZE_KEYS:
        sizes = (config.global_batch_size(dp_size), config.train.batch_size, config.accumulation(dp_size))
        return str(sizes[BATCH_SIZE_KEYS.index(path)])
    if path == WARMUP_STEPS:
        return f"{config.warmup_steps} steps of {config.decay_iters}"
    if path == OPTIMIZER_PARAMS + FREEZE_STEP:
        return "found while the run goes on"
    row = DS_KEYS[path]
    if not isinstance(row, JsonKey) or not row.field:
        return "the default"
    return f"{flag_name(row.field)} {value_text(config.settings()[row.field])}"
