"""Norm and clipping of gradients that are partly split over tensor parallel.

A split parameter's gradient is a different slice on every tp rank: all of them count. A replicated one is the same
on every tp rank: it counts once, on rank 0. Data parallelism is not known here: gradients are already reduced.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from mpu.classic import current_groups
from mpu.collectives import all_reduce
from mpu.device import on_accelerator
from mpu.groups import Groups
from mpu.partition import partition_of

_CPU_BLOCK = 1 << 20
"""Elements squared at a time on CPU: bounds the memory; small enough for the cache, large enough for two threads."""


NORM_ROW = 128
"""Elements whose squares are summed in fp32 before fp64 takes over; see sum_of_squares."""


def sum_of_squares(x: Tensor) -> Tensor:
    """Sum of x**2 as a float64 scalar on x's device, in bounded memory.

    Not by torch's fp32 norm: on CPU it adds all terms in one chain and is off by 0.5% at 40 million elements. Rows of a
    fixed length are summed in fp32, their sums in fp64: 1e-9 there, and cutting x at a row gives the same sum.
    """
    flat = x.detach().reshape(-1)
    if on_accelerator(flat):  # all rows in one kernel, which widens as it reads
        return _squares_of_rows(flat)
    total = torch.zeros((), dtype=torch.float64)
    for block in flat.split(_CPU_BLOCK):
        total += _squares_of_rows(block.float() if block.element_size() < 4 else block)
    return total


def _squares_of_rows(flat: Tensor) -> Tensor:
    whole, wide = len(flat) // NORM_ROW * NORM_ROW, torch.promote_types(flat.dtype, torch.float32)
    rows = flat[:whole].view(-1, NORM_ROW), flat[whole:].view(1, -1)
    return sum((torch.linalg.vector_norm(part, dim=1, dtype=wide).double().square().sum() for part in rows),
               start=torch.zeros((), dtype=torch.float64, device=flat.device))


def clip_grad_norm(
    parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2, groups: Groups | None = None
) -> float:
    """Scale gradients in place so that their norm over the whole model is at most max_norm; returns the norm before.

    Collective over tp. A norm that is not finite leaves the gradients alone: what to do then is the caller's business.
    """
    tp = (current_groups() if groups is None else groups).tp
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    with_grad = [parameter for parameter in given if parameter.grad is not None]
    counted = [p.grad.detach() for p in with_grad if p.grad is not None and (tp.rank == 0 or partition_of(p))]
    device = given[0].device if given else torch.device("cpu")
    total = torch.zeros((), dtype=torch.float64, device=device)
    if math.isinf(norm_type):
        for grad in counted:
            if grad.numel():
                total = torch.maximum(total, grad.abs().max().double())
        norm = float(all_reduce(total, tp, "max"))
    else:
        for grad in counted:
            total = total + (sum_of_squares(grad) if norm_type == 2 else grad.double().abs().pow(norm_type).sum())
        norm = float(all_reduce(total, tp)) ** (1.0 / norm_type)
    if math.isfinite(norm) and norm > max_norm:
        for parameter in with_grad:
            assert parameter.grad is not None
            parameter.grad.mul_(max_norm / norm)
    return norm
