"""Parameters before `zero.initialize`: deferred initialization, and the shards that `zero.Init` keeps.

    LazyInitParam      has an initializer (mpu/weight_init.py) for any part of its values. The engine draws only the
                       shard of a rank: no value is drawn twice, and none is sent
    InitShardedParam   `zero.Init` sharded its values, or a user has edited them: each data parallel rank keeps an equal
                       part of one rank's, on the device, the host or NVMe

Both are placeholders (partitioned_param.py) until an engine takes their values over.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from copy import copy
from threading import Event

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from megatron.errors import ConfigError
from megatron.zero.layout import FlatLayout
from megatron.zero.offload.nvme import NvmeSettings, NvmeStorage
from megatron.zero.offload.storage import WEIGHT, DeviceShard, StoredShard
from megatron.zero.offload.swap_drive import SwapDrive
from megatron.zero.partitioned_param import (ParamOwner, Placeholder, param_owner, replace_by_placeholder,
                                             set_param_data, set_param_owner)
from mpu.collectives import all_gather_into, broadcast_into
from mpu.groups import Group
from mpu.weight_init import Initializer, initializer_of


class DeferredParam(ParamOwner):
    """The owner of one parameter before there is an engine."""

    def __init__(self, parameter: nn.Parameter, dtype: torch.dtype, dp: Group, is_building: Event) -> None:
        """`is_building`: of a `zero.Init` block, in which all ranks build the same model; set while it is open."""
        self._param_ref, self._shape, self._dtype, self.dp = TensorWeakRef(parameter), parameter.shape, dtype, dp
        self.is_building = is_building

    @property
    def _parameter(self) -> nn.Parameter:
        parameter = self._param_ref()
        assert isinstance(parameter, nn.Parameter), "it has gone, and its owner should have gone with it"
        return parameter

    def _take_ownership(self) -> None:
        self._become_placeholder()
        set_param_owner(self._parameter, self)

    def _become_placeholder(self) -> None:
        replace_by_placeholder(self._parameter, self._parameter.detach().new_empty(0, dtype=self._dtype))

    def clone(self) -> nn.Parameter:
        """A copy of the parameter that is deferred as well."""
        other = copy(self)
        parameter = nn.Parameter(torch.empty(0, dtype=self._dtype, device=self._parameter.device),
                                 self._parameter.requires_grad)
        other._param_ref = TensorWeakRef(parameter)
        other._unshare_after_clone()
        other._take_ownership()
        return parameter

    def _unshare_after_clone(self) -> None:
        """After a copy: stop sharing values that are written in place with the original."""

    @abstractmethod
    def full_value(self, device: torch.device | None = None) -> Tensor:
        """All elements, on every rank. Collective."""

    @abstractmethod
    def _is_unmodified(self, value: Tensor) -> bool:
        """Whether `value` equals the elements, as far as this rank has them."""

    def full_shape(self, parameter: nn.Parameter) -> torch.Size:
        return self._shape

    def describe(self, parameter: Tensor) -> str:
        return f"a parameter of shape {tuple(self._shape)}"

    def gather_for_user(self) -> None:
        if isinstance(self._parameter, Placeholder):
            set_param_data(self._parameter, self.full_value())

    def check_before_user_reshard(self, modifier_rank: int | None) -> None:
        value = self._parameter.detach()
        if (value.shape, value.dtype) != (self._shape, self._dtype):
            raise ConfigError(f"a parameter of {self._dtype} and shape {tuple(self._shape)} became {value.dtype} of "
                              f"shape {tuple(value.shape)} inside GatheredParameters; give it values of its kind")
        if modifier_rank is None and not self._is_unmodified(value):
            raise ConfigError(f"a parameter of shape {tuple(self._shape)} was edited inside GatheredParameters without "
                              "modifier_rank: the edits would be lost; say which rank's edits count")

    def cancel_user_gather(self) -> None:
        if not isinstance(self._parameter, Placeholder):
            self._become_placeholder()


def full_initial_value(parameter: nn.Parameter, dp: Group, device: torch.device) -> Tensor:
    """The full value of a parameter without an engine; rank 0's value on every rank. Collective."""
    owner = param_owner(parameter)
    if owner is None:
        value = parameter.detach().to(device).contiguous()
        broadcast_into(value, 0, dp).wait()
        return value
    if isinstance(owner, DeferredParam):
        return owner.full_value(device)
    raise ConfigError(f"a parameter of shape {tuple(owner.full_shape(parameter))} belongs to another engine already: "
                      "build one engine for a model, or destroy() the other first")


# ---- drawn by the engine ---------------------------------------------------------------------------------------------


class LazyInitParam(DeferredParam):
    def __init__(self, parameter: nn.Parameter, source: Initializer, dp: Group, is_building: Event = Event()) -> None:
        super().__init__(parameter, parameter.dtype, dp, is_building)
        self.source = source
        self._take_ownership()

    def full_value(self, device: torch.device | None = None) -> Tensor:
        flat = torch.empty(self._shape.numel(), device=device)
        self.source(flat, 0)
        return flat.view(self._shape).to(self._dtype)

    def _is_unmodified(self, value: Tensor) -> bool:
        return torch.equal(value, self.full_value(value.device))

    def reshard_after_user(self, modifier_rank: int | None) -> None:
        if modifier_rank is None:
            self._become_placeholder()
        else:  # the values no longer follow from the source
            InitShardedParam(self._parameter, self.dp, self.is_building, source_rank=modifier_rank)


