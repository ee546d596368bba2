"""The loss of a vocabulary that is split over tensor parallel; no rank ever sees the logits of another.

Rank i of p holds the columns [i V/p, (i+1) V/p) of the logits. With m the largest logit of a row, over all ranks,

    lse  = m + log(sum_j exp(x_j - m))      loss = lse - x_target      d loss / d x_j = exp(x_j - lse) - [j = target]

needs three numbers per row from the other ranks: the maximum, the sum, and the target's logit. Columns at or beyond `vocab_size` are
padding: they are left out of the sum and their gradient is zero. Arithmetic is fp32 where logits are 16-bit.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from mpu.collectives import all_reduce
from mpu.facade import resolve
from mpu.groups import Group


def vocab_parallel_cross_entropy(
    logits: Tensor, target: Tensor, tp: Group | None = None, vocab_size: int | None = None
) -> Tensor:
    """Loss per token: logits [..., V / tp] and target [...] (ids of the whole vocabulary) -> fp32 [...]."""
    flat = logits.reshape(-1, logits.shape[-1])  # [..., V / tp] -> [N, V / tp]
    losses = cast(Tensor, _VocabParallel.apply(flat, target.reshape(-1), resolve(tp), vocab_size))
    return losses.view(target.shape)


class _VocabParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, tp: Group, vocab_size: int | None) -> Tensor:
        columns = valid_columns(logits.shape[1], tp, vocab_size)
        x = logits[:, :columns].float()
        lse, at_target = reduce_rows(x, target - tp.rank * logits.shape[1], tp)
        ctx.save_for_backward(logits, target, lse)
        ctx.tp, ctx.columns = tp, columns
        return lse - at_target

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        logits, target, lse = ctx.saved_tensors
        grad = torch.zeros_like(logits) if ctx.columns < logits.shape[1] else torch.empty_like(logits)
        dx = (logits[:, : ctx.columns].float() - lse.unsqueeze(1)).exp_()
        subtract_at_target(dx, target - ctx.tp.rank * logits.shape[1])
        grad[:, : ctx.columns].copy_(dx.mul_(grads[0].unsqueeze(1)))
        return grad, None, None, None


def valid_columns(columns: int, tp: Group, vocab_size: int | None) -> int:
    """How many of this rank's columns are real tokens."""
    return columns if vocab_size is None else max(0, min(columns, vocab_size - tp.rank * columns))


def reduce_rows(x: Tensor, local: Tensor, tp: Group) -> tuple[Tensor, Tensor]:
    """(log-sum-exp, target's logit) of each row over all ranks; x fp32 [N, real columns], local: target - first column."""
    here, column = _on_this_rank(x, local)
    at_target = x.gather(1, column).squeeze(1).masked_fill(~here, 0) if x.shape[1] else x.new_zeros(len(x))
    mine = torch.logsumexp(x, dim=1)  # -inf on a rank that has only padding
    if tp.is_solo:
        return mine, at_target
    top = all_reduce(mine, tp, "max")
    total, at_target = all_reduce(torch.stack([(mine - top).exp(), at_target]), tp)
    return top + total.log(), at_target


def subtract_at_target(p: Tensor, local: Tensor) -> None:
    """p[row, target] -= 1 where this rank has the target's column."""
    if p.shape[1]:
        here, column = _on_this_rank(p, local)
        p.scatter_add_(1, column, -here.unsqueeze(1).to(p.dtype))


def _on_this_rank(x: Tensor, local: Tensor) -> tuple[Tensor, Tensor]:
    """(is the target among x's columns [N], a legal column index [N, 1])."""
    here = (local >= 0) & (local < x.shape[1])
    return here, local.masked_fill(~here, 0).unsqueeze(1)
