"""x W^T + b for a few rows x, as when text is written a token at a time.

Such a product reads the whole weight for little arithmetic, and torch's ways to it differ by up to two on a CPU: in
bf16 the weight comes first (a vector of one row has a kernel of its own), in fp32 so from some rows on; other types,
many rows, gradients, accelerators and weights with a product of their own are F.linear's. Measured by
scripts/bench/few_rows.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import has_torch_function

from mpu.device import on_accelerator

WEIGHT_FIRST = {torch.bfloat16: range(1, 65), torch.float32: range(8, 17)}
"""Numbers of rows for which W x^T is faster than x W^T."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[..., in], [out, in], [out] -> [..., out]"""
    rows = x.numel() // x.shape[-1]
    if torch.is_grad_enabled() or rows not in WEIGHT_FIRST.get(x.dtype, ()) or on_accelerator(x) \
            or has_torch_function((weight,)):
        return F.linear(x, weight, bias)
    if rows == 1:
        row = x.reshape(-1)
        y = torch.mv(weight, row) if bias is None else torch.addmv(bias, weight, row)
    else:
        columns = x.reshape(rows, -1).t()
        y = torch.mm(weight, columns) if bias is None else torch.addmm(bias[:, None], weight, columns)
        y = y.t().contiguous()
    return y.view(*x.shape[:-1], len(weight))
