"""What the ranks compare at the end of a backward: whether they ran the same blocks, and which parameters they reached.

A parameter that no rank has reached keeps no gradient, as with DistributedDataParallel, and an optimizer leaves it
alone. One that some ranks have reached has the mean, in which the others count as zero.

Where all ranks did the same, two digests travel. On an accelerator they are looked at when the next forward begins: to
wait for them would hold up the optimizer's launches. Ranks that reached different parameters are an error there.
"""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

import torch
from torch import Tensor

from megatron.errors import ConfigError
from megatron.zero.exchanges import ExchangeLog
from megatron.zero.forwards import different_blocks
from megatron.zero.verdict import HostCopy
from mpu.collectives import all_gather_json, all_reduce_into
from mpu.device import on_accelerator
from mpu.groups import Group

Reached = Sequence[frozenset[int]]
"""Of each bucket, which of its parameters."""


class Agreement:
    def __init__(self, dp: Group, device: torch.device, log: ExchangeLog, *, waits: bool) -> None:
        """`waits`: the optimizer must know of an overflow before its step, and so the host."""
        self._dp, self._device, self._log, self._waits = dp, device, log, waits
        self._open: HostCopy | None = None

    def __call__(self, trace: int, reached: Reached, overflows: Sequence[Tensor]) -> tuple[Reached, bool]:
        """What the ranks together have reached, and whether on one of them a gradient overflowed: one of `overflows` is
        true. Collective."""
        if self._dp.is_solo:
            return reached, bool(overflows) and bool(self._any(overflows))
        self._log.meet("the end of a backward")
        mask = crc32(repr([sorted(one) for one in reached]).encode())
        numbers = torch.empty(5, dtype=torch.float64, device=self._device)
        for place, value in zip(numbers, (trace, -trace, mask, -mask), strict=False):
            place.fill_(value)
        numbers[-1].copy_(self._any(overflows))
        all_reduce_into(numbers, self._dp, "max").wait()
        self._open = HostCopy(numbers)
        if on_accelerator(self._device) and not self._waits:
            return reached, False
        overflowed = bool(self._open.values()[-1])
        return self._union(reached) if self._masks_differ() else reached, overflowed

    def _any(self, flags: Sequence[Tensor]) -> Tensor:
        """Of flags on the device and of others on the host, where there is nothing to wait for; one look is left."""
        on_host = any(bool(flag) for flag in flags if not on_accelerator(flag))
        others = [flag for flag in flags if on_accelerator(flag)]
        start = torch.full((), on_host, dtype=torch.bool, device=self._device)
        return torch.stack([start, *others]).any() if others else start

    def conclude(self) -> None:
        """Raise where the ranks of the last backward differed. All of them come here."""
        if self._open is not None and self._masks_differ():
            raise ConfigError("the last backward reached other parameters on some ranks than on others, and their "
                              "optimizers have gone different ways: use every parameter on every rank")

    def _masks_differ(self) -> bool:
        """Of the ranks; an error where what they ran differs."""
        assert self._open is not None
        trace, minus_trace, mask, minus_mask, _ = self._open.values()
        self._open = None
        if trace != -minus_trace:
            raise different_blocks(self._log, self._dp)
        return mask != -minus_mask

    def _union(self, reached: Reached) -> Reached:
        everywhere = all_gather_json([sorted(one) for one in reached], self._dp)
        return [frozenset(index for rank in everywhere for index in rank[number]) for number in range(len(reached))]
