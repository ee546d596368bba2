"""Two buffers that numbers pass through on their way to the other side: one is filled while the other one travels."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from megatron.zero.homes.ferry import CopyEvent
from megatron.zero.homes.memory import page_aligned_zeros


@dataclass
class _StagingBuffer:
    tensor: Tensor
    copy: CopyEvent | None = None
    is_acquired: bool = False


@final
class StagingDoubleBuffer:
    def __init__(self, size: int, dtype: torch.dtype, device: torch.device | None, *, pinned: bool = False) -> None:
        """From the device; or from the host, if that is None."""
        self._from_host = device is None
        self._buffers = deque(_StagingBuffer(page_aligned_zeros(size, dtype, pinned=pinned) if device is None else
                                             torch.empty(size, dtype=dtype, device=device)) for _ in range(2))

    def acquire(self, count: int) -> Tensor:
        """The buffer that left first, when it has: until it is `sent` it is the caller's."""
        first = self._buffers[0]
        assert not first.is_acquired, "it would be given to two, who fill it with different numbers"
        first.is_acquired = True
        if first.copy is not None and self._from_host:
            first.copy.wait_on_host()
        elif first.copy is not None:
            first.copy.wait_on_device()
        return first.tensor[:count]

    def mark_sent(self, copy: CopyEvent) -> None:
        self._buffers[0].copy, self._buffers[0].is_acquired = copy, False
        self._buffers.rotate(-1)
