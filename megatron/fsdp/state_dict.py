"""State dicts of sharded modules: full, this rank's, and back.

    full     whole tensors under the names of the unwrapped model, in its order and precisions; made a bucket at a time
    local    this rank's runs, flat, to be loaded by the same rank of as many; with `local_metadata_dict` the files of
             all ranks make a full one again, without any rank (`consolidate_shard_weights`)
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megatron.checkpoint.agree import agree, alike
from megatron.errors import ConfigError
from megatron.fsdp.root import VOLATILE, Root
from megatron.fsdp.same import sum_of_bytes
from megatron.fsdp.shard import Part, Shard, local, place_of
from megatron.fsdp.sharding import inside, members, the_member
from megatron.fsdp.whole import from_first, keep, masters, replaced
from megatron.zero.bucket import FlatBucket
from megatron.zero.placeholder import set_param_data
from megatron.zero.together import assert_collective_call
from mpu.collectives import broadcast_into, broadcast_json

STATE_DICT = "a full state dict"
_EXTRA_STATE = "_extra_state"


def named_tensors(module: nn.Module) -> OrderedDict[str, Any]:
    """Parameters and buffers themselves by the names of a state dict."""
    return module.state_dict(keep_vars=True)  # type: ignore[return-value]  # torch's is an OrderedDict


def buckets_of(module: nn.Module) -> list[FlatBucket]:
    return [bucket for _, _, member in members(module) for bucket in member.unit.buckets]


def _roots(module: nn.Module) -> list[Root]:
    return list(dict.fromkeys(member.root for _, _, member in members(module)))


def ready(module: nn.Module, what: str) -> None:
    """No pass is under way, and all ranks are here. Collective."""
    for root in _roots(module):
        root.check_idle(what)
        assert_collective_call(root.log, root.dp, what)
        root.catch_up()
        root.rest()


@contextmanager
def saved_buffers(module: nn.Module) -> Iterator[None]:
    """Inside, buffers that mixed precision has cast are in their own precision, as in the unwrapped model."""
    with replaced([(child._buffers, name, buffer.to(dtype)) for _, _, member in members(module)
                   for child, name, dtype in member.own_dtypes if (buffer := child._buffers.get(name)) is not None]):
        yield


@contextmanager
def _full_parameters(module: nn.Module, keeps: bool, device: torch.device | str | None,
                     ) -> Iterator[Mapping[nn.Parameter, Tensor]]:
    """Inside, the module of a rank that `keeps` them has full parameters, new ones, in the place of the sharded ones by
    which they are given: torch's own code and a user's hooks see the unwrapped model. Collective but for buckets that
    `summon_full_params` has lent, whose parameters are copied."""
    roots, full = _roots(module), dict[nn.Parameter, nn.Parameter]()
    before, lent = [root.summoned for root in roots], {bucket for root in roots for bucket in root.lent}
    for bucket in buckets_of(module):
        values = bucket.parameters if bucket in lent else masters(bucket)
        for parameter, value in zip(bucket.parameters, values, strict=True) if keeps else ():
            full[parameter] = nn.Parameter(value.detach().to(device or bucket.device, copy=True),
                                           parameter.requires_grad)
    try:
        for root in roots:
            root.summoned = STATE_DICT
        with replaced([(child._parameters, name, full[parameter]) for child in module.modules()
                       for name, parameter in child._parameters.items() if parameter in full]):
            yield full
    finally:
        for root, by in zip(roots, before, strict=True):
            root.summoned = by


def full_state_dict(module: nn.Module, *, device: torch.device | str | None = None, everywhere: bool = True,
                    frozen: bool = True, destination: Any = None, prefix: str = "", keep_vars: bool = False,
                    ) -> OrderedDict[str, Any]:
    """That of the unwrapped model, on `device` (None: where the model computes), on all ranks or on the first alone
    (empty on the others). Collective, unless `summon_full_params` has lent all of it; beside the result one bucket is
    whole at a time. With `keep_vars`, of the sharded parameters themselves."""
    state: OrderedDict[str, Any] = OrderedDict() if destination is None else destination
    root = the_member(module).root
    keeps = everywhere or root.dp.rank == 0
    if keep_vars or root.summoned == STATE_DICT:  # then it is that of a module around this one
        return module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
    if root.summoned is None:
        ready(module, STATE_DICT)
    elif not root.lent.issuperset(buckets_of(module)):  # summoned with recurse=False, or for another module
        assert_collective_call(root.log, root.dp, STATE_DICT)
    with _full_parameters(module, keeps, device), saved_buffers(module):
        if keeps:
            state = module.state_dict(destination=destination, prefix=prefix)
        left_out = {name for name, one in module.named_parameters(remove_duplicate=False)
                    if not (frozen or one.requires_grad)}
    for name in [name for name in state if name.startswith(prefix)]:
        if name in left_out:
            del state[name]
        elif isinstance(state[name], Part):
            raise ConfigError(f"a full state dict: {name} is shared with a module outside of this one, which has its "
                              "elements: take the state dict of the sharded module around both")
        elif isinstance(state[name], Tensor):
            state[name] = state[name].to(device)
    return state


def load_from_first(module: nn.Module, state: Mapping[str, Any], strict: bool = True) -> None:
    """The full state dict of the first rank, on all ranks; what it does not have stays. Collective. The first rank
    loads it into full parameters on its host, as the unwrapped model does; they travel by buckets."""
    ready(module, STATE_DICT)
    group = _roots(module)[0].dp
    extra = {name: value for name, value in state.items() if name.endswith(_EXTRA_STATE)} if group.rank == 0 else {}
    with _full_parameters(module, group.rank == 0, "cpu") as full:
        agree(lambda: _load(module, state, extra, strict) if group.rank == 0 else None, group)
    for bucket in buckets_of(module):
        from_first(bucket, [full.get(parameter) for parameter in bucket.parameters])
    for root in _roots(module):
        root.note_edits()
    for buffer in [child._buffers[name] for child in module.modules()
                   for name in child._buffers if name not in child._non_persistent_buffers_set]:
        if buffer is not None:
            values = buffer.contiguous()
            broadcast_into(values.view(-1).view(torch.uint8), 0, group).wait()  # not every type can travel
            buffer.copy_(values)
    extra = broadcast_json(extra, group)
    for path, child in module.named_modules() if group.rank else ():
        if (name := f"{path}.{_EXTRA_STATE}".removeprefix(".")) in extra and inside(child) is child:
            child.set_extra_state(extra[name])


def _load(module: nn.Module, state: Mapping[str, Any], extra: Mapping[str, Any], strict: bool) -> None:
    try:
        if extra != json.loads(json.dumps(extra)):
            raise TypeError("it has a tuple, or a key that is not a string")
    except TypeError as error:
        raise ConfigError(f"the extra state of the modules cannot be sent as JSON ({error}): load the full state dict "
                          "on every rank, without broadcast_from_rank0") from error
    try:
        module.load_state_dict(state, strict)
    except RuntimeError as error:
        told = " ".join(str(error).split())
        raise ConfigError(f"the full state dict on the first rank does not fit the model: {told}") from error


def _split_tensors(module: nn.Module, what: str) -> OrderedDict[str, Any]:
    """Parameters and buffers by name, while no parameter is whole."""
    for root in _roots(module):
        root.check_idle(what)
    return named_tensors(module)


def local_state_dict(module: nn.Module) -> OrderedDict[str, Any]:
    """This rank's part: flat runs, and buffers whole. Not collective."""
    with saved_buffers(module):
        state = _split_tensors(module, "local_state_dict()")
    for name, tensor in state.items():
        if isinstance(tensor, Tensor):
            state[name] = (local(tensor) if isinstance(tensor, Shard) else tensor.detach()).clone()
    return state


