"""The functions of torch.distributed.checkpoint.state_dict, for sharded models: state by parameter names.

    model_state, optim_state = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    set_state_dict(model, optimizer, model_state_dict=..., optim_state_dict=..., options=...)

Without `full_state_dict` values are this rank's runs, for the same rank of as many. With it they are whole: on all
ranks, or with `cpu_offload` on the first one's host alone, the others have empty dicts. `broadcast_from_rank0` sets the
first rank's on all. torch's own StateDictOptions will do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from megatron.checkpoint.agree import agree
from megatron.errors import ConfigError
from megatron.fsdp.optim_state import cut_of_first, first_states, own_state, split_kinds, whole_states
from megatron.fsdp.shard import Shard
from megatron.fsdp.sharding import inside, the_member
from megatron.fsdp.state_dict import buckets_of, full_state_dict, load_from_first, named_tensors, ready, saved_buffers
from megatron.zero.api.hyper import OF_THE_RUN, hyper_parameters
from mpu.collectives import broadcast_json

State = dict[str, Any]


@dataclass(frozen=True)
class StateDictOptions:
    full_state_dict: bool = False
    cpu_offload: bool = False
    ignore_frozen_params: bool = False
    strict: bool = True
    broadcast_from_rank0: bool = False


def get_model_state_dict(model: nn.Module, *, options: Any = None) -> State:
    options = options or StateDictOptions()
    module = inside(model)
    if options.full_state_dict:
        return full_state_dict(module, device="cpu" if options.cpu_offload else None,
                               everywhere=not options.cpu_offload, frozen=not options.ignore_frozen_params)
    with saved_buffers(module):
        state = named_tensors(module)
    for name, tensor in [*state.items()]:
        if options.ignore_frozen_params and isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
            del state[name]
        elif isinstance(tensor, Tensor):
            state[name] = tensor.detach()
    return state


def set_model_state_dict(model: nn.Module, model_state_dict: Mapping[str, Any], *, options: Any = None) -> None:
    options = options or StateDictOptions()
    module = inside(model)
    if options.broadcast_from_rank0:
        load_from_first(module, model_state_dict, options.strict)
    else:
        model.load_state_dict(model_state_dict, options.strict)


def get_optimizer_state_dict(model: nn.Module, optimizers: Optimizer | Iterable[Optimizer], *, options: Any = None,
                             ) -> State:
    """{"state": {name: {kind: value}}, "param_groups": [{"params": [names], ...}]}. Of an optimizer that has taken no
    step, without `full_state_dict`, it is what there is to load into."""
    options = options or StateDictOptions()
    module = inside(model)
    names = _names(model)
    found: State = {"state": {}, "param_groups": []}
    for optimizer in _each(optimizers):
        if options.full_state_dict:
            ready(module, "get_optimizer_state_dict()")
            keeps = not options.cpu_offload or the_member(module).root.dp.rank == 0
            device = "cpu" if options.cpu_offload else None
            states: Iterable[tuple[nn.Parameter, State]] = list(
                whole_states(optimizer, buckets_of(module), keeps=keeps, device=device))
        else:
            keeps, own = True, optimizer.state or first_states(optimizer)
            states = [(one, dict(state)) for one, state in own.items() if isinstance(one, nn.Parameter)]
        if keeps:
            found["state"] |= {names[id(parameter)]: state for parameter, state in states}
            found["param_groups"] += [{**group, "params": [names[id(one)] for one in group["params"]]}
                                      for group in optimizer.param_groups]
    return found if found["param_groups"] else {}


def set_optimizer_state_dict(model: nn.Module, optimizers: Optimizer | Iterable[Optimizer],
                             optim_state_dict: Mapping[str, Any], *, options: Any = None) -> None:
    options = options or StateDictOptions()
    names, states, groups = _names(model), optim_state_dict.get("state", {}), optim_state_dict.get("param_groups", [])
    is_full, split = options.full_state_dict, split_kinds(states.values())
    if options.broadcast_from_rank0:
        states, groups, is_full = *_of_first(model, states, groups), False
    for optimizer in _each(optimizers):
        number = {names[id(one)]: index for index, one in enumerate(
            one for group in optimizer.param_groups for one in group["params"])}
        parameters = {names[id(one)]: one for group in optimizer.param_groups for one in group["params"]}
        strange = states.keys() - number.keys()
        if strange and options.strict:
            raise ConfigError(f"set_optimizer_state_dict: {len(strange)} names are not the optimizer's, {min(strange)} "
                              "first")
        state = {number[name]: own_state(parameters[name], values, split)
                 if is_full and isinstance(parameters[name], Shard) else dict(values)
                 for name, values in states.items() if name in number}
        own = optimizer.state_dict()["param_groups"]
        for group, given in zip(own, _groups_for(optimizer, names, groups), strict=True):
            group |= {key: value for key, value in given.items() if key not in OF_THE_RUN}
        optimizer.load_state_dict({"state": state, "param_groups": own})


def _of_first(model: nn.Module, states: Mapping[str, State], groups: list[State],
              ) -> tuple[dict[str, State], list[State]]:
    """This rank's part of the states that the first rank has, and its groups. Collective."""
    root = the_member(inside(model)).root
    parameters = dict(model.named_parameters())
    agree(lambda: _check_whole(states, parameters) if root.dp.rank == 0 else None, root.dp)
    plain = [{**one, "params": group["params"]} for one, group in zip(hyper_parameters(groups), groups, strict=True)]
    told = broadcast_json([{key: value.item() if isinstance(value, Tensor) else value for key, value in group.items()}
                           for group in plain], root.dp)
    tuples = {key for group in plain for key, value in group.items() if isinstance(value, tuple)}
    tuples = set(broadcast_json(sorted(tuples), root.dp))
    return (cut_of_first(parameters, states, root.dp, root.device),
            [{key: tuple(value) if key in tuples else value for key, value in group.items()} for group in told])


