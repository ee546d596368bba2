"""The walk of the loss: one pass over the rows of hidden @ weight.T, a chunk of this rank's columns of the logits at a
time. It returns the loss of each row and, if asked to, leaves the gradients of a weighted sum of them.

How the losses of a chunk are made, and its share of the weight gradient is added, is the business of loss_cpu.py and
loss_accelerator.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mpu.collectives import all_reduce
from mpu.groups import Group

LossesOf = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(logits, target, row_scale) -> losses; with row_scale, the logits become the gradient of their scaled losses."""

AddProduct = Callable[[Tensor, Tensor, Tensor, bool], None]
"""(total, d_logits, x, first): total += d_logits.T @ x, or = for the first chunk."""


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


@torch.no_grad()
def in_chunks(head: Head, wanted: Wanted, rows: int, total: Tensor | None, losses_of: LossesOf,
              add_product: AddProduct) -> Made:
    """`rows` at a time; the weight gradient adds up in `total`, if it is wanted."""
    hidden, weight = head.hidden.detach(), head.weight.detach()
    buffer = hidden.new_empty(rows, weight.shape[0])
    losses = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
    d_hidden = torch.empty_like(hidden) if wanted.hidden else None
    if total is not None and not len(hidden):  # there is no first chunk to begin it
        total.zero_()
    for start in range(0, len(hidden), rows):
        chunk = slice(start, start + rows)
        x = hidden[chunk]
        logits = torch.mm(x, weight.t(), out=buffer[: len(x)])  # [rows, H] x [H, width]
        scale = None if wanted.row_scale is None else wanted.row_scale[chunk]
        losses[chunk] = losses_of(logits, head.target[chunk], scale)
        # from here on `logits` holds the gradient of the logits
        if d_hidden is not None:
            torch.mm(logits, weight, out=d_hidden[chunk])
        if total is not None:
            add_product(total, logits, x, start == 0)
    made = Made(losses, None if d_hidden is None else all_reduce(d_hidden, head.share.tp))
    if total is not None:
        made.weight = total.to(weight.dtype) if wanted.place is None else wanted.place
        if wanted.place is not None and total is not wanted.place:
            wanted.place.copy_(total)
    return made
