"""Verdict: what all ranks know of a step after one exchange; on the device at once, on the host when somebody asks.

Each rank contributes the square of its gradients' norm, a digest of what it ran and of its settings, whether it
objects to the step, and *riders*: numbers of the caller that travel along (a loss, a request to stop). All of them are
sums over the world. The optimizer's step follows on the device, without waiting for the host: where the verdict is no,
it changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mpu.collectives import all_reduce_into
from mpu.groups import Group
from mpu.wire import waits

_RESULT_SCALARS = 4
"""Numbers of the exchange before the riders: squares, digests, squares of digests, objections."""


class HostStepResult(NamedTuple):
    """The verdict on the host."""

    norm: float
    """Of the mean gradient over all ranks; inf or nan where any element anywhere is."""
    grad_multiplier: float
    """What the sums of gradients are multiplied by: unscaling, averaging and clipping."""
    digests_match: bool
    """All ranks gave the same digest."""
    has_veto: bool
    """Some rank objects to the step."""
    scalars: tuple[float, ...] = ()

    @property
    def ranks_disagree(self) -> bool:
        """The ranks disagree."""
        return self.has_veto or not self.digests_match

    @property
    def applied(self) -> bool:
        return math.isfinite(self.norm) and not self.ranks_disagree


class StepResult:
    """The tensors are 0-dimensional, on the device of the gradients."""

    def __init__(self, sums: Tensor, ranks: int, *, mean_factor: float, max_norm: float) -> None:
        """From what `exchange` returned. `per_unit` makes the mean gradient of the sum; the norm is clipped to `limit`
        (0: not at all)."""
        self._ranks, self._mean_factor, self._max_norm = ranks, mean_factor, max_norm
        squares, digests, squared_digests, objections = sums[:_RESULT_SCALARS].unbind()
        norm = squares.sqrt() * mean_factor
        self.is_applied = norm.isfinite() & (squared_digests * ranks == digests * digests) & (objections == 0)
        self._host_scalars = HostScalars(torch.cat([norm.view(1), sums]))
        self._norm = norm

    def grad_divisor(self) -> Tensor:
        """1 / factor, in fp32."""
        if not self._max_norm:
            return torch.full((), 1.0 / self._mean_factor, dtype=torch.float32, device=self._norm.device)
        clipped = torch.where(self._norm > self._max_norm, self._max_norm / (self._norm + 1e-6), 1.0)
        return (clipped * self._mean_factor).reciprocal().float()

    def to_host(self) -> HostStepResult:
        """Waits for the device."""
        norm, _, digests, squared_digests, vetoes, *scalars = self._host_scalars.values()
        return HostStepResult(norm, self._mean_factor * clip_factor(norm, self._max_norm),
                              squared_digests * self._ranks == digests * digests, vetoes > 0, tuple(scalars))


def all_reduce_step_scalars(norm_squared: Tensor,
                            world: Group,
                            *,
                            counts_norm: bool = True,
                            digest: int = 0,
                            has_veto: bool = False,
                            scalars: Sequence[Tensor | float] = ()) -> Tensor:
    """The sums over the world. `counts` is False on ranks whose gradients another one counts. `digest` has as few bits
    that the sums of it and of its square are exact (settings.py)."""
    numbers = scalars_on_device(norm_squared.device,
                                (norm_squared if counts_norm else 0, digest, digest * digest, has_veto, *scalars))
    all_reduce_into(numbers, world).wait()
    return numbers


def scalars_on_device(device: torch.device, numbers: Sequence[Tensor | float]) -> Tensor:
    """The numbers in fp64 on the device. Those of the host are one copy, which neither waits for the device (it is from
    page-locked memory) nor is a kernel; each 0-dimensional tensor is one more."""
    on_host = torch.tensor([0.0 if isinstance(number, Tensor) else number for number in numbers], dtype=torch.float64,
                           pin_memory=device.type == "cuda")
    row = torch.empty(len(numbers), dtype=torch.float64, device=device)
    row.copy_(on_host, non_blocking=True)
    for place, number in enumerate(numbers):
        if isinstance(number, Tensor):
            row[place].copy_(number)
    return row


def clip_factor(norm: float, max_norm: float) -> float:
    """What to multiply gradients by so that their norm is at most `limit` (0: no limit)."""
    return max_norm / (norm + 1e-6) if max_norm and norm > max_norm else 1.0


class HostScalars:
    """A few numbers on their way from the device to the host."""

    def __init__(self, numbers: Tensor) -> None:
        self._host, self._arrived = numbers, None
        if numbers.is_cuda:
            self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._host.copy_(numbers, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(numbers.device))

    def values(self) -> list[float]:
        if self._arrived is not None:
            waits.mark_waiting()  # behind the device, which may wait for other ranks
            self._arrived.synchronize()
            waits.mark_idle()
        values: list[float] = self._host.tolist()
        return values
