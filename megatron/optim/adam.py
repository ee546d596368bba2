"""AdamW over flat fp32 spans: torch's fused kernel, in tiles.

A *span* is a contiguous part of a shard with one set of hyper-parameters. The kernel multiplies the gradient on its
way in (unscaling, averaging and clipping are one factor), so the gradient is read once. 16-bit gradients are widened
a tile at a time: the fp32 copy of the whole gradient never exists.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

LARGEST_TILE = 2**24
"""Elements widened at a time: 64 MB of fp32, large enough to keep a device busy."""


@dataclass(frozen=True)
class AdamW:
    """The constants of the rule; `states` names the moments it keeps beside each weight."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    states: tuple[str, ...] = ("exp_avg", "exp_avg_sq")

    tile: int = LARGEST_TILE
    """Elements updated at a time."""

    def step(self, master: Tensor, grad: Tensor, states: dict[str, Tensor], *, steps_taken: int, lr: float,
             weight_decay: float, factor: float) -> None:
        """Update `master` (fp32, 1-D) in place by `factor` x `grad`, after `steps_taken` steps before this one."""
        # The kernel divides by grad_scale and writes the quotient back into the gradient, which is spent afterwards.
        divisor = None if factor == 1.0 else torch.full((), 1.0 / factor, device=master.device)
        for start in range(0, master.numel(), self.tile):
            tile = slice(start, start + self.tile)
            count = torch.full((), float(steps_taken), device=master.device)
            adamw([master[tile]], [grad[tile].to(torch.float32)], [states["exp_avg"][tile]],
                  [states["exp_avg_sq"][tile]], [], [count], fused=True, grad_scale=divisor, amsgrad=False,
                  maximize=False, beta1=self.beta1, beta2=self.beta2, eps=self.eps, lr=lr, weight_decay=weight_decay)
