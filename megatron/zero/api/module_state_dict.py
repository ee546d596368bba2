"""The model's weights as a state dict at every ZeRO stage. Optimizer state is in checkpoint_io.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron.config.tree import ZeroConfig
from megatron.distributed.collective_log import LOAD, SAVE
from megatron.distributed.consistency import all_succeed_or_raise, assert_same_arguments
from megatron.errors import ConfigError
from megatron.zero.api.checkpoint_io import gather_full_state_dict
from megatron.zero.api.init import GatheredParameters
from megatron.zero.api.model_checks import check_same_buffers
from megatron.zero.engine import ZeroEngine
from megatron.zero.state import broadcast_module_buffers

MODULE_PREFIX = "module."
"""Prefix of names in the engine's (not the model's) state dict, as in DeepSpeed and DistributedDataParallel."""


def build_module_state_dict(core: ZeroEngine, zero: ZeroConfig, *, prefix: str = "", keep_vars: bool = False,
                            frozen: bool = True) -> dict[str, Any]:
    """In the working precision. At stage 3 gathered to rank 0's host, and empty on the others."""
    core.sync_delayed_update("engine.module_state_dict()")
    if zero.zero_stage == 3:
        if not zero.stage3_gather_16bit_weights_on_model_save:
            raise ConfigError("at stage 3 parameters are split, and a state dict would be without them: set "
                              "stage3_gather_16bit_weights_on_model_save to gather them, or call save_checkpoint and "
                              "zero.get_fp32_state_dict_from_zero_checkpoint")
        core.assert_collective_call(SAVE)
        assert_same_arguments("module_state_dict", {"exclude_frozen_parameters": not frozen}, core.groups.world)
        return {prefix + name: tensor for name, tensor in gather_full_state_dict(core, frozen=frozen).items()}
    state: dict[str, Any] = core.module.state_dict(prefix=prefix, keep_vars=keep_vars)
    left_out = [] if frozen else [name for name, p in core.module.named_parameters() if not p.requires_grad]
    return {name: value for name, value in state.items() if name.removeprefix(prefix) not in left_out}


def load_module_weights(core: ZeroEngine, state: Mapping[str, Any], strict: bool) -> None:
    """Load data parallel rank 0's weights and buffers by name, into the model and the masters. Collective, one bucket
    at a time; mismatches raise on every rank before anything changes."""
    provides_values = core.groups.dp.rank == 0
    buckets = [*core.buckets, *core.frozen_buckets]

    def check() -> None:
        for bucket in buckets:
            bucket.check_before_user_gather()
        if provides_values:
            _check_state_dict(core, state, strict)

    core.assert_collective_call(LOAD)
    assert_same_arguments("load_module_state_dict", {"strict": strict}, core.groups.world)
    check_same_buffers(core.module, core.groups.world, "load_module_state_dict")
    all_succeed_or_raise(check, core.groups.world)
    named: dict[str, Any] = core.module.state_dict(keep_vars=True)
    new = {id(tensor): state[name] for name, tensor in named.items() if provides_values and name in state}
    with core.guard_state_change("load of weights"):
        for bucket in buckets:
            with GatheredParameters(bucket.parameters, modifier_rank=0):
                for parameter in bucket.parameters:
                    if (value := new.get(id(parameter))) is not None:
                        parameter.copy_(value)
    with torch.no_grad():
        for buffer in core.module.buffers():
            if (value := new.get(id(buffer))) is not None:
                buffer.copy_(value)
    broadcast_module_buffers(core.module, core.groups)


def _check_state_dict(core: ZeroEngine, state: Mapping[str, Any], strict: bool) -> None:
    """torch's checks of a state dict, before anything is written."""
    named: dict[str, Any] = core.module.state_dict(keep_vars=True)
    if named and not state:
        raise ConfigError("load_state_dict was given an empty state dict on the first data parallel rank (tensor "
                          f"parallel rank {core.groups.tp.rank}), whose weights count: give it the weights of its "
                          "part of the model, or use save_checkpoint and load_checkpoint")
    for what, names in (("missing", named.keys() - state.keys()), ("not the model's", state.keys() - named.keys())):
        if names and strict:
            raise ConfigError(f"load_state_dict: {len(names)} names are {what}, {min(names)} first; give the state "
                              "dict of this model, or strict=False")
    for name in named.keys() & state.keys():
        current, given = named[name], state[name]
        if not isinstance(current, Tensor):  # from get_extra_state()
            raise ConfigError(f"load_state_dict: {name} is not a tensor, and only tensors are loaded: give it to "
                              "set_extra_state() of its module, and leave it out, with strict=False")
        if not isinstance(given, Tensor) or given.shape != current.shape:
            found = f"shape {list(given.shape)}" if isinstance(given, Tensor) else f"a {type(given).__name__}"
            raise ConfigError(f"load_state_dict: {name} has {found} in the state dict, and shape "
                              f"{list(current.shape)} in the model")
