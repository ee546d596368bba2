"""A DeepSpeed JSON configuration (file or dict), together with the flags that were given -> a Config.

    read_ds_json(source)          every key checked against the table of ds_keys.py
    build_ds_config(source, ...)  the Config; a key and a flag that are both given must agree

An absent key leaves the preset's value or the default; `"auto"` does the same, with a note.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from megatron.config import ds_cross_keys
from megatron.config.config_errors import NAME_PREFIX_END, ErrorCollector, ErrorList, FlagToKeyNames
from megatron.config.ds_cross_keys import (BATCH_FIELDS, BATCH_SIZE_KEYS, FREEZE_STEP, OPTIMIZER_PARAMS, WARMUP_STEPS,
                                           FieldValue, solve_batch_sizes)
from megatron.config.ds_keys import DS_KEYS, IgnoredKey, RenamedKey, keys_of_fields
from megatron.config.ds_reader import (DsKeyChecker, DsKeyValues, parse_loose_json, to_plain_dicts, values_are_close,
                                       values_match)
from megatron.config.optimizer_config import OPTIMIZERS, ScheduleConfig
from megatron.config.schema import JsonKey, flag_name, json_text, require
from megatron.config.tree import Config, build_config, data_parallel_size, unused_settings
from megatron.errors import ConfigError

# Fields without effect unless fp16 is enabled; as in DeepSpeed, they are ignored then.
FP16_ONLY = frozenset(row.field for path, row in DS_KEYS.items()
                      if isinstance(row, JsonKey) and path.startswith("fp16.") and path != "fp16.enabled")
KEYS_THAT_YIELD_TO_FLAGS = frozenset(path for path, row in DS_KEYS.items() if isinstance(row, JsonKey) and
                                     row.flag_wins)


def build_ds_config(source: str | os.PathLike[str] | Mapping[str, Any], *, flags: Mapping[str, Any] | None = None,
                    fallback: Mapping[str, Any] | None = None, world_size: int = 1, in_engine: bool = False,
                    argument: str = "config", collector: ErrorCollector | None = None) -> Config:
    """The Config of a JSON file (or dict) and flags, which must agree; `fallback` (a preset) yields to both.
    `in_engine` selects the engine's notes; `argument` names the parameter that held `source`. Errors are raised, or
    added to `collector`; then the Config leaves out the wrong values."""
    flags, fallback, errors = flags or {}, fallback or {}, collector or ErrorCollector()
    ds_values, problems = parse_ds_json(source, argument)
    # An engine gets no warm-up flags: "auto" means DeepSpeed's default then.
    in_effect = replace(ds_values, auto_keys=tuple(
        path for path in ds_values.auto_keys if not in_engine or path != WARMUP_STEPS))
    errors.ignore_later_errors_of(_flags_of_keys(ds_values.invalid_keys))
    values, conflicts = merge_with_flags(in_effect, flags, problems, fallback.get("lr", ScheduleConfig.lr))
    errors.add_errors(problems, ds_values.name)
    errors.add_errors(conflicts)
    others = _keys_of_other_flags(flags if in_engine else {**fallback, **flags}, values.get("optimizer"))
    keys_of_given = {flag_name(name): OPTIMIZER_PARAMS + NAME_PREFIX_END if name == "optimizer_params"
                     else in_effect.name_as_written(path, "")
                     for name, _, path in _field_values(in_effect, flags, ErrorList()) if name not in flags}
    errors.key_names = FlagToKeyNames(keys_of_given, others, in_engine, ds_values.name)
    dp = 1
    with errors.collecting_errors():
        tp = flags.get("model_parallel_size", 1)
        dp = data_parallel_size(world_size, max(1, tp))  # an invalid size is reported by its section
        values |= _batch_sizes(in_effect, flags, dp)
    config = build_config({**fallback, **values}, errors)
    if collector is None:
        errors.raise_if_any()
    if errors.has_errors:
        return config
    of_keys = [name for name, _, _ in _field_values(ds_values, flags, ErrorList()) if name not in flags]
    unread = (f" {ds_values.name}: {errors.key_names.translate(line)}"
              for line in unused_settings(config, of_keys, {*of_keys, *flags}))
    return replace(config, notes=(*ds_notes(ds_values, config, dp, in_engine), *unread), key_names=errors.key_names)


def read_ds_json(source: str | os.PathLike[str] | Mapping[str, Any], argument: str = "config") -> DsKeyValues:
    """The file's keys, checked one by one and together. `argument` names the parameter that held it, and a dict."""
    ds_values, problems = parse_ds_json(source, argument)
    merge_with_flags(ds_values, {}, problems)
    problems.raise_if_any(ds_values.name)
    return ds_values


def parse_ds_json(source: str | os.PathLike[str] | Mapping[str, Any],
                  argument: str = "config") -> tuple[DsKeyValues, ErrorList]:
    """The file's keys, and the errors of single keys."""
    name = argument if isinstance(source, Mapping) else os.fspath(source)
    text = None if isinstance(source, Mapping) else _read_text(name, argument)
    if text is not None and not os.path.exists(name):
        name = "the base64 configuration"
    doubles = ErrorList()
    try:
        tree = to_plain_dicts(source if text is None else parse_loose_json(text, name), doubles)
    except RecursionError:
        raise ConfigError(f"{name} is nested too deeply to be a configuration") from None
    require(isinstance(tree, dict), f"{name}: expected an object {{...}}, found {json_text(tree)}")
    ds_values, problems = DsKeyChecker(name).check(tree)
    return ds_values, ErrorList([*doubles, *problems])


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


