"""State dicts of sharded modules: full, this rank's, and back.

    full     whole tensors under the names of the unwrapped model, in its order and precisions; made a bucket at a time
    local    this rank's runs, flat, to be loaded by the same rank of as many; with `local_metadata_dict` the files of
             all ranks make a full one again, without any rank (`consolidate_shard_weights`)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron.checkpoint.agree import agree
from megatron.errors import ConfigError
from megatron.fsdp.shard import Shard, local, place_of
from megatron.fsdp.sharding import WRAPPED, members, plain_name
from megatron.fsdp.whole import from_first, masters
from megatron.zero.bucket import FlatBucket
from megatron.zero.together import meet
from mpu.collectives import broadcast_into
from mpu.groups import Group


def inside(model: nn.Module) -> nn.Module:
    """The sharded module, of a wrapper or itself."""
    found: nn.Module = getattr(model, "_modules", {}).get(WRAPPED) or model
    return found


def named_tensors(module: nn.Module) -> dict[str, Any]:
    """Parameters and buffers themselves by the names of a state dict."""
    found: dict[str, Any] = nn.Module.state_dict(module, keep_vars=True)
    return {plain_name(name): tensor for name, tensor in found.items()}


def buckets_of(module: nn.Module) -> list[FlatBucket]:
    return [bucket for _, _, member in members(module) for bucket in member.unit.buckets]


def ready(module: nn.Module, what: str) -> None:
    """No pass is under way, and all ranks are here. Collective."""
    for root in {id(member.root): member.root for _, _, member in members(module)}.values():
        root.check_idle(what)
        meet(root.log, root.dp, what)
        root.catch_up()
        root.rest()


def full_state_dict(module: nn.Module, *, device: torch.device | str | None = None, everywhere: bool = True,
                    frozen: bool = True) -> dict[str, Any]:
    """On `device` (None: where the model computes), on all ranks or on the first alone (empty on the others).
    Collective; beside the result one bucket is whole at a time."""
    ready(module, "a full state dict")
    values: dict[int, Tensor] = {}
    for bucket in buckets_of(module):
        for parameter, value in zip(bucket.parameters, masters(bucket), strict=True):
            if everywhere or bucket.dp.rank == 0:
                values[id(parameter)] = value.to(device or bucket.device, copy=True)
        del value
    if not everywhere and _group(module).rank:
        return {}
    return {name: values.get(id(tensor), tensor.detach() if isinstance(tensor, Tensor) else tensor)
            for name, tensor in named_tensors(module).items()
            if frozen or not isinstance(tensor, nn.Parameter) or tensor.requires_grad}


def _group(module: nn.Module) -> Group:
    return next(member.root.dp for _, _, member in members(module))


def load_from_first(module: nn.Module, state: Mapping[str, Any], strict: bool = True) -> None:
    """The full state dict of the first rank, on all ranks; what it does not have stays. Collective, by buckets."""
    ready(module, "a load of a full state dict")
    named, group = named_tensors(module), _group(module)
    agree(lambda: _check_fits(named, state, strict) if group.rank == 0 else None, group)
    new = {id(tensor): state.get(name) for name, tensor in named.items()}
    for bucket in buckets_of(module):
        from_first(bucket, [new.get(id(parameter)) for parameter in bucket.parameters])
    for root in {id(member.root): member.root for _, _, member in members(module)}.values():
        root.note_edits()
    with torch.no_grad():
        for name, tensor in named.items():
            if isinstance(tensor, Tensor) and not isinstance(tensor, nn.Parameter):
                if group.rank == 0 and name in state:
                    tensor.copy_(state[name])
                values = tensor.contiguous()
                broadcast_into(values.view(-1).view(torch.uint8), 0, group).wait()  # not every type can travel
                tensor.copy_(values)


def _check_fits(named: Mapping[str, Any], state: Mapping[str, Any], strict: bool) -> None:
    for what, names in (("missing", named.keys() - state.keys()), ("not the model's", state.keys() - named.keys())):
        if names and strict:
            raise ConfigError(f"the full state dict: {len(names)} names are {what}, {min(names)} first; give the state "
                              "dict of this model on the first rank, or strict=False")
    for name in named.keys() & state.keys():
        if isinstance(named[name], Tensor) and named[name].shape != state[name].shape:
            raise ConfigError(f"the full state dict: {name} has shape {list(state[name].shape)}, expected "
                              f"{list(named[name].shape)}")


def local_state_dict(module: nn.Module) -> dict[str, Any]:
    """This rank's part: flat runs, and buffers whole. Not collective."""
    return {name: local(tensor).clone() if isinstance(tensor, Shard) else tensor.detach().clone()
            if isinstance(tensor, Tensor) else tensor for name, tensor in named_tensors(module).items()}


