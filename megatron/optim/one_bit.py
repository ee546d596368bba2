"""1-bit Adam (Tang et al. 2021, https://arxiv.org/abs/2102.02888) and 1-bit Lamb (Li et al. 2021,
https://arxiv.org/abs/2104.06069).

    warm-up      Adam or Lamb, bit for bit, on all-reduced gradients
    afterwards   the variance v is frozen; each rank sends beta1 m + (1 - beta1) g of its own gradient at one bit
                 per element with error feedback (mpu/compressed_all_reduce.py), and the received mean is the new m

The warm-up ends after `freeze_step` steps, or when the sum of v changes by less than 4 % in 1 / (1 - beta2) steps
without a rise of the learning rate. Differences from the papers: docs/methods.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron.optim.adam import CACHE_TILE_NUMEL, AdamW
from megatron.optim.lamb import Lamb, apply_updates, bias_corrections, denominator, iter_tiles, unscaled_update
from megatron.optim.rule import ParamGroup, StepScalars, UpdateRule, UpdateSegment
from mpu.device import on_accelerator
from mpu.grads import sum_of_squares

STABLE_VARIANCE_RATIO = 0.96  # minimum ratio of the smaller to the larger of two successive sums of v


@dataclass
class OneBitRule(UpdateRule):
    """Base of rules with states `exp_avg` and `exp_avg_sq`: freezes the second and compresses the first. Both are
    on the device. Nothing is sent for elements whose `exp_avg_sq` is 0, since they never had a gradient."""

    freeze_step: int | None = None  # steps of the warm-up; None: until v is stable
    # Steps before v was frozen; None during the warm-up.
    frozen_at: int | None = field(default=None, init=False)
    _variance_sum: float = field(default=0.0, init=False)
    # The last measured sum of v, and the number of steps before it.
    _measured_after_steps: int = field(default=0, init=False)
    _last_lr: float = field(default=0.0, init=False)
    # The learning rate of the last step, and whether it rose since the last measurement.
    _lr_rose: bool = field(default=False, init=False)

    @property
    def is_compressed(self) -> bool:
        return self.frozen_at is not None

    def begin_step(self, steps_taken: int, groups: Sequence[ParamGroup], sum_of_state: Callable[[str], float]) -> None:
        """Before each step, after `steps_taken` steps: decide what is sent. `sum_of_state(name)` sums a state over the
        whole model; it is collective, so all ranks must call it or none. Called again after a skipped step."""
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
        return (not rose
                and min(before, self._variance_sum) >= STABLE_VARIANCE_RATIO * max(before, self._variance_sum) > 0)

    def add_compression_input(self, error_buffer: Tensor, momentum: Tensor, grad: Tensor, hyper: Mapping[str, Any], *,
                              factor: float) -> None:
        """Add this rank's message to the fp32 error buffer. `factor` scales the gradient of this rank."""
        beta1 = hyper["betas"][0]
        error_buffer.add_(momentum, alpha=beta1).add_(grad, alpha=(1 - beta1) * factor)

    def scalars(self) -> dict[str, Any]:
        return {"frozen_at": self.frozen_at, "sum": self._variance_sum, "rate": self._last_lr, "rose": self._lr_rose,
                "looked_after": self._measured_after_steps}

    def restore(self, scalars: Mapping[str, Any]) -> None:
        self.frozen_at = scalars.get("frozen_at")
        self._variance_sum, self._last_lr = scalars.get("sum", 0.0), scalars.get("rate", 0.0)
        self._measured_after_steps, self._lr_rose = scalars.get("looked_after", 0), scalars.get("rose", False)


@dataclass
class OneBitAdam(OneBitRule, AdamW):
    name = "OneBitAdam"

    def step(self, segments: Sequence[UpdateSegment], hyper: Mapping[str, Any], scalars: StepScalars) -> bool:
        return (AdamW if self.frozen_at is None else UpdateRule).step(self, segments, hyper, scalars)

    def step_segment(self, segment: UpdateSegment, hyper: Mapping[str, Any], *, factor: float,
                     steps_taken: int) -> None:
        assert self.frozen_at is not None, "Adam has no steps of one segment"
        m_correction, v_correction = 1.0, 1.0
        if self.bias_correction:
            beta1, beta2 = hyper["betas"]
            m_correction, v_correction = 1 - beta1 ** (steps_taken + 1), 1 - beta2 ** self.frozen_at
        size = self.tile if on_accelerator(segment.master) else min(self.tile, CACHE_TILE_NUMEL *
                                                                    torch.get_num_threads())
        for start in range(0, len(segment.master), size):
            tile = slice(start, start + size)
            momentum = segment.states["exp_avg"][tile].copy_(segment.grad[tile]).mul_(factor)
            rms = (segment.states["exp_avg_sq"][tile] / v_correction).sqrt_().add_(hyper["eps"])
            weights = segment.master[tile]
            weights.mul_(1 - hyper["lr"] * hyper["weight_decay"])
            weights.addcdiv_(momentum, rms, value=-hyper["lr"] / m_correction)
            del rms  # before that of the next tile is made


