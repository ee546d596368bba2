"""A parameter that is split before any engine exists: what `zero.Init` makes of it.

Each data parallel rank keeps an equal part of the flattened values of rank 0.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

from megatron.zero.holders import hold
from megatron.zero.placeholder import vacate
from megatron.zero.waiting import Waiting
from mpu.collectives import all_gather_into, broadcast_into
from mpu.groups import Group


@final
class Parked(Waiting):
    def __init__(self, parameter: nn.Parameter, dp: Group, dtype: torch.dtype | None,
                 home: torch.device | None) -> None:
        super().__init__(parameter, dtype or parameter.dtype, dp)
        self._device = parameter.device
        self._part = torch.empty(-(-parameter.numel() // dp.size), dtype=self._dtype, device=home or parameter.device)
        self.take_back(editor=0)
        hold(parameter, self)

    def whole(self, device: torch.device | None = None) -> Tensor:
        part = self._part.to(self._device)
        flat = part.new_empty(self._dp.size * part.numel())
        all_gather_into(flat, part, self._dp).wait()
        return flat[: self._shape.numel()].view(self._shape).to(device)

    def _is_unedited(self, value: Tensor) -> bool:
        return torch.equal(self._own(value), self._part)

    def take_back(self, editor: int | None) -> None:
        value = self._parameter.detach().to(self._device).contiguous()
        if editor is not None:
            broadcast_into(value, editor, self._dp).wait()
            self._part = self._own(value)
        vacate(self._parameter, value.new_empty(0))

    def _own(self, value: Tensor) -> Tensor:
        """This rank's part of the flattened values, padded with zeros."""
        count = self._part.numel()
        own = self._part.new_zeros(count)
        mine = value.flatten()[self._dp.rank * count : (self._dp.rank + 1) * count]
        own[: mine.numel()] = mine
        return own
