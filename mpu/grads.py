"""Gradients: where an operation may write a weight gradient itself (`MainGrad`), and their norm and clipping.

A tensor-parallel parameter's gradient is a different slice on every tp rank: all of them count in the norm. A
replicated one counts once, on rank 0. Gradients are already reduced over data parallelism.
`MainGrad` is Megatron's `main_grad` as a protocol: the owner of the gradient buffer (the engine) implements it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from mpu.collectives import all_reduce
from mpu.device import load_kernels, on_accelerator
from mpu.groups import Groups
from mpu.parallel_state import current_groups
from mpu.partition import partition_of


class MainGradReservation(Protocol):
    """A gradient that a forward prepares in its place before it is known to count."""

    @property
    def buffer(self) -> Tensor:
        """Where to write it; for the forward that made the claim only, as the owner may move it away afterwards."""

    def commit(self, scale: Tensor | None = None) -> None:
        """It counts, times `factor`: the backward of that forward has come. Once."""


class MainGrad(Protocol):
    """The place of one parameter's gradient."""

    def reserve(self) -> MainGradReservation | None:
        """The place itself; None where there is a gradient already."""

    def accumulated(self) -> Tensor:
        """The gradient so far, zeros if there is none, to add to."""


_CPU_BLOCK_ELEMENTS = 1 << 20
"""Elements squared at a time on CPU: bounds the memory; small enough for the cache, large enough for two threads."""

_FP64_BLOCK_ELEMENTS = 1 << 23
"""Elements that an accelerator without the kernel copies into fp64 at a time: 64 MiB."""


NORM_ROW = 128
"""Elements whose squares are summed at a time, in fp32 on CPU, before fp64 takes over; see row_norms."""


def row_norms(flat: Tensor, out: Tensor | None = None) -> Tensor:
    """The fp32 norm of each row of NORM_ROW elements: flat [n x NORM_ROW] -> [n].

    torch's own fp32 norm adds all terms in one chain on CPU and is off by 0.5% at 40 million elements. Rows of a fixed
    length are summed in fp32, what they sum to in fp64: 1e-9 there, and cutting a buffer at a row gives the same rows.

    In fp32 the square of an element above 1e19 is infinite. A CPU looks, and takes such a row again in fp64; an
    accelerator must not be asked: its kernel never squares a large number."""
    rows = flat.detach().view(-1, NORM_ROW)
    out = torch.empty(len(rows), dtype=torch.float32, device=flat.device) if out is None else out
    if not on_accelerator(flat):
        _row_norms_cpu(rows, out)
    elif (kernel := _kernel_on(flat.device)) is not None and kernel.serves(rows):
        kernel.norms_into(out, rows)
    else:
        at_a_time = _FP64_BLOCK_ELEMENTS // NORM_ROW
        for block, place in zip(rows.split(at_a_time), out.split(at_a_time), strict=True):
            place.copy_(torch.linalg.vector_norm(block, dim=1, dtype=torch.float64))
    return out


def _row_norms_cpu(rows: Tensor, out: Tensor) -> None:
    at_a_time = _CPU_BLOCK_ELEMENTS // NORM_ROW
    for block, place in zip(rows.split(at_a_time), out.split(at_a_time), strict=True):
        torch.linalg.vector_norm(block.float(), dim=1, out=place)
        if not math.isfinite(place.sum()):
            large = place.isinf()
            place[large] = torch.linalg.vector_norm(block[large].double(), dim=1).float()


@cache
def _kernel_on(device: torch.device) -> ModuleType | None:
    def load() -> ModuleType:
        from mpu import norm_kernel
        return norm_kernel

    return load_kernels(load, device, "no kernel for the norms of gradients, which are copied to fp64 without it")


def sum_of_squares(x: Tensor) -> Tensor:
    """Sum of x**2 as a float64 scalar on x's device, in bounded memory: by rows."""
    flat = x.detach().reshape(-1)
    whole = len(flat) // NORM_ROW * NORM_ROW
    total = row_norms(flat[:whole]).double().square().sum()
    if whole < len(flat):
        total = total + torch.linalg.vector_norm(flat[whole:].double()).square()
    return total


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
