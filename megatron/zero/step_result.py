"""The result of an optimizer step, all-reduced once: gradient norm, overflow, and whether all ranks agree.

Each rank contributes the squared norm of its gradients, a digest of what it ran and of its hyper-parameters, a veto
flag, and extra scalars of the caller (a loss, a stop request). The sums are on the device at once, so the optimizer
step follows without a wait; the host reads them later (`StepReport`). Where digests differ, the texts behind them are
gathered and the error names the difference. A learning rate on the device is not compared: the host would wait for it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from megatron.distributed.collective_log import (NO_ENTRY, CollectiveLog, CollectiveLogSnapshot, describe_positions,
                                                 divergence_positions)
from megatron.distributed.rank_text import describe_differences
from megatron.errors import ConfigError
from megatron.optim.rule import ParamGroup
from mpu import collective_tracker
from mpu.collectives import all_gather_json, all_reduce_into
from mpu.device import on_accelerator
from mpu.groups import Group

if TYPE_CHECKING:
    from megatron.zero.step import GradNorm

# Extra scalars in the all-reduce of a step. Fewer are padded, so that its size is equal on all ranks even if their
# callers give different numbers of scalars.
MAX_EXTRA_SCALARS = 8


@dataclass(eq=False)
class StepReport:
    """What one optimizer step did. The device has the result at once; to read it on the host may wait for the device,
    but never for another rank."""

    # [4 + scalars], fp64, on the device: the squared norm, the digest, its square and the veto, then the extra scalars
    # and the engine's, each summed over the world.
    sums: Tensor
    ranks: int
    mean_factor: float  # turns the sum of gradients into their mean
    max_norm: float  # the norm is clipped to it; 0: no clipping
    veto_error: str | None
    number: int
    loss_scale: float
    lr: float  # learning rate of the first param group
    settings: Mapping[str, str] | None  # the settings of this rank for the step; None on a single rank
    # Of this rank's micro-batches. Read only if a gradient is not finite.
    losses: Sequence[Tensor]
    norm: GradNorm  # names the first parameter whose gradient is not finite
    note: str | None  # what changes from this step on
    given_scalar_count: int  # how many extra scalars this rank gave; the rest of MAX_EXTRA_SCALARS is padding
    # Why the step was skipped, if that is unusual. Set by `finish_step`.
    skip_warning: str | None = None

    def __post_init__(self) -> None:
        squares, digests, squared_digests, vetoes = self.sums[:4].unbind()  # extra scalars follow
        self._device_norm = squares.sqrt() * self.mean_factor
        # n * sum(d^2) == sum(d)^2 only if all n digests d are equal
        digests_match = squared_digests * self.ranks == digests * digests
        # `applied`, on the device.
        self.is_applied = self._device_norm.isfinite() & digests_match & (vetoes == 0)
        self._host_scalars = HostScalars(torch.cat([self._device_norm.view(1), self.sums]))

    def grad_divisor(self) -> Tensor:
        """What the sums of gradients are divided by: unscaling, averaging and clipping. In fp32, on the device."""
        norm = self._device_norm
        if not self.max_norm:
            return torch.full((), 1.0 / self.mean_factor, dtype=torch.float32, device=norm.device)
        clipped = torch.where(norm > self.max_norm, self.max_norm / (norm + 1e-6), 1.0)
        return (clipped * self.mean_factor).reciprocal().float()

    @cached_property
    def _on_host(self) -> list[float]:
        return self._host_scalars.values()

    @cached_property
    def grad_norm(self) -> float:
        """The norm of the mean gradient before clipping, or of the optimizer's compressed gradient. Not finite if the
        step was skipped."""
        return self._on_host[0]

    @property
    def ranks_agree(self) -> bool:
        """All ranks gave the same digest, and none refuses the step."""
        digests, squared_digests, vetoes = self._on_host[2:5]
        return squared_digests * self.ranks == digests * digests and not vetoes

    @property
    def applied(self) -> bool:
        return math.isfinite(self.grad_norm) and self.ranks_agree

    @property
    def extra_scalars(self) -> tuple[float, ...]:
        """The caller's extra scalars, summed over the world; as many as this rank gave."""
        return tuple(self._on_host[5:][:self.given_scalar_count])

    @property
    def engine_scalars(self) -> tuple[float, ...]:
        """The engine's extra scalars, summed over the world."""
        return tuple(self._on_host[5 + MAX_EXTRA_SCALARS:])


def scalars_on_device(device: torch.device, numbers: Sequence[Tensor | float]) -> Tensor:
    """The numbers as one fp64 tensor on the device. All host numbers take one copy from page-locked memory, without a
    wait or a kernel launch; each 0-dimensional tensor takes one more copy."""
    on_host = torch.tensor([0.0 if isinstance(number, Tensor) else number for number in numbers], dtype=torch.float64,
                           pin_memory=device.type == "cuda")
    row = torch.empty(len(numbers), dtype=torch.float64, device=device)
    row.copy_(on_host, non_blocking=True)
    for place, number in enumerate(numbers):
        if isinstance(number, Tensor):
            row[place].copy_(number)
    return row


def clip_factor(norm: float, max_norm: float) -> float:
    """The factor that limits the norm of gradients to `max_norm` (0: no limit)."""
    return max_norm / (norm + 1e-6) if max_norm and norm > max_norm else 1.0


class HostScalars:
    """A few numbers that are copied to the host asynchronously; `values` waits for them."""

    def __init__(self, numbers: Tensor) -> None:
        self._host, self._arrived = numbers, None
        if numbers.is_cuda:
            self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._host.copy_(numbers, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(numbers.device))

    def values(self) -> list[float]:
        if self._arrived is not None:
            collective_tracker.mark_waiting()  # the device may be waiting for other ranks
            self._arrived.synchronize()
            collective_tracker.mark_idle()
        values: list[float] = self._host.tolist()
        return values


FLOAT64_INTEGER_BITS = 53  # float64 represents integers of this many bits exactly
NOT_COMPARED = frozenset({"params", "param_names"})  # keys of a param group that are not hyper-parameters


def make_step_settings(number: int, losses: Mapping[str, int], accumulation: int, micro_batch: int | None,
                       groups: Sequence[ParamGroup]) -> dict[str, str]:
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
        traces, squares = numbers.values()
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
