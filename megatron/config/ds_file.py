"""A DeepSpeed-style JSON configuration -> a Config, together with the flags that were given.

    read(source)         a file or a dict, every key judged by the table of ds_keys.py
    build(source, ...)   the Config; a key and a flag that are both given must agree

A key that is absent says nothing: the field keeps the preset's value, or its default. `"auto"` is the same, but is
answered with a note. Not here: the table (ds_keys.py), the walk (ds_reader.py), the grammar (loose_json.py), ranges
of fields (the sections).
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from megatron.config import ds_together
from megatron.config.ds_keys import TABLE, NoEffect, Old, keys_of_fields
from megatron.config.ds_reader import Found, agree, plain, same, walk
from megatron.config.ds_together import (BATCH, BATCH_FIELDS, FREEZE_STEP, PARAMS, WARMUP_STEPS, Setting,
                                         solve_batch)
from megatron.config.idle import idle
from megatron.config.kinds import shown
from megatron.config.loose_json import parse
from megatron.config.optimizers import OPTIMIZERS
from megatron.config.problems import Draft, Problems
from megatron.config.schedule import ScheduleConfig
from megatron.config.setting import Key, flag_name, require
from megatron.config.tree import Config, build_config, data_parallel_size
from megatron.config.words import SECTION, Words
from megatron.errors import ConfigError

FP16_ONLY = frozenset(row.field for path, row in TABLE.items()
                      if isinstance(row, Key) and path.startswith("fp16.") and path != "fp16.enabled")
"""Fields that mean something only with fp16 on; as in DeepSpeed, the file says nothing about them otherwise."""

YIELDING = frozenset(path for path, row in TABLE.items() if isinstance(row, Key) and row.yields)
"""Keys that flags may differ from."""


def build(source: str | os.PathLike[str] | Mapping[str, Any], *, flags: Mapping[str, Any] | None = None,
          fallback: Mapping[str, Any] | None = None, world_size: int = 1, in_engine: bool = False,
          argument: str = "config", draft: Draft | None = None) -> Config:
    """The Config of a JSON file (or dict) and flags, which must agree; `fallback` (a preset) yields to both. Its notes
    are the trainer's, or the engine's; `argument` is what the caller gave the source in. What is wrong is raised; or it
    goes to the `draft`, and the Config is what is left without it."""
    flags, fallback, errors = flags or {}, fallback or {}, draft or Draft()
    found, problems = examine(source, argument)
    # No flags of a warm-up reach an engine: what DeepSpeed does where the key is absent.
    said = replace(found, autos=tuple(path for path in found.autos if path != WARMUP_STEPS)) if in_engine else found
    errors.doubt(_flags_of(found.refused))
    values, conflicts = resolve(said, flags, problems, fallback.get("lr", ScheduleConfig.lr))
    errors.note(problems, found.name)
    errors.note(conflicts)
    others = _other_keys(flags if in_engine else {**fallback, **flags}, values.get("optimizer"))
    errors.words = Words(_keys(said, flags), others, in_engine, found.name)
    dp = 1
    with errors.collecting():
        tp = flags.get("model_parallel_size", 1)
        dp = data_parallel_size(world_size, max(1, tp))  # a wrong size is reported by its section
        values |= _batch(said, flags, dp)
    config = build_config({**fallback, **values}, errors)
    if draft is None:
        errors.stop()
    if errors.is_wrong:
        return config
    of_keys = [name for name, _, _ in _fields(found, flags, Problems()) if name not in flags]
    unread = (f" {found.name}: {errors.words.of(line)}" for line in idle(config, of_keys, {*of_keys, *flags}))
    return replace(config, notes=(*notes(found, config, dp, in_engine), *unread), words=errors.words)


def read(source: str | os.PathLike[str] | Mapping[str, Any], argument: str = "config") -> Found:
    """What the file says, every key checked against the table, and against its neighbours; `argument` is what the
    caller gave it in, and the name of a dict."""
    found, problems = examine(source, argument)
    resolve(found, {}, problems)
    problems.stop(found.name)
    return found


def examine(source: str | os.PathLike[str] | Mapping[str, Any], argument: str = "config") -> tuple[Found, Problems]:
    """What the file says, and what is wrong with its keys one by one."""
    name = argument if isinstance(source, Mapping) else os.fspath(source)
    text = None if isinstance(source, Mapping) else _text_of(name, argument)
    if text is not None and not os.path.exists(name):
        name = "the base64 configuration"
    doubles = Problems()
    try:
        tree = plain(source if text is None else parse(text, name), doubles)
    except RecursionError:
        raise ConfigError(f"{name} is nested too deeply to be a configuration") from None
    require(isinstance(tree, dict), f"{name}: expected an object {{...}}, found {shown(tree)}")
    found, problems = walk(tree, name)
    return found, Problems([*doubles, *problems])


def _text_of(name: str, argument: str) -> str:
    """The file's text, or the text that `name` itself is in base64."""
    given = f"{argument}{' ' if argument.startswith('--') else '='}{name}"
    try:
        return Path(name).read_text(encoding="utf-8-sig")
    except OSError as error:
        if (text := _decoded(name)) is not None:
            return text
        raise ConfigError(f"{given} cannot be read: {error.strerror or error}; give the path of a JSON file") from None
    except ValueError as error:  # not UTF-8, or a path with a zero byte
        raise ConfigError(f"{given} is not a text file: {error}; give the path of a JSON file") from None


