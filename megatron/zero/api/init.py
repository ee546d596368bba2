"""Models larger than one rank's memory: `zero.Init` shards parameters as they are created, `zero.GatheredParameters`
gathers them.

    with zero.Init():                          # at most one layer's parameters are gathered at a time
        model = Model()
    with zero.GatheredParameters(model.head.parameters(), modifier_rank=0):
        model.head.weight.zero_()              # the edit of rank 0 reaches all ranks

Inside `Init`, in-place initialization of a sharded parameter (`nn.init.xavier_uniform_(p)`) works. `Module.apply`
gathers each module's own parameters for the function, until an engine exists.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from threading import Event
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from megatron.config import ds_json
from megatron.distributed.collective_log import assert_collective_call
from megatron.distributed.consistency import all_succeed_or_raise
from megatron.distributed.exit_codes import exit_reason_of, install_excepthook
from megatron.errors import ConfigError, TrainerError
from megatron.zero.deferred_init import InitShardedParam, LazyInitParam, NvmeInitArena
from megatron.zero.offload.swap_drive import SwapDrive, check_nvme_path
from megatron.zero.partitioned_param import ParamOwner, param_owner
from mpu import groups as mpu_groups
from mpu.groups import Groups
from mpu.parallel_state import current_groups
from mpu.weight_init import initializer_of

TRIM_AFTER_BYTES = 16 << 20  # bytes of full parameters to free before malloc_trim is called


@contextmanager
def GatheredParameters(  # noqa: N802 (the name that scripts know)
        params: Iterable[nn.Parameter] | nn.Parameter, modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None, enabled: bool = True) -> Iterator[None]:
    """Parameters are gathered inside; all data parallel ranks must enter together. Ordinary tensors are left alone.

    With `modifier_rank` that rank's edits are kept; without it edits raise, since they would be lost. Gradients are off
    inside for parameters that may be edited or are sharded: a backward would find their elements freed.
    """
    given = [params] if isinstance(params, nn.Parameter) else list(params)
    for parameter in given:
        if not isinstance(parameter, nn.Parameter):
            raise ConfigError(f"GatheredParameters takes parameters, not a {type(parameter).__name__}; "
                              "for a module give its .parameters()")
    if not enabled:
        yield
        return
    holders: dict[int, ParamOwner] = {}  # unique, in the given order, which is equal on all ranks
    names: list[str] = []
    for parameter in given:
        if (holder := param_owner(parameter)) is not None:
            holders.setdefault(id(holder), holder)
            names.append(holder.describe(parameter))
    without_gradients = modifier_rank is not None or any(holder.params_are_sharded for holder in holders.values())
    with _gather_for_user([*holders.values()], modifier_rank, names), \
            torch.no_grad() if without_gradients else nullcontext():
        yield


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[Any]:
    """Gather all parameters of an engine: forwards inside do not communicate, so each rank may run any number.
    Collective."""
    with GatheredParameters(model.parameters()):
        yield model


@contextmanager
def _gather_for_user(holders: list[ParamOwner], modifier_rank: int | None, names: list[str]) -> Iterator[None]:
    """Gather inside, reshard afterwards. An error of one rank is raised on all, so that none waits for a rank that
    left."""
    if not holders:
        yield
        return
    dp, engine = holders[0].dp, holders[0].engine()
    if engine is not None:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        assert_collective_call(engine.log, dp, f"GatheredParameters of {names[0]}{more}",
                               details=f"{modifier_rank} {names}")
    owners = [owner for owner in dict.fromkeys(holder.engine() for holder in holders) if owner is not None]
    for owner in owners:
        owner.finish_delayed_update()

    def check_before_gather() -> None:
        for holder in holders:
            holder.check_before_user_gather()

    def check_before_reshard() -> None:
        if failure is not None:
            raise ConfigError(f"a rank left GatheredParameters by an error ({type(failure).__name__}: {failure}), and "
                              "nothing was changed: see its traceback")
        for holder in holders:
            holder.check_before_user_reshard(modifier_rank)

    all_succeed_or_raise(check_before_gather, dp)
    failure: Exception | None = None
    try:
        for holder in holders:
            holder.gather_for_user()
        try:
            yield
        except Exception as error:
            failure = error
        if failure is None or not exit_reason_of(failure).is_peer_loss:  # a lost peer would not answer
            if engine is not None:
                engine.log.record_barrier("the end of GatheredParameters")
            all_succeed_or_raise(check_before_reshard, dp)
    except BaseException:
        for holder in holders:
            holder.cancel_user_gather()
        if failure is not None:
            raise failure from None
        raise
    if modifier_rank is None:
        _reshard_all(holders, None)
        return
    with ExitStack() as changes:
        for owner in owners:
            changes.enter_context(owner.state.guard_state_change("edit"))
        all_succeed_or_raise(lambda: _reshard_all(holders, modifier_rank), dp)


def _reshard_all(holders: list[ParamOwner], modifier_rank: int | None) -> None:
    """Continue after an error: the peers still exchange the edits of the other owners. Raises the first error."""
    failure: TrainerError | None = None
    try:
        for holder in holders:
            try:
                holder.reshard_after_user(modifier_rank)
            except TrainerError as error:  # an NVMe error
                failure = failure or error
        if failure is not None:
            raise failure
    except BaseException:
        for holder in holders:
            holder.cancel_user_gather()
        raise


class Init:
    """Context: each parameter created inside is sharded over data parallel ranks at once; or, with `module`, those it
    has. The outermost of nested contexts counts.

    The shards hold rank 0's values until `zero.initialize`, whose configuration decides their later storage. `dtype` is
    the precision until then (default: as created). `remote_device` is the storage until then: "cpu" or "nvme"
    (`zero_optimization.offload_param.nvme_path` of the configuration); default is its `offload_param.device`.
    `pin_memory` has no effect.
    """

    def __init__(self, module: nn.Module | None = None, data_parallel_group: Any = None,
                 mem_efficient_linear: bool = True, remote_device: str | None = None, pin_memory: bool = False,
                 config_dict_or_path: str | os.PathLike[str] | Mapping[str, Any] | None = None, config: Any = None,
                 enabled: bool = True, dtype: torch.dtype | None = None, mpu: Any = None) -> None:
        install_excepthook()
        source = config if config_dict_or_path is None else config_dict_or_path
        self._requested_device, self._nvme_path = init_placement(remote_device, source)
        self._enabled, self._dtype = enabled, dtype
        self._dp = mpu_groups.SOLO
        if enabled:
            self._dp = (groups_from_mpu(mpu).dp if data_parallel_group is None
                        else mpu_groups.group_from_process_group(data_parallel_group))
        self._undo_patches = ExitStack()
        self._modules_without_values: list[nn.Module] = []
        self._freed_bytes = 0  # full parameters freed since the last malloc_trim
        if enabled:
            setattr(nn.Module, "apply", _apply_gathered)  # permanent: differs only for parameters without an engine
        if module is not None:
            with self:
                for child in module.modules() if enabled else ():
                    self._partition_module(child)

    def __enter__(self) -> None:
        if not self._enabled:
            return
        self._is_building = Event()  # a new one for each block
        self._is_building.set()
        self._storage: torch.device | NvmeInitArena | None = None
        if self._nvme_path is not None:
            self._storage = NvmeInitArena(SwapDrive(self._nvme_path, flag=PATH_KEY))
        elif self._requested_device is not None:
            self._storage = torch.device("cpu")
        with ExitStack() as undo:
            undo.push(self)
            for cls in _all_subclasses(nn.Module):
                self._patch_class(cls)
            undo.pop_all()

    def __exit__(self, *exception: object) -> None:
        self._undo_patches.close()
        if self._enabled:
            unfilled, self._modules_without_values = self._modules_without_values, []
            for module in unfilled:
                self._partition_module(module)
            self._is_building.clear()
            self._storage = None  # swap files are closed with their last parameter

    def _patch_class(self, cls: type) -> None:
        """Let its `__init__`, if it has its own, partition the parameters that it created."""
        if "__init__" not in vars(cls):
            return
        original = vars(cls)["__init__"]

        @functools.wraps(original)
        def init_and_partition(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            original(module, *args, **kwargs)
            outermost = next(base for base in type(module).__mro__ if "__init__" in vars(base))
            if outermost is cls:  # in a base class's __init__ more parameters follow
                self._partition_module(module)

        setattr(cls, "__init__", init_and_partition)  # raises if the metaclass forbids it
        self._undo_patches.callback(setattr, cls, "__init__", original)

    def _partition_module(self, module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            if param_owner(parameter) is not None or is_lazy(parameter):
                continue
            source = initializer_of(parameter)
            # Without memory for its values it has an initializer, or will get one (mpu/weight_init.py).
            if not parameter.is_meta and parameter.untyped_storage().nbytes() >= parameter.nbytes:
                self._freed_bytes += parameter.nbytes
                InitShardedParam(parameter, self._dp, self._is_building, dtype=self._dtype, storage=self._storage)
                if self._freed_bytes > TRIM_AFTER_BYTES:
                    # glibc keeps freed memory below blocks in use, and does not reuse it for the next large tensor.
                    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):  # glibc only
                        libc.malloc_trim(0)
                    self._freed_bytes = 0
            elif source is not None:
                LazyInitParam(parameter, source, self._dp, self._is_building)
            else:
                self._modules_without_values.append(module)  # its values are set later in the context


def _all_subclasses(cls: type[nn.Module]) -> list[type[nn.Module]]:
    return list(dict.fromkeys(found for sub in cls.__subclasses__() for found in (sub, *_all_subclasses(sub))))


def _apply_gathered(module: nn.Module, fn: Callable[[nn.Module], None]) -> nn.Module:
    """`Module.apply` before an engine exists: parameters are gathered for `fn`, and rank 0's edits are kept."""
    for child in module.children():
        child.apply(fn)
    sharded = [parameter for parameter in module.parameters(recurse=False)
               if (holder := param_owner(parameter)) is not None and not holder.is_engine_owned]
    with GatheredParameters(sharded, modifier_rank=0) if sharded else nullcontext():
        fn(module)
    return module


