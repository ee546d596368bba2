"""What the two walks of the loss have in common: this rank's columns of the logits, and what is asked of a walk.

A *walk* is one pass over the rows of hidden @ weight.T, chunk by chunk (loss_walk.py). It returns
the loss of each row and, if asked to, leaves the gradients of a weighted sum of them. This file computes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mpu.groups import Group


@dataclass(frozen=True)
class Share:
    """This rank's columns of the logits: global ids first .. first + columns are its real tokens."""

    tp: Group
    first: int
    columns: int

    @staticmethod
    def of(local_size: int, tp: Group, vocab_size: int | None) -> Share:
        first = tp.rank * local_size
        real = local_size if vocab_size is None else max(0, min(local_size, vocab_size - first))
        return Share(tp, first, real)

    def locate(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """(is the target among my columns [n], its column, or 0, [n])."""
        local = target - self.first
        mine = (local >= 0) & (local < self.columns)
        return mine, local.masked_fill(~mine, 0)


@dataclass(frozen=True)
class Head:
    """The operands: hidden [N, H], weight [V / tp, H], target [N]."""

    hidden: Tensor
    weight: Tensor
    target: Tensor
    share: Share


@dataclass(frozen=True)
class Wanted:
    """The gradients of sum(row_scale * losses), as far as they are asked for; without `row_scale` [N] none are."""

    row_scale: Tensor | None = None
    hidden: bool = False
    weight: bool = False
    place: Tensor | None = None
    """Where the weight gradient belongs, if it has a place already."""


@dataclass
class Made:
    """Losses [N], and the gradients that were asked for; `weight` is the place, where there is one."""

    losses: Tensor
    hidden: Tensor | None = None
    weight: Tensor | None = None
