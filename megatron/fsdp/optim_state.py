"""Full and sharded state dicts of torch optimizers over sharded parameters, also by torch's functions.

    model_state, optim_state = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    set_state_dict(model, optimizer, model_state_dict=..., optim_state_dict=..., options=...)

State that has a value for each element is sharded like its parameter; a number is the same on all ranks; anything else
is refused. Without `full_state_dict` values are this rank's segments, for the same rank of as many. With `cpu_offload`
only rank 0 gets the full state. `broadcast_from_rank0` sets rank 0's state on all ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.optim import Optimizer

from megatron.errors import ConfigError
from megatron.fsdp.sharded_tensor import (ShardedParam, gather_shards, local_params, local_tensor, location_of,
                                          segment_like)
from megatron.fsdp.sharding import require_fsdp_state, unwrap
from megatron.fsdp.state_dict import (broadcast_nested, buckets_of, buffers_in_own_dtype, full_state_dict,
                                      load_from_rank0, prepare_all_ranks)
from megatron.zero.api.checkpoint_io import RUN_SPECIFIC_KEYS, hyper_parameters
from megatron.zero.bucket import FlatBucket
from mpu.collectives import broadcast_json

OptimState = dict[str, Any]
Options = StateDictOptions | None
Optimizers = Optimizer | Iterable[Optimizer]


def params_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """The parameters of all param groups, in the order in which a state dict numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def gather_full_states(optimizer: Optimizer, buckets: list[FlatBucket], *, collects: bool,
                       device: torch.device | str | None = "cpu") -> Iterator[tuple[nn.Parameter, OptimState]]:
    """Each parameter that has state, with the full state if this rank `collects` (otherwise without tensors).
    Collective; one kind of one bucket is gathered at a time."""
    for bucket in buckets:
        states = {parameter: dict(optimizer.state.get(parameter, {})) for parameter in bucket.parameters}
        full: dict[nn.Parameter, OptimState] = {parameter: {} for parameter in bucket.parameters}
        for kind in dict.fromkeys(name for state in states.values() for name in state):
            is_sharded = {parameter: _is_sharded(parameter, kind, state[kind])
                          for parameter, state in states.items() if kind in state}
            if any(is_sharded.values()):
                dtype = next(states[parameter][kind].dtype for parameter, split in is_sharded.items() if split)
                shard = torch.zeros(bucket.layout.shard_numel, dtype=dtype, device=bucket.device)
                for one in local_params(bucket):
                    if is_sharded.get(one.parameter):
                        shard[one.range] = local_tensor(states[one.parameter][kind]).to(bucket.device)
                gathered = gather_shards(bucket, shard)
            for index, parameter in enumerate(bucket.parameters):
                if kind not in states[parameter]:
                    continue
                if not is_sharded[parameter]:
                    value = states[parameter][kind]
                    is_tensor = isinstance(value, Tensor)
                    full[parameter][kind] = value.detach().to(device, copy=True) if is_tensor else value
                elif collects:
                    full[parameter][kind] = gathered[index].to(device or bucket.device, copy=True)
        yield from ((parameter, state) for parameter, state in full.items() if states[parameter])


def sharded_kinds(optimizer: Optimizer, buckets: Iterable[FlatBucket]) -> list[str]:
    """The kinds of state with one value per element, in order."""
    return list(dict.fromkeys(
        kind for bucket in buckets for parameter in bucket.parameters
        for kind, value in optimizer.state.get(parameter, {}).items() if _is_sharded(parameter, kind, value)))


def scalar_states(optimizer: Optimizer, buckets: Iterable[FlatBucket]) -> dict[str, OptimState]:
    """By parameter name, the state that is a single number."""
    return {slot.name: {kind: value.item() if isinstance(value, Tensor) else value
                        for kind, value in optimizer.state[parameter].items()
                        if value is not None and not _is_sharded(parameter, kind, value)}
            for bucket in buckets for slot, parameter in zip(bucket.layout.slots, bucket.parameters, strict=True)
            if optimizer.state.get(parameter)}


