"""A parameter that is split before any engine exists: what `zero.Init` makes of it.

Each data parallel rank keeps an equal part of the flattened values of rank 0, on a device or on a drive.
"""

from __future__ import annotations

from typing import Protocol, Self, final

import torch
from torch import Tensor, nn

from megatron.zero.homes.depot import Depot
from megatron.zero.waiting import Building, Waiting
from mpu.collectives import all_gather_into, broadcast_into
from mpu.groups import Group


class Kept(Protocol):
    """A rank's part."""

    def put(self, values: Tensor) -> None: ...

    def get(self) -> Tensor: ...

    def copy(self) -> Self: ...


@final
class InMemory:
    def __init__(self, values: Tensor) -> None:
        self._values = values

    def put(self, values: Tensor) -> None:
        self._values = values.to(self._values.device)

    def get(self) -> Tensor:
        return self._values

    def copy(self) -> InMemory:
        return InMemory(self._values.clone())


@final
class Parked(Waiting):
    def __init__(self, parameter: nn.Parameter, dp: Group, building: Building, *, dtype: torch.dtype | None = None,
                 where: torch.device | Depot | None = None, asked: str | None = None) -> None:
        """`where` the part is kept: on the parameter's device, another one, or a drive, which was `asked` for."""
        kind = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
        super().__init__(parameter, kind, dp, building)
        self.asked = asked
        self._device = parameter.device
        self._count = -(-parameter.numel() // dp.size)
        own = self._own(self._from(parameter.detach(), editor=0))
        self._part: Kept = where.store(own) if isinstance(where, Depot) else InMemory(own.to(where))
        self._hold()

    def whole(self, device: torch.device | None = None) -> Tensor:
        part = self._part.get().to(self._device)
        flat = part.new_empty(self._dp.size * part.numel())
        all_gather_into(flat, part, self._dp).wait()
        return flat[: self._shape.numel()].view(self._shape).to(device)

    def _is_unedited(self, value: Tensor) -> bool:
        return torch.equal(self._own(value), self._part.get().to(value.device))

    def take_back(self, editor: int | None) -> None:
        if editor is not None:
            self._part.put(self._own(self._from(self._parameter.detach(), editor)))
        self._vacate()

    def _twin(self) -> None:
        self._part = self._part.copy()

    def _from(self, value: Tensor, editor: int) -> Tensor:
        value = value.to(self._device).contiguous()
        broadcast_into(value, editor, self._dp).wait()
        return value

    def _own(self, value: Tensor) -> Tensor:
        """This rank's part of the flattened values, padded with zeros."""
        own = value.new_zeros(self._count, dtype=self._dtype)
        mine = value.flatten()[self._dp.rank * self._count : (self._dp.rank + 1) * self._count]
        own[: mine.numel()] = mine
        return own
