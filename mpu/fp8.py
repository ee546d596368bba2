"""Linear layers whose products have 8-bit floating point factors (Micikevicius et al., 2022).

    forward    y = x W^T              x and W in e4m3, which has more digits
    backward   dx = g W, dW = g^T x   g in e5m2, which has more range

Each factor is divided by a scale that maps its largest magnitude to the largest number of its format. Products are
summed in fp32 and returned in the dtype of x. The scale is that of the tensor at hand ("current" scaling, as torchao's
tensorwise recipe), not one predicted from earlier steps: there is no state to save, to reduce over ranks or to warm up,
and a resumed run computes the same bits. Parameters, gradients and what is kept for backward stay in 16 bits. A GPU
needs compute capability 8.9 and sizes that are multiples of 16; a CPU emulates the products.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from mpu.device import on_accelerator
from mpu.groups import SOLO, Group
from mpu.regions import all_gather_positions, reduce_scatter_positions

FORWARD_FORMAT, BACKWARD_FORMAT = torch.float8_e4m3fn, torch.float8_e5m2
SMALLEST_MAXIMUM = 1e-12  # of a tensor; keeps a tensor of zeros from a division by zero


class Fp8Matrix(NamedTuple):
    values: Tensor
    scale: Tensor  # fp32 scalar: the matrix is values * scale

    def t(self) -> Fp8Matrix:
        return Fp8Matrix(self.values.t(), self.scale)


def to_fp8(x: Tensor, dtype: torch.dtype = FORWARD_FORMAT) -> Fp8Matrix:
    """An element that is not finite makes its products NaN, so the step is skipped as with 16-bit products."""
    scale = x.abs().amax().float().clamp(min=SMALLEST_MAXIMUM) / torch.finfo(dtype).max
    return Fp8Matrix((x.float() / scale).to(dtype), scale)


def fp8_mm(a: Fp8Matrix, b: Fp8Matrix, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """[m, k] x [k, n] -> [m, n]. `fast`: tensor cores sum in fewer bits than fp32, enough for a forward."""
    if not on_accelerator(a.values):  # torch's own product is a plain loop there; each 8-bit number is one of fp32
        return ((a.values.float() @ b.values.float()) * (a.scale * b.scale)).to(dtype)
    # cuBLAS takes a by rows and b by columns
    columns = b.values.t().contiguous().t()
    return torch._scaled_mm(a.values.contiguous(), columns, scale_a=a.scale, scale_b=b.scale, out_dtype=dtype,
                            use_fast_accum=fast)


class _Fp8Linear(torch.autograd.Function):
    """x W^T. With a `sequence_group` x is this rank's positions, [b, s / tp, in]: they are gathered here, and again in
    backward, and y has all positions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, sequence_group: Group) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sequence_group = sequence_group
        whole = x if sequence_group.is_solo else all_gather_positions(x, sequence_group)
        y = fp8_mm(to_fp8(whole.flatten(0, -2)), to_fp8(weight).t(), x.dtype, fast=True)  # [b * s, out]
        return y.view(*whole.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        tp = ctx.sequence_group
        grad = to_fp8(grads[0].flatten(0, -2), BACKWARD_FORMAT)  # [b * s, out]
        d_x = fp8_mm(grad, to_fp8(weight), x.dtype).view(*grads[0].shape[:-1], -1)  # [b, s, in]
        if not tp.is_solo:
            if torch.compiler.is_compiling():  # otherwise this gather moves to the forward, its result kept
                x = x + 0 * grads[0].flatten()[0]
            x, d_x = all_gather_positions(x, tp), reduce_scatter_positions(d_x, tp)
        return d_x, fp8_mm(grad.t(), to_fp8(x.flatten(0, -2)), weight.dtype), None  # [out, b * s] x [b * s, in]


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, sequence_group: Group = SOLO) -> Tensor:
    """x W^T + b: [..., in], [out, in], [out] -> [..., out]."""
    y = cast(Tensor, _Fp8Linear.apply(x, weight, sequence_group))  # type: ignore[no-untyped-call]
    return y if bias is None else y + bias
