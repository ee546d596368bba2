"""The LM-head loss on a CPU: chunks sized for the matrix product, and within them blocks whose fp32 copy stays in the
cache.

A chunk of logits is small enough to keep and large enough for a fast product. Its softmax runs over *blocks* of a few
rows, and a 16-bit weight gradient over *slabs* of columns, so that data is read again before it leaves the cache.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from mpu.chunked_loss import LossGradRequest, LossInputs, LossOutputs, VocabShard, run_in_chunks
from mpu.collectives import all_reduce

_BLOCK_ROWS = 64

_CHUNK_BYTES = 104 << 20
"""Bytes of logits per chunk: 1,024 bf16 or 512 fp32 rows of GPT-2's vocabulary. Smaller products are slower."""

_SLAB_COLUMNS = 8192
"""Columns whose 16-bit weight gradient is computed, and added to the fp32 total, while in the cache."""


def compute_losses(logits: Tensor, target: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """logits [N, V / tp] -> (losses [N], log-sum-exp [N] over all ranks)."""
    x = logits[:, : shard.num_columns].float()
    is_local, column = shard.locate(target)
    at_target = torch.zeros(len(x), device=x.device)
    if shard.num_columns:
        at_target = x.gather(1, column.unsqueeze(1)).squeeze(1).masked_fill(~is_local, 0)
    lse, at_target = _combine_across_ranks(shard, torch.logsumexp(x, dim=1), at_target)
    return lse - at_target, lse


def compute_gradient(logits: Tensor, target: Tensor, shard: VocabShard, lse: Tensor, row_scale: Tensor) -> Tensor:
    """The gradient [N, V / tp] of sum(row_scale * losses) with respect to the logits."""
    grad = torch.zeros_like(logits)
    probability = (logits[:, : shard.num_columns].float() - lse.unsqueeze(1)).exp_()
    _subtract_one_hot(probability, *shard.locate(target))
    grad[:, : shard.num_columns].copy_(probability.mul_(row_scale.unsqueeze(1)))
    return grad


def chunked_loss(inputs: LossInputs, request: LossGradRequest, chunk_rows: int | None = None) -> LossOutputs:
    hidden, width = inputs.hidden, len(inputs.weight)  # with padding: a product of odd width is slower
    rows = chunk_rows or max(_BLOCK_ROWS, _CHUNK_BYTES // max(1, width * hidden.element_size()))
    rows = max(1, min(rows, len(hidden)))
    scratch = torch.empty(min(_BLOCK_ROWS, rows), width, dtype=torch.float32, device=hidden.device)
    return run_in_chunks(inputs, request, rows, partial(_chunk_loss, inputs.shard, scratch), _accumulate_weight_grad,
                         always_into_fp32_buffer=False)


def _chunk_loss(shard: VocabShard, scratch: Tensor, logits: Tensor, target: Tensor, row_scale: Tensor | None) -> Tensor:
    """Losses of a chunk, block by block in `scratch`; with row_scale, `logits` becomes the gradient."""
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    logits[:, shard.num_columns:] = -torch.inf  # padding: probability and gradient 0
    for start in range(0, len(logits), len(scratch)):
        block = slice(start, start + len(scratch))
        scale = None if row_scale is None else row_scale[block]
        losses[block] = _block_loss(logits[block], target[block], scale, shard, scratch)
    return losses


def _block_loss(logits: Tensor, target: Tensor, row_scale: Tensor | None, shard: VocabShard, scratch: Tensor) -> Tensor:
    """Losses of a few rows; with row_scale, `logits` is overwritten with the gradient of the scaled losses."""
    is_local, column = shard.locate(target)
    log_p = scratch[: len(logits)]
    if shard.num_columns:
        torch.log_softmax(logits, 1, dtype=torch.float32, out=log_p)  # one fused pass
        at_target = log_p.gather(1, column.unsqueeze(1)).squeeze(1)
    else:  # this rank has padding only
        at_target = torch.zeros(len(logits), device=logits.device)
        log_p.fill_(-torch.inf)
    if shard.tp.is_solo:
        loss = -at_target
    else:
        lse = torch.full_like(at_target, -torch.inf)
        if shard.num_columns:  # what log_softmax subtracted: recovered at the largest logit, where rounding is smallest
            top, at_top = logits.max(dim=1)
            lse = top.float() - log_p.gather(1, at_top.unsqueeze(1)).squeeze(1)
        global_lse, at_target = _combine_across_ranks(shard, lse, (at_target + lse).masked_fill(~is_local, 0))
        loss = global_lse - at_target
        log_p += (lse - global_lse).unsqueeze(1)
    if row_scale is not None:
        gradient = log_p.exp_()
        _subtract_one_hot(gradient, is_local, column)
        logits.copy_(gradient.mul_(row_scale.unsqueeze(1)))
    return loss


def _combine_across_ranks(shard: VocabShard, lse: Tensor, at_target: Tensor) -> tuple[Tensor, Tensor]:
    """(log-sum-exp of this rank's columns, target logit or 0) -> the same over all ranks' columns. Two all-reduces."""
    if shard.tp.is_solo:
        return lse, at_target
    top = all_reduce(lse, shard.tp, "max")
    total, at_target = all_reduce(torch.stack([(lse - top).exp(), at_target]), shard.tp)
    return top + total.log(), at_target


def _accumulate_weight_grad(total: Tensor, d_logits: Tensor, x: Tensor, first: bool) -> None:
    """total [columns, H] += d_logits.T @ x, or = for the first chunk."""
    if x.dtype == torch.float32:
        total.addmm_(d_logits.t(), x, beta=0 if first else 1)
        return
    for start in range(0, total.shape[0], _SLAB_COLUMNS):
        slab = slice(start, start + _SLAB_COLUMNS)
        product = torch.mm(d_logits[:, slab].t(), x)  # accumulated in fp32, rounded once per chunk
        if first:
            total[slab] = product
        else:
            total[slab] += product


def _subtract_one_hot(probability: Tensor, is_local: Tensor, column: Tensor) -> None:
    """probability[row, target] -= 1 in rows whose target is on this rank."""
    if probability.shape[1]:
        probability.scatter_add_(1, column.unsqueeze(1), -is_local.unsqueeze(1).float())
