"""The weights of the whole model as one state dict: gather, write to a file, load.

Names are the module's. These functions are collective, and the arguments are equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron.distributed.collective_log import LOAD
from megatron.distributed.consistency import all_succeed_or_raise, assert_same_arguments
from megatron.errors import ConfigError
from megatron.zero.api.init import GatheredParameters
from megatron.zero.api.model_checks import check_same_descriptions, describe_buffers
from megatron.zero.engine import ZeroEngine
from megatron.zero.state import broadcast_buffers
from mpu.collectives import all_gather
from mpu.partition import join_local_slices, partition_of


def gather_full_state_dict(engine: ZeroEngine, frozen: bool = True) -> dict[str, Tensor]:
    """The model's state dict in the working precision, tensor parallel slices joined, on the host of world rank 0
    (empty on the others). Collective; one bucket is gathered at a time. The caller has checked that arguments are
    equal."""
    all_succeed_or_raise(engine.check_before_save, engine.groups.world)
    collects, tp = engine.groups.world.rank == 0, engine.groups.tp
    collected: dict[int, Tensor] = {}
    for bucket in engine.all_buckets:
        with GatheredParameters(bucket.parameters):
            for parameter in bucket.parameters:
                value, partition = parameter.detach(), partition_of(parameter)
                if partition is not None:
                    slices = [value] if tp.is_solo else list(all_gather(value.unsqueeze(0), tp, dim=0))
                    value = join_local_slices(slices, partition)
                    if partition.size is not None:  # without padding
                        value = value.narrow(partition.dim, 0, partition.size)
                if collects and (frozen or bucket.trainable):
                    collected[id(parameter)] = value.to("cpu", copy=True).contiguous()
    for tensor in engine.module.buffers() if collects else ():
        collected[id(tensor)] = tensor.detach().cpu()
    names = engine.module.state_dict(keep_vars=True)
    return {name: collected[id(tensor)] for name, tensor in names.items() if id(tensor) in collected}


def write_state_dict(state_dict: Mapping[str, Tensor], path: Path) -> None:
    """Write one file: safetensors if its name ends so (a tied tensor once per name), otherwise torch.save."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".safetensors":
        save_file({name: tensor.clone() for name, tensor in state_dict.items()}, path)
    else:
        torch.save(dict(state_dict), path)


def load_module_weights(engine: ZeroEngine, state: Mapping[str, Any], strict: bool) -> None:
    """Load data parallel rank 0's weights and buffers by name, into the model and the masters. Collective, one bucket
    at a time; mismatches raise on every rank before anything changes."""
    provides_values = engine.groups.dp.rank == 0

    def check() -> None:
        for bucket in engine.all_buckets:
            bucket.check_before_user_gather()
        if provides_values:
            _check_state_dict(engine, state, strict)

    engine.assert_collective_call(LOAD)
    assert_same_arguments("load_module_state_dict", {"strict": strict}, engine.groups.world)
    check_same_descriptions(describe_buffers(engine.module), engine.groups.world,  # they may be newer than the engine
                            "the ranks call load_module_state_dict with different buffers")
    all_succeed_or_raise(check, engine.groups.world)
    named: dict[str, Any] = engine.module.state_dict(keep_vars=True)
    new = {id(tensor): state[name] for name, tensor in named.items() if provides_values and name in state}
    with engine.state.guard_state_change("load of weights"):
        for bucket in engine.all_buckets:
            with GatheredParameters(bucket.parameters, modifier_rank=0):
                for parameter in bucket.parameters:
                    if (value := new.get(id(parameter))) is not None:
                        parameter.copy_(value)
    with torch.no_grad():
        for buffer in engine.module.buffers():
            if (value := new.get(id(buffer))) is not None:
                buffer.copy_(value)
    broadcast_buffers(engine.module.buffers(), engine.groups.dp)


def _check_state_dict(engine: ZeroEngine, state: Mapping[str, Any], strict: bool) -> None:
    """torch's checks of a state dict, before anything is written."""
    named: dict[str, Any] = engine.module.state_dict(keep_vars=True)
    if named and not state:
        raise ConfigError("load_state_dict was given an empty state dict on the first data parallel rank (tensor "
                          f"parallel rank {engine.groups.tp.rank}), whose weights count: give it the weights of its "
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
