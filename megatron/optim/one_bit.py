"""What optimizers have in common that warm up on sums of gradients, and from a step on have one bit a number on the
wire; and 1-bit Adam over flat fp32 spans (Tang et al. 2021, https://arxiv.org/abs/2102.02888).

    warm-up       AdamW, bit for bit
    afterwards    each rank says beta1 m + (1 - beta1) g, of its own gradient; what comes is the new m (mpu/one_bit.py)
                  w <- w - lr (m^ / (sqrt(v^) + eps) + decay w),  v^ as it was when the warm-up ended

What differs from the original is in docs/methods.md.

When v freezes is a number of steps, or found: where the sum of v has moved by less than 4 % in 1 / (1 - beta2) steps,
the measure of the paper, in none of which the learning rate rose.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch

from megatron.optim.adam import IN_CACHE, LARGEST_TILE, AdamW
from megatron.optim.rule import ParamGroup, Saying, Span, StepScalars
from mpu.device import on_accelerator
from mpu.groups import Group

SETTLED = 0.96
"""Of the two sums of v, the smaller is at least so much of the larger."""


@dataclass
class OneBit:
    """Part of a rule with states `exp_avg` and `exp_avg_sq`: when the second freezes, and what is said of the first."""

    freeze_step: int | None
    """Steps of the warm-up; None: until v has settled."""
    frozen_at: int | None = field(default=None, init=False)
    """Steps before the first one that v does not see any more, once it is frozen."""
    _sum: float = field(default=0.0, init=False)
    _looked_after: int = field(default=0, init=False)
    """The sum of v when it was last looked at, and after how many steps."""
    _rate: float = field(default=0.0, init=False)
    _rose: bool = field(default=False, init=False)
    """The learning rate of the last step, and whether one rose since then."""

    has_exchange = True
    speaks_where = "exp_avg_sq"

    remark = "the variance is frozen and the momentum travels at one bit a number"

    @property
    def is_compressed(self) -> bool:
        return self.frozen_at is not None

    def begin_step(self, taken: int, groups: Sequence[ParamGroup], size_of: Callable[[str], float]) -> None:
        if self.frozen_at is not None:
            return
        if self.freeze_step is None:
            ends = self._has_settled(taken, groups, size_of)
        else:
            ends = taken >= self.freeze_step
        if ends:
            self.frozen_at = taken

    def _has_settled(self, taken: int, groups: Sequence[ParamGroup], size_of: Callable[[str], float]) -> bool:
        span = max(1, round(1 / (1 - min(group["betas"][1] for group in groups))))
        rate = max(float(group["lr"]) for group in groups)
        self._rose, self._rate = self._rose or rate > self._rate, rate
        if taken == self._looked_after or taken % span:
            return False
        before, rose = self._sum, self._rose
        self._sum, self._looked_after, self._rose = size_of("exp_avg_sq"), taken, False
        return not rose and min(before, self._sum) >= SETTLED * max(before, self._sum) > 0

    def say(self, what: Saying, hyper: Mapping[str, Any], *, factor: float) -> None:
        beta1 = hyper["betas"][0]
        what.owed.add_(what.before(), alpha=beta1).add_(what.grad, alpha=(1 - beta1) * factor)

    def scalars(self) -> dict[str, Any]:
        return {"frozen_at": self.frozen_at, "sum": self._sum, "rate": self._rate, "rose": self._rose,
                "looked_after": self._looked_after}

    def restore(self, scalars: Mapping[str, Any]) -> None:
        self.frozen_at = scalars.get("frozen_at")
        self._sum, self._rate = scalars.get("sum", 0.0), scalars.get("rate", 0.0)
        self._looked_after, self._rose = scalars.get("looked_after", 0), scalars.get("rose", False)


@final
@dataclass
class OneBitAdam(OneBit):
    tile: int = LARGEST_TILE
    bias_correction: bool = True

    name = "OneBitAdam"
    states = AdamW.states
    elementwise = True

    def __post_init__(self) -> None:
        self._adam = AdamW(self.tile, bias_correction=self.bias_correction)

    @property
    def waits(self) -> bool:
        return self.frozen_at is not None

    def settle_on(self, device: torch.device, world: Group) -> None:
        self._adam.settle_on(device, world)

    def step_many(self, spans: Sequence[Span], hyper: Mapping[str, Any], at: StepScalars) -> bool:
        return self._adam.step_many(spans, hyper, at)

    def step(self, span: Span, hyper: Mapping[str, Any], *, factor: float, steps_taken: int) -> None:
        if self.frozen_at is None:
            self._adam.step(span, hyper, factor=factor, steps_taken=steps_taken)
            return
        size = self.tile if on_accelerator(span.master) else min(self.tile, IN_CACHE * torch.get_num_threads())
        for start in range(0, len(span.master), size):
            self._step(span, slice(start, start + size), hyper, factor, steps_taken)

    def _step(self, span: Span, tile: slice, hyper: Mapping[str, Any], factor: float, taken: int) -> None:
        of_m, of_v = 1.0, 1.0
        if self.bias_correction:
            beta1, beta2 = hyper["betas"]
            assert self.frozen_at is not None
            of_m, of_v = 1 - beta1 ** (taken + 1), 1 - beta2 ** self.frozen_at
        momentum = span.states["exp_avg"][tile].copy_(span.grad[tile]).mul_(factor)
        denominator = (span.states["exp_avg_sq"][tile] / of_v).sqrt_().add_(hyper["eps"])
        weights = span.master[tile]
        weights.mul_(1 - hyper["lr"] * hyper["weight_decay"])
        weights.addcdiv_(momentum, denominator, value=-hyper["lr"] / of_m)
