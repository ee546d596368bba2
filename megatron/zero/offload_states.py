"""`engine.offload_states()` and `reload_states()`: the engine's tensors lose their storage and get a new one on reload.

A user's view of a weight keeps the old storage. While weights are offloaded their parameters are placeholders. State
that is on the host or NVMe stays there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from megatron.errors import ConfigError
from megatron.zero.bucket import FlatBucket
from megatron.zero.flat_buffers import BufferPool
from megatron.zero.offload.copy_streams import CopyEvent, CopyStreams, create_copy_streams
from megatron.zero.offload.direct_io import page_aligned_zeros
from megatron.zero.offload.storage import WEIGHT


class OffloadStateTypeEnum(str, Enum):
    """DeepSpeed's names of the states that can be offloaded."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class OffloadDeviceEnum(str, Enum):
    """DeepSpeed's names of the devices."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


OPTIM, MASTERS, LP_PARAMS, GRADS, GRAD_BUFFERS = (state.value for state in OffloadStateTypeEnum)


def parse_offload_states(include: object, device: object) -> list[str]:
    """Names of the states to offload; None means all. Accepts strings and members of DeepSpeed's or our enum. Raises
    ConfigError for an unknown state or another device than the host."""
    where, known = getattr(device, "value", device), [state.value for state in OffloadStateTypeEnum]
    if str(where) != OffloadDeviceEnum.cpu.value:
        raise ConfigError(f"offload_states: device is '{where}', and states can be offloaded to the host only: give "
                          "\"cpu\"")
    given = known if include is None else [include] if isinstance(include, str) else include
    if not isinstance(given, Collection):
        raise ConfigError(f"offload_states: include is a {type(include).__name__}; give a list of {', '.join(known)}")
    wanted = {str(getattr(state, "value", state)) for state in given}
    for name in wanted.difference(known):
        raise ConfigError(f"offload_states: unknown state {name!r}; known are {', '.join(known)}")
    return [state for state in known if state in wanted]


@dataclass
class _OffloadedStorage:
    """A host copy of one device storage."""

    # The flat tensors in the storage, each with its offset and size.
    tensors: list[tuple[Tensor, int, torch.Size]]
    device: torch.device
    copy: Tensor
    copy_event: CopyEvent


class StateOffloader:
    """Offloads and reloads the states of one engine. No parameter may be gathered, and no collective may be running."""

    def __init__(self, buckets: Sequence[FlatBucket], buffer_pool: BufferPool, device: torch.device) -> None:
        self._buckets, self._buffer_pool, self._device = buckets, buffer_pool, device
        self.copy_streams = create_copy_streams(device)
        self._offloaded: dict[str, list[_OffloadedStorage]] = {}
        # Size in bytes -> pinned buffers for reuse: pinning takes longer than copying.
        self._pinned_buffers: dict[int, list[Tensor]] = {}

    def offload(self, states: Sequence[str], *, pinned: bool, non_blocking: bool) -> None:
        """Offload the states. If that fails (host memory), reload those of this call and raise."""
        if self.copy_streams is None:
            return
        new = [state for state in states if state not in self._offloaded]
        try:
            for state in new:
                self._offload_state(state, self.copy_streams, pinned and self._device.type == "cuda", non_blocking)
        except BaseException:
            self.reload(new)
            raise
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # so that other processes can use the memory

    def _offload_state(self, state: str, copy_streams: CopyStreams, pinned: bool, non_blocking: bool) -> None:
        if state in (GRADS, GRAD_BUFFERS):
            self._buffer_pool.clear()
            return
        device_tensors = [(bucket, tensors) for bucket in self._buckets
                          for tensors in _tensors_by_storage(bucket, state)]
        copies = self._offloaded.setdefault(state, []) if device_tensors else []
        for bucket, tensors in device_tensors:
            bucket.offloaded_states.add(state)
            if state == LP_PARAMS:
                bucket.begin_param_offload()
            storage, device = tensors[0].untyped_storage(), tensors[0].device
            reusable = self._pinned_buffers.get(storage.nbytes()) if pinned else None
            copy = reusable.pop() if reusable else page_aligned_zeros(storage.nbytes(), torch.uint8, pinned=pinned)
            copy_event = copy_streams.to_host.copy(copy, _byte_view(storage, device))
            copy_event.wait_on_device()  # the current stream waits: the copy is done before the memory is reused
            if not non_blocking:
                copy_event.wait_on_host()
            copies.append(_OffloadedStorage([(one, int(one.storage_offset()), one.shape) for one in tensors], device,
                                            copy, copy_event))
            for one in tensors:
                one.set_(torch.UntypedStorage(0, device=device))

    def reload(self, states: Sequence[str] | None = None, *, non_blocking: bool = False) -> None:
        """Reload these states, by default all. If the device runs out of memory, the rest stays offloaded."""
        for state in [state for state in self._offloaded if states is None or state in states]:
            copies = self._offloaded[state]
            while copies:
                offloaded, streams = copies[-1], self.copy_streams
                assert streams is not None
                storage = torch.UntypedStorage(len(offloaded.copy), device=offloaded.device)
                copy_event = streams.to_device.copy(_byte_view(storage, offloaded.device), offloaded.copy,
                                                    [offloaded.copy_event])
                copy_event.wait_on_device()
                if not non_blocking:
                    copy_event.wait_on_host()
                for tensor, offset, size in offloaded.tensors:
                    tensor.set_(storage, offset, size, (1,))
                if offloaded.copy.is_pinned():
                    self._pinned_buffers.setdefault(len(offloaded.copy), []).append(offloaded.copy)
                copies.pop()
            for bucket in self._buckets:
                if state == LP_PARAMS:
                    bucket.end_param_offload()
                bucket.offloaded_states.discard(state)
            del self._offloaded[state]


def _tensors_by_storage(bucket: FlatBucket, state: str) -> Iterator[list[Tensor]]:
    """Yield the device tensors of a state, grouped by the storage they share."""
    if state == LP_PARAMS:
        if bucket.param_shard.is_on_device:
            yield [bucket.device_param_shard, *([] if bucket.params_are_sharded else [bucket.gathered_params])]
        return
    masters = [WEIGHT] if bucket.has_separate_masters else []
    for kind in masters if state == MASTERS else [one for one in bucket.master_state.kinds if one != WEIGHT]:
        if bucket.master_state.is_on_device:
            yield [bucket.master_state.view(kind)]


def _byte_view(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
