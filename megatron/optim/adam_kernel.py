"""AdamW over flat segments as a Triton kernel: all segments of a call in one launch, including the 16-bit weights.

It reads the gradient, the fp32 master and both moments, and writes master, moments and the 16-bit copy of the master if
there is one: 28 bytes per weight with 16-bit gradients and weights. The formula is that of torch's fused kernel, with
`divisor` for the gradient and `skip` on the device; all in fp32, except the bias corrections, one per program, in fp64.

A program updates one *block* of one segment. Two tables on the device (`SegmentTable`) map each block to the number of
its segment, and each segment to a *row* of addresses and lengths. Segments begin at multiples of 16 bytes, so a thread
moves four weights at once. Importing this file needs Triton.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.optim.rule import StepScalars, UpdateSegment

TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

_BLOCK = 2048
_WARPS = 8
_ALIGNED = 16  # addresses and lengths of segments must be multiples of this

# Columns of a row after its five addresses: the segment's length, its first block; then the number of columns.
_LENGTH, _FIRST, _ROW = 5, 6, 7


@triton.jit
def _load_pointer(row, number: tl.constexpr, kind: tl.constexpr):
    address = tl.load(row + number).to(tl.pointer_type(kind), bitcast=True)
    return tl.multiple_of(address, 4 * kind.primitive_bitwidth // 8)


@triton.jit
def _correction(count, log_beta):
    """1 - beta^count, in fp64: in fp32 it would cancel in the first steps."""
    return (1.0 - tl.exp(tl.load(count).to(tl.float64) * log_beta)).to(tl.float32)


@triton.jit
def update_block(rows, row_of, count, divisor, skip, lr, decay, eps, beta1, rest1, log1, beta2, rest2, log2,
                 GRAD: tl.constexpr, LP_DTYPE: tl.constexpr, DECOUPLED: tl.constexpr, LENGTH: tl.constexpr,
                 FIRST: tl.constexpr, ROW: tl.constexpr, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    row = rows + tl.load(row_of + block) * ROW
    at = tl.multiple_of((block - tl.load(row + FIRST)) * BLOCK, BLOCK) + tl.arange(0, BLOCK)
    length = tl.multiple_of(tl.load(row + LENGTH), 16)
    if skip is not None:
        length = tl.where(tl.load(skip) == 0, length, 0)
    here = at < tl.multiple_of(length, 16)

    masters = _load_pointer(row, 0, tl.float32) + at
    averages = _load_pointer(row, 2, tl.float32) + at
    squares = _load_pointer(row, 3, tl.float32) + at
    weight = tl.load(masters, mask=here, other=0.0)
    grad = tl.load(_load_pointer(row, 1, GRAD) + at, mask=here, other=0.0).to(tl.float32)
    average = tl.load(averages, mask=here, other=0.0)
    square = tl.load(squares, mask=here, other=0.0)

    if divisor is not None:
        grad = tl.div_rn(grad, tl.load(divisor))
    if DECOUPLED:
        weight -= lr * decay * weight
    else:
        grad += decay * weight
    average = beta1 * average + rest1 * grad
    square = beta2 * square + rest2 * grad * grad
    rate = tl.div_rn(lr, _correction(count, log1))
    root = tl.sqrt_rn(_correction(count, log2))
    weight -= tl.div_rn(rate * average, tl.div_rn(tl.sqrt_rn(square), root) + eps)

    tl.store(masters, weight, mask=here)
    tl.store(averages, average, mask=here)
    tl.store(squares, square, mask=here)
    if LP_DTYPE is not None:
        tl.store(_load_pointer(row, 4, LP_DTYPE) + at, weight.to(LP_DTYPE), mask=here)


# -- called with tensors -------------------------------------------------------------------------------------------

def try_out(device: torch.device) -> None:
    """Run the smallest case, so that a kernel that does not work on this system raises here."""
    master, grad, *states = torch.zeros(4, 16, device=device)
    segment = UpdateSegment(0, master, grad, dict(zip(("exp_avg", "exp_avg_sq"), states)), (), 1, lambda sums: sums)
    hyper = {"lr": 0.0, "betas": (0.9, 0.99), "eps": 1.0, "weight_decay": 0.0}
    update([segment], SegmentTable(), hyper, StepScalars.for_applied_step(0.5, 0, device), bias_correction=True,
           decoupled=True)


class SegmentTable:
    """The device tables of one hyper-parameter group. Masters and moments keep their addresses, and gradients mostly
    do, so the tables are rebuilt only if an address changed, without a host synchronization."""

    def __init__(self) -> None:
        self._current_rows: list[list[int]] = []
        self._blocks_per_row: list[int] = []
        # rows: [segments, _ROW] int64. row_of_block: [blocks] int32.
        self.rows = self.row_of_block = torch.empty(0)

    def refresh(self, segments: Sequence[UpdateSegment]) -> bool:
        """Point the tables at these segments; False if they are not aligned."""
        rows = [[*(0 if tensor is None else tensor.data_ptr() for tensor in (
            segment.master, segment.grad, segment.states["exp_avg"], segment.states["exp_avg_sq"], segment.lp_out)),
            len(segment.master)] for segment in segments]
        if rows == self._current_rows:
            return True
        if any(number % _ALIGNED for row in rows for number in row):
            return False
        device, blocks = segments[0].master.device, [-(-length // _BLOCK) for *_, length in rows]
        if blocks != self._blocks_per_row:
            self.row_of_block = _to(device, torch.repeat_interleave(torch.tensor(blocks)).int())
        firsts = accumulate(blocks[:-1], initial=0)
        self.rows = _to(device, torch.tensor([[*row, first] for row, first in zip(rows, firsts, strict=True)]))
        self._current_rows, self._blocks_per_row = rows, blocks
        return True


def _to(device: torch.device, numbers: Tensor) -> Tensor:
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers.to(device)


def update(segments: Sequence[UpdateSegment], table: SegmentTable, hyper: Mapping[str, Any], scalars: StepScalars, *,
           bias_correction: bool, decoupled: bool) -> bool:
    """One step of all segments in one launch. False, without effect, if they are not aligned or differ in dtypes."""
    if len({(segment.grad.dtype, segment.lp_out is None or segment.lp_out.dtype) for segment in segments}) > 1:
        return False
    if not table.refresh(segments):
        return False
    betas = [number for beta in hyper["betas"] for number in _beta_constants(beta, bias_correction)]
    lp_out = segments[0].lp_out
    update_block[(len(table.row_of_block),)](
        table.rows, table.row_of_block, scalars.count, scalars.divisor, scalars.skip, float(hyper["lr"]),
        float(hyper["weight_decay"]), float(hyper["eps"]), *betas, GRAD=TRITON_DTYPES[segments[0].grad.dtype],
        LP_DTYPE=None if lp_out is None else TRITON_DTYPES[lp_out.dtype], DECOUPLED=decoupled, LENGTH=_LENGTH,
        FIRST=_FIRST, ROW=_ROW, BLOCK=_BLOCK, num_warps=_WARPS)
    return True


def _beta_constants(beta: float, bias_correction: bool) -> tuple[float, float, float]:
    """(beta, 1 - beta, ln beta), in double precision. ln is -inf without bias correction, so that beta^t is 0."""
    return beta, 1 - beta, math.log(beta) if beta and bias_correction else -math.inf
