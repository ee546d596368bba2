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
from megatron.ranges import differences
from mpu.collectives import all_gather_json
from mpu.device import on_accelerator
from mpu.groups import Group

EXACT = 53
"""Bits of a whole number that float64 holds."""
NOT_COMPARED = frozenset({"params", "param_names"})
"""Keys of a param group that are no hyper-parameters."""


@dataclass(frozen=True)
class HyperParameters:
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
    groups: HyperParameters

    def facts(self) -> dict[str, str]:
        return {**self.step, **dict(zip(self.groups.names, self.groups.values, strict=True))}

    def digest(self, trace: int, ranks: int) -> int:
        """With that of what the rank ran."""
        text = f"{trace} {' '.join(self.step.values())} ".encode()
        found = blake2b(text + self.groups.checksum, digest_size=8).digest()
        return int.from_bytes(found) & (1 << bits(ranks)) - 1


def settings_of_a_step(number: int, losses: Mapping[str, int], accumulation: int, micro_batch: int | None,
                       groups: HyperParameters) -> StepSettings:
    """`losses`: how many of the step's were multiplied by what."""
    summed = " + ".join(f"{count} x {part}" for part, count in sorted(losses.items()))
    return StepSettings({"the number of the step": str(number), "the step's sum of losses": summed,
                         "gradient_accumulation_steps": str(accumulation),
                         "train_micro_batch_size_per_gpu": str(micro_batch)}, groups)


@final
class GroupReader:
    """Looks at the param groups once in each step. The text of a value is made anew where it is another object than in
    the step before, or one that can change in place; where there is none, nothing is made."""

    def __init__(self, groups: Sequence[ParamGroup]) -> None:
        self._groups = groups
        # Of all groups, one behind the other: the keys, where each group ends, and the values last seen.
        self._keys: list[str] = []
        self._lengths: list[int] = []
        self._seen: list[Any] = []
        self._place: dict[int, int] = {}
        """Of a compared value in `_seen`, its place among the names. Those of a group are in the order of its keys'
        names: another order in the group is no difference."""
        self._mutable: set[int] = set()
        """Places in `_seen` of values that can change in place."""
        self._last = HyperParameters((), (), b"")

    def __call__(self) -> HyperParameters:
        keys, lengths = list(chain.from_iterable(self._groups)), list(map(len, self._groups))
        if keys != self._keys or lengths != self._lengths:
            self._begin(keys, lengths)
            self._renew(list(self._values()), self._place)
        elif self._mutable or not all(map(is_, self._seen, self._values())):
            values = list(self._values())
            changed = {i for i, (old, new) in enumerate(zip(self._seen, values, strict=True)) if old is not new}
            self._renew(values, self._place.keys() & (changed | self._mutable))
        return self._last

    def _values(self) -> Iterator[Any]:
        return chain.from_iterable(map(dict.values, self._groups))

    def _begin(self, keys: list[str], lengths: list[int]) -> None:
        """The groups have other keys than before."""
        self._keys, self._lengths, self._mutable = keys, lengths, set()
        group_of = [number for number, length in enumerate(lengths) for _ in range(length)]
        compared = sorted((number, str(key), i) for i, (key, number) in enumerate(zip(keys, group_of, strict=True))
                          if key not in NOT_COMPARED)
        self._place = {i: place for place, (_, _, i) in enumerate(compared)}
        names = tuple(f"{key} of param group {number}" for number, key, _ in compared)
        self._last = HyperParameters(names, ("",) * len(names), b"")

    def _renew(self, values: list[Any], changed: Collection[int]) -> None:
        """The texts of the changed ones. Those of earlier steps stay as they are: a step may be refused later."""
        self._seen, texts = values, list(self._last.values)
        for i in changed:
            value = values[i]
            texts[self._place[i]] = _text(value)
            (self._mutable.discard if _is_immutable(value) else self._mutable.add)(i)
        content = "\n".join((*self._last.names, *texts))
        self._last = HyperParameters(self._last.names, tuple(texts), blake2b(content.encode(), digest_size=16).digest())


def _text(value: Any) -> str:
    if type(value) is float and isfinite(value):
        return repr(value + 0.0)  # as JSON has it, sooner; minus zero is zero
    if type(value) is int and value == float(value):
        return repr(float(value))  # 1 is 1.0
    return json.dumps(plain(value, fetches=False), sort_keys=True)


def _is_immutable(value: Any) -> bool:
    """Or is not looked into: a tensor on the device."""
    return value is None or isinstance(value, (bool, int, float, str)) or \
        isinstance(value, tuple) and all(map(_is_immutable, value)) or \
        isinstance(value, Tensor) and on_accelerator(value)


def plain(value: Any, *, fetches: bool = True) -> Any:
    """As it can be compared: numbers, whoever holds them, and lists of them; of what is none, its kind. Without
    `fetches` a tensor on the device is none."""
    if type(value) is float:
        return value
    if isinstance(value, Tensor) and not fetches and on_accelerator(value):
        return "a tensor on the device"
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [plain(item, fetches=fetches) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(item, fetches=fetches) for item in value), key=repr)
    if isinstance(value, Mapping):
        return {str(key): plain(item, fetches=fetches) for key, item in value.items()}
    return value if value is None or isinstance(value, (bool, int, float, str)) else type(value).__name__


def bits(ranks: int) -> int:
    """Of a digest, so that float64 is exact in ranks * (sum of squares) and in (sum of digests) squared, which are the
    same only where all ranks have the same: 25 of two ranks, 16 of a thousand."""
    return (EXACT - 2 * (ranks - 1).bit_length()) // 2


def different_settings(settings: StepSettings, world: Group) -> ConfigError | None:
    """What to say of ranks whose digests differ; None where they ran different blocks. Collective."""
    told = all_gather_json(settings.facts(), world)
    found = differences([(facts, [rank]) for rank, facts in enumerate(told)])
    return ConfigError(f"the ranks would take different steps, and their weights would part: {found}. No weight was "
                       "changed; every rank must set the same hyper-parameters, from numbers that all ranks have, the "
                       "same batch sizes, and step after as many micro-batches") if found else None
