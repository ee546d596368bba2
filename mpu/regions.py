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

from typing import Any, cast

import torch
from torch import Tensor

from mpu.collectives import all_gather, all_reduce, reduce_scatter
from mpu.groups import Group
from mpu.split import split_range


def split_tensor_along_last_dim(x: Tensor, num_partitions: int,
                                contiguous_split_chunks: bool = False) -> tuple[Tensor, ...]:
    """[..., n] -> num_partitions times [..., n / num_partitions]."""
    start, stop = split_range(0, num_partitions, x.shape[-1])
    chunks = x.split(stop - start, dim=-1)
    return tuple(chunk.contiguous() for chunk in chunks) if contiguous_split_chunks else tuple(chunks)


def _my_slice(x: Tensor, tp: Group) -> Tensor:
    start, stop = split_range(tp.rank, tp.size, x.shape[-1])
    return x[..., start:stop].contiguous()  # [..., n] -> [..., n / tp]


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Group) -> Tensor:
        ctx.tp = tp
        return x.view_as(x)  # not the input itself: the result is another tensor of the graph

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grads[0], ctx.tp), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Group) -> Tensor:
        return all_reduce(x, tp)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None  # every rank's partial sum has the gradient of the sum


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Group) -> Tensor:
        ctx.tp = tp
        return _my_slice(x, tp)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_gather(grads[0], ctx.tp), None  # [..., n / tp] -> [..., n]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Group) -> Tensor:
        ctx.tp = tp
        return all_gather(x, tp)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _my_slice(grads[0], ctx.tp), None


def all_gather_positions(x: Tensor, tp: Group) -> Tensor:
    """[b, s / tp, ...] -> [b, s, ...]"""
    return all_gather(x.flatten(0, 1), tp, 0).view(len(x), -1, *x.shape[2:])


def reduce_scatter_positions(x: Tensor, tp: Group) -> Tensor:
    """[b, s, ...] -> the sum over ranks at this rank's positions, [b, s / tp, ...]"""
    return reduce_scatter(x.flatten(0, 1), tp).view(len(x), -1, *x.shape[2:])


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Group) -> Tensor:
        ctx.tp = tp
        return all_gather_positions(x, tp)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter_positions(grads[0], ctx.tp), None


class _ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Group) -> Tensor:
        ctx.tp = tp
        return reduce_scatter_positions(x, tp)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_gather_positions(grads[0], ctx.tp), None


def _apply(function: type[torch.autograd.Function], x: Tensor, tp: Group) -> Tensor:
    return x if tp.is_solo else cast(Tensor, function.apply(x, tp))


def copy_to_region(x: Tensor, tp: Group) -> Tensor:
    """Replicated -> replicated; each rank uses it differently, so backward sums the gradients."""
    return _apply(_Copy, x, tp)


def reduce_from_region(x: Tensor, tp: Group) -> Tensor:
    """Partial sums -> their sum, replicated."""
    return _apply(_Reduce, x, tp)


def scatter_to_region(x: Tensor, tp: Group) -> Tensor:
    """Replicated [..., n] -> this rank's slice [..., n / tp]."""
    return _apply(_Scatter, x, tp)


def gather_from_region(x: Tensor, tp: Group) -> Tensor:
    """This rank's slice [..., n / tp] -> all slices [..., n], replicated."""
    return _apply(_Gather, x, tp)


def gather_from_sequence_region(x: Tensor, tp: Group) -> Tensor:
    """This rank's positions [b, s / tp, ...] -> all [b, s, ...]; each rank uses them differently, so backward sums."""
    return _apply(_GatherSequence, x, tp)


def reduce_scatter_to_sequence_region(x: Tensor, tp: Group) -> Tensor:
    """Partial sums [b, s, ...] -> their sum at this rank's positions, [b, s / tp, ...]."""
    return _apply(_ReduceScatterSequence, x, tp)


def replicated_to_partial(x: Tensor, tp: Group) -> Tensor:
    """Replicated -> a term of a partial sum: x on the first rank, zeros on the others. Each rank has the gradient of
    the sum, so a parameter that is added before a reduce-scatter needs no reduction of its gradient."""
    return x if tp.rank == 0 else x - x.detach()
