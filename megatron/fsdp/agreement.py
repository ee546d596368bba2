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

ReachedParams = Sequence[frozenset[int]]
"""Of each bucket, which of its parameters."""


class BackwardConsistency:
    def __init__(
        self,
        dp: Group,
        device: torch.device,
        log: CollectiveLog,
        param_counts: Sequence[int],
        *,
        host_needs_overflow: bool,
    ) -> None:
        """`counts`: the parameters of each bucket. `waits`: the optimizer must know of an overflow before its step, and
        so the host."""
        self._dp, self._device, self._log, self._param_counts, self._host_needs_overflow = dp, device, log, param_counts, host_needs_overflow
        self._pending: HostScalars | None = None

    def __call__(self, trace: int, reached: ReachedParams, overflows: Sequence[Tensor]) -> tuple[ReachedParams, bool]:
        """What the ranks together have reached, and whether on one of them a gradient overflowed: one of `overflows` is
        true. Collective."""
        if self._dp.is_solo:
            return reached, any(map(bool, overflows))
        self.check_pending()
        self._log.record_barrier("the end of a backward")
        marks = [index in one for one, count in zip(reached, self._param_counts, strict=True) for index in range(count)]
        numbers = scalars_on_device(self._device, (trace, -trace, _any_flag(overflows), *marks))
        all_reduce_into(numbers, self._dp, "max").wait()
        self._pending = HostScalars(numbers)
        if on_accelerator(self._device) and all(marks) and not self._host_needs_overflow:
            return reached, False
        _, _, overflow, *found = self._pending.values()
        if not on_accelerator(self._device):
            self.check_pending()
        marked = iter(found)
        return [frozenset(index for index, mark in enumerate(islice(marked, count)) if mark)
                for count in self._param_counts], bool(overflow)

    def check_pending(self) -> None:
        """Raise where the ranks of the last backward ran other blocks. All of them come here."""
        if self._pending is not None:
            trace, minus_trace, *_ = self._pending.values()
            self._pending = None
            if trace != -minus_trace:
                raise diverged_blocks_error(self._log, self._dp)


def _any_flag(flags: Iterable[Tensor]) -> Tensor | float:
    """Of flags on the host, where there is nothing to wait for, and of others on the device."""
    by_device: dict[bool, list[Tensor]] = {True: [], False: []}
    for flag in flags:
        by_device[on_accelerator(flag)].append(flag)
    on_host = any(map(bool, by_device[False]))
    return torch.stack(by_device[True]).any() if by_device[True] and not on_host else float(on_host)


# ---- the loss scale of fp16 -----------------------------------------------------------------------------------------

INITIAL_SCALE, SCALE_WINDOW, MIN_SCALE = 2.0**15, 2000, 1.0
"""A loss in fp16 can carry no more at the beginning; torch's GradScaler doubles after as many steps."""
MAX_OVERFLOWS_IN_A_ROW = 20


class FSDPLossScaler:
    def __init__(self, is_on: bool) -> None:
        self.is_enabled = is_on
        self._rule = LossScaleRule(INITIAL_SCALE, SCALE_WINDOW, 1, MIN_SCALE, dynamic=True,
                                   is_enabled=True) if is_on else LossScaleRule()
        self._state = self._rule.initial_state()
        self.skipped_backwards = 0
        """Backwards that overflowed."""
        self._overflows_in_a_row = 0

    @property
    def scale(self) -> float:
        return self._state.scale if self.is_enabled else 1.0

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"loss_scale": self.scale, "clean_steps": self._state.clean_steps,
                "hysteresis_left": self._state.hysteresis_left}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """What `numbers` gave; the scale of another precision says nothing here."""
        if self.is_enabled and saved["loss_scale"] > 1:
            self._state = LossScaleState(saved["loss_scale"], saved["clean_steps"], saved["hysteresis_left"])

    def update(self, overflow: bool) -> bool:
        """A backward has been summed; whether it overflowed."""
        if not self.is_enabled:
            return False
        exhausted = overflow and self._rule.is_exhausted(self._state)
        self._state = self._rule.next_state(self._state, overflow=overflow)
        self.skipped_backwards += overflow
        self._overflows_in_a_row = self._overflows_in_a_row + 1 if exhausted else 0
        if self._overflows_in_a_row > MAX_OVERFLOWS_IN_A_ROW:
            raise NumericsError(
                f"{self._overflows_in_a_row} backwards in a row overflowed at the least loss scale ({MIN_SCALE:g}): "
                "use bf16, or a lower learning rate")
        return overflow
