"""Flat buffers: dtypes and configuration of buckets, and a pool of buffers that buckets of equal layout use in turn.

A flat buffer is one tensor with a view for each slot. Reuse keeps addresses fixed and the heap without holes. The
pool holds as many buffers as were in use at the same time. A buffer whose copy to the host is still running may be
taken: the device then waits for the copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron.config.tree import PrecisionConfig, ZeroConfig
from megatron.distributed.collective_log import CollectiveLog
from megatron.zero.layout import FlatLayout
from megatron.zero.offload.copy_streams import CopyEvent
from megatron.zero.offload.storage import EngineStorage
from megatron.zero.stages import StagePolicy, gradient_precisions
from mpu.device import on_accelerator
from mpu.groups import Group

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class BucketDtypes:
    params: torch.dtype = torch.float32
    grads: torch.dtype = torch.float32  # dtype of the full gradient buffer that backward fills
    grad_shard: torch.dtype = torch.float32
    communication: torch.dtype | None = None  # of gradients that are sent; None: fp32 on GPUs, else `grads`
    master: torch.dtype = torch.float32
    # Keep masters apart from parameters even in the same dtype, because parameters are rounded (moq.py).
    masters_are_separate: bool = False
    frozen_have_masters: bool = False  # store frozen parameters in the dtype of the masters too

    @property
    def reduction(self) -> torch.dtype:
        """The dtype of partial sums over ranks on an accelerator."""
        return self.communication or torch.float32

    def copies_for_reduction(self, device: torch.device) -> bool:
        return self.communication not in (None, self.grads) or on_accelerator(device) and self.reduction != self.grads


def bucket_dtypes(policy: StagePolicy, precision: PrecisionConfig, accumulation: int, *,
                  masters_are_separate: bool = False) -> BucketDtypes:
    sent = None if precision.communication is None else DTYPES[precision.communication]
    grads, sums = (DTYPES[name] for name in gradient_precisions(policy, precision, accumulation))
    return BucketDtypes(DTYPES[precision.name], grads, sums, sent, masters_are_separate=masters_are_separate)


@dataclass(frozen=True)
class BucketingConfig:
    """What all buckets of a model have in common."""

    policy: StagePolicy
    # How gradients and parameters are sent. Accelerators send a bucket at once (docs/decisions/010-wires.md).
    comm: ZeroConfig
    dtypes: BucketDtypes
    dp: Group
    device: torch.device
    persistence_threshold: int
    param_group_of: Callable[[nn.Parameter], int]  # parameter -> index of its param group
    log: CollectiveLog
    engine_storage: EngineStorage
    buffer_pool: BufferPool
    # Changes the parameters of a bucket when it is resharded; None: replaces them by placeholders.
    show_sharded: Callable[[Any], None] | None = None
    # All ranks have the same initial values; otherwise the first rank of `dp` broadcasts its own.
    values_are_equal: bool = False
    # Where states are sharded over a part of `dp`: those ranks, and the ranks with the same shard.
    sharding: tuple[Group, Group] | None = None


@dataclass(frozen=True, eq=False)
class FlatBuffer:
    flat: Tensor
    views: list[Tensor]  # one for each slot, in its shape

    @staticmethod
    def allocate(layout: FlatLayout, dtype: torch.dtype, device: torch.device) -> FlatBuffer:
        """Allocate a buffer. The padding between slots is zero and is never written."""
        flat = torch.empty(layout.numel, dtype=dtype, device=device)
        for start, stop in layout.padding_ranges():
            flat[start:stop].zero_()
        return FlatBuffer(flat, [flat[slot.offset : slot.end].view(slot.shape) for slot in layout.slots])


class BufferPool:
    """The free buffers of one engine."""

    def __init__(self) -> None:
        self._free: dict[tuple[object, ...], list[tuple[FlatBuffer, CopyEvent | None]]] = {}

    def get(self, layout: FlatLayout, dtype: torch.dtype, device: torch.device) -> FlatBuffer:
        free = self._free.get((dtype, layout.buffer_key))
        if not free:
            return FlatBuffer.allocate(layout, dtype, device)
        buffer, pending_copy = free.pop(0 if free[0][1] is not None else
                                        -1)  # the oldest copy, or else the buffer that is warmest in the cache
        if pending_copy is not None:
            pending_copy.wait_on_device()
        return buffer

    def put(self, layout: FlatLayout, buffer: FlatBuffer, pending_copy: CopyEvent | None = None) -> None:
        """Return a buffer to the pool. All device work on it has been launched; `pending_copy` may still be reading."""
        self._free.setdefault((buffer.flat.dtype, layout.buffer_key), []).append((buffer, pending_copy))

    def clear(self) -> None:
        """Free the memory of all buffers in the pool."""
        self._free.clear()
