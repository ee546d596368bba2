"""The loss of a chunk of logits, and its gradient in their place: by fused kernels on a GPU, else by torch operators.

A GPU needs few large products and no other pass over the logits: its kernel (loss_kernel.py) reads and writes them
once, and the weight gradient is accumulated in fp32 inside the product. Tensor-parallel ranks exchange one all-gather
per chunk: a *summary* of each row (largest logit, sum of exponentials, logit of the target). On a CPU, and without
Triton, torch operators work on blocks of rows, and a 16-bit weight gradient over *slabs* of columns, so that data is
read again before it leaves the cache; ranks exchange two all-reduces per block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from mpu.collectives import all_gather, all_reduce
from mpu.device import load_kernels, on_accelerator
from mpu.groups import Group

CPU_CHUNK_BYTES = 104 << 20
"""Bytes of logits per chunk: 1,024 bf16 or 512 fp32 rows of GPT-2's vocabulary. Smaller products are slower."""

ACCELERATOR_CHUNK_BYTES = 1 << 30
"""As much on an accelerator, 10,624 bf16 rows of GPT-2's vocabulary: fast products, few weight gradient sums."""

_TILE_ROWS = 128
"""An accelerator's chunks are multiples of this, the tile size of the products."""

CPU_BLOCK_ROWS, ACCELERATOR_BLOCK_ROWS = 64, 1024
"""Rows that torch operators hold in fp32 at a time."""

SLAB_COLUMNS = 8192
"""Columns whose 16-bit weight gradient is computed on a CPU, and added to the fp32 total, while in the cache."""


