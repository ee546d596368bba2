"""Who holds a parameter's elements: nobody (it is an ordinary tensor), `zero.Init`, or an engine's bucket.

The record of it is the one piece of state that is global here: `zero.GatheredParameters(params)` is given parameters
and nothing else. An entry goes with its parameter, and must not keep it: a bucket, which has its parameters, lives with
the hooks of its model; a holder that nobody else has refers to its parameter weakly (initial_params.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from megatron.errors import ConfigError
from mpu.groups import Group


class ParamOwner(Protocol):
    """Something that keeps parameters split and can make them whole for a while."""

    is_engine_owned: bool
    """The precision and the device of the elements are final."""

    @property
    def is_offloaded(self) -> bool:
        """The elements are on the host between two phases of a program (aside.py)."""

    @property
    def allows_in_place_writes(self) -> bool:
        """The model is being built: an operation in place makes the parameter whole for itself."""

    def full_shape(self, parameter: nn.Parameter) -> torch.Size: ...

    def describe(self, parameter: Tensor) -> str:
        """The parameter for a message: its name where that is known, and its shape."""

    @property
    def params_are_sharded(self) -> bool:
        """The parameters are whole only while they are used."""

    @property
    def dp(self) -> Group:
        """The ranks that keep the parts."""

    def check_before_user_gather(self) -> None:
        """An error where the parameters cannot be lent, as far as this rank sees."""

    def gather_for_user(self) -> None:
        """Make the parameters whole; they may be edited. Collective."""

    def check_before_user_reshard(self, modifier_rank: int | None) -> None:
        """An error where what was done to the parameters cannot be kept, as far as this rank sees."""

    def reshard_after_user(self, modifier_rank: int | None) -> None:
        """Split them again, with the edits of data parallel rank `editor`. None: there are none. Collective."""

    def cancel_user_gather(self) -> None:
        """Split them again, as they were. Not collective."""


class DeferredParamOwner(ParamOwner, Protocol):
    """Of one parameter, before there is an engine."""

    def clone(self) -> nn.Parameter:
        """A copy of the parameter, which is held in the same way."""


_PARAM_OWNERS = WeakTensorKeyDictionary()
"""Parameter -> a function that gives its holder."""


def set_param_owner(parameter: nn.Parameter, owner: ParamOwner, *, keeps_owner_alive: bool = True) -> None:
    """The holder lives as long as its parameter, or as somebody else has it."""
    _PARAM_OWNERS[parameter] = (lambda: owner) if keeps_owner_alive else ref(owner)


def release_param(parameter: nn.Parameter) -> None:
    _PARAM_OWNERS.pop(parameter, None)


def param_owner(parameter: Tensor) -> ParamOwner | None:
    found: Callable[[], ParamOwner | None] | None = _PARAM_OWNERS.get(parameter)
    return None if found is None else found()


def full_shape(parameter: nn.Parameter) -> torch.Size:
    """The shape of the whole parameter, wherever its elements are."""
    holder = param_owner(parameter)
    return parameter.shape if holder is None else holder.full_shape(parameter)


_EXTERNAL = "zero_external_parameters"


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Say that the forward of `module` uses a parameter of another module. Before `zero.initialize`: the parameter then
    is there whenever the model runs. (Sharing a Parameter object between modules needs no such call.)"""
    if not isinstance(module, nn.Module) or not isinstance(parameter, nn.Parameter):
        raise ConfigError(f"register_external_parameter takes a Module and a Parameter, not {type(module).__name__} "
                          f"and {type(parameter).__name__}")
    known: list[nn.Parameter] = module.__dict__.setdefault(_EXTERNAL, [])
    if not any(parameter is other for other in known):
        known.append(parameter)


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    known: list[nn.Parameter] = module.__dict__.get(_EXTERNAL, [])
    if not any(parameter is other for other in known):
        raise ConfigError(f"the parameter of shape {tuple(full_shape(parameter))} is not registered as an external one "
                          f"of {type(module).__name__}")
    module.__dict__[_EXTERNAL] = [other for other in known if other is not parameter]


def external_parameters(module: nn.Module) -> list[nn.Parameter]:
    found: Any = module.__dict__.get(_EXTERNAL, [])
    return list(found)
