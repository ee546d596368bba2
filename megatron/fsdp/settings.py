"""How one module is sharded: what both faces (FairScale's and torch's) come to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megatron.errors import ConfigError
from megatron.zero.nested import mapped


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """As torch's of this name. `param_dtype` is that of parameters and gradients in use (None: their own), in
    `reduce_dtype` gradients travel, to `output_dtype` floating point outputs are cast, and to `param_dtype` inputs
    where `cast_forward_inputs`."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@dataclass(frozen=True)
class OffloadPolicy:
    """What lasts stays on the device."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """What lasts (parameters, gradients, and so the optimizer's state) is on the host, and the step is taken there."""

    pin_memory: bool = True


@dataclass(frozen=True)
class Settings:
    """Of one module and the parameters in it that no module inside has."""

    reshards: bool | int = True
    """Its parameters are split again between forward and backward; a number: among so many neighbouring ranks."""
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    input_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    on_host: bool = False
    pins: bool = True
    predivide: float = 1.0
    copies_first: bool = False
    """All ranks start from the values of the first."""

    @property
    def stays(self) -> bool:
        """The parameters are whole from the forward to the backward."""
        return self.reshards is False or self.reshards == 1 and self.reshards is not True


def cast(value: Any, dtype: torch.dtype | None) -> Any:
    """Floating point tensors as `dtype`, also inside of tuples, lists, dicts and records; the rest as it is."""
    if dtype is None:
        return value
    return mapped(value, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def check_dtype(name: str, dtype: Any) -> torch.dtype | None:
    if dtype is None or isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        return dtype
    raise ConfigError(f"{name} is {dtype!r}: give a floating point dtype of torch, or None for the parameters' own")
