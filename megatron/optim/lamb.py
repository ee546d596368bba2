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
        beta1, beta2 = hyper["betas"]
        weights = torch.zeros(span.slots, dtype=torch.float64, device=span.master.device)
        updates = torch.zeros_like(weights)
        for slot, tile in self._tiles(span):
            grad = span.grad[tile].to(torch.float32).mul_(factor)
            span.states["exp_avg"][tile].mul_(beta1).add_(grad, alpha=1 - beta1)
            span.states["exp_avg_sq"][tile].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            weights[slot] += sum_of_squares(span.master[tile])
            updates[slot] += sum_of_squares(_update(span, tile, hyper, steps_taken))
        ratios = _trust_ratios(span.total(weights).sqrt(), span.total(updates).sqrt(), hyper)
        for slot, tile in self._tiles(span):
            span.master[tile].sub_(_update(span, tile, hyper, steps_taken).mul_(ratios[slot] * hyper["lr"]))

    def _tiles(self, span: Span) -> Iterator[tuple[int, slice]]:
        """(slot, elements of the span), none of them padding."""
        for part in span.parts:
            for start in range(part.start, part.stop, self.tile):
                yield part.slot, slice(start, min(start + self.tile, part.stop))

    def scalars(self) -> dict[str, Any]:
        return {}

    def restore(self, scalars: Mapping[str, Any]) -> None:
        pass


def _update(span: Span, tile: slice, hyper: Mapping[str, Any], steps_taken: int) -> Tensor:
    """u of these elements, from the new moments."""
    corrections = [1.0, 1.0]
    if hyper["bias_correction"]:
        corrections = [1 - beta ** (steps_taken + 1) for beta in hyper["betas"]]
    denominator = span.states["exp_avg_sq"][tile] / corrections[1]
    if hyper["eps_inside_sqrt"]:
        denominator.add_(hyper["eps"]).sqrt_()
    else:
        denominator.sqrt_().add_(hyper["eps"])
    update = (span.states["exp_avg"][tile] / corrections[0]).div_(denominator)
    return update.add_(span.master[tile], alpha=hyper["weight_decay"])


def _trust_ratios(weights: Tensor, updates: Tensor, hyper: Mapping[str, Any]) -> Tensor:
    ratios = (weights / updates).clamp(hyper["min_coeff"], hyper["max_coeff"])
    return torch.where((weights > 0) & (updates > 0), ratios, 1.0)