def defer_param_init(parameters: Iterable[nn.Parameter], dp: Group) -> None:
    """Turn parameters with an initializer into placeholders."""
    for parameter in parameters:
        if (source := initializer_of(parameter)) is not None and param_owner(parameter) is None:
            LazyInitParam(parameter, source, dp)


def init_chunk(out: Tensor, layout: FlatLayout, rank: int, chunk: slice, sources: Sequence[Initializer]) -> None:
    """Draw the values of `chunk` of shard `rank` into `out`, fp32; padding is left unchanged."""
    source_of_slot = dict(zip((slot.name for slot in layout.slots), sources, strict=True))
    for segment in layout.segments(rank, chunk):
        segment_values = out[segment.shard_offset - chunk.start : segment.shard_offset - chunk.start + segment.count]
        source_of_slot[segment.slot.name](segment_values, segment.slot_offset)


# ---- sharded by zero.Init --------------------------------------------------------------------------------------------


IO_BYTES = 1 << 20  # bytes per read or write; there are three buffers of this size on the host

# Bytes of the first and of the largest file. A larger parameter gets a larger file.
FIRST_FILE_BYTES, MAX_FILE_BYTES = 64 * IO_BYTES, 4096 * IO_BYTES


class NvmeInitArena:
    def __init__(self, drive: SwapDrive) -> None:
        self._storage = NvmeStorage(drive, "waiting", (),
                                    NvmeSettings(chunk_numel=IO_BYTES, buffer_sets=3, dtype=torch.uint8))
        self._current_shard: StoredShard | None = None
        self._used, self._size, self._shard_count = 0, FIRST_FILE_BYTES, 0

    def store(self, values: Tensor) -> tuple[StoredShard, int]:
        """Append bytes to the current file; returns it and where they begin. Each new file is twice as large."""
        nbytes = len(values)
        if self._current_shard is None or self._used + nbytes > self._current_shard.numel:
            self._current_shard = self._storage.allocate_shard(str(self._shard_count),
                                                               max(self._size, -(-nbytes // IO_BYTES) * IO_BYTES))
            self._used, self._size, self._shard_count = 0, min(2 * self._size, MAX_FILE_BYTES), self._shard_count + 1
        start, self._used = self._used, self._used + nbytes
        self._current_shard.write(WEIGHT, start, values.cpu())
        return self._current_shard, start


class InitShardedParam(DeferredParam):
    def __init__(self, parameter: nn.Parameter, dp: Group, is_building: Event, *,
                 dtype: torch.dtype | None = None, storage: torch.device | NvmeInitArena | None = None,
                 source_rank: int = 0) -> None:
        """`storage` of the shard: a device (None: the parameter's) or NVMe. The values of `source_rank` count."""
        kind = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
        super().__init__(parameter, kind, dp, is_building)
        self._device = parameter.device
        self._shard_numel = -(-parameter.numel() // dp.size)
        self._storage = storage
        self._shard, self._start = self._store(self._shard_of(self._broadcast_from(parameter.detach(), source_rank)))
        self._take_ownership()

    def _store(self, own: Tensor) -> tuple[StoredShard, int]:
        """Store the bytes of this rank's shard."""
        data = own.view(torch.uint8)
        if isinstance(self._storage, NvmeInitArena):
            return self._storage.store(data)
        return DeviceShard(data.to(self._storage)), 0

    def _read(self) -> Tensor:
        return self._shard.fetch(WEIGHT, self._start, self._shard_numel * self._dtype.itemsize).view(self._dtype)

    def full_value(self, device: torch.device | None = None) -> Tensor:
        part = self._read().to(self._device)
        flat = part.new_empty(self.dp.size * part.numel())
        all_gather_into(flat, part, self.dp).wait()
        return flat[: self._shape.numel()].view(self._shape).to(device)

    def _is_unmodified(self, value: Tensor) -> bool:
        return torch.equal(self._shard_of(value), self._read().to(value.device))

    def reshard_after_user(self, modifier_rank: int | None) -> None:
        if modifier_rank is not None:
            own = self._shard_of(self._broadcast_from(self._parameter.detach(), modifier_rank))
            self._shard.write(WEIGHT, self._start, own.view(torch.uint8))
        self._become_placeholder()

    def _unshare_after_clone(self) -> None:
        self._shard, self._start = self._store(self._read().clone())

    def _broadcast_from(self, value: Tensor, source_rank: int) -> Tensor:
        value = value.to(self._device).contiguous()
        broadcast_into(value, source_rank, self.dp).wait()
        return value

    def _shard_of(self, value: Tensor) -> Tensor:
        """This rank's part of the flattened values, padded with zeros."""
        own = value.new_zeros(self._shard_numel, dtype=self._dtype)
        mine = value.flatten()[self.dp.rank * self._shard_numel : (self.dp.rank + 1) * self._shard_numel]
        own[: mine.numel()] = mine
        return own
