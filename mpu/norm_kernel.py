"""The norms of a buffer's rows as a Triton kernel: one launch, each element read once, no copy in a wider type.

The squares of a row are summed in units of its largest element: fp32 then holds the norm of whatever it holds itself,
and nobody has to ask whether one overflowed. A row with a number that is not finite has an infinite norm.

Importing this file needs Triton, which comes with torch for CUDA; grads.py asks whether it is there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_ROWS = 16
"""Rows a program: 16 elements a thread."""
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


def runs_on(device: torch.device) -> bool:
    """Kernels run on a GPU, and anywhere in Triton's interpreter (TRITON_INTERPRET=1 when this file is imported)."""
    return device.type == "cuda" or isinstance(row_norms_kernel, InterpretedFunction)


def try_out(device: torch.device) -> None:
    """Run the smallest case, so that what does not work here says so."""
    norms_into(torch.empty(1, device=device), torch.zeros(1, 128, device=device))


def serves(rows: Tensor) -> bool:
    """Whether the kernel reads such rows."""
    return rows.dtype in DTYPES


def norms_into(out: Tensor, rows: Tensor) -> None:
    """out [n] <- the norm of each row of rows [n x a power of two], which lie one after the other."""
    if len(rows):
        row_norms_kernel[(triton.cdiv(len(rows), _ROWS),)](rows, out, len(rows), WIDTH=rows.shape[1], ROWS=_ROWS,
                                                           num_warps=_WARPS)
