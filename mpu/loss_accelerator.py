"""The LM-head loss on an accelerator: chunks of rows sized by memory, and one fused kernel per chunk.

A matrix product computes a chunk of logits; a fused kernel (loss_kernel.py) overwrites it with its gradient; two more
products use that. Tensor-parallel ranks exchange one all-gather per chunk: a *summary* of each row (largest logit, sum
of exponentials, logit of the target). The weight gradient is accumulated in fp32 inside the product. Without Triton, or
for other dtypes, torch operators compute the same in blocks, with more memory traffic.
"""

from __future__ import annotations

from functools import cache, partial
from importlib import import_module
from types import ModuleType
from typing import cast

import torch
from torch import Tensor

from mpu.chunked_loss import LossGradRequest, LossInputs, LossOutputs, VocabShard, run_in_chunks
from mpu.collectives import all_gather
from mpu.device import load_kernels

_CHUNK_BYTES = 1 << 30
"""Bytes of logits per chunk, 10,624 bf16 rows of GPT-2's vocabulary: fast products, few weight gradient sums."""

_TILE_ROWS = 128
"""Chunks are multiples of this, the tile size of the products."""

_BLOCK_ROWS = 1024
"""Rows that torch operators hold in fp32 at a time."""


def rows_per_chunk(rows: int, columns: int, element_size: int) -> int:
    """Rows per chunk: as few chunks as memory allows, about equal."""
    most = max(1, _CHUNK_BYTES // max(1, columns * element_size) // _TILE_ROWS) * _TILE_ROWS
    chunks = max(1, -(-rows // most))
    return min(rows, -(-rows // chunks // _TILE_ROWS) * _TILE_ROWS)


def compute_losses(logits: Tensor, target: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """logits [N, V / tp] -> (losses [N], summaries [3, N] over all ranks' columns)."""
    summaries = _combine_across_ranks(shard, _row_summaries(logits, target, shard))
    return _losses_from_summaries(summaries), summaries


def compute_gradient(logits: Tensor, target: Tensor, shard: VocabShard, summaries: Tensor, row_scale: Tensor) -> Tensor:
    """The gradient [N, V / tp] of sum(row_scale * losses) with respect to the logits."""
    grad = torch.empty_like(logits)
    _write_gradients(grad, logits, target, shard, summaries, row_scale.float().contiguous())
    return grad


def chunked_loss(inputs: LossInputs, request: LossGradRequest, chunk_rows: int | None = None) -> LossOutputs:
    hidden = inputs.hidden
    most = chunk_rows or rows_per_chunk(len(hidden), len(inputs.weight), hidden.element_size())
    rows = max(1, min(most, len(hidden)))
    return run_in_chunks(inputs, request, rows, partial(_chunk_loss, inputs.shard), accumulate_weight_grad,
                         always_into_fp32_buffer=True)


def _chunk_loss(shard: VocabShard, logits: Tensor, target: Tensor, row_scale: Tensor | None) -> Tensor:
    """Losses of a chunk; with row_scale, `logits` is overwritten with the gradient of the scaled losses."""
    kernel = _kernel_for(logits)
    if shard.tp.is_solo and kernel is None:
        return _log_softmax_loss(logits, target, shard, row_scale)
    if shard.tp.is_solo and kernel is not None and row_scale is not None:
        return cast(Tensor, kernel.losses_and_gradients(logits, target, shard.num_columns, row_scale))
    summaries = _combine_across_ranks(shard, _row_summaries(logits, target, shard))
    if row_scale is not None:
        _write_gradients(logits, logits, target, shard, summaries, row_scale)
    return _losses_from_summaries(summaries)


def _kernel_for(logits: Tensor) -> ModuleType | None:
    kernel = _kernel_on(logits.device)
    return kernel if kernel is not None and kernel.serves(logits) else None


@cache
def _kernel_on(device: torch.device) -> ModuleType | None:
    return load_kernels(lambda: import_module("mpu.loss_kernel"), device,
                        "no fused kernel for the loss, which moves seven times the bytes without it")


def _losses_from_summaries(summaries: Tensor) -> Tensor:
    top, total, at_target = summaries.unbind()
    return total.log() + (top - at_target)


def _combine_across_ranks(shard: VocabShard, local: Tensor) -> Tensor:
    """Summaries [3, n] over all ranks' columns, in one all-gather; bitwise equal on every rank."""
    if shard.tp.is_solo:
        return local
    tops, totals, at_targets = all_gather(local.unsqueeze(1), shard.tp, dim=1)  # [3, size, n]
    top = tops.amax(0)
    return torch.stack([top, (totals * (tops - top).exp()).sum(0), at_targets.sum(0)])


def _row_summaries(logits: Tensor, target: Tensor, shard: VocabShard) -> Tensor:
    """[3, n] for this rank's columns: largest logit (-inf without columns), sum of exponentials, logit of the target or
    0."""
    kernel = _kernel_for(logits)
    if kernel is not None:
        return cast(Tensor, kernel.summaries_of(logits, target, shard.first_id, shard.num_columns))
    summaries = torch.empty(3, len(logits), dtype=torch.float32, device=logits.device)
    if not shard.num_columns:
        summaries[0], summaries[1:] = -torch.inf, 0.0
        return summaries
    is_local, column = shard.locate(target)
    for block in _row_blocks(len(logits)):
        x = logits[block, : shard.num_columns]
        top, total, at_target = summaries[:, block]
        top.copy_(x.amax(1))
        total.copy_((x - top.unsqueeze(1)).exp_().sum(1))  # 16-bit minus fp32 is fp32
        at_target.copy_(x.gather(1, column[block].unsqueeze(1)).squeeze(1).masked_fill(~is_local[block], 0))
    return summaries


def _write_gradients(out: Tensor, logits: Tensor, target: Tensor, shard: VocabShard, summaries: Tensor,
                     row_scale: Tensor) -> None:
    """out <- the gradient of sum(row_scale * losses); `out` may be `logits` itself."""
    top, total, _ = summaries
    kernel = _kernel_for(logits)
    if kernel is not None and out.stride() == logits.stride():
        kernel.gradients_into(out, logits, target, shard.first_id, shard.num_columns, top, total, row_scale)
        return
    factor, one = row_scale / total, row_scale.neg()
    is_local, column = shard.locate(target)
    for block in _row_blocks(len(logits)):
        gradient = (logits[block, :shard.num_columns] - top[block].unsqueeze(1)).exp_().mul_(factor[block].unsqueeze(1))
        if shard.num_columns:
            gradient.scatter_add_(1, column[block].unsqueeze(1),
                                  (one * is_local)[block].unsqueeze(1).to(gradient.dtype))
        out[block, : shard.num_columns].copy_(gradient)
    out[:, shard.num_columns:] = 0


def _log_softmax_loss(logits: Tensor, target: Tensor, shard: VocabShard, row_scale: Tensor | None) -> Tensor:
    """As _chunk_loss, if one rank has all columns: torch fuses the conversion and the softmax."""
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    logits[:, shard.num_columns:] = -torch.inf  # padding: probability and gradient 0
    scratch = torch.empty(min(_BLOCK_ROWS, len(logits)), logits.shape[1], dtype=torch.float32, device=logits.device)
    for block in _row_blocks(len(logits)):
        log_p = scratch[: len(logits[block])]
        torch.log_softmax(logits[block], 1, dtype=torch.float32, out=log_p)  # one fused pass
        column = target[block].unsqueeze(1)
        losses[block] = -log_p.gather(1, column).squeeze(1)
        if row_scale is not None:
            gradient = log_p.exp_()
            gradient.scatter_add_(1, column, -torch.ones_like(column, dtype=torch.float32))
            logits[block].copy_(gradient.mul_(row_scale[block].unsqueeze(1)))
    return losses


def _row_blocks(rows: int) -> list[slice]:
    return [slice(start, start + _BLOCK_ROWS) for start in range(0, rows, _BLOCK_ROWS)]


def accumulate_weight_grad(total: Tensor, d_logits: Tensor, x: Tensor, first: bool) -> None:
    """total [columns, H] += d_logits.T @ x, or = for the first chunk; 16-bit factors are added to an fp32 total
    unrounded."""
    beta = 0 if first else 1
    if total.dtype == x.dtype:
        total.addmm_(d_logits.t(), x, beta=beta)
    elif total.is_cuda:  # fp32 accumulation inside the product; torch has it on CUDA only
        torch.addmm(total, d_logits.t(), x, beta=beta, out_dtype=total.dtype, out=total)
    elif first:
        total.copy_(torch.mm(d_logits.t(), x))
    else:
        total += torch.mm(d_logits.t(), x)
