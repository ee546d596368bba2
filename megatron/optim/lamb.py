"""Lamb over flat fp32 spans: Adam's update, scaled for each whole parameter by a trust ratio.

    u = m^ / (sqrt(v^) + eps) + decay w;   ratio = |w| / |u| within [min_coeff, max_coeff], 1 where either norm is 0
    w <- w - lr ratio u

This is algorithm 2 of You et al. 2019 (https://arxiv.org/abs/1904.00962) with the limits and switches of DeepSpeed's
FusedLamb: `bias_correction` corrects the moments themselves, `eps_inside_sqrt` puts eps under the root. The norms are
those of whole parameters, summed in fp64 over all ranks that hold a part of one.

Two passes over a span: the first updates the moments and sums squares, the second makes the same update again and
applies it, so that no update of the size of the span is ever kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.optim.adam import LARGEST_TILE
from megatron.optim.rule import OneByOne, Span
from mpu.grads import sum_of_squares


@dataclass(frozen=True)
class Lamb(OneByOne):
    tile: int = LARGEST_TILE
    """Elements updated at a time: a temporary has as many."""

    name = "Lamb"
    states = ("exp_avg", "exp_avg_sq")
    elementwise = False

    def step(self, span: Span, hyper: Mapping[str, Any], *, factor: float, steps_taken: int) -> None:
        self.take(span, hyper, factor=factor, steps_taken=steps_taken)

    def take(self, span: Span, hyper: Mapping[str, Any], *, factor: float, steps_taken: int) -> Tensor:
        """A step; the trust ratios of the bucket's parameters, 1 where the span has nothing of one."""
        beta1, beta2 = hyper["betas"]
        of_moments = corrections(hyper, steps_taken + 1)
        weights = torch.zeros(span.slots, dtype=torch.float64, device=span.master.device)
        updates = torch.zeros_like(weights)
        for slot, tile in tiles(span, self.tile):
            grad = span.grad[tile].to(torch.float32).mul_(factor)
            span.states["exp_avg"][tile].mul_(beta1).add_(grad, alpha=1 - beta1)
            span.states["exp_avg_sq"][tile].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            weights[slot] += sum_of_squares(span.master[tile])
            updates[slot] += sum_of_squares(_update(span, tile, hyper, of_moments))
        ratios = _trust_ratios(span.total(weights).sqrt(), span.total(updates).sqrt(), hyper)
        for slot, tile in tiles(span, self.tile):
            span.master[tile].sub_(_update(span, tile, hyper, of_moments).mul_(ratios[slot] * hyper["lr"]))
        return ratios


def tiles(span: Span, size: int) -> Iterator[tuple[int, slice]]:
    """(slot, elements of the span), none of them padding."""
    for part in span.parts:
        for start in range(part.start, part.stop, size):
            yield part.slot, slice(start, min(start + size, part.stop))


def corrections(hyper: Mapping[str, Any], steps: int) -> tuple[float, float]:
    """What the moments are divided by that have seen so many steps."""
    beta1, beta2 = hyper["betas"]
    return (1 - beta1 ** steps, 1 - beta2 ** steps) if hyper["bias_correction"] else (1.0, 1.0)


def denominator(squares: Tensor, correction: float, hyper: Mapping[str, Any]) -> Tensor:
    """sqrt(v^) + eps, of v."""
    corrected = squares / correction
    if hyper["eps_inside_sqrt"]:
        return corrected.add_(hyper["eps"]).sqrt_()
    return corrected.sqrt_().add_(hyper["eps"])


def _update(span: Span, tile: slice, hyper: Mapping[str, Any], of_moments: tuple[float, float]) -> Tensor:
    """u of these elements, from the new moments."""
    size = denominator(span.states["exp_avg_sq"][tile], of_moments[1], hyper)
    update = (span.states["exp_avg"][tile] / of_moments[0]).div_(size)
    return update.add_(span.master[tile], alpha=hyper["weight_decay"])


def _trust_ratios(weights: Tensor, updates: Tensor, hyper: Mapping[str, Any]) -> Tensor:
    ratios = (weights / updates).clamp(hyper["min_coeff"], hyper["max_coeff"])
    return torch.where((weights > 0) & (updates > 0), ratios, 1.0)