# ---- from keys to fields -----------------------------------------------------------------------------------------


def merge_with_flags(ds_values: DsKeyValues, flags: Mapping[str, Any], problems: ErrorList,
                     peak: float = ScheduleConfig.lr) -> tuple[dict[str, Any], ErrorList]:
    """(field values of flags and keys without batch sizes, errors where a flag and a key differ). Errors of keys
    together go to `problems`. `peak` is the default learning rate."""
    values: dict[str, Any] = {}
    conflicts = ErrorList()
    for name, value, path in _field_values(ds_values, flags, problems, peak):
        if name in flags and not values_are_close(flags[name], value) and path not in KEYS_THAT_YIELD_TO_FLAGS:
            meant = "" if values_match(ds_values.raw_value(path),
                                       value) else f" (that is {flag_name(name)} {value_text(value)})"
            conflicts.append(f"{flag_name(name)} is {value_text(flags[name])}, but {ds_values.name_as_written(path)} "
                             f"is {json_text(ds_values.raw_value(path))}{meant}: give one of them, or the same value")
        values[name] = value
    given = {**values, **flags}
    return {name: value for name, value in given.items()
            if name in flags or given.get("fp16") or name not in FP16_ONLY}, conflicts


def _flags_of_keys(paths: Iterable[str]) -> Iterator[str]:
    """The flags that these keys correspond to."""
    for row in map(DS_KEYS.get, paths):
        if isinstance(row, RenamedKey):
            yield from _flags_of_keys(row.new_paths)
        elif isinstance(row, JsonKey) and row.field:
            yield flag_name(row.field)


def _field_values(ds_values: DsKeyValues, flags: Mapping[str, Any], problems: ErrorList,
                  peak: float = ScheduleConfig.lr) -> Iterator[FieldValue]:
    """(field, value, path of the key) for all but the batch sizes; keys that contradict each other are errors."""
    rows = ((DS_KEYS[path], value, path) for path, value in ds_values.keys.items())
    alone = ((row.field, row.convert(value), path)
             for row, value, path in rows if isinstance(row, JsonKey) and row.is_independent)
    seen: dict[str, tuple[Any, str]] = {}
    for name, value, path in chain(alone, ds_cross_keys.weight_group_fields(ds_values, flags)):
        other, where = seen.setdefault(name, (value, path))
        problems.require(values_are_close(other, value), f"{ds_values.name_as_written(where, '')} "
                         f"{json_text(ds_values.raw_value(where))} and {ds_values.name_as_written(path, '')} "
                         f"{json_text(ds_values.raw_value(path))} disagree on {flag_name(name)}; leave one out")
        yield name, value, path
    yield from ds_cross_keys.optimizer_fields(ds_values, flags, problems)
    yield from ds_cross_keys.scheduler_fields(ds_values, flags, problems, peak)
    yield from ds_cross_keys.monitor_fields(ds_values)
    yield from ds_cross_keys.layer_drop_fields(ds_values, flags)


def _batch_sizes(ds_values: DsKeyValues, flags: Mapping[str, Any], dp_size: int) -> dict[str, int]:
    """Batch sizes of the file and the flags, with missing ones computed; {} if the file has none."""
    if not ds_values.invalid_keys.isdisjoint(BATCH_SIZE_KEYS):
        return {}
    given = {key: (ds_values.keys[key], ds_values.name_as_written(key)) for key in BATCH_SIZE_KEYS
             if key in ds_values.keys}
    if not given:
        return {}
    problems = ErrorList()
    for key, name in BATCH_FIELDS.items():
        if name in flags:
            value, flag = flags[name], flag_name(name)
            was, where = given.setdefault(key, (value, flag))
            problems.require(value >= 1, f"{flag} is {value}: expected a number >= 1")
            problems.require(was == value, f"{flag} is {value}, but {where} is {was}: give one of them, or the same "
                             "value")
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
    for path in sorted(KEYS_THAT_YIELD_TO_FLAGS & ds_values.keys.keys()):
        in_force = _value_in_effect(path, config)
        if not in_force.endswith(f" {value_text(ds_values.keys[path])}"):
            lines.append(f"{path} {json_text(ds_values.keys[path])} has no effect: {in_force} is given")
    lines += [f'{path} "auto": {_value_of_auto(path, config, dp_size)}' for path in ds_values.auto_keys]
    if not config.precision.fp16:
        unused = [path for path in ds_values.keys if path.startswith("fp16.") and path != "fp16.enabled"]
        if unused and "fp16.enabled" not in ds_values.keys:
            lines.append(f"{', '.join(unused)} without effect: fp16.enabled is not true")
    if ds_values.keys.get("scheduler.type", "").startswith("Warmup") and ds_values.keys.get(WARMUP_STEPS) != 0:
        lines.append("the warm-up starts at once; DeepSpeed's has a learning rate of 0 in its first two steps")
    return tuple(f" {ds_values.name}: {line}" for line in lines)


def _value_in_effect(path: str, config: Config) -> str:
    """The flag of a key and its value; "" if the key sets no field."""
    row = DS_KEYS[path]
    if not isinstance(row, JsonKey) or not row.field:
        return ""
    flat = {name: value for section in config.as_dict().values() for name, value in section.items()}
    return f"{flag_name(row.field)} {value_text(flat[row.field])}"


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
    return _value_in_effect(path, config) or "the default"
