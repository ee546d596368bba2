"""The four region functions: transposes of each other, and harmless to the tensors around them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mpu.groups import SOLO, Group, build
from mpu.regions import (
    copy_to_region, gather_from_region, reduce_from_region, scatter_to_region, split_tensor_along_last_dim,
)
from mpu.split import ParallelError
from tests.distributed import run_ranks

Region = Callable[[Tensor, Group], Tensor]
REGIONS: list[Region] = [copy_to_region, reduce_from_region, scatter_to_region, gather_from_region]


def _values(rank: int, *shape: int) -> Tensor:
    return torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(rank)).float()


def _forward_backward(rank: int, world: int, region: Region, width: int) -> tuple[Tensor, Tensor]:
    tp = build(world).tp
    x = _values(rank, 3, width).requires_grad_()
    y = region(x, tp)
    (grad,) = torch.autograd.grad(y, x, _values(10 + rank, *y.shape))
    return y.detach(), grad


@pytest.mark.parametrize("world", [2, 4])
def test_forward_and_backward_are_the_table(world: int) -> None:
    x = [_values(r, 3, 8) for r in range(world)]
    g = [_values(10 + r, 3, 8) for r in range(world)]
    g_wide = [_values(10 + r, 3, 8 * world) for r in range(world)]
    g_slim = [_values(10 + r, 3, 8 // world) for r in range(world)]
    total_x, total_g = torch.stack(x).sum(0), torch.stack(g).sum(0)
    expected: dict[Region, list[tuple[Tensor, Tensor]]] = {
        copy_to_region: [(x[r], total_g) for r in range(world)],
        reduce_from_region: [(total_x, g[r]) for r in range(world)],
        scatter_to_region: [(x[r].chunk(world, -1)[r], torch.cat(g_slim, -1)) for r in range(world)],
        gather_from_region: [(torch.cat(x, -1), g_wide[r].chunk(world, -1)[r]) for r in range(world)],
    }
    for region, by_rank in expected.items():
        results = run_ranks(_forward_backward, world, region, 8)
        for (y, grad), (forward, backward) in zip(results, by_rank, strict=True):
            assert torch.equal(y, forward) and torch.equal(grad, backward), region


def _siblings(rank: int, world: int) -> tuple[Tensor, Tensor]:
    tp = build(world).tp
    a = torch.tensor([0.3, -0.2, 0.5], requires_grad=True)
    reduce_from_region(torch.tanh(a), tp).sum().backward()  # tanh keeps its output for backward
    z = torch.zeros(3, requires_grad=True)
    b = torch.zeros(3, requires_grad=True)
    (z + copy_to_region(b, tp)).backward(torch.tensor([1.0, 2.0, 3.0]))  # one gradient, two receivers
    assert a.grad is not None and z.grad is not None and b.grad is not None
    assert torch.equal(b.grad, torch.tensor([1.0, 2.0, 3.0]) * world)
    return a.grad, z.grad


def test_a_reduction_leaves_saved_tensors_and_sibling_gradients_alone() -> None:
    expected = 1 - torch.tensor([0.3, -0.2, 0.5]).tanh().square()
    for through_tanh, sibling in run_ranks(_siblings, 2):
        torch.testing.assert_close(through_tanh, expected)
        assert torch.equal(sibling, torch.tensor([1.0, 2.0, 3.0]))


@pytest.mark.parametrize("region", REGIONS)
def test_on_a_group_of_one_a_region_is_its_argument(region: Region) -> None:
    x = torch.ones(2, 3)
    assert region(x, SOLO) is x


def test_split_along_the_last_dimension() -> None:
    parts = split_tensor_along_last_dim(torch.arange(12).view(2, 6), 3, contiguous_split_chunks=True)
    assert [part.tolist() for part in parts] == [[[0, 1], [6, 7]], [[2, 3], [8, 9]], [[4, 5], [10, 11]]]
    assert all(part.is_contiguous() for part in parts)
    with pytest.raises(ParallelError, match="6 is not divisible by 4"):
        split_tensor_along_last_dim(torch.zeros(2, 6), 4)
