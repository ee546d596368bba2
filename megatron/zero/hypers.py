"""Hypers: do all ranks take a step with the same hyper-parameters, and of the same sum of losses?

What a script sets between two steps (`group["lr"] = x`, a scheduler of its own, a boundary by hand) is set on each rank
by itself. Where one differs, the ranks' weights part without a sign. So each says in a text what it steps with, and a
digest of it goes with the exchange that a step has anyway (verdict.py): no exchange more, and no launch.

A rate that is a tensor on the device is not looked at: to read it, the host would wait. One on the host is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from operator import is_
from typing import Any

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
NOT_HYPER = frozenset({"params", "param_names"})
MAY_CHANGE = object()
"""In place of a value that is looked at each time."""


class Told:
    """What a rank steps with, as the text of a JSON object: the facts and their values. The text of a group is made
    again where one of its values is another object than last time, or may have changed in place."""

    def __init__(self, groups: Sequence[ParamGroup]) -> None:
        self._groups = groups
        self._known: dict[int, tuple[ParamGroup, str]] = {}
        self._facts: dict[tuple[int, str], tuple[Any, str]] = {}

    def __call__(self, losses: Mapping[str, int]) -> str:
        """`losses`: how many of the step's were multiplied by what."""
        summed = " + ".join(f"{count} x {part}" for part, count in sorted(losses.items()))
        groups = [self._of(number, group) for number, group in enumerate(self._groups)]
        return f'{{"the step\'s sum of losses": "{summed}", {", ".join(groups)}}}'

    def _of(self, number: int, group: ParamGroup) -> str:
        seen, text = self._known.get(number, ({}, ""))
        if len(seen) == len(group) and all(map(is_, seen.values(), group.values())) and seen.keys() == group.keys():
            return text
        facts, stays = [], True
        for name, value in group.items():
            if name not in NOT_HYPER:
                known = self._facts.get((number, name))
                if known is None or known[0] is not value:
                    fact = f"{name} of param group {number}", plain(value, fetches=False)
                    known = value if _stays(value) else MAY_CHANGE, ": ".join(map(json.dumps, fact))
                    self._facts[number, name] = known
                facts.append(known[1])
                stays &= known[0] is not MAY_CHANGE
        text = ", ".join(sorted(facts))  # the order of the keys is no difference
        if stays:
            self._known[number] = dict(group), text
        return text


def _stays(value: Any) -> bool:
    """It cannot change in place."""
    return type(value) is float or value is None or isinstance(value, (bool, int, float, str)) or \
        isinstance(value, tuple) and all(map(_stays, value))


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
    if isinstance(value, Mapping):
        return {str(key): plain(item, fetches=fetches) for key, item in value.items()}
    return value if value is None or isinstance(value, (bool, int, float, str)) else type(value).__name__


def bits(ranks: int) -> int:
    """Of a digest, so that float64 is exact in ranks * (sum of squares) and in (sum of digests) squared, which are the
    same only where all ranks have the same: 25 of two ranks, 16 of a thousand."""
    return (EXACT - 2 * (ranks - 1).bit_length()) // 2


def digest(trace: int, told: str, ranks: int) -> int:
    """Of what a rank ran, and of what it steps with."""
    found = blake2b(f"{trace} {told}".encode(), digest_size=4).digest()
    return int.from_bytes(found) & (1 << bits(ranks)) - 1


def different_settings(told: str, world: Group) -> ConfigError | None:
    """What to say of ranks whose digests differ; None where they ran different blocks. Collective."""
    found = differences([(json.loads(text), [rank]) for rank, text in enumerate(all_gather_json(told, world))])
    return ConfigError(f"the ranks would take different steps, and their weights would part: {found}. No weight was "
                       "changed; every rank must set the same hyper-parameters, from numbers that all ranks have, and "
                       "step after as many micro-batches") if found else None
