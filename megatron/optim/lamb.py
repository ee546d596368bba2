"""Lamb over flat fp32 segments: Adam's update, scaled for each full parameter by a trust ratio.

    u = m^ / (sqrt(v^) + eps) + decay w;   ratio = |w| / |u| within [min_coeff, max_coeff], 1 if either norm is 0
    w <- w - lr ratio u

Algorithm 2 of You et al. 2019 (https://arxiv.org/abs/1904.00962) with the limits and switches of DeepSpeed's FusedLamb:
`bias_correction` corrects the moments, `eps_inside_sqrt` puts eps under the root. Norms are of full parameters, summed
in fp64 over all ranks. The first pass updates the moments and sums squares, the second recomputes the update and
applies it, so that no temporary of the segment's size is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.optim.adam import MAX_TILE_NUMEL
from megatron.optim.rule import UpdateRule, UpdateSegment
from mpu.grads import sum_of_squares


@dataclass
class Lamb(UpdateRule):
    tile: int = MAX_TILE_NUMEL  # elements updated at a time: the size of temporaries

    name = "Lamb"
    states = ("exp_avg", "exp_avg_sq")
    elementwise = False

    def step_segment(self, segment: UpdateSegment, hyper: Mapping[str, Any], *, factor: float,
                     steps_taken: int) -> None:
        self.step_and_return_trust_ratios(segment, hyper, factor=factor, steps_taken=steps_taken)

    def step_and_return_trust_ratios(self, segment: UpdateSegment, hyper: Mapping[str, Any], *, factor: float,
                                     steps_taken: int) -> Tensor:
        """Take a step; returns the trust ratios [slots] of the bucket's parameters, 1 for those without elements in the
        segment."""
        beta1, beta2 = hyper["betas"]
        corrections, tiles = bias_corrections(hyper, steps_taken + 1), list(iter_tiles(segment, self.tile))
        weight_norms = torch.zeros(segment.num_slots, dtype=torch.float64, device=segment.master.device)
        update_norms = torch.zeros_like(weight_norms)
        for slot, tile in tiles:
            grad = segment.grad[tile].to(torch.float32).mul_(factor)
            segment.states["exp_avg"][tile].mul_(beta1).add_(grad, alpha=1 - beta1)
            segment.states["exp_avg_sq"][tile].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            weight_norms[slot] += sum_of_squares(segment.master[tile])
            update_norms[slot] += sum_of_squares(unscaled_update(segment, tile, hyper, corrections))
        weights, updates = (segment.sum_over_shards(norms).sqrt() for norms in (weight_norms, update_norms))
        ratios = torch.where((weights > 0) & (updates > 0),
                             (weights / updates).clamp(hyper["min_coeff"], hyper["max_coeff"]), 1.0)
        apply_updates(segment, tiles, hyper, corrections, ratios)
        return ratios


def iter_tiles(segment: UpdateSegment, size: int) -> Iterator[tuple[int, slice]]:
    """(slot, range of elements in the segment), without padding."""
    for part in segment.slot_ranges:
        for start in range(part.start, part.stop, size):
            yield part.slot, slice(start, min(start + size, part.stop))


def bias_corrections(hyper: Mapping[str, Any], steps: int) -> tuple[float, float]:
    """The divisors of both moments after `steps` steps."""
    beta1, beta2 = hyper["betas"]
    return (1 - beta1 ** steps, 1 - beta2 ** steps) if hyper["bias_correction"] else (1.0, 1.0)


def denominator(squares: Tensor, correction: float, hyper: Mapping[str, Any]) -> Tensor:
    """sqrt(v^) + eps, for v = `squares`."""
    corrected = squares / correction
    if hyper["eps_inside_sqrt"]:
        return corrected.add_(hyper["eps"]).sqrt_()
    return corrected.sqrt_().add_(hyper["eps"])


def unscaled_update(segment: UpdateSegment, tile: slice, hyper: Mapping[str, Any], corrections: tuple[float, float],
                    decays: bool = True) -> Tensor:
    """u of these elements, from the new moments; without its weight decay unless `decays`."""
    size = denominator(segment.states["exp_avg_sq"][tile], corrections[1], hyper)
    update = (segment.states["exp_avg"][tile] / corrections[0]).div_(size)
    return update.add_(segment.master[tile], alpha=hyper["weight_decay"]) if decays else update


def apply_updates(segment: UpdateSegment, tiles: Sequence[tuple[int, slice]], hyper: Mapping[str, Any],
                  corrections: tuple[float, float], ratios: Tensor) -> None:
    """w <- w - lr ratio u"""
    for slot, tile in tiles:
        segment.master[tile].sub_(
            unscaled_update(segment, tile, hyper, corrections).mul_(ratios[slot] * hyper["lr"]))