def _decoded(name: str) -> str | None:
    """The object that a base64 text holds, as launchers pass it on a command line; None if this is no such text."""
    try:
        text = base64.urlsafe_b64decode(name.encode()).decode("utf-8").lstrip()
    except ValueError:
        return None
    return text if text.startswith("{") else None


# ---- from keys to fields -----------------------------------------------------------------------------------------


def resolve(found: Found, flags: Mapping[str, Any], problems: Problems, peak: float = ScheduleConfig.lr,
            ) -> tuple[dict[str, Any], Problems]:
    """Flags and keys as one set of field values, without the batch sizes, and where the two say different things. What
    is wrong with keys together goes to `problems`. `peak` is the learning rate where neither says one."""
    values: dict[str, Any] = {}
    conflicts = Problems()
    for name, value, path in _fields(found, flags, problems, peak):
        if name in flags and not agree(flags[name], value) and path not in YIELDING:
            meant = "" if same(found.said(path), value) else f" (that is {flag_name(name)} {in_words(value)})"
            conflicts.append(f"{flag_name(name)} is {in_words(flags[name])}, but {found.written(path)} is "
                             f"{shown(found.said(path))}{meant}: give one of them, or the same value")
        values[name] = value
    given = {**values, **flags}
    return {name: value for name, value in given.items() if name in flags or _counts(name, given)}, conflicts


def _counts(name: str, given: Mapping[str, Any]) -> bool:
    """Some keys mean nothing where fp16 is not `given`."""
    return bool(given.get("fp16")) or name not in FP16_ONLY


def _flags_of(paths: Iterable[str]) -> Iterator[str]:
    """What these keys would have set."""
    for row in map(TABLE.get, paths):
        if isinstance(row, Old):
            yield from _flags_of(row.new)
        elif isinstance(row, Key) and row.field:
            yield flag_name(row.field)


def _fields(found: Found, flags: Mapping[str, Any], problems: Problems,
            peak: float = ScheduleConfig.lr) -> Iterator[Setting]:
    """(field, value, path of the key) of everything but the batch sizes."""
    rows = ((TABLE[path], value, path) for path, value in found.keys.items())
    alone = ((row.field, row.to(value), path) for row, value, path in rows if isinstance(row, Key) and row.alone)
    yield from _agreed(chain(alone, ds_together.weight_group(found, flags)), found, problems)
    yield from ds_together.optimizer(found, flags, problems)
    yield from ds_together.scheduler(found, flags, problems, peak)
    yield from ds_together.monitors(found)
    yield from ds_together.layer_drop(found, flags)


def _agreed(settings: Iterable[Setting], found: Found, problems: Problems) -> Iterator[Setting]:
    """The same settings: no two keys may give one field different values."""
    seen: dict[str, tuple[Any, str]] = {}
    for name, value, path in settings:
        other, where = seen.setdefault(name, (value, path))
        problems.require(agree(other, value), f"{found.written(where, '')} {shown(found.said(where))} and "
                         f"{found.written(path, '')} {shown(found.said(path))} disagree on {flag_name(name)}; "
                         "leave one out")
        yield name, value, path


