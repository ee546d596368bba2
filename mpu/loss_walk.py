"""The walk of the loss head: one pass over the rows of hidden @ weight.T, a chunk of logits at a time.

What a chunk's losses are made by, and how its share of the weight gradient is added, is the business of loss_cpu.py and
loss_accelerator.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mpu.collectives import all_reduce
from mpu.vocab_share import Head, Made, Wanted

LossesOf = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(logits, target, row_scale) -> losses; with row_scale, the logits become the gradient of their scaled losses."""

AddProduct = Callable[[Tensor, Tensor, Tensor, bool], None]
"""(total, d_logits, x, first): total += d_logits.T @ x, or = for the first chunk."""


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