def local_metadata_dict(module: nn.Module) -> dict[str, Any]:
    """What this rank's runs are of: for each parameter its shape, and where its run begins and how long it is."""
    group = _roots(module)[0].dp
    places = {name: (list(place_of(tensor)[0]), place_of(tensor)[2], local(tensor).numel())
              for name, tensor in _split_tensors(module, "local_metadata_dict()").items() if isinstance(tensor, Shard)}
    return {"rank": group.rank, "ranks": group.size,
            "params": {name: {"shape": shape, "offset": offset, "numel": numel}
                       for name, (shape, offset, numel) in places.items()}}


def load_local_state_dict(module: nn.Module, state: Mapping[str, Any], strict: bool = True) -> None:
    """What `local_state_dict` gave on this rank, of as many ranks. Not collective."""
    named = _split_tensors(module, "load_local_state_dict()")
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
                              with_module_buffers: bool = True, strict: bool = True) -> OrderedDict[str, Any]:
    """One full state dict from what `local_state_dict` and `local_metadata_dict` gave on every rank, in any order."""
    if len(shard_weights) != len(shard_metadata) or not shard_weights:
        raise ConfigError(f"consolidate_shard_weights: {len(shard_weights)} state dicts and {len(shard_metadata)} "
                          "metadata: give one of each for every rank")
    ranks = sorted(metadata["rank"] for metadata in shard_metadata)
    expected = list(range(shard_metadata[0]["ranks"]))
    if ranks != expected:
        raise ConfigError(f"consolidate_shard_weights: expected the ranks {expected}, found {ranks}")
    whole: OrderedDict[str, Any] = OrderedDict()
    vars(whole).update(getattr(shard_weights[0], "__dict__", {}))  # torch's metadata
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


