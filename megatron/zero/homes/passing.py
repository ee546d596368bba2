"""Two buffers that numbers pass through on their way to the other side: one is filled while the other one travels."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from megatron.zero.homes.ferry import Mark
from megatron.zero.homes.memory import numbers


@dataclass
class _Buffer:
    numbers: Tensor
    leaves: Mark | None = None
    is_taken: bool = False


@final
class Passing:
    def __init__(self, size: int, dtype: torch.dtype, device: torch.device | None, *, pinned: bool = False) -> None:
        """From the device; or from the host, if that is None."""
        self._from_host = device is None
        self._turns = deque(_Buffer(numbers(size, dtype, pinned=pinned) if device is None else
                                    torch.empty(size, dtype=dtype, device=device)) for _ in range(2))

    def take(self, count: int) -> Tensor:
        """The buffer that left first, when it has: until it is `sent` it is the caller's."""
        first = self._turns[0]
        assert not first.is_taken, "it would be given to two, who fill it with different numbers"
        first.is_taken = True
        if first.leaves is not None and self._from_host:
            first.leaves.wait()
        elif first.leaves is not None:
            first.leaves.join()
        return first.numbers[:count]

    def sent(self, mark: Mark) -> None:
        self._turns[0].leaves, self._turns[0].is_taken = mark, False
        self._turns.rotate(-1)