def _batch(found: Found, flags: Mapping[str, Any], dp_size: int) -> dict[str, int]:
    """The batch sizes of the file and of the flags, solved for what is missing; nothing if the file has none."""
    if not found.refused.isdisjoint(BATCH):
        return {}
    given = {key: (found.keys[key], found.written(key)) for key in BATCH if key in found.keys}
    if not given:
        return {}
    problems = Problems()
    for key, name in BATCH_FIELDS.items():
        if name in flags:
            value, flag = flags[name], flag_name(name)
            was, where = given.setdefault(key, (value, flag))
            problems.require(value >= 1, f"{flag} is {value}: expected a number >= 1")
            problems.require(was == value, f"{flag} is {value}, but {where} is {was}: give one of them, or the same "
                             "value")
    problems.stop()
    total, micro, accumulation = (given.get(key) for key in BATCH)
    return dict(zip(("global_batch_size", "batch_size"), solve_batch(total, micro, accumulation, dp_size), strict=True))


# ---- words -------------------------------------------------------------------------------------------------------


def _keys(found: Found, flags: Mapping[str, Any]) -> dict[str, str]:
    """Flag -> the key that was given instead."""
    return {flag_name(name): PARAMS + SECTION if name == "optimizer_params" else found.written(path, "")
            for name, _, path in _fields(found, flags, Problems()) if name not in flags}


def _other_keys(flags: Mapping[str, Any], optimizer: str | None) -> dict[str, str]:
    """Flag that is not given -> the key that sets the same. What several keys together set has no such name."""
    paths: dict[str, list[Key]] = {}
    for key in keys_of_fields():
        paths.setdefault(key.field, []).append(key)
    of_optimizer = {field: PARAMS + name for name, field in OPTIMIZERS[optimizer].fields.items()} if optimizer else {}
    return {flag_name(name): of_optimizer.get(name, keys[0].path) for name, keys in paths.items()
            if name not in flags and (keys[0].alone or len(keys) == 1)}


def notes(found: Found, config: Config, dp_size: int, in_engine: bool = False) -> tuple[str, ...]:
    """What the user should read once: deprecated keys, keys without effect, the values chosen for "auto"."""
    lines = [*found.notices, *(() if in_engine else _idle_in_trainer(found)), *_overruled(found, config),
             *(f'{path} "auto": {_chosen(path, config, dp_size)}' for path in found.autos)]
    if not config.precision.fp16:
        idle = [path for path in found.keys if path.startswith("fp16.") and path != "fp16.enabled"]
        if idle and "fp16.enabled" not in found.keys:
            lines.append(f"{', '.join(idle)} without effect: fp16.enabled is not true")
    if found.keys.get("scheduler.type", "").startswith("Warmup") and found.keys.get(WARMUP_STEPS) != 0:
        lines.append("the warm-up starts at once; DeepSpeed's has a learning rate of 0 in its first two steps")
    return tuple(f" {found.name}: {line}" for line in lines)


def _idle_in_trainer(found: Found) -> Iterator[str]:
    for path, value in found.of_engine.items():
        row = TABLE[path]
        assert isinstance(row, NoEffect)
        if value != row.default:
            yield f"{path} {shown(value)} has no effect: {row.reason}"


def _overruled(found: Found, config: Config) -> Iterator[str]:
    for path in sorted(YIELDING & found.keys.keys()):
        said, in_force = found.keys[path], _in_force(path, config)
        if not in_force.endswith(f" {in_words(said)}"):
            yield f"{path} {shown(said)} has no effect: {in_force} is given"


def _in_force(path: str, config: Config) -> str:
    """The flag of a key and its value; "" where the key sets no field."""
    row = TABLE[path]
    if not isinstance(row, Key) or not row.field:
        return ""
    flat = {name: value for section in config.as_dict().values() for name, value in section.items()}
    return f"{flag_name(row.field)} {in_words(flat[row.field])}"


def in_words(value: Any) -> str:
    """A field's value in a message."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return "not set" if value is None else " ".join(value) if isinstance(value, tuple) else str(value)


def _chosen(path: str, config: Config, dp_size: int) -> str:
    """The value in the configuration where the file says "auto"."""
    if path in BATCH:
        chosen = (config.global_batch_size(dp_size), config.train.batch_size, config.accumulation(dp_size))
        return str(chosen[BATCH.index(path)])
    if path == WARMUP_STEPS:
        return f"{config.warmup_steps} steps of {config.decay_iters}"
    if path == PARAMS + FREEZE_STEP:
        return "found while the run goes on"
    return _in_force(path, config) or "the default"
