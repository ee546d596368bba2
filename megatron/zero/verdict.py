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

_OWN = 4
"""Numbers of the exchange before the riders: squares, digests, squares of digests, objections."""


class Found(NamedTuple):
    """The verdict on the host."""

    norm: float
    """Of the mean gradient over all ranks; inf or nan where any element anywhere is."""
    factor: float
    """What the sums of gradients are multiplied by: unscaling, averaging and clipping."""
    alike: bool
    """All ranks gave the same digest."""
    objections: bool
    """Some rank objects to the step."""
    riders: tuple[float, ...] = ()

    @property
    def disputed(self) -> bool:
        """The ranks disagree."""
        return self.objections or not self.alike

    @property
    def applied(self) -> bool:
        return math.isfinite(self.norm) and not self.disputed


class Verdict:
    """The tensors are 0-dimensional, on the device of the gradients."""

    def __init__(self, sums: Tensor, ranks: int, *, per_unit: float, limit: float) -> None:
        """From what `exchange` returned. `per_unit` makes the mean gradient of the sum; the norm is clipped to `limit`
        (0: not at all)."""
        self._ranks, self._per_unit, self._limit = ranks, per_unit, limit
        squares, digests, squared_digests, objections = sums[:_OWN].unbind()
        norm = squares.sqrt() * per_unit
        self.applies = norm.isfinite() & (squared_digests * ranks == digests * digests) & (objections == 0)
        self._line = HostCopy(torch.cat([norm.view(1), sums]))
        self._norm = norm

    def divisor(self) -> Tensor:
        """1 / factor, in fp32."""
        if not self._limit:
            return torch.full((), 1.0 / self._per_unit, dtype=torch.float32, device=self._norm.device)
        clipped = torch.where(self._norm > self._limit, self._limit / (self._norm + 1e-6), 1.0)
        return (clipped * self._per_unit).reciprocal().float()

    def read(self) -> Found:
        """Waits for the device."""
        norm, _, digests, squared_digests, objections, *riders = self._line.values()
        return Found(norm, self._per_unit * clip_factor(norm, self._limit),
                     squared_digests * self._ranks == digests * digests, objections > 0, tuple(riders))


def exchange(square: Tensor, world: Group, *, counts: bool = True, digest: int = 0, objects: bool = False,
             riders: Sequence[Tensor | float] = ()) -> Tensor:
    """The sums over the world. `counts` is False on ranks whose gradients another one counts. `digest` has as few bits
    that the sums of it and of its square are exact (settings.py)."""
    numbers = row_on(square.device, (square if counts else 0, digest, digest * digest, objects, *riders))
    all_reduce_into(numbers, world).wait()
    return numbers


def row_on(device: torch.device, numbers: Sequence[Tensor | float]) -> Tensor:
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


def clip_factor(norm: float, limit: float) -> float:
    """What to multiply gradients by so that their norm is at most `limit` (0: no limit)."""
    return limit / (norm + 1e-6) if limit and norm > limit else 1.0


class HostCopy:
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
