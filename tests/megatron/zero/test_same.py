"""Ranks whose models differ, or have their parameters or buffers in another order, get no engine: the first that
differs is named. The order within param groups is no difference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron import zero
from megatron.errors import ConfigError
from mpu.groups import build
from mpu.partition import set_partition
from mpu.split import Partition
from tests.distributed import on_ranks, run_ranks
from tests.megatron.zero import small

NAMES = ("alpha", "beta", "gamma")


class Named(nn.Module):
    """Layers and buffers that are registered in an order, and used in another, which is the same for all."""

    def __init__(self, names: tuple[str, ...] = NAMES, buffers: tuple[str, ...] = ("mean", "std")) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in names})
        for name, layer in self.layers.items():
            torch.nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(len(name) + ord(name[0])))
        for name in buffers:
            self.register_buffer(name, torch.full((2,), float(len(name))))

    def forward(self, x: Tensor) -> Tensor:
        x = (x - self.mean.sum()) / self.std.sum()
        for name in sorted(self.layers):
            x = torch.tanh(self.layers[name](x))
        return x.square().mean()


def engine_of(model: nn.Module, stage: int, parameters: Any = None, mpu: Any = None) -> Any:
    rule = torch.optim.SGD(parameters or model.parameters(), lr=0.5)
    return small.engine_of(stage, model, given={"optimizer": rule, "mpu": mpu})


def another_shape(rank: int) -> nn.Module:
    model = Named()
    model.layers["beta"].weight = nn.Parameter(torch.ones(4, 4) if rank == 0 else torch.ones(2, 8))
    return model


def frozen(rank: int) -> nn.Module:
    model = Named()
    model.layers["beta"].weight.requires_grad = rank == 0
    return model


def tiles_swapped(rank: int) -> nn.Module:
    order = ("first", "second") if rank == 0 else ("second", "first")
    return nn.Sequential(nn.ModuleDict({name: zero.TiledLinear(4, 4, in_splits=2, out_splits=2) for name in order}))


def sharded_on_one_rank(rank: int) -> nn.Module:
    """By zero.Init, over a group of this rank alone."""
    model = Named()
    if rank == 1:
        with zero.Init(data_parallel_group=torch.distributed.new_group([1], use_local_synchronization=True)):
            model.layers["beta"] = nn.Linear(4, 4, bias=False)
    return model


def another_dtype(rank: int) -> nn.Module:
    model = Named()
    model.std = torch.ones(2, dtype=torch.int64 if rank == 0 else torch.int32)
    return model


ALPHA, BETA = (f"layers.{name}.weight: float32 [4, 4]" for name in ("alpha", "beta"))
MODELS: dict[str, tuple[Callable[[int], nn.Module], str]] = {
    "swapped": (lambda rank: Named(NAMES if rank == 0 else ("beta", "alpha", "gamma")),
                f"parameter 0 is {ALPHA} in unit root on rank 0, {BETA} in unit root on rank 1; build the same model"),
    "one more": (lambda rank: Named(NAMES if rank == 0 else (*NAMES, "delta")),
                 "parameter 3 is not there on rank 0, layers.delta.weight: float32"),
    "shape": (another_shape, f"parameter 1 is {BETA} in unit root on rank 0, layers.beta.weight: float32 [2, 8]"),
    "frozen": (frozen, f"parameter 1 is {BETA} in unit root on rank 0, {BETA} (frozen) in unit"),
    "tiles": (tiles_swapped, "build the same model in the same order on every rank"),
    "zero.Init": (sharded_on_one_rank, f"parameter 1 is {BETA} in unit root on rank 0, {BETA} of zero.Init in"),
    "buffers": (lambda rank: Named(buffers=("mean", "std") if rank == 0 else ("std", "mean")),
                "buffer 0 is mean: float32 [2] on rank 0, std: float32 [2] on rank 1"),
    "dtype": (another_dtype, "buffer 1 is std: int64 [2] on rank 0, std: int32 [2] on rank 1")}


@on_ranks(2)
def test_ranks_with_other_models_get_no_engine(rank: int, world: int) -> None:
    for name, (make, told) in MODELS.items():
        with pytest.raises(ConfigError) as caught:
            engine_of(make(rank), 1)
        assert told in str(caught.value), name


class Slice(nn.Module):
    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, nn.Parameter(torch.ones(4)))
            set_partition(getattr(self, name), Partition(0))


def refused_in_a_tp_group(rank: int, world: int, odd: int) -> str:
    """`odd` has another order: one of a tensor parallel group, whose data parallel group agrees where it is solo."""
    try:
        engine_of(Slice(("a", "b") if rank != odd else ("b", "a")), 1, mpu=build(2))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("world, odd", [(2, 1), (4, 3), (4, -1)])
def test_ranks_of_a_tensor_parallel_group_have_the_same_names(world: int, odd: int) -> None:
    said = set(run_ranks(refused_in_a_tp_group, world, odd))
    assert len(said) == 1
    others = "rank 0" if world == 2 else "ranks 0-2"
    expected = f"parameter 0 is a: float32 [4] in unit root on {others}, b: float32 [4] in unit root on rank {odd}"
    assert (expected in next(iter(said))) == (odd >= 0), said


@on_ranks(2)
def test_the_order_within_param_groups_is_no_difference(rank: int, world: int) -> None:
    batch = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    for stage in range(4):
        plain, model = Named(), Named()
        rule = torch.optim.SGD(plain.parameters(), lr=0.5)
        engine = engine_of(model, stage, parameters=list(model.parameters())[::-1 if rank else 1])
        for number in range(3):
            parts = [part.roll(number, 0) for part in batch.chunk(2)]
            rule.zero_grad()
            torch.stack([plain(part) for part in parts]).mean().backward()
            rule.step()
            engine.backward(engine(parts[rank]))
            engine.step()
        expected = dict(plain.named_parameters())
        with zero.GatheredParameters(list(engine.module.parameters())):
            for name, value in engine.module.named_parameters():
                assert (value - expected[name]).abs().max() <= 1e-6  # the order of a sum