def local_metadata_dict(module: nn.Module) -> dict[str, Any]:
    """What this rank's runs are of: for each parameter its shape, and where its run begins and how long it is."""
    group = _group(module)
    places = {name: (list(place_of(tensor)[0]), place_of(tensor)[2], local(tensor).numel())
              for name, tensor in named_tensors(module).items() if isinstance(tensor, Shard)}
    return {"rank": group.rank, "ranks": group.size,
            "params": {name: {"shape": shape, "offset": offset, "numel": numel}
                       for name, (shape, offset, numel) in places.items()}}


def load_local_state_dict(module: nn.Module, state: Mapping[str, Any], strict: bool = True) -> None:
    """What `local_state_dict` gave on this rank, of as many ranks. Not collective."""
    named = named_tensors(module)
    for what, names in (("missing", named.keys() - state.keys()), ("not the model's", state.keys() - named.keys())):
        if names and strict:
            raise ConfigError(f"load_local_state_dict: {len(names)} names are {what}, {min(names)} first")
    for name in named.keys() & state.keys():
        tensor, value = named[name], state[name]
        if not isinstance(tensor, Tensor):
            continue
        target = local(tensor)
        if value.shape != target.shape:
            raise ConfigError(f"load_local_state_dict: {name}: this rank has a run of {target.numel()} elements, the "
                              f"state dict {list(value.shape)}: it is of another rank, or number of ranks; make one of "
                              "all ranks' with consolidate_shard_weights, and load that with load_state_dict")
        with torch.no_grad():
            tensor.copy_(value)


def consolidate_shard_weights(shard_weights: Sequence[Mapping[str, Any]], shard_metadata: Sequence[Mapping[str, Any]],
                              with_module_buffers: bool = True, strict: bool = True) -> dict[str, Any]:
    """One full state dict from what `local_state_dict` and `local_metadata_dict` gave on every rank, in any order."""
    if len(shard_weights) != len(shard_metadata) or not shard_weights:
        raise ConfigError(f"consolidate_shard_weights: {len(shard_weights)} state dicts and {len(shard_metadata)} "
                          "metadata: give one of each for every rank")
    ranks = sorted(metadata["rank"] for metadata in shard_metadata)
    expected = list(range(shard_metadata[0]["ranks"]))
    if ranks != expected:
        raise ConfigError(f"consolidate_shard_weights: expected the ranks {expected}, found {ranks}")
    whole: dict[str, Any] = {}
    filled: dict[str, int] = {}
    for weights, metadata in zip(shard_weights, shard_metadata, strict=True):
        for name, value in weights.items():
            place = metadata["params"].get(name)
            if place is None:
                if with_module_buffers and (name not in whole or metadata["rank"] == 0):
                    whole[name] = value
                continue
            if name not in whole:
                whole[name] = torch.empty(place["shape"], dtype=value.dtype)
            whole[name].view(-1)[place["offset"] : place["offset"] + place["numel"]] = value
            filled[name] = filled.get(name, 0) + place["numel"]
    short = [name for name, count in filled.items() if count != whole[name].numel()]
    if short and strict:
        raise ConfigError(f"consolidate_shard_weights: {short[0]} has {filled[short[0]]} of {whole[short[0]].numel()} "
                          "elements: the state dicts are not of one model at one time")
    return whole
