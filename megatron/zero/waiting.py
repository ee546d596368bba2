"""A parameter that waits for its engine: what its holders have in common. drawn.py and parked.py say where its values
are meanwhile; until the engine takes them over (`whole_value`), the parameter is a placeholder (placeholder.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from megatron.errors import ConfigError
from megatron.zero.holders import hold, holder_of
from megatron.zero.placeholder import Placeholder, fill, vacate
from mpu.collectives import broadcast_into
from mpu.groups import Group


@dataclass
class Building:
    """The block that a model is being built in: all ranks do the same there."""

    is_open: bool = False


class Waiting(ABC):
    """The holder of one parameter (see holders.py)."""

    is_settled = is_set_aside = False
    comes_and_goes = True

    def __init__(self, parameter: nn.Parameter, dtype: torch.dtype, dp: Group, building: Building) -> None:
        self._held, self._shape, self._dtype, self._dp = TensorWeakRef(parameter), parameter.shape, dtype, dp
        self._building = building

    @property
    def _parameter(self) -> nn.Parameter:
        parameter = self._held()
        assert isinstance(parameter, nn.Parameter), "it has gone, and its holder should have gone with it"
        return parameter

    @property
    def takes_writes(self) -> bool:
        return self._building.is_open

    def _hold(self) -> None:
        """From now on."""
        self._vacate()
        hold(self._parameter, self)

    def _vacate(self) -> None:
        vacate(self._parameter, self._parameter.detach().new_empty(0, dtype=self._dtype))

    def twin(self) -> nn.Parameter:
        """A copy of the parameter, which waits as well."""
        other = copy(self)
        parameter = nn.Parameter(torch.empty(0, dtype=self._dtype, device=self._parameter.device),
                                 self._parameter.requires_grad)
        other._held = TensorWeakRef(parameter)
        other._twin()
        other._hold()
        return parameter

    @abstractmethod
    def _twin(self) -> None:
        """Have nothing in common with whom this is a copy of."""

    @abstractmethod
    def whole(self, device: torch.device | None = None) -> Tensor:
        """All elements, on every rank. Collective."""

    @abstractmethod
    def _is_unedited(self, value: Tensor) -> bool:
        """These are still the elements, as far as this rank keeps them."""

    @abstractmethod
    def take_back(self, editor: int | None) -> None: ...

    def shape_of(self, parameter: nn.Parameter) -> torch.Size:
        return self._shape

    def describe(self, parameter: Tensor) -> str:
        return f"a parameter of shape {tuple(self._shape)}"

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
        if (value.shape, value.dtype) != (self._shape, self._dtype):
            raise ConfigError(f"a parameter of {self._dtype} and shape {tuple(self._shape)} became {value.dtype} of "
                              f"shape {tuple(value.shape)} inside GatheredParameters; give it values of its kind")
        if editor is None and not self._is_unedited(value):
            raise ConfigError(f"a parameter of shape {tuple(self._shape)} was edited inside GatheredParameters without "
                              "modifier_rank: the edits would be lost; say which rank's edits count")

    def cancel_loan(self) -> None:
        if not isinstance(self._parameter, Placeholder):
            self._vacate()


def whole_value(parameter: nn.Parameter, dp: Group, device: torch.device) -> Tensor:
    """The values, on every rank those of the first, of a parameter that no engine holds yet. Collective."""
    holder = holder_of(parameter)
    if holder is None:
        value = parameter.detach().to(device).contiguous()
        broadcast_into(value, 0, dp).wait()
        return value
    if isinstance(holder, Waiting):
        return holder.whole(device)
    raise ConfigError(f"a parameter of shape {tuple(holder.shape_of(parameter))} belongs to another engine already: "
                      "build one engine for a model, or destroy() the other first")
