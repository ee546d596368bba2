"""Lion over flat fp32 segments: the sign of an interpolated momentum, and decoupled weight decay.

    w <- (1 - lr x decay) w - lr sign(beta1 m + (1 - beta1) g);   m <- beta2 m + (1 - beta2) g

One state per weight, half of Adam's (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms",
https://arxiv.org/abs/2302.06675).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron.optim.adam import MAX_TILE_NUMEL
from megatron.optim.rule import UpdateRule, UpdateSegment


@dataclass(frozen=True)
class Lion(UpdateRule):
    tile: int = MAX_TILE_NUMEL
    """Elements updated at a time: the size of temporaries."""

    name = "Lion"
    states = ("exp_avg",)
    elementwise = True

    def step(self, segment: UpdateSegment, hyper: Mapping[str, Any], *, factor: float, steps_taken: int) -> None:
        beta1, beta2 = hyper["betas"]
        for start in range(0, segment.master.numel(), self.tile):
            tile = slice(start, start + self.tile)
            master, exp_avg = segment.master[tile], segment.states["exp_avg"][tile]
            grad = segment.grad[tile].to(torch.float32).mul_(factor)
            direction = exp_avg.mul(beta1).add_(grad, alpha=1 - beta1).sign_()
            master.mul_(1 - hyper["lr"] * hyper["weight_decay"]).add_(direction, alpha=-hyper["lr"])
            exp_avg.mul_(beta2).add_(grad, alpha=1 - beta2)
