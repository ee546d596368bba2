"""1-bit Lamb over flat fp32 spans: Lamb at first, and from a step on one bit a number on the wire (Li et al. 2021,
https://arxiv.org/abs/2104.06069).

    warm-up       Lamb, bit for bit; of the trust ratios of each parameter that are not 1, a running average:
                  average <- coeff_beta average + (1 - coeff_beta) ratio
    afterwards    each rank says beta1 m + (1 - beta1) g, of its own gradient; what comes is the new m (mpu/one_bit.py)
                  g' = (m - beta1 m before) / (1 - beta1);   v' <- beta2 v' + (1 - beta2) g'^2, from v on
                  a = m^ / (sqrt(v^) + eps),  v^ as it was when the warm-up ended;   u = a + decay w
                  factor = the largest (sqrt(v^) + eps) / (sqrt(v'^) + eps) of the parameter
                  factor <- share factor + 1 - share,   share = |a| / |u|, at most 1
                  within [factor_min, factor_max], and no further from the one before than factor_threshold times that
                  w <- w - lr average factor u

The paper scales each momentum to a mean size before it is sent, and back afterwards. Here every parameter has a size of
its own in each chunk, so no scale is needed. What else differs from the original is in docs/methods.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from megatron.optim.adam import CACHE_TILE_NUMEL, MAX_TILE_NUMEL
from megatron.optim.lamb import Lamb, bias_corrections, denominator, iter_tiles
from megatron.optim.one_bit import OneBitRule
from megatron.optim.rule import StepScalars, UpdateSegment
from mpu.device import on_accelerator
from mpu.grads import sum_of_squares
from mpu.groups import Group


@dataclass
class _TrustState:
    """What is known of the parameters of a bucket: [slots], in fp64, the same on all ranks that hold parts of them."""

    average: Tensor
    """Of their trust ratios; 0 where none was counted."""
    factor: Tensor
    """The last one."""


@final
@dataclass
class OneBitLamb(OneBitRule):
    tile: int = MAX_TILE_NUMEL
    """Elements updated at a time: a temporary has as many."""
    _trust: dict[tuple[str, ...], _TrustState] = field(default_factory=dict, init=False)
    """By the names of a bucket's parameters."""
    _restored_trust: dict[str, list[float]] = field(default_factory=dict, init=False)
    """Parameter -> average and factor, before they were looked at."""

    name = "OneBitLamb"
    states = ("exp_avg", "exp_avg_sq", "exp_avg_sq_fresh")
    elementwise = False
    needs_host_scalars = True

    def __post_init__(self) -> None:
        self._lamb = Lamb(self.tile)

    def bind_device(self, device: torch.device, world: Group) -> None:
        """There is one way."""

    def step_many(self, segments: Sequence[UpdateSegment], hyper: Mapping[str, Any], scalars: StepScalars) -> bool:
        raise AssertionError("1-bit Lamb steps one span at a time, by numbers on the host")

    def step(self, segment: UpdateSegment, hyper: Mapping[str, Any], *, factor: float, steps_taken: int) -> None:
        trust = self._trust_of(segment)
        if self.frozen_at is None:
            ratios = self._lamb.step_and_return_trust_ratios(segment, hyper, factor=factor, steps_taken=steps_taken)
            after = trust.average * hyper["coeff_beta"] + ratios * (1 - hyper["coeff_beta"])
            trust.average = torch.where(ratios == 1, trust.average, after)
            return
        if steps_taken == self.frozen_at:
            segment.states["exp_avg_sq_fresh"].copy_(segment.states["exp_avg_sq"])
        update = _FrozenVarianceUpdate(segment, hyper, self.frozen_at, steps_taken, self.tile)
        trust.factor = _next_factors(trust.factor, *update.measure(factor), hyper)
        update.apply(torch.where(trust.average == 0, 1.0, trust.average) * trust.factor)

    def _trust_of(self, segment: UpdateSegment) -> _TrustState:
        names = tuple(segment.param_names)
        if names not in self._trust:
            known = torch.tensor([self._restored_trust.get(name, [0.0, 1.0]) for name in names], dtype=torch.float64,
                                 device=segment.master.device)
            self._trust[names] = _TrustState(*known.view(-1, 2).unbind(1))
        return self._trust[names]

    def scalars(self) -> dict[str, Any]:
        """All ranks know those of all parameters."""
        known = dict(self._restored_trust)
        for names, trust in self._trust.items():
            known |= zip(names, map(list, zip(trust.average.tolist(), trust.factor.tolist())))
        return {**super().scalars(), "trust": known}

    def restore(self, scalars: Mapping[str, Any]) -> None:
        super().restore(scalars)
        self._trust, self._restored_trust = {}, dict(scalars.get("trust", {}))


