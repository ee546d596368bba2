"""Triton kernels: the softmax of the loss, and the norms of a buffer's rows. Importing this file needs Triton.

Of the loss: one program a row, fp32 inside, the gradient in the place of the logits.

    row_summary_kernel         a row's largest logit m, sum(exp(x - m)), and the logit of the target (or 0)
    gradient_kernel            from summaries of *all* ranks: x <- (exp(x - m) / sum - [target]) * scale
    loss_and_gradient_kernel   both, where one rank has all columns, and the loss: reads and writes a row once

Loads are masked by the padded width of the buffer, not by the odd number of real columns: only aligned masks allow
loads of 16 bytes. Measurements: decision 002.

Of norms: one launch, each element read once, no copy in a wider dtype. Squares are summed in units of the row's largest
element, so that fp32 does not overflow and no check is needed. A row with a non-finite element has an infinite norm.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_BLOCK = 1024
_WARPS = 4
_NORM_ROWS = 16  # rows of a program of norms: 16 elements per thread
# Initial maximum. Not -inf, since -inf - -inf is nan.
_LOWEST_FLOAT = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def _row_max_and_sum(row, columns, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """(max, sum(exp(x - max))) of a row. Each lane keeps its own, so that threads synchronize once per row."""
    tops = tl.full([BLOCK], _LOWEST_FLOAT, tl.float32)
    totals = tl.zeros([BLOCK], tl.float32)
    for start in range(0, WIDTH, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(row + at, mask=at < WIDTH, other=0.0, eviction_policy="evict_last").to(tl.float32)
        x = tl.where(at < columns, x, -float("inf"))
        apart = tl.exp(-tl.abs(x - tops))  # one exponential: of the two that a running sum needs, one is of 0
        totals = tl.where(x > tops, totals * apart + 1.0, totals + apart)
        tops = tl.maximum(tops, x)
    top = tl.max(tops, 0)
    total = tl.sum(totals * tl.exp(tops - top), 0)
    return tl.where(total == 0.0, -float("inf"), top), total


@triton.jit
def _write_row_gradient(row, column, columns, top, factor, scale, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    for start in range(0, WIDTH, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(row + at, mask=at < WIDTH, other=0.0, eviction_policy="evict_first").to(tl.float32)
        gradient = tl.exp(tl.where(at < columns, x, -float("inf")) - top) * factor
        gradient = tl.where(at == column, gradient - scale, gradient)
        tl.store(row + at, gradient.to(row.dtype.element_ty), mask=at < WIDTH)


@triton.jit
def _target_column_and_logit(row, target, first, columns):
    """(local column of the target or -1, its logit or 0)."""
    local = target - first
    mine = (local >= 0) & (local < columns)
    logit = tl.load(row + tl.where(mine, local, 0), mask=mine, other=0.0).to(tl.float32)
    return tl.where(mine, local, -1), logit


@triton.jit
def row_summary_kernel(logits, stride, targets, first, columns, tops, totals, at_targets, WIDTH: tl.constexpr,
                       BLOCK: tl.constexpr):
    number = tl.program_id(0).to(tl.int64)  # 64 bits: rows * stride may exceed 2^31 elements
    row = logits + number * stride
    column, logit = _target_column_and_logit(row, tl.load(targets + number), first, columns)
    top, total = _row_max_and_sum(row, columns, WIDTH, BLOCK)
    tl.store(tops + number, top)
    tl.store(totals + number, total)
    tl.store(at_targets + number, logit)


@triton.jit
def gradient_kernel(logits, stride, targets, first, columns, tops, totals, scales, z_loss, WIDTH: tl.constexpr,
                    BLOCK: tl.constexpr):
    number = tl.program_id(0).to(tl.int64)
    row = logits + number * stride
    column, logit = _target_column_and_logit(row, tl.load(targets + number), first, columns)
    scale, top, total = tl.load(scales + number), tl.load(tops + number), tl.load(totals + number)
    factor = scale / total * (1.0 + 2.0 * z_loss * (top + tl.log(total)))
    _write_row_gradient(row, column, columns, top, factor, scale, WIDTH, BLOCK)


@triton.jit
def loss_and_gradient_kernel(logits, stride, targets, first, columns, scales, losses, z_loss, WIDTH: tl.constexpr,
                             BLOCK: tl.constexpr):
    number = tl.program_id(0).to(tl.int64)
    row = logits + number * stride
    # read before the row is overwritten
    column, logit = _target_column_and_logit(row, tl.load(targets + number), first, columns)
    top, total = _row_max_and_sum(row, columns, WIDTH, BLOCK)
    lse = top + tl.log(total)
    tl.store(losses + number, tl.log(total) + (top - logit) + z_loss * lse * lse)
    scale = tl.load(scales + number)
    factor = scale / total * (1.0 + 2.0 * z_loss * lse)
    _write_row_gradient(row, column, columns, top, factor, scale, WIDTH, BLOCK)


@triton.jit
def row_norms_kernel(flat, norms, count, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = row < count
    x = tl.load(flat + row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :], mask=here[:, None], other=0.0)
    size = tl.abs(x.to(tl.float32))
    finite = size < float("inf")  # false for nan, too
    size = tl.where(finite, size, 0.0)
    largest = tl.max(size, 1)
    unit = tl.where(largest == 0.0, 1.0, largest)
    # Every quotient is at most 1, so that its square fits; div_rn, since the fast division is off by 2 units.
    part = tl.div_rn(size, tl.broadcast_to(unit[:, None], (ROWS, WIDTH)))
    norm = tl.sqrt(tl.sum(part * part, 1)) * unit
    tl.store(norms + row, tl.where(tl.min(finite.to(tl.int32), 1) == 1, norm, float("inf")), mask=here)


# -- called with tensors -------------------------------------------------------------------------------------------

def try_out(device: torch.device) -> None:
    """Run the smallest cases, to raise if the kernels do not work here."""
    losses_and_gradients(torch.zeros(1, 16, device=device), torch.zeros(1, dtype=torch.int64, device=device), 16,
                         torch.ones(1, device=device))
    norms_into(torch.empty(1, device=device), torch.zeros(1, 128, device=device))


def serves(rows: Tensor) -> bool:
    """Whether the kernels support this dtype and layout."""
    return rows.dtype in DTYPES and rows.stride(1) == 1


def summaries_of(logits: Tensor, target: Tensor, first: int, columns: int) -> Tensor:
    """[3, N]: largest logit, sum of exponentials, logit of the target, over columns [0, columns)."""
    found = torch.empty(3, len(logits), dtype=torch.float32, device=logits.device)
    _launch(row_summary_kernel, logits, logits.stride(0), target, first, columns, *found)
    return found


def write_gradients(logits: Tensor, target: Tensor, first: int, columns: int, top: Tensor, total: Tensor,
                    row_scale: Tensor, z_loss: float = 0.0) -> None:
    """logits [N, width] <- the gradient of sum(row_scale * losses)."""
    _launch(gradient_kernel, logits, logits.stride(0), target, first, columns, top, total, row_scale, z_loss)


def losses_and_gradients(logits: Tensor, target: Tensor, columns: int, row_scale: Tensor,
                         z_loss: float = 0.0) -> Tensor:
    """Losses [N]; logits <- the gradient of sum(row_scale * losses)."""
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    _launch(loss_and_gradient_kernel, logits, logits.stride(0), target, 0, columns, row_scale, losses, z_loss)
    return losses


def _launch(kernel: Any, logits: Tensor, *arguments: object) -> None:
    if len(logits):
        width = logits.shape[1]
        block = min(_BLOCK, triton.next_power_of_2(width))  # Triton's ranges are powers of two
        kernel[(len(logits),)](logits, *arguments, WIDTH=width, BLOCK=block, num_warps=_WARPS)


def norms_into(out: Tensor, rows: Tensor) -> None:
    """out [n] <- the norm of each row of `rows` [n, power of two], contiguous."""
    if len(rows):
        programs = triton.cdiv(len(rows), _NORM_ROWS)
        row_norms_kernel[(programs,)](rows, out, len(rows), WIDTH=rows.shape[1], ROWS=_NORM_ROWS, num_warps=_WARPS)