def _is_sharded(parameter: nn.Parameter, kind: str, value: Any) -> bool:
    if not isinstance(value, Tensor) or local_tensor(value).dim() == 0:
        return False
    if local_tensor(value).shape == local_tensor(parameter).shape:
        return True
    raise ConfigError(f"the state {kind!r} of {location_of(parameter).param_name} has shape "
                      f"{list(local_tensor(value).shape)}, and this rank a segment of "
                      f"{local_tensor(parameter).numel()} elements: it is neither one number for each element nor one "
                      "for all, and cannot be gathered")


def shard_full_state(parameter: nn.Parameter | None, state: Mapping[str, Any], sharded: Collection[str]) -> OptimState:
    """This rank's part of a parameter's full state, of which the kinds in `sharded` are split; all of it if the
    parameter is not sharded."""
    if not isinstance(parameter, ShardedParam):
        return dict(state)
    whole, name, offset = location_of(parameter)
    count = local_tensor(parameter).numel()
    local: OptimState = {}
    for kind, value in state.items():
        if kind not in sharded:
            local[kind] = value.clone() if isinstance(value, Tensor) else value
            continue
        if value.shape != whole:
            raise ConfigError(f"the state {kind!r} of {name} has shape {list(value.shape)}, expected {list(whole)}")
        segment = value.detach().flatten()[offset : offset + count].clone()
        local[kind] = segment_like(segment.to(local_tensor(parameter).device), parameter)
    return local


