"""The autograd functions between replicated and split activations.

In a *region* the last dimension of the activations, or the sum that computes them, is split over the tensor-parallel
group. Each function crosses the border of a region; forward and backward are transposes:

    function              forward             backward
    copy_to_region        identity            all-reduce
    reduce_from_region    all-reduce          identity
    scatter_to_region     take my slice       all-gather
    gather_from_region    all-gather          take my slice

Sequence parallelism (Korthikanti et al., 2022) also splits positions, between the regions: rank r has the r-th part of
the flattened [b * s, ...], shaped [b, s / tp, ...]. What treats each position alone sees no difference, and nothing is
copied before or after a collective.

    gather_from_sequence_region         all-gather          reduce-scatter
    reduce_scatter_to_sequence_region   reduce-scatter      all-gather

A replicated tensor has the same value and gradient on every rank; the gradient counts once, not once per rank. On a
group of one each function returns its argument. Collectives are out of place, since autograd may have saved the tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from mpu.collectives import all_gather, all_reduce, reduce_scatter
from mpu.groups import Group
from mpu.split import split_range

GroupOperation = Callable[[Tensor, Group], Tensor]


def split_tensor_along_last_dim(x: Tensor, num_partitions: int,
                                contiguous_split_chunks: bool = False) -> tuple[Tensor, ...]:
    """[..., n] -> num_partitions times [..., n / num_partitions]."""
    start, stop = split_range(0, num_partitions, x.shape[-1])
    chunks = x.split(stop - start, dim=-1)
    return tuple(chunk.contiguous() for chunk in chunks) if contiguous_split_chunks else tuple(chunks)


def _my_slice(x: Tensor, tp: Group) -> Tensor:
    start, stop = split_range(tp.rank, tp.size, x.shape[-1])
    return x[..., start:stop].contiguous()  # [..., n] -> [..., n / tp]


class _RegionBorder(torch.autograd.Function):
    """A row of the tables above: one operation in forward, its transpose in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Group, operation: GroupOperation, transpose: GroupOperation) -> Tensor:
        ctx.tp, ctx.transpose = tp, transpose
        return operation(x, tp)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.transpose(grads[0], ctx.tp), None, None, None


def _apply(x: Tensor, tp: Group, operation: GroupOperation, transpose: GroupOperation) -> Tensor:
    if tp.is_solo:
        return x
    return cast(Tensor, _RegionBorder.apply(x, tp, operation, transpose))  # type: ignore[no-untyped-call]


def _identity(x: Tensor, tp: Group) -> Tensor:
    return x.view_as(x)  # not the input itself: the result is another tensor of the graph


def all_gather_positions(x: Tensor, tp: Group) -> Tensor:
    """[b, s / tp, ...] -> [b, s, ...]"""
    return all_gather(x.flatten(0, 1), tp, 0).view(len(x), -1, *x.shape[2:])


def reduce_scatter_positions(x: Tensor, tp: Group) -> Tensor:
    """[b, s, ...] -> the sum over ranks at this rank's positions, [b, s / tp, ...]"""
    return reduce_scatter(x.flatten(0, 1), tp).view(len(x), -1, *x.shape[2:])


def copy_to_region(x: Tensor, tp: Group) -> Tensor:
    """Replicated -> replicated; each rank uses it differently, so backward sums the gradients."""
    return _apply(x, tp, _identity, all_reduce)


def reduce_from_region(x: Tensor, tp: Group) -> Tensor:
    """Partial sums -> their sum, replicated."""
    return _apply(x, tp, all_reduce, _identity)


def scatter_to_region(x: Tensor, tp: Group) -> Tensor:
    """Replicated [..., n] -> this rank's slice [..., n / tp]."""
    return _apply(x, tp, _my_slice, all_gather)


def gather_from_region(x: Tensor, tp: Group) -> Tensor:
    """This rank's slice [..., n / tp] -> all slices [..., n], replicated."""
    return _apply(x, tp, all_gather, _my_slice)


def gather_from_sequence_region(x: Tensor, tp: Group) -> Tensor:
    """This rank's positions [b, s / tp, ...] -> all [b, s, ...]; each rank uses them differently, so backward sums."""
    return _apply(x, tp, all_gather_positions, reduce_scatter_positions)


def reduce_scatter_to_sequence_region(x: Tensor, tp: Group) -> Tensor:
    """Partial sums [b, s, ...] -> their sum at this rank's positions, [b, s / tp, ...]."""
    return _apply(x, tp, reduce_scatter_positions, all_gather_positions)


def replicated_to_partial(x: Tensor, tp: Group) -> Tensor:
    """Replicated -> a term of a partial sum: x on the first rank, zeros on the others. Each rank has the gradient of
    the sum, so a parameter that is added before a reduce-scatter needs no reduction of its gradient."""
    return x if tp.rank == 0 else x - x.detach()
