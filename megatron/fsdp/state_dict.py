"""State dicts of sharded modules.

    full     full tensors with the names, order and precision of the unwrapped model, gathered one bucket at a time
    local    this rank's flat segments, for the same rank of as many; `consolidate_shard_weights` joins all ranks'
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megatron.distributed.collective_log import assert_collective_call
from megatron.distributed.consistency import all_succeed_or_raise, assert_equal_across_ranks
from megatron.errors import ConfigError
from megatron.fsdp.full_params import (broadcast_masters_from_rank0, broadcast_nested, gather_masters, store_masters,
                                       temporarily_replaced)
from megatron.fsdp.root import VOLATILE, FSDPRoot
from megatron.fsdp.sharded_tensor import PartialTensor, ShardedParam, local_tensor, segment_location
from megatron.fsdp.sharding import byte_checksum, require_fsdp_state, sharded_modules, unwrap
from megatron.zero.bucket import FlatBucket
from megatron.zero.partitioned_param import set_param_data

FULL_STATE_DICT_CALL = "a full state dict"
_EXTRA_STATE = "_extra_state"


def named_tensors(module: nn.Module) -> OrderedDict[str, Any]:
    """Parameters and buffers themselves (not copies), by state dict name."""
    return module.state_dict(keep_vars=True)  # type: ignore[return-value]  # torch's is an OrderedDict


def buckets_of(module: nn.Module) -> list[FlatBucket]:
    return [bucket for _, _, member in sharded_modules(module) for bucket in member.unit.buckets]


def _roots(module: nn.Module) -> list[FSDPRoot]:
    return list(dict.fromkeys(member.root for _, _, member in sharded_modules(module)))


def prepare_all_ranks(module: nn.Module, call: str) -> None:
    """Check that no pass is running and that all ranks make this call; apply writes and reshard. Collective."""
    for root in _roots(module):
        root.check_idle(call)
        assert_collective_call(root.log, root.dp, call)
        root.sync_before_access()
        root.reshard_all()


def buffers_in_own_dtype(module: nn.Module) -> AbstractContextManager[None]:
    """Inside, buffers that mixed precision cast have their original dtype, as in the unwrapped model."""
    return temporarily_replaced(
        [(child._buffers, name, buffer.to(dtype)) for _, _, member in sharded_modules(module)
         for child, name, dtype in member.buffer_dtypes if (buffer := child._buffers.get(name)) is not None])


@contextmanager
def _full_parameters(module: nn.Module, collects: bool, device: torch.device | str | None,
                     ) -> Iterator[Mapping[nn.Parameter, Tensor]]:
    """Inside, on ranks that `collects`, new full parameters replace the sharded ones in the module, so that torch's
    code and user hooks see the unwrapped model. Yields sharded -> full parameter. Collective except for buckets in
    `summon_full_params`, which are copied locally."""
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
            yield full
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


def load_from_rank0(module: nn.Module, state: Mapping[str, Any], strict: bool = True) -> None:
    """Load rank 0's full state dict on all ranks; missing entries keep their values. Collective. Rank 0 loads it into
    full parameters on its host, as into the unwrapped model, and broadcasts them bucket by bucket."""
    prepare_all_ranks(module, FULL_STATE_DICT_CALL)
    group, device = _roots(module)[0].dp, _roots(module)[0].device

    def load() -> None:
        try:
            module.load_state_dict(state, strict)
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"the full state dict on the first rank does not fit the model: {reason}") from error

    with _full_parameters(module, group.rank == 0, "cpu") as full:
        all_succeed_or_raise(load if group.rank == 0 else lambda: None, group)
    for bucket in buckets_of(module):
        broadcast_masters_from_rank0(bucket, [full.get(parameter) for parameter in bucket.parameters])
    for root in _roots(module):
        root.apply_master_edits()
    buffers = {f"{path}.{name}": buffer for path, child in module.named_modules()
               for name, buffer in child._buffers.items()
               if buffer is not None and name not in child._non_persistent_buffers_set}
    broadcast_nested(buffers, group, device, lambda path, full: buffers[path[0]].copy_(full))
    extra = broadcast_nested({name: value for name, value in state.items() if name.endswith(_EXTRA_STATE)}, group,
                             device, lambda path, full: full)
    for path, child in module.named_modules() if group.rank else ():
        if (name := f"{path}.{_EXTRA_STATE}".removeprefix(".")) in extra and unwrap(child) is child:
            child.set_extra_state(extra[name])


class LocalStateDicts:
    """FairScale's methods for state dicts of this rank's flat segments. Not collective."""

    module: nn.Module

    def _split_tensors(self, what: str) -> OrderedDict[str, Any]:
        """Parameters and buffers by name. Raises ConfigError if parameters are gathered."""
        for root in _roots(self.module):
            root.check_idle(what)
        return named_tensors(self.module)

    def local_state_dict(self) -> OrderedDict[str, Any]:
        """This rank's segments, and full buffers."""
        with buffers_in_own_dtype(self.module):
            state = self._split_tensors("local_state_dict()")
        for name, tensor in state.items():
            if isinstance(tensor, Tensor):
                state[name] = (local_tensor(tensor) if isinstance(tensor, ShardedParam) else tensor.detach()).clone()
        return state

    def local_metadata_dict(self) -> dict[str, Any]:
        """{"rank", "ranks", "params": {name: {"shape", "offset", "numel"}}} of this rank's segments."""
        group, params = _roots(self.module)[0].dp, {}
        for name, tensor in self._split_tensors("local_metadata_dict()").items():
            if isinstance(tensor, ShardedParam):
                shape, _, offset = segment_location(tensor)
                params[name] = {"shape": list(shape), "offset": offset, "numel": local_tensor(tensor).numel()}
        return {"rank": group.rank, "ranks": group.size, "params": params}

    def load_local_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Load this rank's `local_state_dict`, saved with the same number of ranks."""
        tensors = self._split_tensors("load_local_state_dict()")
        if strict and (differing := tensors.keys() ^ state_dict.keys()):
            raise ConfigError(f"load_local_state_dict: {len(differing)} names are missing, or not the model's, "
                              f"{min(differing)} first")
        for name in tensors.keys() & state_dict.keys():
            tensor, value = tensors[name], state_dict[name]
            if not isinstance(tensor, Tensor):
                continue
            if value.shape != (own := local_tensor(tensor)).shape:
                raise ConfigError(f"load_local_state_dict: {name}: this rank has a segment of {own.numel()} elements, "
                                  f"the state dict {list(value.shape)}: it is of another rank, or number of ranks; "
                                  "make one of all ranks' with consolidate_shard_weights, and load that with "
                                  "load_state_dict")
            with torch.no_grad():
                tensor.copy_(value)

    @staticmethod
    def consolidate_shard_weights(
            shard_weights: Sequence[Mapping[str, Any]], shard_metadata: Sequence[Mapping[str, Any]],
            with_module_buffers: bool = True, strict: bool = True) -> OrderedDict[str, Any]:
        """One full state dict from every rank's `local_state_dict` and `local_metadata_dict`, in any order."""
        ranks = sorted(metadata["rank"] for metadata in shard_metadata)
        expected = list(range(shard_metadata[0]["ranks"])) if shard_metadata else [0]
        if ranks != expected:
            raise ConfigError(f"consolidate_shard_weights: expected the ranks {expected}, found {ranks}")
        whole: OrderedDict[str, Any] = OrderedDict()
        vars(whole).update(getattr(shard_weights[0], "__dict__", {}))  # torch's metadata
        filled: dict[str, int] = {}
        for weights, metadata in zip(shard_weights, shard_metadata, strict=True):
            for name, value in weights.items():
                location = metadata["params"].get(name)
                if location is None:
                    if with_module_buffers and (name not in whole or metadata["rank"] == 0):
                        whole[name] = value
                    continue
                if name not in whole:
                    whole[name] = torch.empty(location["shape"], dtype=value.dtype)
                whole[name].view(-1)[location["offset"] : location["offset"] + location["numel"]] = value
                filled[name] = filled.get(name, 0) + location["numel"]
        short = [name for name, count in filled.items() if count != whole[name].numel()]
        if short and strict:
            raise ConfigError(f"consolidate_shard_weights: {short[0]} has {filled[short[0]]} of "
                              f"{whole[short[0]].numel()} elements: the state dicts are not of one model at one time")
        return whole


# ---- full parameters for a while ------------------------------------------------------------------------------------

SUMMON_CALL = "summon_full_params()"


@contextmanager
def summon_full_params(module: nn.Module, recurse: bool = True, volatile: bool = False) -> Iterator[None]:
    """Inside, parameters of the sharded modules in `module` (without `recurse`: of itself) are full, in the masters'
    dtype. Edits must be equal on all ranks and are kept unless `volatile`. State dicts inside are full and include the
    edits. Collective."""
    found = [member for _, child, member in sharded_modules(module) if recurse or child is module]
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