def _check_whole(states: Mapping[str, State], parameters: Mapping[str, nn.Parameter]) -> None:
    split = split_kinds(states.values())
    for name, state in states.items():
        for kind, value in state.items():
            if kind in split and name in parameters and value.shape != parameters[name].shape:
                raise ConfigError(f"set_optimizer_state_dict: the state {kind!r} of {name} has shape "
                                  f"{list(value.shape)}, expected {list(parameters[name].shape)}: give the first rank "
                                  "the full state dict of this model's optimizer")


def get_state_dict(model: nn.Module, optimizers: Optimizer | Iterable[Optimizer], *, options: Any = None,
                   ) -> tuple[State, State]:
    return get_model_state_dict(model, options=options), get_optimizer_state_dict(model, optimizers, options=options)


def set_state_dict(model: nn.Module, optimizers: Optimizer | Iterable[Optimizer], *,
                   model_state_dict: Mapping[str, Any], optim_state_dict: Mapping[str, Any],
                   options: Any = None) -> None:
    set_model_state_dict(model, model_state_dict, options=options)
    set_optimizer_state_dict(model, optimizers, optim_state_dict, options=options)


def _each(optimizers: Optimizer | Iterable[Optimizer]) -> list[Optimizer]:
    return [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)


def _names(model: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in model.named_parameters()}


def _groups_for(optimizer: Optimizer, names: Mapping[int, str], saved: Iterable[Mapping[str, Any]],
                ) -> Iterable[Mapping[str, Any]]:
    """The saved group of each of the optimizer's, by a parameter that they share."""
    by_name = {name: group for group in saved for name in group["params"]}
    for group in optimizer.param_groups:
        found = next((by_name[names[id(one)]] for one in group["params"] if names[id(one)] in by_name), None)
        if found is None:
            raise ConfigError("set_optimizer_state_dict: the state dict has no parameter of one of the param groups")
        yield found