def initial_states(optimizer: Optimizer) -> dict[nn.Parameter, OptimState]:
    """The state that the optimizer would create in its first step: runs one with zero gradients and zero learning rate.
    The optimizer is left without state."""
    parameters = params_of(optimizer)
    gradients = [one.grad for one in parameters]
    rates = [group["lr"] for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
        for one in parameters:
            one.grad = torch.zeros_like(one.detach()) if one.requires_grad else None
        optimizer.step()
        return {one: dict(optimizer.state[one]) for one in parameters if one in optimizer.state}
    finally:
        optimizer.state.clear()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for one, gradient in zip(parameters, gradients, strict=True):
            one.grad = gradient


def infer_sharded_kinds(states: Iterable[Mapping[str, Any]]) -> set[str]:
    """Kinds of full state with one value per element. 0-dimensional parameters are ambiguous: if there are no others,
    every kind but torch's `step` counts."""
    tensors = [(kind, value) for state in states for kind, value in state.items() if isinstance(value, Tensor)]
    return {kind for kind, value in tensors if value.dim()} or {kind for kind, _ in tensors} - {"step"}


# ---- the functions of torch.distributed.checkpoint.state_dict -------------------------------------------------------


def get_model_state_dict(model: nn.Module, *, options: Options = None) -> OptimState:
    options = options or StateDictOptions()
    module = unwrap(model)
    if options.full_state_dict:
        return full_state_dict(module, device="cpu" if options.cpu_offload else None,
                               everywhere=not options.cpu_offload, frozen=not options.ignore_frozen_params)
    with buffers_in_own_dtype(module):
        state = module.state_dict(keep_vars=True)
    for name, tensor in [*state.items()]:
        if options.ignore_frozen_params and isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
            del state[name]
        elif isinstance(tensor, Tensor):
            state[name] = tensor.detach()
    return state


def set_model_state_dict(model: nn.Module, model_state_dict: Mapping[str, Any], *, options: Options = None) -> None:
    options = options or StateDictOptions()
    module = unwrap(model)
    if options.broadcast_from_rank0:
        load_from_rank0(module, model_state_dict, options.strict)
    else:
        model.load_state_dict(model_state_dict, options.strict)


def get_optimizer_state_dict(model: nn.Module, optimizers: Optimizers, *, options: Options = None) -> OptimState:
    """{"state": {name: {kind: value}}, "param_groups": [{"params": [names], ...}]}. Without `full_state_dict`, an
    optimizer that has taken no step yields its initial state, as a target to load into."""
    options = options or StateDictOptions()
    module = unwrap(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: OptimState = {"state": {}, "param_groups": []}
    for optimizer in [optimizers] if isinstance(optimizers, Optimizer) else optimizers:
        if options.full_state_dict:
            prepare_all_ranks(module, "get_optimizer_state_dict()")
            keeps = not options.cpu_offload or require_fsdp_state(module).root.dp.rank == 0
            device = "cpu" if options.cpu_offload else None
            states: Iterable[tuple[nn.Parameter, OptimState]] = list(
                gather_full_states(optimizer, buckets_of(module), collects=keeps, device=device))
        else:
            keeps, own = True, optimizer.state or initial_states(optimizer)
            states = [(one, dict(state)) for one, state in own.items() if isinstance(one, nn.Parameter)]
        if keeps:
            found["state"] |= {names[id(parameter)]: state for parameter, state in states}
            found["param_groups"] += [{**group, "params": [names[id(one)] for one in group["params"]]}
                                      for group in optimizer.param_groups]
    return found if found["param_groups"] else {}


def set_optimizer_state_dict(model: nn.Module, optimizers: Optimizers, optim_state_dict: Mapping[str, Any], *,
                             options: Options = None) -> None:
    options = options or StateDictOptions()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    states, groups = optim_state_dict.get("state", {}), optim_state_dict.get("param_groups", [])
    is_full, split = options.full_state_dict, infer_sharded_kinds(states.values())
    if options.broadcast_from_rank0:
        states, groups, is_full = *_broadcast_from_rank0(model, states, groups), False
    group_of_name = {name: group for group in groups for name in group["params"]}
    for optimizer in [optimizers] if isinstance(optimizers, Optimizer) else optimizers:
        parameters = {names[id(one)]: one for one in params_of(optimizer)}
        unknown = states.keys() - parameters.keys()
        if unknown and options.strict:
            raise ConfigError(f"set_optimizer_state_dict: {len(unknown)} names are not the optimizer's, {min(unknown)} "
                              "first")
        state = {index: shard_full_state(parameter, states[name], split) if is_full else dict(states[name])
                 for index, (name, parameter) in enumerate(parameters.items()) if name in states}
        own = optimizer.state_dict()["param_groups"]
        for group, with_params in zip(own, optimizer.param_groups, strict=True):
            # the saved group that has a parameter in common
            saved = next((group_of_name[names[id(one)]] for one in with_params["params"]
                          if names[id(one)] in group_of_name), None)
            if saved is None:
                raise ConfigError("set_optimizer_state_dict: the state dict has no parameter of one of the param "
                                  "groups")
            group |= {key: value for key, value in saved.items() if key not in RUN_SPECIFIC_KEYS}
        optimizer.load_state_dict({"state": state, "param_groups": own})


def _broadcast_from_rank0(model: nn.Module, states: Mapping[str, OptimState], groups: list[OptimState],
                          ) -> tuple[dict[str, OptimState], list[OptimState]]:
    """This rank's part of rank 0's states, and its param groups. Collective."""
    root = require_fsdp_state(unwrap(model)).root
    parameters = dict(model.named_parameters())
    split = broadcast_json(sorted(infer_sharded_kinds(states.values())), root.dp)

    def keep(path: tuple[Any, ...], full: Tensor) -> Any:
        if path[0] == 1 or path[2] not in split:  # of a param group, or one number for the whole parameter
            return full.cpu()
        _, name, kind = path
        return shard_full_state(parameters.get(name), {kind: full}, split)[kind]

    plain = [{**one, "params": group["params"]} for one, group in zip(hyper_parameters(groups), groups, strict=True)]
    local_states, local_groups = broadcast_nested((states, plain), root.dp, root.device, keep)
    return local_states, local_groups


def get_state_dict(model: nn.Module, optimizers: Optimizers, *, options: Options = None,
                   ) -> tuple[OptimState, OptimState]:
    return get_model_state_dict(model, options=options), get_optimizer_state_dict(model, optimizers, options=options)


def set_state_dict(model: nn.Module, optimizers: Optimizers, *, model_state_dict: Mapping[str, Any],
                   optim_state_dict: Mapping[str, Any], options: Options = None) -> None:
    set_model_state_dict(model, model_state_dict, options=options)
    set_optimizer_state_dict(model, optimizers, optim_state_dict, options=options)
