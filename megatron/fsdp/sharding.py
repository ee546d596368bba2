"""`shard_module(module, settings)`: shards the parameters of a module over the ranks, except those of modules sharded
inside it.

`check_shardable` comes first and changes nothing; it also checks that all ranks shard the same module, in the same
order, from equal weights. Modules are sharded from the inside out. Each call makes one unit and a new root (root.py)
that takes over the units inside. A parameter used in several units goes to the innermost module that contains them all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import monotonic_ns
from typing import cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from data.storage import crc32
from megatron.config.tree import ZeroConfig
from megatron.distributed.collective_log import CollectiveLog
from megatron.distributed.consistency import assert_equal_across_ranks
from megatron.distributed.process_group import device_for, read_environment, register_shutdown_at_exit
from megatron.errors import ConfigError
from megatron.fsdp.hooks import before_state_dict, map_module_inputs
from megatron.fsdp.root import VOLATILE, FSDPRoot
from megatron.fsdp.sharded_tensor import ShardedParamViews, gather_masters
from megatron.zero.api.initialize import init_distributed
from megatron.zero.api.model_checks import check_same_descriptions, describe_tensor
from megatron.zero.bucket import FlatBucket
from megatron.zero.engine import drop_gradients
from megatron.zero.flat_buffers import BucketDtypes, BucketingConfig, BufferPool
from megatron.zero.hooks import map_module_outputs, map_tensors
from megatron.zero.offload.copy_streams import CopyStreams, create_copy_streams
from megatron.zero.offload.storage import DeviceStorage, EngineStorage, HostStorage
from megatron.zero.partitioned_param import clear_param_owner, full_shape, param_owner, set_param_data
from megatron.zero.stages import stage_policy
from megatron.zero.state import broadcast_buffers
from megatron.zero.units import ROOT, Unit, detach_main_grad_writers
from mpu import groups
from mpu.device import on_accelerator
from mpu.groups import SOLO, Group, subgroup

CHECKSUM_CHUNK = 1 << 22  # bytes that are summed at a time
_STATE_ATTRIBUTE = "_megatron_fsdp_state"

register_shutdown_at_exit()  # at import, before torch.distributed is initialized


@dataclass(frozen=True)
class ShardingSettings:
    """Settings of one sharded module, for the parameters that no sharded module inside owns."""

    # Free gathered parameters between forward and backward; with a number they stay sharded over that many neighbouring
    # ranks.
    reshard_after_forward: bool | int = True
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    input_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    offload_to_host: bool = False
    pin_memory: bool = True
    grad_predivide_factor: float = 1.0
    sync_module_states: bool = False  # all ranks start from rank 0's values

    @property
    def is_kept_for_backward(self) -> bool:
        """Parameters stay gathered from forward to backward."""
        return self.reshard_after_forward is not True and self.reshard_after_forward in (False, 1)


@dataclass(eq=False)
class FSDPState:
    """State of a sharded module."""

    unit: Unit
    settings: ShardingSettings
    root: FSDPRoot
    # (module, name, original dtype) of each buffer that was cast.
    buffer_dtypes: Sequence[tuple[nn.Module, str, torch.dtype]]
    # For the order in which modules were sharded, which must be the same on all ranks.
    sharded_at: int = field(default_factory=monotonic_ns)

    def before_state_dict(self, assigns: bool | None) -> None:
        if assigns is not None and self.root.full_params_holder == VOLATILE:
            raise ConfigError(f"load_state_dict() inside {VOLATILE} would be lost at its end: load before or after it, "
                              "or leave volatile out")
        if assigns:
            raise ConfigError("load_state_dict(assign=True) would replace sharded parameters by ordinary tensors of "
                              "this rank: leave assign out, and each rank copies its part of the values")
        self.root.reshard_between_passes()


def fsdp_state_of(module: nn.Module) -> FSDPState | None:
    return cast("FSDPState | None", module.__dict__.get(_STATE_ATTRIBUTE))


def require_fsdp_state(module: nn.Module) -> FSDPState:
    member = fsdp_state_of(module)
    if member is None:
        raise ConfigError(f"{type(module).__name__} is not sharded: call fully_shard(module) first")
    return member


def sharded_modules(module: nn.Module) -> dict[str, FSDPState]:
    """The state of each sharded module in `module`, itself included, by its path."""
    return {path: member for path, child in module.named_modules() if (member := fsdp_state_of(child)) is not None}


WRAPPED_ATTRIBUTE = "_fsdp_wrapped_module"  # the attribute of a wrapper that holds the wrapped module


def unwrap(model: nn.Module) -> nn.Module:
    """The wrapped module, or `model` itself."""
    return cast(nn.Module, model.__dict__.get(WRAPPED_ATTRIBUTE, model))


def check_shardable(module: nn.Module, settings: ShardingSettings, group: Group,
                    ignored: Collection[nn.Parameter] = ()) -> None:
    """Raise ConfigError if the module cannot be sharded; changes nothing. Collective over the group."""
    kind = type(module).__name__
    if fsdp_state_of(module) is not None:
        raise ConfigError(f"this {kind} is sharded already: wrap a module once")
    inner = sharded_modules(module)
    for path, member in inner.items():
        if member.root.dp.ranks != group.ranks:
            raise ConfigError(f"{path} is sharded over the ranks {member.root.dp.ranks}, the module around it over "
                              f"{group.ranks}: give both the same process group")
        member.root.check_idle("a module around it is sharded")
    own = _own_parameters(module, ignored,
                          {id(one) for _, shared in _externally_used_params(module, inner.values()) for one in shared})
    for name, parameter in own.items():
        if not parameter.is_floating_point():
            raise ConfigError(f"{name} is of {parameter.dtype}: only floating point parameters are sharded; give the "
                              "others as ignored_params")
        if parameter.is_meta and param_owner(parameter) is None:
            raise ConfigError(f"{name} is on the meta device, and has no values: make the model inside "
                              "megatron.zero.Init(), or give it values before it is sharded")
    for path, child in module.named_modules():
        tp = getattr(child, "tp", None)
        if isinstance(tp, Group) and not tp.is_solo:
            raise ConfigError(f"{path or type(child).__name__} is split over tensor parallel: train that model with "
                              "zero.initialize, which knows both groups")
    buffers = {f"{path}.{name}".removeprefix("."): buffer for path, child in _own_modules(module, inner.values())
               for name, buffer in child.named_buffers(recurse=False)}
    in_sharding_order = sorted(inner, key=lambda path: inner[path].sharded_at)
    _check_same_on_all_ranks(own, buffers, group, kind, in_sharding_order, settings)
    size = settings.reshard_after_forward
    if not isinstance(size, bool) and not group.is_solo and (size < 1 or group.size % size):
        raise ConfigError(f"reshard_after_forward={size}: give True, False, or a number of neighbouring ranks that "
                          f"divides the {group.size} ranks")


def _check_same_on_all_ranks(parameters: Mapping[str, nn.Parameter], buffers: Mapping[str, Tensor], group: Group,
                             where: str, sharded_before: Sequence[str], settings: ShardingSettings) -> None:
    """Raise ConfigError on every rank, naming the first parameter or buffer whose description or values differ.
    `sharded_before`: modules inside that are sharded already, in that order. Collective."""
    if group.is_solo:
        return
    check_same_descriptions(
        {"setting": [f"{name} = {value}" for name, value in vars(settings).items()],
         "module sharded before": sharded_before,
         "parameter": [f"{name}: {describe_tensor(parameter, full_shape(parameter))}"
                       + " (frozen)" * (not parameter.requires_grad) for name, parameter in parameters.items()],
         "buffer": [f"{name}: {describe_tensor(buffer, buffer.shape)}" for name, buffer in buffers.items()]},
        group, f"the ranks shard {where} differently")
    # parameters of zero.Init have no checksum: they are shards of rank 0's values
    checksums = {} if settings.sync_module_states else {
        name: "" if param_owner(tensor) is not None or tensor.is_meta else byte_checksum(tensor.detach())
        for name, tensor in (*parameters.items(), *buffers.items())}
    assert_equal_across_ranks(
        checksums, group, f"the ranks start in {where} from different weights or buffers (give them the same seed "
        "before the model is made, or sync_module_states=True, and all take those of the first; set a buffer that is "
        "each rank's own after the module is sharded)")


def byte_checksum(values: Tensor) -> str:
    data = values.contiguous().view(-1).view(torch.uint8)
    if not on_accelerator(data):
        return f"{crc32(data.numpy()):08x}"
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for start in range(0, len(data), CHECKSUM_CHUNK):
        chunk = data[start : start + CHECKSUM_CHUNK].to(torch.int64)
        total += (chunk * torch.arange(start + 1, start + 1 + len(chunk), device=data.device)).sum()
    return f"{int(total)}"


def shard_module(module: nn.Module, settings: ShardingSettings, group: Group,
                 ignored: Collection[nn.Parameter] = ()) -> FSDPState:
    """Shard a module that passed `check_shardable`. Collective over the group."""
    path_of = {member: path for path, member in sharded_modules(module).items()}
    inner, device = path_of.keys(), compute_device_of(module, group)
    for one, shared in _externally_used_params(module, inner):
        remaining = tuple(_drop_params({id(parameter) for parameter in shared}, one))
        one.unit = Unit(one.unit.index, one.unit.name, one.unit.module, remaining)
    own = _own_parameters(module, ignored)
    drop_gradients(module)
    log, buffer_pool = CollectiveLog(reductions_in_order=on_accelerator(device)), BufferPool()
    own_dtypes = [*_move_buffers(module, inner, settings, device)]
    if settings.sync_module_states:
        broadcast_buffers(module.buffers(), group)
    unit = Unit(0, ROOT, module, tuple(_create_buckets(own, settings, group, device, log, buffer_pool)))
    roots = dict.fromkeys(member.root for member in inner)
    for root in roots:
        for handle in root.handles:
            handle.remove()
        detach_main_grad_writers(root.units)
    for number, (member, path) in enumerate(path_of.items(), 1):
        around = path_of[require_fsdp_state(member.root.module)]
        for bucket in member.unit.buckets:  # renamed for the larger model
            bucket.rebind(f"{around}.{bucket.name}".replace(f".{ROOT}", ""), f"{around}.", log, buffer_pool)
        member.unit = Unit(number, path, member.unit.module, member.unit.buckets)
    kept = {member.unit for member in inner if member.settings.is_kept_for_backward}
    kept |= {unit} if settings.is_kept_for_backward else set()
    units = [unit, *(member.unit for member in inner)]
    state = FSDPState(unit, settings, FSDPRoot(units, kept, group, device, log, buffer_pool), own_dtypes)
    for _, child in _own_modules(module, inner):
        before_state_dict(child, state.before_state_dict)
    module.__dict__[_STATE_ATTRIBUTE] = state
    for member in inner:
        member.root = state.root
    for change, dtype in ((map_module_inputs, settings.input_dtype), (map_module_outputs, settings.output_dtype)):
        if dtype is not None:
            def cast(tensor: Tensor, dtype: torch.dtype = dtype) -> Tensor:
                return tensor.to(dtype) if tensor.is_floating_point() else tensor

            change(module, partial(map_tensors, change=cast))
    return state


def _create_buckets(own: dict[str, nn.Parameter], settings: ShardingSettings, group: Group, device: torch.device,
                    log: CollectiveLog, buffer_pool: BufferPool) -> Iterator[FlatBucket]:
    """One bucket for each combination of dtype and requires_grad."""
    by_kind: dict[tuple[bool, torch.dtype], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in own.items():
        by_kind.setdefault((parameter.requires_grad, parameter.dtype), []).append((name, parameter))
    for (trained, dtype), members in by_kind.items():
        suffix = f".{str(dtype).removeprefix('torch.')}" if len({one for _, one in by_kind}) > 1 else ""
        yield _create_bucket(f"{ROOT}{suffix}{'' if trained else '.frozen'}", members, settings, group, device, log,
                             buffer_pool)


def _externally_used_params(module: nn.Module, inner: Collection[FSDPState],
                            ) -> Iterator[tuple[FSDPState, list[nn.Parameter]]]:
    """Units inside, each with those of its parameters that are also used outside it."""
    units = {id(member.unit.module) for member in inner}
    users: dict[nn.Parameter, set[int]] = {}

    def walk(child: nn.Module, unit: int) -> None:
        child = unwrap(child)
        unit = id(child) if id(child) in units else unit
        for parameter in child.parameters(recurse=False):
            users.setdefault(parameter, set()).add(unit)
        for one in child.children():
            walk(one, unit)

    walk(module, id(module))
    for member in inner:
        shared = [one for bucket in member.unit.buckets for one in bucket.parameters
                  if users[one] != {id(member.unit.module)}]
        if shared:
            yield member, shared


def _drop_params(shared: Collection[int], member: FSDPState) -> Iterator[FlatBucket]:
    """The buckets of a unit without the `shared` parameters, which become ordinary full tensors again. Collective."""
    root = member.root
    for bucket in member.unit.buckets:
        if not any(id(parameter) in shared for parameter in bucket.parameters):
            yield bucket
            continue
        kept = [(slot.name, parameter) for slot, parameter in zip(bucket.layout.slots, bucket.parameters, strict=True)
                if id(parameter) not in shared]
        for parameter, value in zip(bucket.parameters, gather_masters(bucket), strict=True):
            set_param_data(parameter, value.clone())
            clear_param_owner(parameter)
        if kept:
            yield _create_bucket(bucket.name, kept, member.settings, root.dp, root.device, root.log, root.buffer_pool)


def _own_parameters(module: nn.Module, ignored: Collection[nn.Parameter], shared: Collection[int] = (),
                    ) -> dict[str, nn.Parameter]:
    """Parameters that no unit owns, and the `shared` ones that units inside give up."""
    left_out = {id(one) for one in ignored}
    return {name: parameter for name, parameter in module.named_parameters() if id(parameter) not in left_out and
            (id(parameter) in shared or not isinstance(param_owner(parameter), FlatBucket))}


def _own_modules(module: nn.Module, inner: Collection[FSDPState]) -> Iterator[tuple[str, nn.Module]]:
    """Modules that are in no sharded module inside."""
    theirs = {one for member in inner for one in member.unit.module.modules()}
    return ((path, child) for path, child in module.named_modules() if unwrap(child) not in theirs)


def _create_bucket(name: str, members: list[tuple[str, nn.Parameter]], settings: ShardingSettings, group: Group,
                   device: torch.device, log: CollectiveLog, buffer_pool: BufferPool) -> FlatBucket:
    """A bucket of parameters of one dtype, all trainable or all frozen. Collective."""
    own, policy = members[0][1].dtype, stage_policy(3)
    work = settings.param_dtype or own
    copy_streams = _copy_streams_of(device) if settings.offload_to_host else None
    if copy_streams is None:
        storage = EngineStorage(DeviceStorage(device, own), DeviceStorage(device, work))
    else:
        pins = settings.pin_memory and device.type == "cuda"
        storage = EngineStorage(HostStorage(own, 0, pinned=pins), HostStorage(work, 0, pinned=pins), copy_streams, pins)
    dtypes = BucketDtypes(work, work, own, settings.reduce_dtype, own, frozen_have_masters=True)
    config = BucketingConfig(policy, ZeroConfig(gradient_predivide_factor=settings.grad_predivide_factor), dtypes,
                             group, device, 0, lambda parameter: 0, log, storage, buffer_pool, ShardedParamViews(),
                             values_are_equal=not settings.sync_module_states)
    bucket = FlatBucket(name, members, config, policy if members[0][1].requires_grad else policy.for_frozen_params)
    reshards = settings.reshard_after_forward
    # the ranks that keep the secondary shard between forward and backward
    has_secondary = not (isinstance(reshards, bool) or reshards in (1, group.size) or group.is_solo)
    bucket.secondary_shard_group = subgroup(group, reshards) if has_secondary else SOLO
    return bucket


_COPY_STREAMS: WeakValueDictionary[torch.device, CopyStreams] = WeakValueDictionary()


def _copy_streams_of(device: torch.device) -> CopyStreams | None:
    """Shared by all sharded modules on a device."""
    copy_streams = _COPY_STREAMS.get(device) or create_copy_streams(device)
    if copy_streams is not None:
        _COPY_STREAMS[device] = copy_streams
    return copy_streams


def _move_buffers(module: nn.Module, inner: Collection[FSDPState], settings: ShardingSettings, device: torch.device,
                  ) -> Iterator[tuple[nn.Module, str, torch.dtype]]:
    """Move buffers to the device and floating point ones to `buffer_dtype`; yields those whose dtype changed."""
    for _, child in _own_modules(module, inner):
        for name, buffer in child.named_buffers(recurse=False):
            moved = buffer.to(device, settings.buffer_dtype if buffer.is_floating_point() else None)
            setattr(child, name, moved)
            if moved.dtype != buffer.dtype:
                yield child, name, buffer.dtype


# ---- over which ranks, and where -----------------------------------------------------------------------------------


def resolve_group(process_group: ProcessGroup | None) -> Group:
    """None means all ranks: initializes torch.distributed if a launcher started several and the script has not; without
    a launcher, this process alone."""
    if process_group is not None:
        return groups.group_from_process_group(process_group)
    if groups.build(1).world.is_solo and read_environment().world_size > 1:
        init_distributed()
    return groups.build(1).world


def compute_device_of(module: nn.Module, group: Group) -> torch.device:
    """The GPU that the module is on, this rank's if the backend needs one, or the CPU."""
    device = next((parameter.device for parameter in module.parameters() if parameter.device.type == "cuda"), None)
    if device is None:
        if group.is_solo or group.own_backend_serves_cpu:
            return torch.device("cpu")
        device = device_for(read_environment())
    if device.type == "cuda":
        torch.cuda.set_device(device)  # events and control messages use the current device
    return device
