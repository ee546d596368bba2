"""Aside: what an engine keeps on its device goes to the host between two phases of a program, and comes back.

    engine.offload_states();  ...;  engine.reload_states()      # in between another model may have the memory

    optim_states               states of the optimizer
    hp_params                  the masters, where they are apart from the weights at work
    lp_params                  weights at work, frozen ones too: this rank's part of them where they are split
    lp_grads,                  the buffers that gradients come in. Between two steps there are no gradients, and a
    contiguous_grad_buffer     backward makes the buffers anew

The engine's tensors drop their storage and get another one when they come back; a tensor that a user took of a weight
keeps the old one, and its values. While their weights are away parameters are placeholders. What has its home on the
host or on a drive is left there, and a few small buffers of a step stay.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from megatron.errors import ConfigError
from megatron.zero.bucket import FlatBucket
from megatron.zero.homes.ferry import CopyEvent, CopyStreams, create_copy_streams
from megatron.zero.homes.memory import page_aligned_zeros
from megatron.zero.homes.shelf import WEIGHT
from megatron.zero.turns import BufferPool


class OffloadStateTypeEnum(str, Enum):
    """DeepSpeed's names of what can be set aside."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class OffloadDeviceEnum(str, Enum):
    """DeepSpeed's names of where to."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


OPTIM, MASTERS, LP_PARAMS, GRADS, GRAD_BUFFERS = (state.value for state in OffloadStateTypeEnum)


def parse_offload_states(include: object, device: object) -> list[str]:
    """The states that are meant, by name, from what the user gave: strings, or members of an enum of theirs or ours."""
    where = str(_enum_value(device))
    if where != OffloadDeviceEnum.cpu.value:
        raise ConfigError(f"offload_states: device is {where!r}, and states can be set aside on the host alone: give "
                          "\"cpu\"")
    known = [state.value for state in OffloadStateTypeEnum]
    if include is None:
        return known
    given = [include] if isinstance(include, str) else include
    if not isinstance(given, Collection):
        raise ConfigError(f"offload_states: include is a {type(include).__name__}; give a list of {', '.join(known)}")
    wanted = {str(_enum_value(state)) for state in given}
    for name in wanted.difference(known):
        raise ConfigError(f"offload_states: there is no {name!r} to set aside; known are {', '.join(known)}")
    return [state for state in known if state in wanted]


def _enum_value(member: object) -> object:
    return member.value if isinstance(member, Enum) else member


@dataclass
class _OffloadedStorage:
    """What was in one storage of the device, on the host."""

    tensors: list[tuple[Tensor, int, torch.Size]]
    """Those of the storage, flat, each with its offset and size."""
    device: torch.device
    copy: Tensor
    copy_event: CopyEvent


class StateOffloader:
    """Of one engine. Nothing is lent, and nothing under way, when it is called."""

    def __init__(self, buckets: Sequence[FlatBucket], buffer_pool: BufferPool, device: torch.device) -> None:
        self._buckets, self._buffer_pool, self._device = buckets, buffer_pool, device
        self._copy_streams = create_copy_streams(device)
        self._offloaded: dict[str, list[_OffloadedStorage]] = {}
        self._pinned_buffers: dict[int, list[Tensor]] = {}
        """Page-locked buffers for the next time, by their size: locking takes longer than copying."""

    @property
    def frees_memory(self) -> bool:
        """The device is not the host."""
        return self._copy_streams is not None

    def check_not_offloaded(self, what: str, *needed: str) -> None:
        """`what` needs these states on the device, or all of them."""
        for bucket in self._buckets:
            bucket.check_not_offloaded(what, *needed)

    def offload(self, states: Sequence[str], *, pinned: bool, non_blocking: bool) -> None:
        """All of them, or none where the host has no room."""
        if self._copy_streams is None:
            return
        new = [state for state in states if state not in self._offloaded]
        try:
            for state in new:
                self._offload_state(state, self._copy_streams, pinned and self._device.type == "cuda", non_blocking)
        except BaseException:
            self.reload(new)
            raise
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # for other processes, too

    def _offload_state(self, state: str, copy_streams: CopyStreams, pinned: bool, non_blocking: bool) -> None:
        if state in (GRADS, GRAD_BUFFERS):
            self._buffer_pool.clear()
            return
        found = [(bucket, tensors) for bucket in self._buckets for tensors in _tensors_by_storage(bucket, state)]
        pieces = self._offloaded.setdefault(state, []) if found else []
        for bucket, tensors in found:
            bucket.offloaded_states.add(state)
            if state == LP_PARAMS:
                bucket.begin_param_offload()
            storage, device = tensors[0].untyped_storage(), tensors[0].device
            copy = self._host_buffer(storage.nbytes(), pinned)
            left = copy_streams.to_host.copy(copy, _byte_view(storage, device))
            left.wait_on_device()  # the lane lets go of the memory
            if not non_blocking:
                left.wait_on_host()
            pieces.append(
                _OffloadedStorage([(one, int(one.storage_offset()), one.shape) for one in tensors], device, copy, left))
            for one in tensors:
                one.set_(torch.UntypedStorage(0, device=device))

    def _host_buffer(self, nbytes: int, pinned: bool) -> Tensor:
        kept = self._pinned_buffers.get(nbytes) if pinned else None
        return kept.pop() if kept else page_aligned_zeros(nbytes, torch.uint8, pinned=pinned)

    def reload(self, states: Sequence[str] | None = None, *, non_blocking: bool = False) -> None:
        """They come back, or everything does. Where the device has no room, what did not come is still away."""
        for state in [state for state in self._offloaded if states is None or state in states]:
            pieces = self._offloaded[state]
            while pieces:
                self._reload_storage(pieces[-1], non_blocking)
                pieces.pop()
            for bucket in self._buckets:
                if state == LP_PARAMS:
                    bucket.end_param_offload()
                bucket.offloaded_states.discard(state)
            del self._offloaded[state]

    def _reload_storage(self, piece: _OffloadedStorage, non_blocking: bool) -> None:
        assert self._copy_streams is not None
        storage = torch.UntypedStorage(len(piece.copy), device=piece.device)
        copy_event = self._copy_streams.to_device.copy(_byte_view(storage, piece.device), piece.copy,
                                                       [piece.copy_event])
        copy_event.wait_on_device()
        if not non_blocking:
            copy_event.wait_on_host()
        for tensor, offset, size in piece.tensors:
            tensor.set_(storage, offset, size, (1,))
        if piece.copy.is_pinned():
            self._pinned_buffers.setdefault(len(piece.copy), []).append(piece.copy)


def _tensors_by_storage(bucket: FlatBucket, state: str) -> Iterator[list[Tensor]]:
    """The tensors of each storage of a bucket that is on the device."""
    if state == LP_PARAMS:
        if bucket.is_on_device:
            yield [bucket.device_param_shard
                   ] if bucket.params_are_sharded else [bucket.device_param_shard, bucket.gathered_params]
        return
    masters = [WEIGHT] if bucket.has_separate_masters else []
    for kind in masters if state == MASTERS else [one for one in bucket.master_state.kinds if one != WEIGHT]:
        if (tensor := bucket.master_state.device_view(kind)) is not None:
            yield [tensor]


def _byte_view(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