def groups_from_mpu(mpu: Any) -> Groups:
    """The groups behind `mpu`: a `Groups`, an object with the classic accessors, or None (data parallel only)."""
    if isinstance(mpu, Groups):
        return mpu
    if mpu is None:
        return mpu_groups.build(1)
    missing = [name for axis in ("model", "data") for what in ("rank", "group", "world_size")
               if not callable(getattr(mpu, name := f"get_{axis}_parallel_{what}", None))]
    if missing:
        raise ConfigError(f"mpu is {mpu!r:.80}, without {', '.join(missing)}; pass our `mpu` package, a Groups, or an "
                          "object with get_{model,data}_parallel_{rank,group,world_size}")
    if mpu is sys.modules["mpu"]:  # its single-rank groups have no process group
        return current_groups()
    groups = mpu_groups.groups_from_process_groups(mpu.get_model_parallel_group(), mpu.get_data_parallel_group())
    actual = [(group.rank, group.size) for group in (groups.tp, groups.dp)]
    stated = [(mpu.get_model_parallel_rank(), mpu.get_model_parallel_world_size()),
              (mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size())]
    if actual != stated:
        raise ConfigError("the (rank, size) of mpu's model and data parallel process groups are "
                          f"{actual[0]} and {actual[1]}, and its accessors say {stated[0]} and {stated[1]}: return the "
                          "process group that has these ranks (None is a group of one)")
    return groups


