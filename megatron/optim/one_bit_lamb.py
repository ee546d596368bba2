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

from megatron.optim.adam import IN_CACHE, LARGEST_TILE
from megatron.optim.lamb import Lamb, corrections, denominator, tiles
from megatron.optim.one_bit import OneBit
from megatron.optim.rule import Span, StepScalars
from mpu.device import on_accelerator
from mpu.grads import sum_of_squares
from mpu.groups import Group


@dataclass
class _Trust:
    """What is known of the parameters of a bucket: [slots], in fp64, the same on all ranks that hold parts of them."""

    average: Tensor
    """Of their trust ratios; 0 where none was counted."""
    factor: Tensor
    """The last one."""


@final
@dataclass
class OneBitLamb(OneBit):
    tile: int = LARGEST_TILE
    """Elements updated at a time: a temporary has as many."""
    _trust: dict[tuple[str, ...], _Trust] = field(default_factory=dict, init=False)
    """By the names of a bucket's parameters."""
    _restored: dict[str, list[float]] = field(default_factory=dict, init=False)
    """Parameter -> average and factor, before they were looked at."""

    name = "OneBitLamb"
    states = ("exp_avg", "exp_avg_sq", "exp_avg_sq_fresh")
    elementwise = False
    waits = True

    def __post_init__(self) -> None:
        self._lamb = Lamb(self.tile)

    def settle_on(self, device: torch.device, world: Group) -> None:
        """There is one way."""

    def step_many(self, spans: Sequence[Span], hyper: Mapping[str, Any], at: StepScalars) -> bool:
        raise AssertionError("1-bit Lamb steps one span at a time, by numbers on the host")

    def step(self, span: Span, hyper: Mapping[str, Any], *, factor: float, steps_taken: int) -> None:
        trust = self._trust_in(span)
        if self.frozen_at is None:
            ratios = self._lamb.take(span, hyper, factor=factor, steps_taken=steps_taken)
            after = trust.average * hyper["coeff_beta"] + ratios * (1 - hyper["coeff_beta"])
            trust.average = torch.where(ratios == 1, trust.average, after)
            return
        if steps_taken == self.frozen_at:
            span.states["exp_avg_sq_fresh"].copy_(span.states["exp_avg_sq"])
        update = _Update(span, hyper, self.frozen_at, steps_taken, self.tile)
        trust.factor = _factors(trust.factor, *update.measure(factor), hyper)
        update.apply(torch.where(trust.average == 0, 1.0, trust.average) * trust.factor)

    def _trust_in(self, span: Span) -> _Trust:
        names = tuple(span.names)
        if names not in self._trust:
            known = torch.tensor([self._restored.get(name, [0.0, 1.0]) for name in names], dtype=torch.float64,
                                 device=span.master.device)
            self._trust[names] = _Trust(*known.view(-1, 2).unbind(1))
        return self._trust[names]

    def scalars(self) -> dict[str, Any]:
        """All ranks know those of all parameters."""
        known = dict(self._restored)
        for names, trust in self._trust.items():
            known |= zip(names, map(list, zip(trust.average.tolist(), trust.factor.tolist())))
        return {**super().scalars(), "trust": known}

    def restore(self, scalars: Mapping[str, Any]) -> None:
        super().restore(scalars)
        self._trust, self._restored = {}, dict(scalars.get("trust", {}))


class _Update:
    """Of one span, once v is frozen. Two passes, so that nothing of the size of the span is kept between them."""

    def __init__(self, span: Span, hyper: Mapping[str, Any], frozen_at: int, taken: int, tile: int) -> None:
        size = tile if on_accelerator(span.master) else min(tile, IN_CACHE)
        self._span, self._hyper, self._tiles = span, hyper, list(tiles(span, size))
        self._of_m, self._of_fresh = corrections(hyper, taken + 1)
        self._of_v = corrections(hyper, frozen_at)[1]

    def measure(self, factor: float) -> tuple[Tensor, Tensor]:
        """New moments; then [slots]: the largest ratio of denominators, 0 where there is nothing to look at, and the
        update's share without decay."""
        span = self._span
        alone = torch.zeros(span.slots, dtype=torch.float64, device=span.master.device)
        with_decay, largest = torch.zeros_like(alone), torch.zeros_like(alone)
        for slot, tile in self._tiles:
            self._move(tile, factor)
            update = self._without_decay(tile)
            alone[slot] += sum_of_squares(update)
            with_decay[slot] += sum_of_squares(self._decay(update, tile))
            largest[slot] = torch.maximum(largest[slot], self._ratios(tile).max())
        share = (span.total(alone) / span.total(with_decay)).sqrt()
        return span.largest(largest), share.nan_to_num(1.0).clamp(max=1.0)

    def _move(self, tile: slice, factor: float) -> None:
        beta1, beta2 = self._hyper["betas"]
        states = self._span.states
        said = self._span.grad[tile].to(torch.float32).mul_(factor)
        grad = states["exp_avg"][tile].mul_(-beta1).add_(said).div_(1 - beta1)
        states["exp_avg_sq_fresh"][tile].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        grad.copy_(said)

    def _without_decay(self, tile: slice) -> Tensor:
        states = self._span.states
        return (states["exp_avg"][tile] / self._of_m).div_(
            denominator(states["exp_avg_sq"][tile], self._of_v, self._hyper))

    def _decay(self, update: Tensor, tile: slice) -> Tensor:
        return update.add_(self._span.master[tile], alpha=self._hyper["weight_decay"])

    def _ratios(self, tile: slice) -> Tensor:
        frozen, fresh = self._span.states["exp_avg_sq"][tile], self._span.states["exp_avg_sq_fresh"][tile]
        ratios = denominator(frozen, self._of_v, self._hyper).div_(denominator(fresh, self._of_fresh, self._hyper))
        return ratios.masked_fill_(frozen == 0, 0.0)

    def apply(self, coefficients: Tensor) -> None:
        """To the weights."""
        for slot, tile in self._tiles:
            update = self._decay(self._without_decay(tile), tile)
            self._span.master[tile].sub_(update.mul_(coefficients[slot] * self._hyper["lr"]))


def _factors(before: Tensor, largest: Tensor, share: Tensor, hyper: Mapping[str, Any]) -> Tensor:
    """[slots] each."""
    blended = (largest * share + (1 - share)).clamp(hyper["factor_min"], hyper["factor_max"])
    near = hyper["factor_threshold"]
    return torch.where(largest > 0, blended.clamp(before * (1 - near), before * (1 + near)), before)