# ---- full parameters for a while ------------------------------------------------------------------------------------

WHAT = "summon_full_params()"


@contextmanager
def summon_full_params(module: nn.Module, recurse: bool = True, volatile: bool = False) -> Iterator[None]:
    """Inside, parameters of the sharded modules in `module` (without `recurse`, of itself) are full, in the precision
    of the masters. Edits last unless it is `volatile`, and must be alike on all ranks. Every rank calls it. State dicts
    inside are full, and have the edits."""
    found = [member for _, child, member in members(module) if recurse or child is module]
    if not found:
        raise ConfigError(f"{WHAT}: {type(module).__name__} is not sharded, and nothing in it")
    roots = _roots(module)
    ready(module, WHAT)
    buckets = [bucket for member in found for bucket in member.unit.buckets]
    try:
        lent = [(bucket, _lend(bucket)) for bucket in buckets]
        for root in roots:
            root.summoned, root.lent = VOLATILE if volatile else WHAT, {*buckets}
        yield
        if not volatile:
            edits = [(bucket, _now(bucket, whole)) for bucket, whole in lent]
            if not roots[0].dp.is_solo:
                alike({slot.name: sum_of_bytes(value) for bucket, values in edits
                       for slot, value in zip(bucket.layout.slots, values, strict=True)}, roots[0].dp,
                      f"the ranks edited parameters differently inside {WHAT}, and nothing was kept (checksums)")
            for bucket, values in edits:
                keep(bucket, values)
    finally:
        for bucket in buckets:  # also where there was no memory to lend all of them
            bucket.show_params_sharded()
        for root in roots:
            root.summoned, root.lent = None, set()
            root.note_edits()


def _lend(bucket: FlatBucket) -> list[Tensor]:
    whole = masters(bucket)
    for parameter, value in zip(bucket.parameters, whole, strict=True):
        set_param_data(parameter, value)
    return whole


def _now(bucket: FlatBucket, whole: Sequence[Tensor]) -> list[Tensor]:
    """What the parameters are: `p.data = ...` is an edit too."""
    for slot, parameter, value in zip(bucket.layout.slots, bucket.parameters, whole, strict=True):
        if parameter.shape != value.shape:
            raise ConfigError(f"{slot.name} became a tensor of shape {list(parameter.shape)} inside {WHAT}, and was of "
                              f"{list(value.shape)}")
    return [parameter.detach() for parameter in bucket.parameters]