DEVICE_KEY, PATH_KEY = (f"zero_optimization.offload_param.{key}" for key in ("device", "nvme_path"))


def init_placement(remote_device: str | None, source: str | os.PathLike[str] | Mapping[str, Any] | None,
                   ) -> tuple[str | None, str | None]:
    """(remote device "cpu", "nvme" or None; NVMe folder or None). Raises ConfigError if arguments contradict."""
    if remote_device not in (None, "none", "cpu", "nvme"):
        raise ConfigError(f"zero.Init: remote_device is {remote_device!r}; expected None, 'none', 'cpu' or 'nvme'")
    keys = {} if source is None else ds_json.read_ds_json(source, "config_dict_or_path").keys
    configured, path = keys.get(DEVICE_KEY), keys.get(PATH_KEY)
    if None not in (remote_device, configured) and remote_device != configured:
        raise ConfigError(f"zero.Init: remote_device is {remote_device!r}, and {DEVICE_KEY} of the configuration "
                          f"{configured!r}; leave one of them out")
    device = configured if remote_device is None else remote_device
    if device != "nvme":
        return (None if device == "none" else device), None
    if path is None:
        raise ConfigError(f"zero.Init: remote_device 'nvme' needs a folder on the drive: give config_dict_or_path= "
                          f"with {PATH_KEY}")
    check_nvme_path(path, PATH_KEY)
    return device, path