@dataclass(frozen=True)
class VocabShard:
    """This rank's columns of the logits: ids [first_id, first_id + num_columns) are its real (unpadded) tokens."""

    tp: Group
    first_id: int
    num_columns: int

    @staticmethod
    def of(local_size: int, tp: Group, vocab_size: int | None) -> VocabShard:
        first = tp.rank * local_size
        real = local_size if vocab_size is None else max(0, min(local_size, vocab_size - first))
        return VocabShard(tp, first, real)

    def locate(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """target [n] -> (is the target among this rank's columns [n], its local column or 0 [n])."""
        local = target - self.first_id
        is_local = (local >= 0) & (local < self.num_columns)
        return is_local, local.masked_fill(~is_local, 0)


def rows_per_chunk(hidden: Tensor, width: int) -> int:
    """Rows of `width` logits, in the dtype of `hidden`, to process at a time."""
    if on_accelerator(hidden):
        return accelerator_rows_per_chunk(len(hidden), width, hidden.element_size())
    return min(len(hidden), max(CPU_BLOCK_ROWS, CPU_CHUNK_BYTES // max(1, width * hidden.element_size())))


def accelerator_rows_per_chunk(rows: int, columns: int, element_size: int) -> int:
    """As few chunks as memory allows, about equal."""
    most = max(1, ACCELERATOR_CHUNK_BYTES // max(1, columns * element_size) // _TILE_ROWS) * _TILE_ROWS
    chunks = max(1, -(-rows // most))
    return min(rows, -(-rows // chunks // _TILE_ROWS) * _TILE_ROWS)


def losses_of_chunk(logits: Tensor, target: Tensor, shard: VocabShard, row_scale: Tensor | None) -> Tensor:
    """Losses [n] of logits [n, V / tp]; with `row_scale` [n], `logits` is overwritten with the gradient of
    sum(row_scale * losses), otherwise its padding columns are."""
    kernel = load_kernels("mpu.loss_kernel", logits.device, "no fused kernel for the loss, which moves seven times the "
                          "bytes without it") if on_accelerator(logits) else None
    if kernel is None or not kernel.serves(logits):
        return _losses_by_blocks(logits, target, shard, row_scale)
    first, columns = shard.first_id, shard.num_columns
    if shard.tp.is_solo and row_scale is not None:
        return cast(Tensor, kernel.losses_and_gradients(logits, target, columns, row_scale))
    top, total, at_target = _combine_summaries(shard, kernel.summaries_of(logits, target, first, columns))
    if row_scale is not None:
        kernel.gradients_into(logits, logits, target, first, columns, top, total, row_scale)
    return cast(Tensor, total.log() + (top - at_target))


def _combine_summaries(shard: VocabShard, local: Tensor) -> Tensor:
    """Summaries [3, n] over all ranks' columns, in one all-gather; bitwise equal on every rank."""
    if shard.tp.is_solo:
        return local
    tops, totals, at_targets = all_gather(local.unsqueeze(1), shard.tp, dim=1)  # [3, size, n]
    top = tops.amax(0)
    return torch.stack([top, (totals * (tops - top).exp()).sum(0), at_targets.sum(0)])


def _losses_by_blocks(logits: Tensor, target: Tensor, shard: VocabShard, row_scale: Tensor | None) -> Tensor:
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    rows = ACCELERATOR_BLOCK_ROWS if on_accelerator(logits) else CPU_BLOCK_ROWS
    scratch = torch.empty(min(rows, len(logits)), logits.shape[1], dtype=torch.float32, device=logits.device)
    logits[:, shard.num_columns:] = -torch.inf  # padding: probability and gradient 0
    for start in range(0, len(logits), rows):
        block = slice(start, start + rows)
        scale = None if row_scale is None else row_scale[block]
        losses[block] = _losses_of_block(logits[block], target[block], shard, scale, scratch[: len(logits[block])])
    return losses


def _losses_of_block(logits: Tensor, target: Tensor, shard: VocabShard, row_scale: Tensor | None,
                     log_p: Tensor) -> Tensor:
    """`log_p` [rows, V / tp] in fp32 is scratch."""
    is_local, column = shard.locate(target)
    if shard.num_columns:
        torch.log_softmax(logits, 1, dtype=torch.float32, out=log_p)  # one fused pass
        at_target = log_p.gather(1, column.unsqueeze(1)).squeeze(1)
    else:  # this rank has padding only
        at_target = torch.zeros(len(logits), device=logits.device)
        log_p.fill_(-torch.inf)
    if shard.tp.is_solo:
        losses = -at_target
    else:
        lse = torch.full_like(at_target, -torch.inf)
        if shard.num_columns:  # what log_softmax subtracted: recovered at the largest logit, where rounding is smallest
            top, at_top = logits.max(dim=1)
            lse = top.float() - log_p.gather(1, at_top.unsqueeze(1)).squeeze(1)
        largest = all_reduce(lse, shard.tp, "max")
        logit = (at_target + lse).masked_fill(~is_local, 0)
        total, logit = all_reduce(torch.stack([(lse - largest).exp(), logit]), shard.tp)
        global_lse = largest + total.log()
        losses = global_lse - logit
        log_p += (lse - global_lse).unsqueeze(1)
    if row_scale is not None:
        gradient = log_p.exp_()
        if gradient.shape[1]:  # minus 1 in the column of the target, on the rank that has it
            gradient.scatter_add_(1, column.unsqueeze(1), -is_local.unsqueeze(1).float())
        logits.copy_(gradient.mul_(row_scale.unsqueeze(1)))
    return losses


def accumulate_weight_grad(total: Tensor, d_logits: Tensor, x: Tensor, first: bool) -> None:
    """total [V / tp, H] += d_logits.T @ x, or = for the first chunk; on an accelerator 16-bit factors are added to an
    fp32 total unrounded."""
    beta, on_device = 0 if first else 1, on_accelerator(total)
    if x.dtype == torch.float32 or on_device and total.dtype == x.dtype:
        total.addmm_(d_logits.t(), x, beta=beta)
        return
    if total.is_cuda:  # fp32 accumulation inside the product; torch has it on CUDA only
        torch.addmm(total, d_logits.t(), x, beta=beta, out_dtype=total.dtype, out=total)
        return
    columns = len(total) if on_device else SLAB_COLUMNS
    for start in range(0, len(total), columns):
        slab = slice(start, start + columns)
        product = torch.mm(d_logits[:, slab].t(), x)  # accumulated in fp32, rounded once per chunk
        if first:
            total[slab] = product
        else:
            total[slab] += product
