"""State dicts of sharded modules and of torch optimizers over sharded parameters, also by torch's functions; and full
parameters for a while (`summon_full_params`).

    model_state, optim_state = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    set_state_dict(model, optimizer, model_state_dict=..., optim_state_dict=..., options=...)

A full state dict has the names, order and precision of the unwrapped model and is gathered one bucket at a time.
Optimizer state that has a value for each element is sharded like its parameter; a number is the same on all ranks;
anything else is refused. Without `full_state_dict` values are this rank's segments, for the same rank of as many. With
`cpu_offload` only rank 0 gets the full state. `broadcast_from_rank0` sets rank 0's state on all ranks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.optim import Optimizer

from megatron.checkpoint.json_state import decode_state, encode_state
from megatron.checkpoint.safetensors_io import DTYPE_NAMES, DTYPES, FileTensor
from megatron.distributed.collective_log import assert_collective_call
from megatron.distributed.consistency import all_succeed_or_raise, assert_equal_across_ranks
from megatron.errors import ConfigError
from megatron.fsdp.root import VOLATILE, FSDPRoot
from megatron.fsdp.sharded_tensor import (PartialTensor, ShardedParam, gather_masters, gather_shards, local_params,
                                          local_tensor, location_of, segment_like, store_masters)
from megatron.fsdp.sharding import byte_checksum, require_fsdp_state, sharded_modules, unwrap
from megatron.zero.api.checkpoint_io import RUN_SPECIFIC_KEYS, hyper_parameters
from megatron.zero.bucket import FlatBucket
from megatron.zero.partitioned_param import set_param_data
from mpu.collectives import broadcast_into, broadcast_json
from mpu.groups import Group

OptimState = dict[str, Any]
Options = StateDictOptions | None
Optimizers = Optimizer | Iterable[Optimizer]

FULL_STATE_DICT_CALL, SUMMON_CALL = "a full state dict", "summon_full_params()"


def buckets_of(module: nn.Module) -> list[FlatBucket]:
    return [bucket for member in sharded_modules(module).values() for bucket in member.unit.buckets]


def _roots(module: nn.Module) -> list[FSDPRoot]:
    return list(dict.fromkeys(member.root for member in sharded_modules(module).values()))


def prepare_all_ranks(module: nn.Module, call: str) -> None:
    """Check that no pass is running and that all ranks make this call; apply writes and reshard. Collective."""
    for root in _roots(module):
        root.check_idle(call)
        assert_collective_call(root.log, root.dp, call)
        root.sync_before_access()
        root.reshard_model()


def buffers_in_own_dtype(module: nn.Module) -> AbstractContextManager[None]:
    """Inside, buffers that mixed precision cast have their original dtype, as in the unwrapped model."""
    return temporarily_replaced(
        [(child._buffers, name, buffer.to(dtype)) for member in sharded_modules(module).values()
         for child, name, dtype in member.buffer_dtypes if (buffer := child._buffers.get(name)) is not None])


@contextmanager
def temporarily_replaced(entries: Sequence[tuple[dict[str, Any], str, Any]]) -> Iterator[None]:
    """Inside, `dict[name]` is `value`, for each (dict, name, value); the dicts hold a module's parameters or
    buffers."""
    before = [(of, name, of[name]) for of, name, _ in entries]
    try:
        for of, name, value in entries:
            of[name] = value
        yield
    finally:
        for of, name, value in before:
            of[name] = value


@contextmanager
def _full_parameters(module: nn.Module, collects: bool, device: torch.device | str | None) -> Iterator[None]:
    """Inside, on ranks that `collects`, new full parameters replace the sharded ones in the module, so that torch's
    code and user hooks see the unwrapped model. Collective except for buckets in `summon_full_params`, which are copied
    locally."""
    roots, full = _roots(module), dict[nn.Parameter, nn.Parameter]()
    holders = [root.full_params_holder for root in roots]
    summoned = {bucket for root in roots for bucket in root.summoned}
    for bucket in buckets_of(module):
        values = bucket.parameters if bucket in summoned else gather_masters(bucket)
        for parameter, value in zip(bucket.parameters, values, strict=True) if collects else ():
            full[parameter] = nn.Parameter(value.detach().to(device or bucket.device, copy=True),
                                           parameter.requires_grad)
    try:
        for root in roots:
            root.full_params_holder = FULL_STATE_DICT_CALL
        with temporarily_replaced([(child._parameters, name, full[parameter]) for child in module.modules()
                                   for name, parameter in child._parameters.items() if parameter in full]):
            yield
    finally:
        for root, holder in zip(roots, holders, strict=True):
            root.full_params_holder = holder


def full_state_dict(module: nn.Module, *, device: torch.device | str | None = None, everywhere: bool = True,
                    frozen: bool = True, destination: Any = None, prefix: str = "", keep_vars: bool = False,
                    ) -> OrderedDict[str, Any]:
    """The unwrapped model's state dict on `device` (None: the compute device), on all ranks or only on rank 0 (empty on
    the others). Collective, unless all of it is in `summon_full_params`; besides the result one bucket is gathered at a
    time. With `keep_vars` it has the sharded parameters themselves."""
    state: OrderedDict[str, Any] = OrderedDict() if destination is None else destination
    root = require_fsdp_state(module).root
    collects = everywhere or root.dp.rank == 0
    if keep_vars or root.full_params_holder == FULL_STATE_DICT_CALL:  # called by the full state dict of an outer module
        return module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
    if root.full_params_holder is None:
        prepare_all_ranks(module, FULL_STATE_DICT_CALL)
    elif not root.summoned.issuperset(buckets_of(module)):  # only some of the buckets are summoned
        assert_collective_call(root.log, root.dp, FULL_STATE_DICT_CALL)
    with _full_parameters(module, collects, device), buffers_in_own_dtype(module):
        if collects:
            state = module.state_dict(destination=destination, prefix=prefix)
        left_out = {name for name, one in module.named_parameters(remove_duplicate=False)
                    if not (frozen or one.requires_grad)}
    for name in [name for name in state if name.startswith(prefix)]:
        if name in left_out:
            del state[name]
        elif isinstance(state[name], PartialTensor):
            raise ConfigError(f"a full state dict: {name} is shared with a module outside of this one, which has its "
                              "elements: take the state dict of the sharded module around both")
        elif isinstance(state[name], Tensor):
            state[name] = state[name].to(device)
    return state


def broadcast_state(value: Any, group: Group, device: torch.device, keep: Callable[[str, Tensor], Any]) -> Any:
    """Rank 0's nested dicts, lists and tuples of numbers, strings and tensors, on every rank. `keep(path, tensor)` says
    what stays of each full tensor, which is on the device; one is there at a time. Collective."""
    tensors: list[FileTensor] = []
    code = all_succeed_or_raise(lambda: encode_state(value if group.rank == 0 else None, "", tensors), group)
    own = {one.key: one for one in tensors}
    code, kinds = broadcast_json(
        [code, {one.key: [DTYPE_NAMES[one.dtype], one.shape] for one in tensors}], group)

    def receive(path: str) -> Any:
        dtype, shape = kinds[path]
        full = torch.empty(shape, dtype=DTYPES[dtype], device=device)
        if group.rank == 0:
            full.copy_(own[path].load())
        broadcast_into(full.view(-1).view(torch.uint8), 0, group).wait()  # bytes: works for every dtype
        return keep(path, full)

    return decode_state(code, receive)


# ---- the state of an optimizer --------------------------------------------------------------------------------------


def params_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """The parameters of all param groups, in the order in which a state dict numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def gather_full_states(optimizer: Optimizer, buckets: list[FlatBucket], *, collects: bool,
                       device: torch.device | str | None = "cpu") -> Iterator[tuple[nn.Parameter, OptimState]]:
    """Each parameter that has state, those of no bucket last, with the full state if this rank `collects` (otherwise
    without tensors). Collective; one kind of one bucket is gathered at a time."""
    for bucket in buckets:
        states = {parameter: dict(optimizer.state.get(parameter, {})) for parameter in bucket.parameters}
        full: dict[nn.Parameter, OptimState] = {parameter: {} for parameter in bucket.parameters}
        for kind in dict.fromkeys(name for state in states.values() for name in state):
            is_sharded = {parameter: is_sharded_state(parameter, kind, state[kind])
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
    yield from ((one, dict(state)) for one, state in optimizer.state.items()
                if collects and isinstance(one, nn.Parameter) and not isinstance(one, ShardedParam))


def is_sharded_state(parameter: nn.Parameter, kind: str, value: Any) -> bool:
    """Whether the state has a value for each element. ConfigError if it is neither that nor one number."""
    if not isinstance(value, Tensor) or local_tensor(value).dim() == 0:
        return False
    if local_tensor(value).shape == local_tensor(parameter).shape:
        return True
    raise ConfigError(f"the state {kind!r} of {location_of(parameter).param_name} has shape "
                      f"{list(local_tensor(value).shape)}, and this rank a segment of "
                      f"{local_tensor(parameter).numel()} elements: it is neither one number for each element nor one "
                      "for all, and cannot be gathered")


def own_segment(parameter: nn.Parameter, full: Tensor) -> Tensor:
    """This rank's segment of a full tensor of the parameter's shape, where the parameter is."""
    start, own = location_of(parameter).offset, local_tensor(parameter)
    return segment_like(full.detach().flatten()[start : start + own.numel()].clone().to(own.device), parameter)


def shard_full_state(parameter: nn.Parameter | None, state: Mapping[str, Any], sharded: Collection[str]) -> OptimState:
    """This rank's part of a parameter's full state, of which the kinds in `sharded` are split; all of it if the
    parameter is not sharded."""
    if not isinstance(parameter, ShardedParam):
        return dict(state)
    whole, name, _ = location_of(parameter)
    local: OptimState = {}
    for kind, value in state.items():
        if kind not in sharded:
            local[kind] = value.clone() if isinstance(value, Tensor) else value
            continue
        if value.shape != whole:
            raise ConfigError(f"the state {kind!r} of {name} has shape {list(value.shape)}, expected {list(whole)}")
        local[kind] = own_segment(parameter, value)
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
    """With `broadcast_from_rank0` each rank keeps its segments of rank 0's parameters, and all other values in full."""
    options = options or StateDictOptions()
    if options.broadcast_from_rank0:
        module, state = unwrap(model), OrderedDict[str, Any]()
        prepare_all_ranks(module, "set_model_state_dict()")
        root = require_fsdp_state(module).root
        parameters = dict(model.named_parameters(remove_duplicate=False))

        def keep(path: str, full: Tensor) -> Tensor:
            parameter = parameters.get(path.split("/")[2])
            if isinstance(parameter, ShardedParam) and full.shape == location_of(parameter).full_size:
                return own_segment(parameter, full)
            return full.cpu()

        given = [{name: value.detach() if isinstance(value, Tensor) else value
                  for name, value in model_state_dict.items()}, getattr(model_state_dict, "_metadata", None)]
        entries, metadata = broadcast_state(given, root.dp, root.device, keep)
        state.update(entries)
        if metadata is not None:  # torch's version numbers of modules
            state._metadata = metadata  # type: ignore[attr-defined]
        model_state_dict = state
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

    def keep(path: str, full: Tensor) -> Any:
        _, name, kind, *_ = path.split("/")
        if kind not in split:  # one number for the whole parameter
            return full.cpu()
        return shard_full_state(parameters.get(name), {kind: full}, split)[kind]

    plain = [{**one, "params": group["params"]} for one, group in zip(hyper_parameters(groups), groups, strict=True)]
    return (broadcast_state(dict(states), root.dp, root.device, keep),
            broadcast_state(plain, root.dp, root.device, lambda path, full: full.cpu()))


def get_state_dict(model: nn.Module, optimizers: Optimizers, *, options: Options = None,
                   ) -> tuple[OptimState, OptimState]:
    return get_model_state_dict(model, options=options), get_optimizer_state_dict(model, optimizers, options=options)


def set_state_dict(model: nn.Module, optimizers: Optimizers, *, model_state_dict: Mapping[str, Any],
                   optim_state_dict: Mapping[str, Any], options: Options = None) -> None:
    set_model_state_dict(model, model_state_dict, options=options)
    set_optimizer_state_dict(model, optimizers, optim_state_dict, options=options)


@contextmanager
def summon_full_params(module: nn.Module, recurse: bool = True, volatile: bool = False) -> Iterator[None]:
    """Inside, parameters of the sharded modules in `module` (without `recurse`: of itself) are full, in the masters'
    dtype. Edits must be equal on all ranks and are kept unless `volatile`. State dicts inside are full and include the
    edits. Collective."""
    found = [member for member in sharded_modules(module).values() if recurse or member.unit.module is module]
    if not found:
        raise ConfigError(f"{SUMMON_CALL}: {type(module).__name__} is not sharded, and nothing in it")
    roots = _roots(module)
    prepare_all_ranks(module, SUMMON_CALL)
    buckets = [bucket for member in found for bucket in member.unit.buckets]
    try:
        for bucket in buckets:
            for parameter, value in zip(bucket.parameters, gather_masters(bucket), strict=True):
                set_param_data(parameter, value)
        for root in roots:
            root.full_params_holder, root.summoned = VOLATILE if volatile else SUMMON_CALL, {*buckets}
        yield
        if not volatile:
            edited = [(slot, parameter) for bucket in buckets  # `p.data = ...` counts as an edit
                      for slot, parameter in zip(bucket.layout.slots, bucket.parameters, strict=True)]
            for slot, parameter in edited:
                if parameter.shape != torch.Size(slot.shape):
                    raise ConfigError(f"{slot.name} became a tensor of shape {list(parameter.shape)} inside "
                                      f"{SUMMON_CALL}, and was of {list(slot.shape)}")
            if not roots[0].dp.is_solo:
                assert_equal_across_ranks(
                    {slot.name: byte_checksum(parameter.detach()) for slot, parameter in edited}, roots[0].dp,
                    f"the ranks edited parameters differently inside {SUMMON_CALL}, and nothing was kept (checksums)")
            for bucket in buckets:
                store_masters(bucket, bucket.parameters)
    finally:
        for bucket in buckets:  # also after an OOM error half way
            bucket.show_params_sharded()
        for root in roots:
            root.full_params_holder, root.summoned = None, set()
            root.apply_master_edits()
