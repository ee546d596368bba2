"""A DeepSpeed-style JSON configuration -> the fields of config.py, each with the path of the key it came from.

    read(source)              a file or a dict, every key judged by the table of ds_keys.py
    JsonConfig.resolve(...)   its fields, once flags and the data parallel size are known: they must agree
    build(source, ...)        both, and the Config

A key that is absent says nothing: the field keeps the preset's value, or config.py's default. A key given here and as
a flag must say the same thing. `"auto"` is as good as absent, but is answered with a note.

Not here: the table, the grammar of the file (loose_json.py), ranges of fields (config.py).
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from megatron.config.ds_keys import (AUTO, OPTIMIZER_TYPES, SECTIONS, TABLE, Absent, Key, Kind, NoEffect, Old, Only,
                                     shown)
from megatron.config.loose_json import Pairs, parse
from megatron.config.optimizers import OPTIMIZERS
from megatron.config.tree import (Config, OptimConfig, ScheduleConfig, TrainConfig, build_config, data_parallel_size,
                                  flag_name, require)
from megatron.errors import ConfigError

BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
BATCH_FIELDS = {"train_batch_size": "global_batch_size", "train_micro_batch_size_per_gpu": "batch_size"}
PARAMS = "optimizer.params."
OF_NO_TYPE = ("max_grad_norm", "fp32_optimizer_states", "torch_adam")
"""Optimizer parameters that are read alike whatever the type."""
WARMUP_STEPS, TOTAL_STEPS = "scheduler.params.warmup_num_steps", "scheduler.params.total_num_steps"
WARMUP_TYPE, COSINE_FLOOR = "scheduler.params.warmup_type", "scheduler.params.cos_min_ratio"
FOREIGN = {"WarmupLR": (TOTAL_STEPS, COSINE_FLOOR), "WarmupDecayLR": (COSINE_FLOOR,),
           "WarmupCosineLR": ("scheduler.params.warmup_max_lr",)}
STYLES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
DEEPSPEED_WARMUP_STEPS, DEEPSPEED_COSINE_FLOOR = 1000, 0.0001
FP16_ONLY = frozenset(row.fields for path, row in TABLE.items()
                      if isinstance(row, Key) and path.startswith("fp16.") and path != "fp16.enabled")
"""Fields that mean something only with fp16 on; as in DeepSpeed, the file says nothing about them otherwise."""


def build(source: str | os.PathLike[str] | Mapping[str, Any], *, flags: Mapping[str, Any] | None = None,
          fallback: Mapping[str, Any] | None = None, world_size: int = 1) -> Config:
    """The Config of a JSON file (or dict) and flags, which must agree; `fallback` (a preset) yields to both."""
    flags, fallback = flags or {}, fallback or {}
    found = read(source)
    tp = flags.get("model_parallel_size", 1)
    dp = data_parallel_size(world_size, tp if tp >= 1 else 1)  # a wrong size is told by its section
    values = found.resolve(flags, dp)
    try:
        config = build_config({**fallback, **values})
    except ConfigError as error:
        raise ConfigError(found.in_its_words(str(error), flags)) from None
    return replace(config, notes=found.notes(config, dp))


def read(source: str | os.PathLike[str] | Mapping[str, Any]) -> JsonConfig:
    """What the file says, every key checked against the table."""
    name = "the configuration dict" if isinstance(source, Mapping) else os.fspath(source)
    try:
        tree = _plain(source if isinstance(source, Mapping) else parse(_text_of(name), name), name)
    except RecursionError:
        raise ConfigError(f"{name} is nested too deeply to be a configuration") from None
    require(isinstance(tree, dict), f"{name}: expected an object {{...}}, found {shown(tree)}")
    return _Reader(name).read(tree)


def _text_of(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"--deepspeed-config {name} cannot be read: {error.strerror or error}") from None
    except ValueError as error:  # not UTF-8, or a path with a zero byte
        raise ConfigError(f"--deepspeed-config {name} is no text file: {error}") from None


def _plain(value: Any, name: str, path: str = "") -> Any:
    """Objects become dicts; a key that stands twice is refused with its path."""
    if isinstance(value, (Pairs, Mapping)):
        plain: dict[str, Any] = {}
        for key, inner in value if isinstance(value, Pairs) else value.items():
            where = f"{path}.{key}" if path else str(key)
            require(isinstance(key, str), f"{name}: the key {key!r} is not a text")
            require(key not in plain, f"{name}: {where} is given twice; leave one of them out")
            plain[key] = _plain(inner, name, where)
        return plain
    if isinstance(value, list):
        return [_plain(inner, name, f"{path}[{index}]") for index, inner in enumerate(value)]
    return value


# ---- from the tree to keys and fields ----------------------------------------------------------------------------


class _Reader:
    """One walk over the tree; `read` hands over what was found."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.keys: dict[str, Any] = {}
        self.raw: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self.autos: list[str] = []
        self.notices: list[str] = []

    def read(self, tree: dict[str, Any]) -> JsonConfig:
        olds = [(path, value) for path, value in self._leaves(tree, "") if not self._take(path, value)]
        for path, value in olds:
            self._take_old(path, value)
        found = JsonConfig(self.name, self.keys, self.raw, self.origins, tuple(self.autos), tuple(self.notices))
        found.check()
        return found

    def _leaves(self, tree: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        """(path, value) of every key; `type` comes first, because what stands beside it depends on it."""
        for key in sorted(tree, key=lambda key: key != "type"):
            path, value = prefix + key, tree[key]
            if path in SECTIONS and isinstance(value, dict):
                yield from self._leaves(value, path + ".")
            elif path in SECTIONS and value is None:
                continue
            elif path in TABLE:
                yield path, value
            elif path in SECTIONS:
                self._refuse(path, value, "expected an object {...}")
            else:
                raise ConfigError(f"{self.name}: unknown key {path}; {_nearest(path)}")

    def _take(self, path: str, value: Any) -> bool:
        """Judge one key by its row; False for a deprecated name, whose turn comes when all others are known."""
        row = TABLE[path]
        if value == AUTO and not isinstance(row, (Old, Absent)):
            self.autos.append(path)
        elif isinstance(row, Key):
            self._take_key(path, value, row)
        elif isinstance(row, Only):
            if not any(_same(value, allowed) for allowed in row.values):
                self._refuse(path, value, f"not supported, {row.reason}; expected {shown(row.values[0])}")
        elif isinstance(row, NoEffect):
            if self._converted(path, value, row.kind) != row.default:
                self.notices.append(f"{path} {shown(value)} has no effect: {row.reason}")
        elif isinstance(row, Absent):
            off = value is None or value is False or value == {}
            require(off or isinstance(value, dict) and value.get("enabled") is False,
                    f"{self.name}: {path} is not supported, {row.reason}; leave it out")
        return not isinstance(row, Old)

    def _take_key(self, path: str, value: Any, row: Key) -> None:
        if value is None and row.nullable:
            return
        if isinstance(value, str) and value.lower() in row.refused:
            raise ConfigError(f"{self.name}: {path} {shown(value)} is not supported, {row.refused[value.lower()]}; "
                              f"expected {row.kind.expected}")
        self.keys[path] = self._converted(path, value, row.kind)
        self.raw[path] = value

    def _take_old(self, path: str, value: Any) -> None:
        row = TABLE[path]
        assert isinstance(row, Old)
        converted = row.to(self._converted(path, value, row.kind))
        for new in row.new:
            known = self.origins.get(new, new)
            require(new not in self.raw, f"{self.name}: {path} is the old name of {known}, and both are given; "
                    f"leave {path} out")
            if converted is not None:
                self._take(new, converted)
                self.origins[new] = path
                self.raw[new] = value
        self.notices.append(f"{path} is deprecated: read as {' and '.join(row.new)} {shown(converted)}")

    def _converted(self, path: str, value: Any, kind: Kind) -> Any:
        try:
            return kind.convert(value)
        except ValueError:
            near = difflib.get_close_matches(value, kind.words, n=1, cutoff=0.5) if isinstance(value, str) else []
            hint = f'; did you mean "{near[0]}"?' if near else ""
            self._refuse(path, value, f"expected {kind.expected}{hint}")

    def _refuse(self, path: str, value: Any, why: str) -> NoReturn:
        raise ConfigError(f"{self.name}: {path} is {shown(value)}: {why}")


def _same(value: Any, allowed: Any) -> bool:
    """Equal, and true is not 1."""
    return bool(value == allowed) and isinstance(value, bool) == isinstance(allowed, bool)


def _nearest(path: str) -> str:
    """What the user may have meant: a similar key beside it, the same words in another order, or another section."""
    section, _, key = path.rpartition(".")
    known = sorted({*TABLE, *SECTIONS})
    beside = [other.rpartition(".")[2] for other in known if other.rpartition(".")[0] == section]
    near = [other for other in beside if sorted(other.split("_")) == sorted(key.split("_"))]
    near = near or difflib.get_close_matches(key, beside, n=1, cutoff=0.6)
    if near:
        return f"did you mean {section + '.' if section else ''}{near[0]}?"
    elsewhere = [other for other in known if other.rpartition(".")[2] == key]
    return f"did you mean {elsewhere[0]}?" if elsewhere else "docs/ds_config.md lists every key"


@dataclass(frozen=True)
class JsonConfig:
    """The keys of one file, by path, checked one by one."""

    name: str
    keys: dict[str, Any]
    raw: dict[str, Any]
    """Path -> the value as it stands in the file."""
    origins: dict[str, str]
    """Path -> the deprecated name that was written."""
    autos: tuple[str, ...]
    notices: tuple[str, ...]

    def check(self) -> None:
        """What is wrong whatever the flags say: keys that set one field differently, or stand beside the wrong type."""
        list(self._simple())
        self._scheduler()
        if "optimizer.type" in self.keys:
            list(self._optimizer({}))

    # ---- fields --------------------------------------------------------------------------------------------------

    def resolve(self, flags: Mapping[str, Any], dp_size: int) -> dict[str, Any]:
        """Flags and keys as one set of field values; ConfigError where they say different things."""
        values: dict[str, Any] = {}
        for name, value, path in self.fields(flags):
            if name in flags and not _agree(flags[name], value):
                meant = "" if _same(self.raw[path], value) else f" (that is {flag_name(name)} {_word(value)})"
                raise ConfigError(f"{flag_name(name)} is {_word(flags[name])}, but {self.told(path)} is "
                                  f"{shown(self.raw[path])}{meant}: give one of them, or the same value")
            values[name] = value
        if not {**values, **flags}.get("fp16"):
            values = {name: value for name, value in values.items() if name not in FP16_ONLY}
        return {**values, **flags, **self._batch(flags, dp_size)}

    def fields(self, flags: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
        """(field, value, path of the key) of everything but the batch sizes."""
        yield from self._simple()
        yield from self._optimizer(flags)
        yield from self._scheduler()
        warms_up = "scheduler.type" in self.keys and self.keys.get(WARMUP_STEPS) != 0
        if warms_up and "warmup_type" not in flags and not self._given(WARMUP_TYPE):
            yield "warmup_type", "log", "scheduler.type"  # as in DeepSpeed
        if self.keys.get("scheduler.type") == "WarmupCosineLR":  # its floor is a share of a peak that a flag may give
            peak = flags.get("lr", self.keys.get("optimizer.params.lr", ScheduleConfig.lr))
            floor = peak * self.keys.get(COSINE_FLOOR, DEEPSPEED_COSINE_FLOOR)
            yield "min_lr", floor, self._first(COSINE_FLOOR, "scheduler.type")
        if self.keys.get("tensorboard.enabled"):
            folder = self.keys.get("tensorboard.output_path") or "runs"
            folder = os.path.join(folder, self.keys.get("tensorboard.job_name", "DeepSpeedJobName"))
            yield "tensorboard_dir", folder, self._first("tensorboard.output_path", "tensorboard.enabled")

    def _first(self, *paths: str) -> str:
        """The first of these keys that is given."""
        return next(path for path in paths if path in self.keys)

    def _simple(self) -> Iterator[tuple[str, Any, str]]:
        """The keys whose row names a field."""
        seen: dict[str, tuple[Any, str]] = {}
        for path, value in self.keys.items():
            row = TABLE[path]
            assert isinstance(row, Key)
            names, given = row.fields.split(), row.to(value)
            for name, part in zip(names, given if len(names) > 1 else [given] * len(names), strict=True):
                other, where = seen.setdefault(name, (part, path))
                require(_agree(other, part), f"{self.name}: {self.told(where, '')} {shown(self.raw[where])} and "
                        f"{self.told(path, '')} {shown(self.raw[path])} disagree on {flag_name(name)}; leave one out")
                yield name, part, path

    def _optimizer(self, flags: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
        """The parameters whose field depends on the optimizer, which a flag may name where the file does not."""
        named = self.keys.get("optimizer.type")
        optimizer = OPTIMIZER_TYPES[named] if named else flags.get("optimizer", OptimConfig.optimizer)
        takes, own = OPTIMIZERS[optimizer], {}
        for path in (*self.keys, *self.autos):
            name: str = path.removeprefix(PARAMS)
            value: Any = self.keys.get(path)
            if not path.startswith(PARAMS) or name in OF_NO_TYPE:
                continue
            if name == "bias_correction" and optimizer in ("adam", "adamw") and value is not False:
                continue  # Adam's moments are always corrected
            require(name in takes.parameters, f"{self.name}: {path} is no parameter of {named or optimizer}, which "
                    f"takes {', '.join(takes.parameters)}; leave it out")
            if path in self.autos:
                continue
            parts = takes.fields.get(name, "").split()
            yield from zip(parts, value if len(parts) > 1 else [value], [path, path])
            if name in takes.own:
                own[path] = f"{name}={json.dumps(value)}"
        if own:
            yield "optimizer_params", tuple(own.values()), next(iter(own))
        if named and optimizer == "sgd" and "sgd_momentum" not in flags and not self._given(PARAMS + "momentum"):
            yield "sgd_momentum", 0.0, "optimizer.type"  # as in DeepSpeed; the flag's default is Megatron's

    def _given(self, path: str) -> bool:
        return path in self.keys or path in self.autos

    def _scheduler(self) -> list[tuple[str, Any, str]]:
        kind = self.keys.get("scheduler.type")
        given = [path for path in (*self.keys, *self.autos) if path.startswith("scheduler.params.")]
        if kind is None:
            require(not given, f"{self.name}: scheduler.type is missing; expected {' or '.join(STYLES)}")
            return []
        for path in given:
            require(path not in FOREIGN[kind], f"{self.name}: {path} is no parameter of {kind}; leave it out")
        total, warmup = self.keys.get(TOTAL_STEPS), self.keys.get(WARMUP_STEPS, DEEPSPEED_WARMUP_STEPS)
        if kind == "WarmupLR":
            total = max(1, warmup)  # a constant rate has no end; the warm-up is a share of this
        if total is None:
            raise ConfigError(f"{self.name}: {kind} needs {TOTAL_STEPS}")
        require(warmup <= total, f"{self.name}: {WARMUP_STEPS} {warmup} is above {TOTAL_STEPS} {total}")
        return self._curve(kind, warmup, total)

    def _curve(self, kind: str, warmup: int, total: int) -> list[tuple[str, Any, str]]:
        where = self._first(WARMUP_STEPS, "scheduler.type")
        rows = [("lr_decay_style", STYLES[kind], "scheduler.type"), ("warmup", _share(warmup, total), where),
                ("lr_decay_iters", total, where if kind == "WarmupLR" else TOTAL_STEPS)]
        return rows + ([("min_lr", 0.0, "scheduler.type")] if kind == "WarmupDecayLR" else [])

    def _batch(self, flags: Mapping[str, Any], dp_size: int) -> dict[str, int]:
        """The batch sizes of the file and of the flags, solved for what is missing; nothing if the file has none."""
        given = {key: (self.keys[key], self.told(key)) for key in BATCH if key in self.keys}
        if not given:
            return {}
        for key, name in BATCH_FIELDS.items():
            if name in flags:
                value, told = flags[name], flag_name(name)
                require(value >= 1, f"{told} is {value}: expected a number >= 1")
                was, where = given.setdefault(key, (value, told))
                require(was == value, f"{told} is {value}, but {where} is {was}: give one of them, or the same value")
        total, micro, accumulation = (given.get(key) for key in BATCH)
        return solve_batch(total, micro, accumulation, dp_size)

    # ---- words ---------------------------------------------------------------------------------------------------

    def told(self, path: str, of: str | None = None) -> str:
        """The key as the user wrote it, and where."""
        return self.origins.get(path, path) + (f" of {self.name}" if of is None else of)

    def in_its_words(self, message: str, flags: Mapping[str, Any]) -> str:
        """The message of a section, which speaks of flags, with the names of the keys that were given instead."""
        keys = {flag_name(name): self.told(path, "") for name, _, path in self.fields(flags) if name not in flags}
        words = re.sub(r"--[\w-]+", lambda match: keys.get(match[0], match[0]), message)
        return message if words == message else f"{self.name}: {words}"

    def notes(self, config: Config, dp_size: int) -> tuple[str, ...]:
        """What the user should read once: deprecated keys, keys without effect, what "auto" came to."""
        notes = [*self.notices, *(f'{path} "auto": {_chosen(path, config, dp_size)}' for path in self.autos)]
        if not config.precision.fp16:
            idle = [path for path in self.keys if path.startswith("fp16.") and path != "fp16.enabled"]
            if idle and "fp16.enabled" not in self.keys:
                notes.append(f"{', '.join(idle)} without effect: fp16.enabled is not true")
        if STYLES.get(self.keys.get("scheduler.type", "")) and self.keys.get(WARMUP_STEPS) != 0:
            notes.append("the warm-up starts at once; DeepSpeed's has a learning rate of 0 in its first two steps")
        if any(path.startswith("aio.") for path in self.keys) and "nvme" not in (
                config.offload.offload_optimizer_device, config.offload.offload_param_device):
            notes.append("aio has no effect: nothing is on NVMe")
        return tuple(f" {self.name}: {note}" for note in notes)


# ---- small rules -------------------------------------------------------------------------------------------------

Given = tuple[int, str] | None
"""A number and the name of its source."""


def solve_batch(total: Given, micro: Given, accumulation: Given, dp_size: int) -> dict[str, int]:
    """train batch = micro-batch x accumulation x data parallel size, solved for what is missing, or refused."""
    solved, size = _solved(total, micro, accumulation, dp_size)
    return {"global_batch_size": solved, "batch_size": size}


def _solved(total: Given, micro: Given, accumulation: Given, dp_size: int) -> tuple[int, int]:
    """(train batch, micro-batch)"""
    if total is None:
        size, steps = (micro or (TrainConfig.batch_size, ""))[0], (accumulation or (1, ""))[0]
        return size * steps * dp_size, size
    if micro is None:
        return total[0], _quotient(total, "accumulation", accumulation, dp_size)
    if accumulation is None:
        _quotient(total, "micro_batch", micro, dp_size)
        return total[0], micro[0]
    product = micro[0] * accumulation[0] * dp_size
    sources = dict.fromkeys((total[1], micro[1], accumulation[1]))
    require(total[0] == product, f"train_batch_size {total[0]} != micro_batch {micro[0]} x accumulation "
            f"{accumulation[0]} x data_parallel {dp_size} = {product} ({', '.join(sources)})")
    return total[0], micro[0]


def _quotient(total: tuple[int, str], name: str, given: Given, dp_size: int) -> int:
    """total / (given x dp_size), which must be whole."""
    product = (given[0] if given else 1) * dp_size
    named = f"{name} {given[0]} ({given[1]}) x " if given else ""
    require(total[0] % product == 0, f"train_batch_size {total[0]} ({total[1]}) is not divisible by {named}"
            f"data_parallel {dp_size}" + (f" = {product}" if given else ""))
    return total[0] // product


def _share(part: int, whole: int) -> float:
    """part / whole, such that int(share * whole) is part again."""
    share = part / whole
    return share if int(share * whole) == part else math.nextafter(share, math.inf)


def _agree(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, (int, float)):
        return math.isclose(one, other, rel_tol=1e-9)
    return bool(one == other)


def _word(value: Any) -> str:
    """A field's value in a message."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return "not set" if value is None else str(value)


def _chosen(path: str, config: Config, dp_size: int) -> str:
    """What stands in the configuration where the file says "auto"."""
    if path in BATCH:
        chosen = (config.global_batch_size(dp_size), config.train.batch_size, config.accumulation(dp_size))
        return str(chosen[BATCH.index(path)])
    row = TABLE[path]
    flat = {name: value for section in config.as_dict().values() for name, value in section.items()}
    names = row.fields.split() if isinstance(row, Key) else []
    return ", ".join(f"{flag_name(name)} {_word(flat[name])}" for name in names) or "the default"
