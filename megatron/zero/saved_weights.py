"""What autograd saves of gathered weights for the backward: which view of which parameter it was, and not its memory.

Weights are released between a unit's forward and its backward, and gathered again into other memory. Without these
hooks the tensors that autograd saved would keep the first memory alive: the gradients would be right, and stage 3 would
save nothing. So gradients do not depend on the hooks, and they stay out of the way where the user has saved-tensor
hooks (torch's checkpoint, activations that are offloaded).

A backward must find each saved tensor unchanged. Autograd compares version counters, but not of tensors that pass
through hooks, so the hooks compare them. A parameter's counter also tells whether it is gathered: it is one higher
while the parameter is split (edits.py).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatron.errors import ConfigError
from megatron.zero.bucket import FlatBucket
from megatron.zero.gradients import UNSEEN

CHANGED = "has been modified by an inplace operation"
"""What autograd says of a saved tensor of another version."""


class SavedWeight(NamedTuple):
    """A view of a gathered parameter."""

    bucket: FlatBucket
    parameter: Tensor
    version: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    """In the bucket's gathered buffer."""


class SavedWeightHooks:
    """Saved-tensor hooks of one unit, active during its forward."""

    def __init__(self, buckets: Sequence[FlatBucket]) -> None:
        self._buckets = [(bucket, [slot.offset for slot in bucket.layout.slots]) for bucket in buckets]
        self._entered: list[saved_tensors_hooks | None] = []

    def enter(self) -> None:
        top = torch._C._autograd._top_saved_tensors_default_hooks(False)
        is_ours = top is None or isinstance(getattr(top[0], "__self__", None), SavedWeightHooks)
        hooks = saved_tensors_hooks(self._pack, _unpack) if is_ours and torch.is_grad_enabled() else None
        if hooks is not None:
            hooks.__enter__()
        self._entered.append(hooks)

    def leave(self) -> None:
        hooks = self._entered.pop() if self._entered else None
        if hooks is not None:
            hooks.__exit__()

    def _pack(self, tensor: Tensor) -> SavedWeight | tuple[Tensor, int]:
        for bucket, starts in self._buckets:
            offset = bucket.offset_of(tensor)
            if offset is not None:
                parameter = bucket.parameters[bisect_right(starts, offset) - 1]
                return SavedWeight(bucket, parameter, parameter._version, tensor.shape, tensor.stride(), offset)
        return tensor, tensor._version


def _unpack(saved: SavedWeight | tuple[Tensor, int]) -> Tensor:
    if isinstance(saved, SavedWeight):
        if saved.parameter._version != saved.version:
            raise ConfigError(f"a backward came to {saved.bucket.describe(saved.parameter)} while it was split over "
                              f"the ranks, or after it was written to: {UNSEEN}")
        return saved.bucket.view(saved.size, saved.stride, saved.offset)
    tensor, version = saved
    if tensor._version != version:
        raise RuntimeError(f"one of the variables needed for gradient computation {CHANGED}: a tensor of shape "
                           f"{list(tensor.shape)} is at version {tensor._version}; expected version {version} instead")
    return tensor
