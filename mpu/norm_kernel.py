"""The norms of a buffer's rows as a Triton kernel: one launch, each element read once, no copy in a wider dtype.

Squares are summed in units of the row's largest element, so that fp32 does not overflow and no check is needed. A row
with a non-finite element has an infinite norm. Needs Triton, which comes with torch for CUDA.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_ROWS = 16
"""Rows per program: 16 elements per thread."""
_WARPS = 4


@triton.jit
def row_norms_kernel(flat, norms, count, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = row < count
    x = tl.load(flat + row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :], mask=here[:, None], other=0.0)
    size = tl.abs(x.to(tl.float32))
    finite = size < float("inf")
    size = tl.where(finite, size, 0.0)
    largest = tl.max(size, 1)
    unit = tl.where(largest == 0.0, 1.0, largest)
    part = tl.div_rn(size, tl.broadcast_to(unit[:, None], (ROWS, WIDTH)))
    norm = tl.sqrt(tl.sum(part * part, 1)) * unit
    tl.store(norms + row, tl.where(tl.min(finite.to(tl.int32), 1) == 1, norm, float("inf")), mask=here)


# -- called with tensors -------------------------------------------------------------------------------------------

def try_out(device: torch.device) -> None:
    """Run the smallest case, to raise if the kernel does not work here."""
    norms_into(torch.empty(1, device=device), torch.zeros(1, 128, device=device))


def serves(rows: Tensor) -> bool:
    """Whether the kernel supports this dtype."""
    return rows.dtype in DTYPES


def norms_into(out: Tensor, rows: Tensor) -> None:
    """out [n] <- the norm of each row of `rows` [n, power of two], contiguous."""
    if len(rows):
        row_norms_kernel[(triton.cdiv(len(rows), _ROWS),)](rows, out, len(rows), WIDTH=rows.shape[1], ROWS=_ROWS,
                                                           num_warps=_WARPS)