class _FrozenVarianceUpdate:
    """Of one span, once v is frozen. Two passes, so that nothing of the size of the span is kept between them."""

    def __init__(self, segment: UpdateSegment, hyper: Mapping[str, Any], frozen_at: int, steps_taken: int,
                 tile: int) -> None:
        size = tile if on_accelerator(segment.master) else min(tile, CACHE_TILE_NUMEL)
        self._segment, self._hyper, self._tiles = segment, hyper, list(iter_tiles(segment, size))
        self._m_correction, self._fresh_v_correction = bias_corrections(hyper, steps_taken + 1)
        self._v_correction = bias_corrections(hyper, frozen_at)[1]

    def measure(self, factor: float) -> tuple[Tensor, Tensor]:
        """New moments; then [slots]: the largest ratio of denominators, 0 where there is nothing to look at, and the
        update's share without decay."""
        segment = self._segment
        norms_without_decay = torch.zeros(segment.num_slots, dtype=torch.float64, device=segment.master.device)
        with_decay, largest = torch.zeros_like(norms_without_decay), torch.zeros_like(norms_without_decay)
        for slot, tile in self._tiles:
            self._update_moments(tile, factor)
            update = self._update_without_decay(tile)
            norms_without_decay[slot] += sum_of_squares(update)
            with_decay[slot] += sum_of_squares(self._add_decay(update, tile))
            largest[slot] = torch.maximum(largest[slot], self._denominator_ratios(tile).max())
        share = (segment.sum_over_shards(norms_without_decay) / segment.sum_over_shards(with_decay)).sqrt()
        return segment.max_over_shards(largest), share.nan_to_num(1.0).clamp(max=1.0)

    def _update_moments(self, tile: slice, factor: float) -> None:
        beta1, beta2 = self._hyper["betas"]
        states = self._segment.states
        momentum = self._segment.grad[tile].to(torch.float32).mul_(factor)
        grad = states["exp_avg"][tile].mul_(-beta1).add_(momentum).div_(1 - beta1)
        states["exp_avg_sq_fresh"][tile].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        grad.copy_(momentum)

    def _update_without_decay(self, tile: slice) -> Tensor:
        states = self._segment.states
        return (states["exp_avg"][tile] / self._m_correction).div_(
            denominator(states["exp_avg_sq"][tile], self._v_correction, self._hyper))

    def _add_decay(self, update: Tensor, tile: slice) -> Tensor:
        return update.add_(self._segment.master[tile], alpha=self._hyper["weight_decay"])

    def _denominator_ratios(self, tile: slice) -> Tensor:
        frozen, fresh = self._segment.states["exp_avg_sq"][tile], self._segment.states["exp_avg_sq_fresh"][tile]
        ratios = denominator(frozen, self._v_correction,
                             self._hyper).div_(denominator(fresh, self._fresh_v_correction, self._hyper))
        return ratios.masked_fill_(frozen == 0, 0.0)

    def apply(self, coefficients: Tensor) -> None:
        """To the weights."""
        for slot, tile in self._tiles:
            update = self._add_decay(self._update_without_decay(tile), tile)
            self._segment.master[tile].sub_(update.mul_(coefficients[slot] * self._hyper["lr"]))


def _next_factors(before: Tensor, largest: Tensor, share: Tensor, hyper: Mapping[str, Any]) -> Tensor:
    """[slots] each."""
    blended = (largest * share + (1 - share)).clamp(hyper["factor_min"], hyper["factor_max"])
    threshold = hyper["factor_threshold"]
    return torch.where(largest > 0, blended.clamp(before * (1 - threshold), before * (1 + threshold)), before)