@dataclass
class OneBitLamb(OneBitRule, Lamb):
    # Names of a bucket's parameters -> moving averages of the trust ratios (0 before the first) and last factors:
    # [slots] in fp64, equal on all ranks that hold segments of them.
    _trust: dict[tuple[str, ...], tuple[Tensor, Tensor]] = field(default_factory=dict, init=False)
    # Parameter -> (average, factor) from a checkpoint, until its bucket is first stepped.
    _restored_trust: dict[str, list[float]] = field(default_factory=dict, init=False)

    name = "OneBitLamb"
    states = ("exp_avg", "exp_avg_sq", "exp_avg_sq_fresh")  # type: ignore[assignment]  # one more than Lamb

    def step_segment(self, segment: UpdateSegment, hyper: Mapping[str, Any], *, factor: float,
                     steps_taken: int) -> None:
        names = tuple(segment.param_names)
        if names not in self._trust:
            known = torch.tensor([self._restored_trust.get(name, [0.0, 1.0]) for name in names], dtype=torch.float64,
                                 device=segment.master.device).view(-1, 2)
            self._trust[names] = known[:, 0], known[:, 1]
        average, last_factor = self._trust[names]
        if self.frozen_at is None:
            ratios = self.step_and_return_trust_ratios(segment, hyper, factor=factor, steps_taken=steps_taken)
            after = average * hyper["coeff_beta"] + ratios * (1 - hyper["coeff_beta"])
            self._trust[names] = torch.where(ratios == 1, average, after), last_factor
            return
        if steps_taken == self.frozen_at:
            segment.states["exp_avg_sq_fresh"].copy_(segment.states["exp_avg_sq"])
        tiles = list(iter_tiles(segment, self.tile if on_accelerator(segment.master) else min(self.tile,
                                                                                              CACHE_TILE_NUMEL)))
        m_correction, fresh_correction = bias_corrections(hyper, steps_taken + 1)
        corrections = m_correction, bias_corrections(hyper, self.frozen_at)[1]
        largest, share = _update_moments(segment, tiles, hyper, factor, corrections, fresh_correction)
        blended = (largest * share + (1 - share)).clamp(hyper["factor_min"], hyper["factor_max"])
        low, high = (last_factor * (1 + change) for change in (-hyper["factor_threshold"], hyper["factor_threshold"]))
        new_factor = torch.where(largest > 0, blended.clamp(low, high), last_factor)
        self._trust[names] = average, new_factor
        apply_updates(segment, tiles, hyper, corrections, torch.where(average == 0, 1.0, average) * new_factor)

    def scalars(self) -> dict[str, Any]:
        """Of all parameters, as every rank knows them."""
        known = dict(self._restored_trust)
        for names, (averages, factors) in self._trust.items():
            known |= zip(names, map(list, zip(averages.tolist(), factors.tolist())))
        return {**super().scalars(), "trust": known}

    def restore(self, scalars: Mapping[str, Any]) -> None:
        super().restore(scalars)
        self._trust, self._restored_trust = {}, dict(scalars.get("trust", {}))


def _update_moments(segment: UpdateSegment, tiles: Sequence[tuple[int, slice]], hyper: Mapping[str, Any],
                    factor: float, corrections: tuple[float, float], fresh_correction: float) -> tuple[Tensor, Tensor]:
    """After v is frozen: [slots] the largest ratio of denominators (0 if all v are 0), and [slots] the norm of the
    update without decay relative to that with it."""
    states, (beta1, beta2) = segment.states, hyper["betas"]
    without_decay = torch.zeros(segment.num_slots, dtype=torch.float64, device=segment.master.device)
    with_decay, largest = torch.zeros_like(without_decay), torch.zeros_like(without_decay)
    for slot, tile in tiles:
        momentum = segment.grad[tile].to(torch.float32).mul_(factor)
        # the mean gradient g, from the received m' = beta1 m + (1 - beta1) g
        grad = states["exp_avg"][tile].mul_(-beta1).add_(momentum).div_(1 - beta1)
        fresh = states["exp_avg_sq_fresh"][tile].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        grad.copy_(momentum)  # the new exp_avg
        del momentum  # a tile of memory
        update = unscaled_update(segment, tile, hyper, corrections, decays=False)
        without_decay[slot] += sum_of_squares(update)
        with_decay[slot] += sum_of_squares(update.add_(segment.master[tile], alpha=hyper["weight_decay"]))
        frozen = states["exp_avg_sq"][tile]
        ratios = denominator(frozen, corrections[1], hyper).div_(
            denominator(fresh, fresh_correction, hyper)).masked_fill_(frozen == 0, 0.0)
        largest[slot] = torch.maximum(largest[slot], ratios.max())
        del ratios
    share = (segment.sum_over_shards(without_decay) / segment.sum_over_shards(with_decay)).sqrt()
    return segment.max_over_shards(largest), share.nan_to_num(1.0).clamp(max=1.0)
