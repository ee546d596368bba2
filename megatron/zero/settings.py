"""Settings of a step: do all ranks take it with the same hyper-parameters, batch sizes and sum of losses?

What a script sets between two steps (`group["lr"] = x`, a scheduler of its own, a batch size, a boundary by hand) is
set on each rank by itself. Where one differs, the ranks' weights part without a sign. So each rank keeps what it steps
with, its *settings*, as texts, and gives a digest of them to the exchange that a step has anyway (verdict.py): no
exchange more. The number of the step is in the digest, so that settings whose digests are the same by chance, in one
of thousands of steps, are not so in the next one. Only where the digests differ do the texts travel.

A rate that is a tensor on the device is not looked at: to read it, the host would wait. One on the host is.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from math import isfinite
from operator import is_
from typing import Any, final

import numpy as np
from torch import Tensor

from megatron.errors import ConfigError
from megatron.optim.rule import ParamGroup
from megatron.ranges import describe_differences
from mpu.collectives import all_gather_json
from mpu.device import on_accelerator
from mpu.groups import Group

FLOAT64_INTEGER_BITS = 53
"""Bits of a whole number that float64 holds."""
NOT_COMPARED = frozenset({"params", "param_names"})
"""Keys of a param group that are no hyper-parameters."""


@dataclass(frozen=True)
class HyperparamTexts:
    """Those of all param groups, as they were at one step: what each is called, and its value in JSON."""

    names: Sequence[str]
    values: Sequence[str]
    checksum: bytes
    """Of all of it."""


@dataclass(frozen=True)
class StepSettings:
    """What this rank takes one step with."""

    step: Mapping[str, str]
    """Of the step itself, by what it is called."""
    groups: HyperparamTexts

    def as_dict(self) -> dict[str, str]:
        return {**self.step, **dict(zip(self.groups.names, self.groups.values, strict=True))}

    def digest(self, run_digest: int, ranks: int) -> int:
        """With that of what the rank ran."""
        text = f"{run_digest} {' '.join(self.step.values())} ".encode()
        found = blake2b(text + self.groups.checksum, digest_size=8).digest()
        return int.from_bytes(found) & (1 << digest_bits(ranks)) - 1


def make_step_settings(number: int, losses: Mapping[str, int], accumulation: int, micro_batch: int | None,
                       groups: HyperparamTexts) -> StepSettings:
    """`losses`: how many of the step's were multiplied by what."""
    summed = " + ".join(f"{count} x {part}" for part, count in sorted(losses.items()))
    return StepSettings({"the number of the step": str(number), "the step's sum of losses": summed,
                         "gradient_accumulation_steps": str(accumulation),
                         "train_micro_batch_size_per_gpu": str(micro_batch)}, groups)


@final
class HyperparamDigest:
    """Looks at the param groups once in each step. The text of a value is made anew where it is another object than in
    the step before, or one that can change in place; where there is none, nothing is made."""

    def __init__(self, groups: Sequence[ParamGroup]) -> None:
        self._groups = groups
        # Of all groups, one behind the other: the keys, where each group ends, and the values last seen.
        self._keys: list[str] = []
        self._lengths: list[int] = []
        self._last_values: list[Any] = []
        self._name_index: dict[int, int] = {}
        """Of a compared value in `_seen`, its place among the names. Those of a group are in the order of its keys'
        names: another order in the group is no difference."""
        self._mutable: set[int] = set()
        """Places in `_seen` of values that can change in place."""
        self._last = HyperparamTexts((), (), b"")

    def __call__(self) -> HyperparamTexts:
        keys, lengths = list(chain.from_iterable(self._groups)), list(map(len, self._groups))
        if keys != self._keys or lengths != self._lengths:
            self._set_keys(keys, lengths)
            self._update_texts(list(self._values()), self._name_index)
        elif self._mutable or not all(map(is_, self._last_values, self._values())):
            values = list(self._values())
            changed = {i for i, (old, new) in enumerate(zip(self._last_values, values, strict=True)) if old is not new}
            self._update_texts(values, self._name_index.keys() & (changed | self._mutable))
        return self._last

    def _values(self) -> Iterator[Any]:
        return chain.from_iterable(map(dict.values, self._groups))

    def _set_keys(self, keys: list[str], lengths: list[int]) -> None:
        """The groups have other keys than before."""
        self._keys, self._lengths, self._mutable = keys, lengths, set()
        group_of = [number for number, length in enumerate(lengths) for _ in range(length)]
        compared = sorted((number, str(key), i) for i, (key, number) in enumerate(zip(keys, group_of, strict=True))
                          if key not in NOT_COMPARED)
        self._name_index = {i: place for place, (_, _, i) in enumerate(compared)}
        names = tuple(f"{key} of param group {number}" for number, key, _ in compared)
        self._last = HyperparamTexts(names, ("",) * len(names), b"")

    def _update_texts(self, values: list[Any], changed: Collection[int]) -> None:
        """The texts of the changed ones. Those of earlier steps stay as they are: a step may be refused later."""
        self._last_values, texts = values, list(self._last.values)
        for i in changed:
            value = values[i]
            texts[self._name_index[i]] = _json_text(value)
            (self._mutable.discard if _is_immutable(value) else self._mutable.add)(i)
        content = "\n".join((*self._last.names, *texts))
        self._last = HyperparamTexts(self._last.names, tuple(texts), blake2b(content.encode(), digest_size=16).digest())


def _json_text(value: Any) -> str:
    if type(value) is float and isfinite(value):
        return repr(value + 0.0)  # as JSON has it, sooner; minus zero is zero
    if type(value) is int and value == float(value):
        return repr(float(value))  # 1 is 1.0
    return json.dumps(to_plain_values(value, reads_device=False), sort_keys=True)


def _is_immutable(value: Any) -> bool:
    """Or is not looked into: a tensor on the device."""
    return value is None or isinstance(value, (bool, int, float, str)) or \
        isinstance(value, tuple) and all(map(_is_immutable, value)) or \
        isinstance(value, Tensor) and on_accelerator(value)


def to_plain_values(value: Any, *, reads_device: bool = True) -> Any:
    """As it can be compared: numbers, whoever holds them, and lists of them; of what is none, its kind. Without
    `fetches` a tensor on the device is none."""
    if type(value) is float:
        return value
    if isinstance(value, Tensor) and not reads_device and on_accelerator(value):
        return "a tensor on the device"
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [to_plain_values(item, reads_device=reads_device) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((to_plain_values(item, reads_device=reads_device) for item in value), key=repr)
    if isinstance(value, Mapping):
        return {str(key): to_plain_values(item, reads_device=reads_device) for key, item in value.items()}
    return value if value is None or isinstance(value, (bool, int, float, str)) else type(value).__name__


def digest_bits(ranks: int) -> int:
    """Of a digest, so that float64 is exact in ranks * (sum of squares) and in (sum of digests) squared, which are the
    same only where all ranks have the same: 25 of two ranks, 16 of a thousand."""
    return (FLOAT64_INTEGER_BITS - 2 * (ranks - 1).bit_length()) // 2


def different_settings_error(settings: StepSettings, world: Group) -> ConfigError | None:
    """What to say of ranks whose digests differ; None where they ran different blocks. Collective."""
    gathered = all_gather_json(settings.as_dict(), world)
    found = describe_differences([(facts, [rank]) for rank, facts in enumerate(gathered)])
    return ConfigError(f"the ranks would take different steps, and their weights would part: {found}. No weight was "
                       "changed; every rank must set the same hyper-parameters, from numbers that all ranks have, the "
                       "same batch sizes, and step after as many micro-batches") if found else None
