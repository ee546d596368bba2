"""Norms: exact enough on large tensors, and the same for every tensor-parallel size."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpu import grads
from mpu.grads import NORM_ROW, clip_grad_norm, row_norms, sum_of_squares
from mpu.groups import Groups, build
from mpu.partition import local_slice, set_partition
from mpu.split import Partition
from tests.distributed import run_ranks


def test_sums_of_squares_are_those_of_float64_also_beyond_fp32() -> None:
    for size, dtype, large in product((0, 1, 128, 1000, 3_000_001),
                                      (torch.float32, torch.bfloat16, torch.float16, torch.float64),
                                      (None, 1e19, 1e20, -1e30, 3e36)):
        x = (torch.randn(size, generator=torch.Generator().manual_seed(0)) * 1e-2 + 5e-3).to(dtype)
        if large is not None and dtype != torch.float16:
            x[::999] = large
        result = sum_of_squares(x)
        assert result.dtype == torch.float64 and result.shape == ()
        # A norm of a row is rounded to fp32, which shows where there is one row.
        torch.testing.assert_close(result, x.double().square().sum(), rtol=2e-7 if large is None else 1e-6, atol=0)
        whole = size // NORM_ROW * NORM_ROW
        rows = row_norms(x[:whole])
        assert rows.dtype == torch.float32
        torch.testing.assert_close(rows, x[:whole].double().view(-1, NORM_ROW).norm(dim=1).float(), rtol=1e-6, atol=0)


def test_rows_are_told_apart_whatever_lies_beside_them() -> None:
    x = torch.zeros(3000, NORM_ROW)
    sizes = torch.logspace(-18, 36, 3000, dtype=torch.float64).float()
    x[torch.arange(3000), torch.arange(3000) % NORM_ROW] = -sizes
    x[::7] = 0
    torch.testing.assert_close(row_norms(x.flatten()), x.abs().amax(1), rtol=1e-6, atol=0)


def test_an_accelerator_copies_a_bounded_part_to_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grads, "on_accelerator", lambda where: True)
    monkeypatch.setattr(grads, "load_kernels", lambda *which: None)
    monkeypatch.setattr(grads, "_FP64_BLOCK_ELEMENTS", 4 * NORM_ROW)
    x = torch.randn(10 * NORM_ROW, generator=torch.Generator().manual_seed(0)) * 1e25
    longest: list[int] = []
    norm = torch.linalg.vector_norm

    def noted(rows: Tensor, **chosen: Any) -> Tensor:
        longest.append(rows.numel())
        result: Tensor = norm(rows, **chosen)
        return result

    monkeypatch.setattr(torch.linalg, "vector_norm", noted)
    torch.testing.assert_close(row_norms(x), norm(x.double().view(-1, NORM_ROW), dim=1).float(), rtol=1e-6, atol=0)
    assert longest == [4 * NORM_ROW, 4 * NORM_ROW, 2 * NORM_ROW]


def test_what_is_not_finite_stays_so_beside_large_numbers() -> None:
    for value in (math.inf, -math.inf, math.nan):
        x = torch.ones(4 * NORM_ROW)
        x[3], x[NORM_ROW + 1], x[-1] = 1e30, value, -1e25
        assert row_norms(x).isfinite().tolist() == [True, False, True, True]
        assert not math.isfinite(sum_of_squares(x).item())
    assert sum_of_squares(torch.full((4,), 60000.0, dtype=torch.float16)).item() == 4 * 60000.0**2


def _gradients() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(8, 6, generator=generator), torch.randn(5, generator=generator) * 3


Clip = tuple[float, Tensor, Tensor]
CLIPS = [*product((0.5, 1e6), (2.0, math.inf, 3.0))]  # the norm that is allowed, and its order


def _clips(rank: int, world: int) -> list[Clip]:
    groups = build(world) if world > 1 else Groups()
    return [_clip(rank, world, groups, *clip) for clip in CLIPS]


def _clip(rank: int, world: int, groups: Groups, max_norm: float, norm_type: float) -> Clip:
    whole, replicated = _gradients()
    cut = Partition(0)
    split = nn.Parameter(torch.zeros(8 // world, 6))
    split.grad = local_slice(whole, cut, rank, world).clone()
    set_partition(split, cut)
    shared = nn.Parameter(torch.zeros(5))
    shared.grad = replicated.clone()
    unused = nn.Parameter(torch.zeros(2))
    norm = clip_grad_norm([split, shared, unused], max_norm, norm_type, groups)
    return norm, split.grad, shared.grad


@pytest.mark.parametrize("world", [1, 4])
def test_clipping_does_not_depend_on_the_layout(world: int) -> None:
    whole, replicated = _gradients()
    for (max_norm, norm_type), *results in zip(CLIPS, *run_ranks(_clips, world), strict=True):
        expected = torch.linalg.vector_norm(torch.cat([whole.flatten(), replicated]), norm_type).item()
        factor = min(1.0, max_norm / expected)
        for norm, _, shared in results:
            assert norm == pytest.approx(expected, rel=1e-6) and norm == results[0][0]
            torch.testing.assert_close(shared, replicated * factor)
        torch.testing.assert_close(torch.cat([split for _, split, _ in results]), whole * factor)


def test_a_norm_that_is_not_finite_leaves_the_gradients_alone() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.tensor([1.0, math.inf, 2.0])
    assert clip_grad_norm(parameter, 1.0, groups=Groups()) == math.inf
    assert parameter.grad.tolist() == [1.0, math.inf, 2.0]
