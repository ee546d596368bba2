"""A parameter that is split before any engine exists: what `zero.Init` makes of it.

Each data parallel rank keeps an equal part of the flattened values of rank 0. The parameter itself is left with a
placeholder without elements (placeholder.py).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron.errors import ConfigError
from megatron.zero.drawn import Drawn
from megatron.zero.holders import hold, holder_of
from megatron.zero.placeholder import Placeholder, fill, vacate
from mpu.collectives import all_gather_into, broadcast_into
from mpu.groups import Group


class Parked:
    """The holder of one parameter (see holders.py)."""

    is_settled = False
    comes_and_goes = True

    def __init__(self, parameter: nn.Parameter, dp: Group, dtype: torch.dtype | None,
                 home: torch.device | None) -> None:
        self._parameter, self._dp, self._shape = parameter, dp, parameter.shape
        self._device = parameter.device
        self._home = home or parameter.device
        self._part = torch.empty(-(-parameter.numel() // dp.size), dtype=dtype or parameter.dtype, device=self._home)
        self._put_away(editor=0)
        hold(parameter, self)

    def shape_of(self, parameter: nn.Parameter) -> torch.Size:
        return self._shape

    def describe(self, parameter: Tensor) -> str:
        return f"a parameter of shape {tuple(self._shape)}"

    def whole(self) -> Tensor:
        """All elements, on every rank."""
        part = self._part.to(self._device)
        flat = part.new_empty(self._dp.size * part.numel())
        all_gather_into(flat, part, self._dp).wait()
        return flat[: self._shape.numel()].view(self._shape)

    @property
    def dp(self) -> Group:
        return self._dp

    def check_before_loan(self) -> None:
        """Always possible."""

    def lend(self) -> None:
        if isinstance(self._parameter, Placeholder):
            fill(self._parameter, self.whole())

    def check_before_return(self, editor: int | None) -> None:
        value = self._parameter.detach()
        if (value.shape, value.dtype) != (self._shape, self._part.dtype):
            raise ConfigError(f"a parameter of {self._part.dtype} and shape {tuple(self._shape)} became {value.dtype} "
                              f"of shape {tuple(value.shape)} inside GatheredParameters; give it values of its kind")
        if editor is None and not torch.equal(self._own(value), self._part):
            raise ConfigError(f"a parameter of shape {tuple(self._shape)} was edited inside GatheredParameters without "
                              "modifier_rank: the edits would be lost; say which rank's edits count")

    def take_back(self, editor: int | None) -> None:
        self._put_away(editor)

    def cancel_loan(self) -> None:
        if not isinstance(self._parameter, Placeholder):
            vacate(self._parameter, self._parameter.detach().new_empty(0))

    def _put_away(self, editor: int | None) -> None:
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


def whole_value(parameter: nn.Parameter, dp: Group, device: torch.device) -> Tensor:
    """The values, on every rank those of the first, of a parameter that no engine holds yet. Collective."""
    holder = holder_of(parameter)
    if holder is None:
        value = parameter.detach().to(device).contiguous()
        broadcast_into(value, 0, dp).wait()
        return value
    if isinstance(holder, Drawn):
        return holder.whole(device)
    if isinstance(holder, Parked):
        return holder.whole().to(device)
    raise ConfigError(f"a parameter of shape {tuple(holder.shape_of(parameter))} belongs to another engine already: "
                      "build one engine for a model, or destroy() the other first")
