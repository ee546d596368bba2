"""What the ranks compare at the end of a backward: whether they ran the same blocks, and which parameters they reached.

A parameter that no rank has reached keeps no gradient, as with DistributedDataParallel, and an optimizer leaves it
alone. One that some ranks have reached has the mean, in which the others count as zero.

A third is whether a gradient of fp16 overflowed. Gradients carry the loss scale from the outermost module's outputs to
their sums, by the engine's rule (optim/loss_scale.py). A backward that overflowed leaves no gradient on any rank.

One exchange tells all. On an accelerator a rank that has reached everything need not wait for it: what it says of the
blocks is looked at when the next backward ends, or before state is taken from the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from megatron.errors import NumericsError
from megatron.optim.loss_scale import LossScaleRule, LossScaleState
from megatron.zero.exchanges import CollectiveLog
from megatron.zero.forwards import diverged_blocks_error
from megatron.zero.verdict import HostScalars, scalars_on_device
from mpu.collectives import all_reduce_into
from mpu.device import on_accelerator
from mpu.groups import Group

Reached = Sequence[frozenset[int]]
"""Of each bucket, which of its parameters."""


class Agreement:
    def __init__(self, dp: Group, device: torch.device, log: CollectiveLog, counts: Sequence[int], *, waits: bool,
                 ) -> None:
        """`counts`: the parameters of each bucket. `waits`: the optimizer must know of an overflow before its step, and
        so the host."""
        self._dp, self._device, self._log, self._counts, self._waits = dp, device, log, counts, waits
        self._open: HostScalars | None = None

    def __call__(self, trace: int, reached: Reached, overflows: Sequence[Tensor]) -> tuple[Reached, bool]:
        """What the ranks together have reached, and whether on one of them a gradient overflowed: one of `overflows` is
        true. Collective."""
        if self._dp.is_solo:
            return reached, any(map(bool, overflows))
        self.conclude()
        self._log.record_barrier("the end of a backward")
        marks = [index in one for one, count in zip(reached, self._counts, strict=True) for index in range(count)]
        numbers = scalars_on_device(self._device, (trace, -trace, _any(overflows), *marks))
        all_reduce_into(numbers, self._dp, "max").wait()
        self._open = HostScalars(numbers)
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
                raise diverged_blocks_error(self._log, self._dp)


def _any(flags: Iterable[Tensor]) -> Tensor | float:
    """Of flags on the host, where there is nothing to wait for, and of others on the device."""
    kinds: dict[bool, list[Tensor]] = {True: [], False: []}
    for flag in flags:
        kinds[on_accelerator(flag)].append(flag)
    on_host = any(map(bool, kinds[False]))
    return torch.stack(kinds[True]).any() if kinds[True] and not on_host else float(on_host)


# ---- the loss scale of fp16 -----------------------------------------------------------------------------------------

INITIAL, WINDOW, LEAST = 2.0**15, 2000, 1.0
"""A loss in fp16 can carry no more at the beginning; torch's GradScaler doubles after as many steps."""
MOST_IN_A_ROW = 20


class Scaling:
    def __init__(self, is_on: bool) -> None:
        self.is_on = is_on
        self._rule = LossScaleRule(INITIAL, WINDOW, 1, LEAST, dynamic=True, scales=True) if is_on else LossScaleRule()
        self._state = self._rule.start()
        self.skipped = 0
        """Backwards that overflowed."""
        self._in_a_row = 0

    @property
    def scale(self) -> float:
        return self._state.scale if self.is_on else 1.0

    def numbers(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"loss_scale": self.scale, "clean_steps": self._state.clean_steps,
                "hysteresis_left": self._state.hysteresis_left}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """What `numbers` gave; the scale of another precision says nothing here."""
        if self.is_on and saved["loss_scale"] > 1:
            self._state = LossScaleState(saved["loss_scale"], saved["clean_steps"], saved["hysteresis_left"])

    def after(self, overflow: bool) -> bool:
        """A backward has been summed; whether it overflowed."""
        if not self.is_on:
            return False
        exhausted = overflow and self._rule.exhausted(self._state)
        self._state = self._rule.after(self._state, overflow=overflow)
        self.skipped += overflow
        self._in_a_row = self._in_a_row + 1 if exhausted else 0
        if self._in_a_row > MOST_IN_A_ROW:
            raise NumericsError(f"{self._in_a_row} backwards in a row overflowed at the least loss scale ({LEAST:g}): "
                                "use bf16, or a lower learning rate")
        return overflow
