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
from megatron.zero.homes.ferry import Ferry, Mark, ferry_for
from megatron.zero.homes.memory import numbers
from megatron.zero.homes.shelf import WEIGHT
from megatron.zero.turns import Turns


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


OPTIM, MASTERS, WEIGHTS, GRADS, GRAD_BUFFERS = (state.value for state in OffloadStateTypeEnum)


def states_of(include: object, device: object) -> list[str]:
    """The states that are meant, by name, from what the user gave: strings, or members of an enum of theirs or ours."""
    where = str(_value(device))
    if where != OffloadDeviceEnum.cpu.value:
        raise ConfigError(f"offload_states: device is {where!r}, and states can be set aside on the host alone: give "
                          "\"cpu\"")
    known = [state.value for state in OffloadStateTypeEnum]
    if include is None:
        return known
    given = [include] if isinstance(include, str) else include
    if not isinstance(given, Collection):
        raise ConfigError(f"offload_states: include is a {type(include).__name__}; give a list of {', '.join(known)}")
    wanted = {str(_value(state)) for state in given}
    for name in wanted.difference(known):
        raise ConfigError(f"offload_states: there is no {name!r} to set aside; known are {', '.join(known)}")
    return [state for state in known if state in wanted]


def _value(member: object) -> object:
    return member.value if isinstance(member, Enum) else member


@dataclass
class _Piece:
    """What was in one storage of the device, on the host."""

    tensors: list[tuple[Tensor, int, torch.Size]]
    """Those of the storage, flat, each with its offset and size."""
    device: torch.device
    copy: Tensor
    left: Mark


class Aside:
    """Of one engine. Nothing is lent, and nothing under way, when it is called."""

    def __init__(self, buckets: Sequence[FlatBucket], turns: Turns, device: torch.device) -> None:
        self._buckets, self._turns, self._device = buckets, turns, device
        self._ferry = ferry_for(device)
        self._away: dict[str, list[_Piece]] = {}
        self._locked: dict[int, list[Tensor]] = {}
        """Page-locked buffers for the next time, by their size: locking takes longer than copying."""

    @property
    def wins_memory(self) -> bool:
        """The device is not the host."""
        return self._ferry is not None

    def check_here(self, what: str, *needed: str) -> None:
        """`what` needs these states on the device, or all of them."""
        for bucket in self._buckets:
            bucket.check_here(what, *needed)

    def take(self, states: Sequence[str], *, pinned: bool, non_blocking: bool) -> None:
        """All of them, or none where the host has no room."""
        if self._ferry is None:
            return
        new = [state for state in states if state not in self._away]
        try:
            for state in new:
                self._take(state, self._ferry, pinned and self._device.type == "cuda", non_blocking)
        except BaseException:
            self.bring(new)
            raise
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # for other processes, too

    def _take(self, state: str, ferry: Ferry, pinned: bool, non_blocking: bool) -> None:
        if state in (GRADS, GRAD_BUFFERS):
            self._turns.clear()
            return
        found = [(bucket, tensors) for bucket in self._buckets for tensors in _storages(bucket, state)]
        pieces = self._away.setdefault(state, []) if found else []
        for bucket, tensors in found:
            bucket.set_aside.add(state)
            if state == WEIGHTS:
                bucket.clear_out()
            storage, device = tensors[0].untyped_storage(), tensors[0].device
            copy = self._room(storage.nbytes(), pinned)
            left = ferry.down.copy(copy, _bytes(storage, device))
            left.join()  # the lane lets go of the memory
            if not non_blocking:
                left.wait()
            pieces.append(_Piece([(one, int(one.storage_offset()), one.shape) for one in tensors], device, copy, left))
            for one in tensors:
                one.set_(torch.UntypedStorage(0, device=device))

    def _room(self, nbytes: int, pinned: bool) -> Tensor:
        kept = self._locked.get(nbytes) if pinned else None
        return kept.pop() if kept else numbers(nbytes, torch.uint8, pinned=pinned)

    def bring(self, states: Sequence[str] | None = None, *, non_blocking: bool = False) -> None:
        """They come back, or everything does. Where the device has no room, what did not come is still away."""
        for state in [state for state in self._away if states is None or state in states]:
            pieces = self._away[state]
            while pieces:
                self._bring(pieces[-1], non_blocking)
                pieces.pop()
            for bucket in self._buckets:
                if state == WEIGHTS:
                    bucket.move_in()
                bucket.set_aside.discard(state)
            del self._away[state]

    def _bring(self, piece: _Piece, non_blocking: bool) -> None:
        assert self._ferry is not None
        storage = torch.UntypedStorage(len(piece.copy), device=piece.device)
        came = self._ferry.up.copy(_bytes(storage, piece.device), piece.copy, [piece.left])
        came.join()
        if not non_blocking:
            came.wait()
        for tensor, offset, size in piece.tensors:
            tensor.set_(storage, offset, size, (1,))
        if piece.copy.is_pinned():
            self._locked.setdefault(len(piece.copy), []).append(piece.copy)


def _storages(bucket: FlatBucket, state: str) -> Iterator[list[Tensor]]:
    """The tensors of each storage of a bucket that is on the device."""
    if state == WEIGHTS:
        if bucket.is_at_hand:
            yield [bucket.shard] if bucket.comes_and_goes else [bucket.shard, bucket.gathered]
        return
    masters = [WEIGHT] if bucket.keeps_masters else []
    for kind in masters if state == MASTERS else [one for one in bucket.kept.kinds if one != WEIGHT]:
        if (tensor := bucket.kept.at_hand(kind)) is not None:
            yield [tensor]


def _bytes(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
