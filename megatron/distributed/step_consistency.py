"""Whether the ranks run the same: digests of what a rank ran and of its hyper-parameters, and the errors that name a
difference.

The digests are compared in the all-reduce of a step (zero/step_result.py). Where they differ, the texts behind them are
gathered. A learning rate on the device is not compared: the host would wait for it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.distributed.collective_log import (NO_ENTRY, CollectiveLog, CollectiveLogSnapshot, describe_positions,
                                                 divergence_positions)
from megatron.distributed.rank_text import describe_differences
from megatron.errors import ConfigError
from mpu.collectives import all_gather_json, all_reduce_into
from mpu.device import HostScalars, on_accelerator, scalars_on_device
from mpu.groups import Group

FLOAT64_INTEGER_BITS = 53  # float64 represents integers of this many bits exactly
NOT_COMPARED = frozenset({"params", "param_names"})  # keys of a param group that are not hyper-parameters


def make_step_settings(number: int, losses: Mapping[str, int], accumulation: int, micro_batch: int | None,
                       groups: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The settings of one optimizer step on this rank, which must be equal on all ranks: name in messages -> value.

    `losses`: factor of a loss ("1/4") -> number of losses with it. Values of `groups` are JSON, in the order of their
    names: the order of keys in a group makes no difference."""
    settings = {"the number of the step": str(number),
                "the step's sum of losses": " + ".join(f"{count} x {part}" for part, count in sorted(losses.items())),
                "gradient_accumulation_steps": str(accumulation),
                "train_micro_batch_size_per_gpu": str(micro_batch)}
    for index, group in enumerate(groups):
        for key in sorted(group, key=str):
            if key not in NOT_COMPARED:
                settings[f"{key} of param group {index}"] = _json_text(group[key])
    return settings


def settings_digest(settings: Mapping[str, str], run_digest: int, ranks: int) -> int:
    """A digest of the settings and of `run_digest`, of `digest_bits(ranks)` bits."""
    text = "\n".join((str(run_digest), *settings, *settings.values()))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest()) & (1 << digest_bits(ranks)) - 1


_JSON_CONSTANTS = {None: "null", True: "true", False: "false"}
_encode_json = json.JSONEncoder(sort_keys=True).encode


def _json_text(value: Any) -> str:
    # JSON takes microseconds, and most values of a group are of these kinds.
    if value is None or type(value) is bool:
        return _JSON_CONSTANTS[value]
    if type(value) is float and math.isfinite(value):
        return repr(value + 0.0)  # + 0.0 turns -0.0 into 0.0
    if type(value) is int and value == float(value):
        return repr(float(value))  # 1 equals 1.0
    return _encode_json(to_plain_values(value, reads_device=False))


def to_plain_values(value: Any, *, reads_device: bool = True) -> Any:
    """`value` as comparable plain numbers, strings, lists and dicts; other objects as their class name. Without
    `reads_device` a tensor on the device is not read."""
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
    """Bits of a digest, 25 for two ranks and 16 for a thousand.

    float64 is then exact in ranks * sum(digest^2) and in sum(digest)^2, which are equal only if all digests are."""
    return (FLOAT64_INTEGER_BITS - 2 * (ranks - 1).bit_length()) // 2


def different_settings_error(settings: Mapping[str, str], world: Group) -> ConfigError | None:
    """The error that names the settings that differ between ranks; None if the settings are equal. Collective."""
    gathered = all_gather_json(settings, world)
    differences = describe_differences([(texts, [rank]) for rank, texts in enumerate(gathered)])
    return ConfigError(f"the ranks would take different steps, and their weights would part: {differences}. No weight "
                       "was changed; every rank must set the same hyper-parameters, from numbers that all ranks have, "
                       "the same batch sizes, and step after as many micro-batches") if differences else None


class NoGradForwardChecker:
    """Checks after a forward without gradients, which no step follows, that the ranks gathered the same units."""

    def __init__(self, dp: Group, device: torch.device, log: CollectiveLog) -> None:
        self._dp, self._device, self._log = dp, device, log
        self._pending: HostScalars | None = None

    def __call__(self, gather_digest: int) -> None:
        """After a forward: start to compare its digest over data parallel. On an accelerator the error is raised by the
        next call, or by `raise_if_diverged`."""
        self.raise_if_diverged()
        self._log.purpose = ""
        self._log.awaited_entry = self._log.record_collective("the end of a forward without gradients")
        numbers = scalars_on_device(self._device, (gather_digest, gather_digest * gather_digest))
        all_reduce_into(numbers, self._dp).wait()
        self._log.awaited_entry = NO_ENTRY
        self._pending = HostScalars(numbers)
        if not on_accelerator(self._device):
            self.raise_if_diverged()

    def raise_if_diverged(self) -> None:
        """Raise ConfigError if the ranks differed at the last check. Collective then: all ranks must call it."""
        numbers, self._pending = self._pending, None
        if numbers is None:
            return
        traces, squares = numbers.values
        if squares * self._dp.size != traces * traces:
            raise diverged_blocks_error(self._log, self._dp)


def diverged_blocks_error(log: CollectiveLog, ranks: Group) -> ConfigError:
    """The error that says where the collective logs of the ranks diverge. Collective."""
    packed = all_gather_json(log.snapshot(ranks.rank).pack(), ranks)
    where = describe_positions(divergence_positions([CollectiveLogSnapshot.unpack(one) for one in packed]))
    return ConfigError(
        "the ranks ran different blocks of the model, or in another order, and have received each other's "
        f"parameters{where and f' ({where})'}: at ZeRO stage 3 what is random in the forward (layer drop) must be "
        "drawn alike on every data parallel rank; draw it alike, or use stage 2. Or a backward failed on some ranks "
        "only, and they went on without it: end the run then, and resume it from the last checkpoint")
