"""A layer in tiles computes what one layer computes, and a model in tiles trains as one without."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.errors import ConfigError
from megatron.zero.tiling import TiledLinear, TiledLinearReturnBias
from mpu.groups import build as build_groups
from mpu.layers import ColumnParallelLinear, RowParallelLinear
from tests.distributed import on_ranks
from tests.megatron.helpers import TINY, steps, total_digest, train

CLOSE = dict(rtol=1e-12, atol=1e-12)
"""fp64 sums of at most a few dozen products of order 1, taken in another order: some 1e-15."""


class BiasBeside(nn.Linear):
    """A layer that leaves its bias to the caller."""

    def forward(self, x: Tensor) -> Any:
        return nn.functional.linear(x, self.weight), self.bias


def gradients(*tensors: Tensor) -> list[Tensor]:
    found = [tensor.grad for tensor in tensors]
    for tensor in tensors:
        tensor.grad = None
    return found  # type: ignore[return-value]


@pytest.mark.parametrize(("width", "height", "bias"), [(6, 12, False), (7, 5, True)])
def test_tiles_compute_what_one_layer_computes(width: int, height: int, bias: bool) -> None:
    torch.manual_seed(1)
    whole = nn.Linear(width, height, bias).double()
    x = torch.randn(2, 3, width, dtype=torch.float64, requires_grad=True)
    g = torch.randn(2, 3, height, dtype=torch.float64)
    whole(x).backward(g)
    x_grad, weight_grad = gradients(x, whole.weight)
    for in_splits, out_splits in itertools.product((1, 2, 3, width), (1, 2, 3, height)):
        tiled = TiledLinear(width, height, bias, in_splits, out_splits, init_linear=whole, dtype=torch.float64)
        y = tiled(x)
        torch.testing.assert_close(y, whole(x), **CLOSE)
        y.backward(g)
        torch.testing.assert_close(gradients(x)[0], x_grad, **CLOSE)
        rows = [torch.cat([tile.weight.grad for tile in row], 1) for row in tiled.linears]
        torch.testing.assert_close(torch.cat(rows), weight_grad, **CLOSE)
        if bias:  # once a row, or it would count in_splits times
            torch.testing.assert_close(torch.cat([row[-1].bias.grad for row in tiled.linears]), g.sum((0, 1)), **CLOSE)
        assert sum(p.numel() for p in tiled.parameters()) == sum(p.numel() for p in whole.parameters())


def test_input_and_output_may_come_and_go_in_parts() -> None:
    whole = nn.Linear(7, 5).double()
    tiled = TiledLinear(7, 5, True, 3, 2, True, False, init_linear=whole, dtype=torch.float64)
    x = torch.randn(4, 7, dtype=torch.float64)
    parts = tiled(x.split(tiled.in_sizes, -1))
    assert [part.shape[-1] for part in parts] == [3, 2]
    torch.testing.assert_close(torch.cat(parts, -1), whole(x), **CLOSE)
    for wrong, found in ((x, "one tensor"), (x.split([3, 4], -1), "found 2")):
        with pytest.raises(ConfigError, match=f"expected 3 tensors.*{found}"):
            tiled(wrong)


def test_biases_that_are_returned_are_joined_and_not_added() -> None:
    whole = nn.Linear(6, 5).double()
    x = torch.randn(4, 6, dtype=torch.float64)
    tiled = TiledLinearReturnBias(6, 5, True, 3, 2, linear_cls=BiasBeside, init_linear=whole, dtype=torch.float64)
    y, bias = tiled(x)
    assert bias.equal(whole.bias)
    torch.testing.assert_close(y + bias, whole(x), **CLOSE)
    tiled.combine_out_splits = False
    outputs, biases = tiled(x)
    assert torch.cat(outputs, -1).equal(y) and torch.cat(biases).equal(bias)
    without = TiledLinearReturnBias(6, 5, False, 3, 2, linear_cls=BiasBeside, dtype=torch.float64)
    assert without(x)[1] is None


def test_splits_beyond_the_features_and_parameters_that_do_not_fit_are_refused() -> None:
    for splits, name in itertools.product((0, -1, 7), ("in_splits", "out_splits")):
        with pytest.raises(ConfigError, match=f"{name} is {splits}: expected a number from 1 to the 6 features"):
            TiledLinear(6, 6, **{name: splits})
    for other, told in ((nn.Linear(5, 6), "expected a weight"), (nn.Linear(6, 6, False), "has bias=True")):
        with pytest.raises(ConfigError, match=told):
            TiledLinear(6, 6, in_splits=2, init_linear=other)


@on_ranks(2)
def test_tensor_parallel_tiles_compute_what_one_tensor_parallel_layer_computes(rank: int, world: int) -> None:
    """Column tiles that gather and row tiles that scatter, alone; and the two with split features between them."""
    tp = build_groups(world).tp
    torch.manual_seed(5)
    x = torch.randn(3, 4, dtype=torch.float64)
    same: dict[str, Any] = dict(tp=tp, dtype=torch.float64)
    for kind, given in ((ColumnParallelLinear, {}), (ColumnParallelLinear, {"skip_bias_add": True}),
                        (RowParallelLinear, {}), (RowParallelLinear, {"skip_bias_add": True})):
        one = kind(4, 8, init_method=nn.init.normal_, **given, **same)
        nn.init.normal_(one.bias)  # rank by rank for columns, so that parts cannot be confused
        if kind is RowParallelLinear:
            torch.distributed.broadcast(one.bias.data, 0)
        cls = TiledLinearReturnBias if given else TiledLinear
        tiled = cls(4, 8, True, 2, 2, linear_cls=kind, init_linear=one, **given, **same)
        torch.testing.assert_close(tiled(x), one(x), **CLOSE)
    wide = ColumnParallelLinear(4, 8, gather_output=False, **same)
    narrow = RowParallelLinear(8, 4, input_is_parallel=True, **same)
    tiled_wide = TiledLinear(4, 8, True, 1, 2, linear_cls=ColumnParallelLinear, init_linear=wide, gather_output=False,
                             **same)
    tiled_narrow = TiledLinear(8, 4, True, 2, 2, linear_cls=RowParallelLinear, init_linear=narrow,
                               input_is_parallel=True, **same)
    torch.testing.assert_close(tiled_narrow(tiled_wide(x)), narrow(wide(x)), **CLOSE)
    strided = ColumnParallelLinear(4, 12, stride=3, **same)
    torch.testing.assert_close(
        TiledLinear(4, 12, True, 2, 3, linear_cls=ColumnParallelLinear, init_linear=strided, **same)(x), strided(x),
        **CLOSE)


# ---- the flags ---------------------------------------------------------------------------------------------------


TILED = ["--memory-centric-tiled-linear", "--tile-factor", "2"]


def test_a_tiled_run_trains_as_one_without_tiles_and_resumes(tmp_path: Path) -> None:
    argv = [*TINY, "--mock-data", "--train-iters", "3", "--batch-size", "2"]
    stage3 = ["--zero-stage", "3", "--checkpoint-activations"]
    for name, more in (("plain", []), ("tiled", TILED), ("stage3", [*TILED, *stage3])):
        train([*argv, *more, "--metrics-file", tmp_path / name, "--save", tmp_path / f"save-{name}"])
    plain, tiled, stage3_run = (steps(tmp_path / name) for name in ("plain", "tiled", "stage3"))
    for row, other in zip(tiled, plain, strict=True):  # with dropout: the same masks
        assert row["lm_loss"] == pytest.approx(other["lm_loss"], abs=1e-5)  # fp32 sums in another order, 3 steps
        assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
    for row, other in zip(stage3_run, tiled, strict=True):
        assert row["lm_loss"] == other["lm_loss"]
        assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-12)  # buckets in another order, in fp64
    half = [*argv, *TILED, "--save", tmp_path / "half", "--load", tmp_path / "half"]
    train([*half, "--exit-interval", "2"])
    train(half)
    assert total_digest(tmp_path / "half") == total_digest(tmp_path / "save-tiled")
