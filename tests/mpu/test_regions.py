"""The four region functions: transposes of each other, and harmless to the tensors around them; and the arithmetic of
who owns what."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mpu.groups import SOLO, build
from mpu.partition import join_local_slices, local_slice
from mpu.regions import (
    copy_to_region, gather_from_region, reduce_from_region, scatter_to_region, split_tensor_along_last_dim,
)
from mpu.split import ParallelError, Partition, divide, pad_vocab, rank_grid, split_range
from tests.distributed import on_ranks


def _values(rank: int, *shape: int) -> Tensor:
    return torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(rank)).float()


@on_ranks(4)
def test_forward_and_backward_are_the_table(rank: int, world: int) -> None:
    tp = build(world).tp
    x = [_values(r, 3, 8) for r in range(world)]
    g = [_values(10 + r, 3, 8) for r in range(world)]
    g_wide = [_values(10 + r, 3, 8 * world) for r in range(world)]
    g_slim = [_values(10 + r, 3, 8 // world) for r in range(world)]
    for region, forward, backward in (
            (copy_to_region, x[rank], sum(g)), (reduce_from_region, sum(x), g[rank]),
            (scatter_to_region, x[rank].chunk(world, -1)[rank], torch.cat(g_slim, -1)),
            (gather_from_region, torch.cat(x, -1), g_wide[rank].chunk(world, -1)[rank])):
        mine = x[rank].clone().requires_grad_()
        y = region(mine, tp)
        (grad,) = torch.autograd.grad(y, mine, _values(10 + rank, *y.shape))
        assert torch.equal(y, forward) and torch.equal(grad, backward), region
        assert region(x[0], SOLO) is x[0], "on a group of one a region is its argument"


@on_ranks(2)
def test_a_reduction_leaves_saved_tensors_and_sibling_gradients_alone(rank: int, world: int) -> None:
    tp = build(world).tp
    a = torch.tensor([0.3, -0.2, 0.5], requires_grad=True)
    reduce_from_region(torch.tanh(a), tp).sum().backward()  # tanh keeps its output for backward
    z, b = torch.zeros(3, requires_grad=True), torch.zeros(3, requires_grad=True)
    gradient = torch.tensor([1.0, 2.0, 3.0])
    (z + copy_to_region(b, tp)).backward(gradient.clone())  # one gradient, two receivers
    assert a.grad is not None and z.grad is not None and b.grad is not None
    torch.testing.assert_close(a.grad, 1 - a.detach().tanh().square())
    assert torch.equal(z.grad, gradient) and torch.equal(b.grad, gradient * world)


def test_split_along_the_last_dimension() -> None:
    parts = split_tensor_along_last_dim(torch.arange(12).view(2, 6), 3, contiguous_split_chunks=True)
    assert [part.tolist() for part in parts] == [[[0, 1], [6, 7]], [[2, 3], [8, 9]], [[4, 5], [10, 11]]]
    assert all(part.is_contiguous() for part in parts)
    with pytest.raises(ParallelError, match="6 is not divisible by 4"):
        split_tensor_along_last_dim(torch.zeros(2, 6), 4)


def test_ranges_cover_the_length_once() -> None:
    for parts, length in ((1, 7), (2, 8), (4, 8), (3, 0)):
        ranges = [split_range(rank, parts, length) for rank in range(parts)]
        assert [i for start, stop in ranges for i in range(start, stop)] == list(range(length))


def test_padded_vocabulary_is_the_smallest_that_fits() -> None:
    for tp in (1, 2, 4):
        size = pad_vocab(50257, 128, tp)
        assert size % (128 * tp) == 0 and 0 <= size - 50257 < 128 * tp
        assert pad_vocab(size, 128, tp) == size


def test_every_rank_is_in_one_group_of_each_kind_and_they_meet_once() -> None:
    for world, tp in ((1, 1), (6, 3), (8, 8), (12, 4)):
        tp_groups, dp_groups = rank_grid(world, tp)
        for groups in (tp_groups, dp_groups):
            assert sorted(rank for group in groups for rank in group) == list(range(world))
        assert all(len(set(a) & set(b)) == 1 for a in tp_groups for b in dp_groups)


def test_an_impossible_split_is_refused_with_both_numbers() -> None:
    for world, tp in ((4, 3), (2, 4), (4, 0)):
        with pytest.raises(ParallelError, match=f"{tp}.*{world}"):
            rank_grid(world, tp)
    with pytest.raises(ParallelError, match="heads 7 .* 2"):
        divide(7, 2, "heads")


def test_slices_join_to_the_whole_and_stride_gives_each_rank_a_slice_of_each_part() -> None:
    full = torch.arange(24 * 16).view(24, 16)
    for partition in (Partition(0), Partition(1), Partition(0, 3), Partition(1, 2)):
        for tp in (1, 2, 4):
            pieces = [local_slice(full, partition, rank, tp) for rank in range(tp)]
            assert torch.equal(join_local_slices(pieces, partition), full)
    qkv = torch.tensor([0, 1, 10, 11, 20, 21])
    assert local_slice(qkv, Partition(0, 3), 1, 2).tolist() == [1, 11, 21]
