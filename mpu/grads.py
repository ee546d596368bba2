"""Gradients: where an operation may write a weight gradient itself (`MainGrad`), and their norm and clipping.

A tensor-parallel parameter's gradient is a different slice on every tp rank: all of them count in the norm. A
replicated one counts once, on rank 0. Gradients are already reduced over data parallelism.
`MainGrad` is Megatron's `main_grad` as a protocol: the owner of the gradient buffer (the engine) implements it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from mpu.collectives import all_reduce
from mpu.device import load_kernels, on_accelerator
from mpu.groups import Groups
from mpu.parallel_state import current_groups
from mpu.partition import partition_of


class MainGradReservation(Protocol):
    """The buffer of a gradient that a forward computes before its backward is known to run."""

    @property
    def buffer(self) -> Tensor:
        """The buffer to write; valid only during the forward that reserved it, since the owner may move it."""

    def commit(self, scale: Tensor | None = None) -> None:
        """Mark the gradient, times `scale`, as valid: the backward has come. Call once."""


class MainGrad(Protocol):
    """The gradient buffer of one parameter."""

    def reserve(self) -> MainGradReservation | None:
        """Reserve the buffer; None if it already holds a gradient."""

    def accumulated(self) -> Tensor:
        """The gradient so far (zeros if none), to add to."""


# Elements squared at a time on CPU: fits the cache, and is large enough for two threads.
_CPU_BLOCK_ELEMENTS = 1 << 20

# Elements converted to fp64 at a time on an accelerator without the kernel: 64 MiB.
_FP64_BLOCK_ELEMENTS = 1 << 23


# Elements per row: squares are summed in fp32 within a row (on CPU), across rows in fp64; see row_norms.
NORM_ROW = 128


def row_norms(flat: Tensor, out: Tensor | None = None) -> Tensor:
    """The fp32 norm of each row of NORM_ROW elements: flat [n * NORM_ROW] -> [n].

    torch's fp32 norm sums all terms sequentially on CPU, with an error of 0.5% at 40 million elements. Short rows in
    fp32 and their sum in fp64 give 1e-9, and a buffer cut at a row boundary gives the same rows. Squares of elements
    above 1e19 overflow fp32: the CPU path detects that and repeats the row in fp64; the accelerator kernel never
    squares a large number, so that no synchronization is needed."""
    rows = flat.detach().view(-1, NORM_ROW)
    out = torch.empty(len(rows), dtype=torch.float32, device=flat.device) if out is None else out
    if not on_accelerator(flat):
        at_a_time = _CPU_BLOCK_ELEMENTS // NORM_ROW
        for block, place in zip(rows.split(at_a_time), out.split(at_a_time), strict=True):
            torch.linalg.vector_norm(block.float(), dim=1, out=place)
            # One check per block, free on a CPU: a square above fp32's range shows as an infinite norm.
            if not math.isfinite(place.sum()):
                large = place.isinf()
                place[large] = torch.linalg.vector_norm(block[large].double(), dim=1).float()
    elif (kernel := load_kernels("mpu.kernels", flat.device, "no kernel for the norms of gradients, which are copied "
                                 "to fp64 without it")) and kernel.serves(rows):
        kernel.norms_into(out, rows)
    else:
        at_a_time = _FP64_BLOCK_ELEMENTS // NORM_ROW
        for block, place in zip(rows.split(at_a_time), out.split(at_a_time), strict=True):
            place.copy_(torch.linalg.vector_norm(block, dim=1, dtype=torch.float64))
    return out


def sum_of_squares(x: Tensor) -> Tensor:
    """Sum of x**2 as an fp64 scalar on x's device, in bounded memory."""
    flat = x.detach().reshape(-1)  # [...] -> [N]: whole rows, and a rest of fewer than NORM_ROW elements
    whole = len(flat) // NORM_ROW * NORM_ROW
    total = row_norms(flat[:whole]).double().square().sum()
    if whole < len(flat):
        total = total + torch.linalg.vector_norm(flat[whole:].double()).square()
    return total


def norm_term(grad: Tensor, order: float) -> Tensor:
    """What one gradient contributes to the norm of several, in fp64: its maximum, or its sum of |x| ** order."""
    if math.isinf(order):
        return grad.abs().max().double()
    return sum_of_squares(grad) if order == 2 else grad.double().abs().pow(order).sum()


def clip_grad_norm(parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2,
                   groups: Groups | None = None) -> float:
    """Scale gradients in place so that their global norm is at most max_norm; returns the norm before. Collective over
    tp. A norm that is not finite leaves the gradients unchanged."""
    tp = (current_groups() if groups is None else groups).tp
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    with_grad = [parameter for parameter in given if parameter.grad is not None]
    counted = [p.grad.detach() for p in with_grad if p.grad is not None and (tp.rank == 0 or partition_of(p))]
    device = given[0].device if given else torch.device("cpu")
    total = torch.zeros((), dtype=torch.float64, device=device)
    is_maximum = math.isinf(norm_type)
    for grad in counted:
        if grad.numel():
            term = norm_term(grad, norm_type)
            total = torch.maximum(total, term) if is_maximum else total + term
    norm = float(all_reduce(total, tp, "max")) if is_maximum else float(all_reduce(total, tp)) ** (1.0 / norm_type)
    if math.isfinite(norm) and norm > max_norm:
        for parameter in with_grad:
            assert parameter.grad is not None
            parameter.grad.mul_(max_norm / norm)
    return norm
