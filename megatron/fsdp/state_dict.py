"""Full state dicts of sharded modules, gathered one bucket at a time: the names, order and precision of the unwrapped
model; and full parameters for a while (`summon_full_params`)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megatron.distributed.collective_log import assert_collective_call
from megatron.distributed.consistency import all_succeed_or_raise, assert_equal_across_ranks
from megatron.errors import ConfigError
from megatron.fsdp.root import VOLATILE, FSDPRoot
from megatron.fsdp.sharded_tensor import PartialTensor, gather_masters, store_masters
from megatron.fsdp.sharding import byte_checksum, require_fsdp_state, sharded_modules, unwrap
from megatron.zero.bucket import FlatBucket
from megatron.zero.partitioned_param import set_param_data
from mpu.collectives import broadcast_into, broadcast_json
from mpu.groups import Group

FULL_STATE_DICT_CALL = "a full state dict"
_EXTRA_STATE = "_extra_state"


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
        whole = gather_masters(bucket)
        for parameter, value in zip(bucket.parameters, whole, strict=True):
            if parameter in full:
                value.copy_(full[parameter].detach())
        # the views of one gather share a storage, which is broadcast at once
        flat = torch.empty(0, dtype=whole[0].dtype, device=device).set_(whole[0].untyped_storage())
        broadcast_into(flat, 0, group).wait()
        store_masters(bucket, whole)
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


def broadcast_nested(value: Any, group: Group, device: torch.device, keep: Callable[[tuple[Any, ...], Tensor], Any],
                     ) -> Any:
    """Rank 0's nested dicts, lists and tuples of numbers, strings and tensors, on every rank. `keep(path, tensor)` says
    what stays of each full tensor, which is on the device; one is there at a time. Collective."""
    def encode(node: Any) -> Any:
        if isinstance(node, Tensor):
            return {"tensor": [str(node.dtype).removeprefix("torch."), list(node.shape)]}
        if isinstance(node, dict):
            return {"dict": [[key, encode(inner)] for key, inner in node.items()]}
        if isinstance(node, list | tuple):
            return {"tuple" if isinstance(node, tuple) else "list": [encode(inner) for inner in node]}
        return node

    def receive(code: Any, own: Any, path: tuple[Any, ...]) -> Any:
        if not isinstance(code, dict):
            return code
        (kind, content), = code.items()
        if kind == "dict":
            return {key: receive(inner, own[key] if own else None, (*path, key)) for key, inner in content}
        if kind == "tensor":
            full = torch.empty(content[1], dtype=getattr(torch, content[0]), device=device)
            if group.rank == 0:
                full.copy_(own)
            broadcast_into(full.view(-1).view(torch.uint8), 0, group).wait()  # bytes: works for every dtype
            return keep(path, full)
        items = [receive(inner, own[index] if own else None, (*path, index)) for index, inner in enumerate(content)]
        return tuple(items) if kind == "tuple" else items

    own = value if group.rank == 0 else None
    return receive(broadcast_json(encode(own), group), own, ())


# ---- full parameters for a while ------------------------------------------------------------------------------------

SUMMON_CALL = "summon_full_params()"


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
