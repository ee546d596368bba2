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

from megatron.optim.adam import CACHE_TILE_NUMEL, MAX_TILE_NUMEL, AdamW
from megatron.optim.rule import CompressionInput, ParamGroup, StepScalars, UpdateSegment
from mpu.device import on_accelerator
from mpu.groups import Group

STABLE_VARIANCE_RATIO = 0.96
"""Of the two sums of v, the smaller is at least so much of the larger."""


@dataclass
class OneBitRule:
    """Part of a rule with states `exp_avg` and `exp_avg_sq`: when the second freezes, and what is said of the first."""

    freeze_step: int | None
    """Steps of the warm-up; None: until v has settled."""
    frozen_at: int | None = field(default=None, init=False)
    """Steps before the first one that v does not see any more, once it is frozen."""
    _variance_sum: float = field(default=0.0, init=False)
    _measured_after_steps: int = field(default=0, init=False)
    """The sum of v when it was last looked at, and after how many steps."""
    _last_lr: float = field(default=0.0, init=False)
    _lr_rose: bool = field(default=False, init=False)
    """The learning rate of the last step, and whether one rose since then."""

    supports_compression = True
    compression_mask_state = "exp_avg_sq"

    compression_note = "the variance is frozen and the momentum travels at one bit a number"

    @property
    def is_compressed(self) -> bool:
        return self.frozen_at is not None

    def begin_step(self, steps_taken: int, groups: Sequence[ParamGroup], sum_of_state: Callable[[str], float]) -> None:
        if self.frozen_at is not None:
            return
        if self.freeze_step is None:
            ends = self._variance_is_stable(steps_taken, groups, sum_of_state)
        else:
            ends = steps_taken >= self.freeze_step
        if ends:
            self.frozen_at = steps_taken

    def _variance_is_stable(self, steps_taken: int, groups: Sequence[ParamGroup],
                            sum_of_state: Callable[[str], float]) -> bool:
        window = max(1, round(1 / (1 - min(group["betas"][1] for group in groups))))
        rate = max(float(group["lr"]) for group in groups)
        self._lr_rose, self._last_lr = self._lr_rose or rate > self._last_lr, rate
        if steps_taken == self._measured_after_steps or steps_taken % window:
            return False
        before, rose = self._variance_sum, self._lr_rose
        self._variance_sum, self._measured_after_steps, self._lr_rose = sum_of_state("exp_avg_sq"), steps_taken, False
        return not rose and min(before,
                                self._variance_sum) >= STABLE_VARIANCE_RATIO * max(before, self._variance_sum) > 0

    def add_compression_input(self, target: CompressionInput, hyper: Mapping[str, Any], *, factor: float) -> None:
        beta1 = hyper["betas"][0]
        target.error_buffer.add_(target.read_first_state(), alpha=beta1).add_(target.grad, alpha=(1 - beta1) * factor)

    def scalars(self) -> dict[str, Any]:
        return {"frozen_at": self.frozen_at, "sum": self._variance_sum, "rate": self._last_lr, "rose": self._lr_rose,
                "looked_after": self._measured_after_steps}

    def restore(self, scalars: Mapping[str, Any]) -> None:
        self.frozen_at = scalars.get("frozen_at")
        self._variance_sum, self._last_lr = scalars.get("sum", 0.0), scalars.get("rate", 0.0)
        self._measured_after_steps, self._lr_rose = scalars.get("looked_after", 0), scalars.get("rose", False)


@final
@dataclass
class OneBitAdam(OneBitRule):
    tile: int = MAX_TILE_NUMEL
    bias_correction: bool = True

    name = "OneBitAdam"
    states = AdamW.states
    elementwise = True

    def __post_init__(self) -> None:
        self._adam = AdamW(self.tile, bias_correction=self.bias_correction)

    @property
    def needs_host_scalars(self) -> bool:
        return self.frozen_at is not None

    def bind_device(self, device: torch.device, world: Group) -> None:
        self._adam.bind_device(device, world)

    def step_many(self, segments: Sequence[UpdateSegment], hyper: Mapping[str, Any], scalars: StepScalars) -> bool:
        return self._adam.step_many(segments, hyper, scalars)

    def step(self, segment: UpdateSegment, hyper: Mapping[str, Any], *, factor: float, steps_taken: int) -> None:
        if self.frozen_at is None:
            self._adam.step(segment, hyper, factor=factor, steps_taken=steps_taken)
            return
        size = self.tile if on_accelerator(segment.master) else min(self.tile, CACHE_TILE_NUMEL *
                                                                    torch.get_num_threads())
        for start in range(0, len(segment.master), size):
            self._step_tile(segment, slice(start, start + size), hyper, factor, steps_taken)

    def _step_tile(self, segment: UpdateSegment, tile: slice, hyper: Mapping[str, Any], factor: float,
                   steps_taken: int) -> None:
        m_correction, v_correction = 1.0, 1.0
        if self.bias_correction:
            beta1, beta2 = hyper["betas"]
            assert self.frozen_at is not None
            m_correction, v_correction = 1 - beta1 ** (steps_taken + 1), 1 - beta2 ** self.frozen_at
        momentum = segment.states["exp_avg"][tile].copy_(segment.grad[tile]).mul_(factor)
        denominator = (segment.states["exp_avg_sq"][tile] / v_correction).sqrt_().add_(hyper["eps"])
        weights = segment.master[tile]
        weights.mul_(1 - hyper["lr"] * hyper["weight_decay"])
        weights.addcdiv_(momentum, denominator, value=-hyper["lr"] / m_correction)
