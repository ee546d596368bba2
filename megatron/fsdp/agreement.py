"""What the ranks compare at the end of a backward: whether they ran the same blocks, and which parameters they reached.

A parameter that no rank has reached keeps no gradient, as with DistributedDataParallel, and an optimizer leaves it
alone. One that some ranks have reached has the mean, in which the others count as zero.

One exchange tells both. On an accelerator a rank that has reached everything need not wait for it: what it says of the
blocks is looked at when the next backward ends, or before state is taken from the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

import torch
from torch import Tensor

from megatron.zero.exchanges import ExchangeLog
from megatron.zero.forwards import different_blocks
from megatron.zero.verdict import HostCopy, row_on
from mpu.collectives import all_reduce_into
from mpu.device import on_accelerator
from mpu.groups import Group

Reached = Sequence[frozenset[int]]
"""Of each bucket, which of its parameters."""


class Agreement:
    def __init__(self, dp: Group, device: torch.device, log: ExchangeLog, counts: Sequence[int], *, waits: bool,
                 ) -> None:
        """`counts`: the parameters of each bucket. `waits`: the optimizer must know of an overflow before its step, and
        so the host."""
        self._dp, self._device, self._log, self._counts, self._waits = dp, device, log, counts, waits
        self._open: HostCopy | None = None

    def __call__(self, trace: int, reached: Reached, overflows: Sequence[Tensor]) -> tuple[Reached, bool]:
        """What the ranks together have reached, and whether on one of them a gradient overflowed: one of `overflows` is
        true. Collective."""
        if self._dp.is_solo:
            return reached, any(map(bool, overflows))
        self.conclude()
        self._log.meet("the end of a backward")
        marks = [index in one for one, count in zip(reached, self._counts, strict=True) for index in range(count)]
        numbers = row_on(self._device, (trace, -trace, _any(overflows), *marks))
        all_reduce_into(numbers, self._dp, "max").wait()
        self._open = HostCopy(numbers)
        if on_accelerator(self._device) and all(marks) and not self._waits:
            return reached, False
        _, _, overflow, *found = self._open.values()
        if not on_accelerator(self._device):
            self.conclude()
        marked = iter(found)
        return [frozenset(index for index, mark in enumerate(islice(marked, count)) if mark)
                for count in self._counts], bool(overflow)

    def conclude(self) -> None:
        """Raise where the ranks of the last backward ran other blocks. All of them come here."""
        if self._open is not None:
            trace, minus_trace, *_ = self._open.values()
            self._open = None
            if trace != -minus_trace:
                raise different_blocks(self._log, self._dp)


def _any(flags: Iterable[Tensor]) -> Tensor | float:
    """Of flags on the host, where there is nothing to wait for, and of others on the device."""
    kinds: dict[bool, list[Tensor]] = {True: [], False: []}
    for flag in flags:
        kinds[on_accelerator(flag)].append(flag)
    on_host = any(map(bool, kinds[False]))
    return torch.stack(kinds[True]).any() if kinds[True] and not on_host else float(on_host)
