"""AdamW, and Adam without bias correction, over flat fp32 spans: torch's fused kernels, in tiles.

The kernel multiplies the gradient on its way in (unscaling, averaging and clipping are one factor), so the gradient is
read once. 16-bit gradients are widened a tile at a time: the fp32 copy of the whole gradient never exists.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from megatron.optim.rule import Span

LARGEST_TILE = 2**24
"""Elements widened at a time: 64 MB of fp32, large enough to keep a device busy."""


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay, unless `decoupled` is False."""

    tile: int = LARGEST_TILE
    """Elements updated at a time."""
    bias_correction: bool = True
    """Divide the moments by 1 - beta^t, since they start from 0."""
    decoupled: bool = True
    """False: weight decay is added to the gradient."""

    name = "AdamW"
    states = ("exp_avg", "exp_avg_sq")
    elementwise = True

    def step(self, span: Span, hyper: Mapping[str, Any], *, factor: float, steps_taken: int) -> None:
        # The kernel divides by grad_scale and writes the quotient back into the gradient.
        divisor = None if factor == 1.0 else torch.full((), 1.0 / factor, device=span.master.device)
        beta1, beta2 = hyper["betas"]
        kernel = adamw if self.decoupled else adam
        taken = float(steps_taken) if self.bias_correction else math.inf  # beta^t is 0 after so many
        for start in range(0, span.master.numel(), self.tile):
            tile = slice(start, start + self.tile)
            count = torch.full((), taken, device=span.master.device)
            kernel([span.master[tile]], [span.grad[tile].to(torch.float32)], [span.states["exp_avg"][tile]],
                   [span.states["exp_avg_sq"][tile]], [], [count], fused=True, grad_scale=divisor, amsgrad=False,
                   maximize=False, beta1=beta1, beta2=beta2, eps=hyper["eps"], lr=hyper["lr"],
                   weight_decay=hyper["weight_decay"])

    def scalars(self) -> dict[str, Any]:
        return {}

    def restore(self, scalars: Mapping[str, Any]) -> None:
        pass
