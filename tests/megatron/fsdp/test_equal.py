"""A model trained through the FSDP face becomes what DistributedDataParallel makes of it.

Tolerance: sums over ranks and of squares are taken in another order. Losses above 1 are compared relatively.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.distributed import on_ranks, run_ranks
from tests.megatron.fsdp.loops import (CLIP, RATE, WAYS, adamw, around, batch, by_ddp, by_shards, mixed, train,
                                       whole)
from tests.megatron.zero import models
from tests.wires import accelerator_side

STEPS, FEW, TOLERANCE = 50, 10, 1e-6
"""FEW steps show what a wrong gradient or order does; rounding that grows is seen in STEPS."""


class Gated(models.Net):
    """Like a mixture of experts at stage 3: each rank runs all blocks, and takes the result of one."""

    def middle(self, x: Tensor) -> Tensor:
        chosen = int(x.detach().sum() > 0)
        return sum((block(x) * (number == chosen) for number, block in enumerate(self.blocks)), x)


MODELS: dict[str, type[nn.Module]] = {
    "tied": models.Words, "frozen": models.Frozen, "gated": Gated, "odd sizes": models.OddSizes, "dicts": models.Dicts,
    "layer drop": models.LayerDrop, "permuted": models.Permuted, "in place": models.InPlace,
    "three elements": models.ThreeElements, "no list": models.NoList, "all in blocks": models.AllInBlocks,
    "ends in a block": models.EndsInABlock, "root ends in a block": models.RootEndsInABlock,
    "slices": models.Slices, "passes": models.Passes, "twice": models.Twice, "frozen twice": models.FrozenTwice,
}


GROWS = {"permuted"}
"""Models in which rounding to fp32 grows to 8e-6 in 50 steps: in fp64 what is left is that of the loss (2e-7)."""


def rate_of(name: str) -> float:
    """GPT-2's is a usual one: what rounding does to its many small gradients grows with it."""
    return 3e-4 if name == "tied" else RATE


def difference(one: tuple[list[float], dict[str, Tensor]], other: tuple[list[float], dict[str, Tensor]]) -> float:
    losses = max(abs(a - b) / max(1, abs(a)) for a, b in zip(one[0], other[0], strict=True))
    assert one[1].keys() == other[1].keys()
    return max([losses, *(float((one[1][name].double() - other[1][name].double()).abs().max())
                          for name in one[1] if one[1][name].numel())])


def both(rank: int, world: int, name: str, ways: Sequence[str], steps: int) -> dict[str, float]:
    """Each way's difference from DistributedDataParallel."""
    torch.manual_seed(1)
    torch.set_default_dtype(torch.float64 if name in GROWS else torch.float32)
    plain = by_ddp(MODELS[name], rank, steps, rate_of(name))
    return {way: difference(plain, by_shards(MODELS[name], way, rank, steps, rate_of(name))) for way in ways}


def check(found: list[dict[str, float]]) -> None:
    """Of all ranks."""
    assert not [(way, off) for rank in found for way, off in rank.items() if not off <= TOLERANCE]


@pytest.mark.parametrize("name, world, ways", [
    ("gated", 2, WAYS), ("slices", 2, ["twice nested"]), ("frozen twice", 2, ["torch"]), ("tied", 3, ["torch"])])
def test_losses_and_weights_are_those_of_ddp(name: str, world: int, ways: Sequence[str]) -> None:
    check(run_ranks(both, world, name, ways, FEW))


@on_ranks(2)
def test_ranks_beside_accelerators_may_use_other_layers_of_the_root(rank: int, world: int) -> None:
    """Rank 1 does not use a layer of the root, and nobody a block's."""
    class Chooses(models.Net):
        def middle(self, x: Tensor) -> Tensor:
            if rank == 0:
                x = x + self.sometimes(x)
            return super().middle(x)

        def change(self) -> None:
            self.sometimes, self.never = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)

    with accelerator_side():
        plain = by_ddp(Chooses, rank, 5)
        found = by_shards(Chooses, "torch", rank, 5)
    start = Chooses().state_dict()
    assert difference(plain, found) <= TOLERANCE
    assert torch.equal(found[1]["never.weight"], start["never.weight"])
    assert not torch.equal(found[1]["sometimes.weight"], start["sometimes.weight"])


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_losses_and_weights_are_those_of_ddp_of_every_model(name: str, world: int) -> None:
    check(run_ranks(both, world, name, WAYS, STEPS, timeout=300))


@on_ranks(2)
def test_wrapping_at_any_depth_gives_equal_bits(rank: int, world: int) -> None:
    losses, weights = by_shards(models.Net, WAYS[0], rank, 10)
    for way in WAYS[1:]:
        found = by_shards(models.Net, way, rank, 10)
        assert found[0] == losses and all(torch.equal(found[1][name], weight) for name, weight in weights.items()), way


@on_ranks(1, init=False)
def test_one_process_without_a_group_is_the_plain_loop(rank: int, world: int) -> None:
    """Nothing travels."""
    plain = models.Net()
    losses = train(plain, lambda: torch.nn.utils.clip_grad_norm_(plain.parameters(), CLIP), 0, 10)
    for way in WAYS:
        found = by_shards(models.Net, way, 0, 10)
        assert difference((losses, dict(plain.state_dict())), found) <= TOLERANCE, way


@on_ranks(2)
def test_parameters_that_are_looked_at_within_a_pass_train_the_same_bits(rank: int, world: int) -> None:
    """Of a 16-bit run: who looks at parameters between a forward and its backward finds what they are at rest."""
    found = []
    for looks in (False, True):
        model: Any = around(models.Net(), "torch", **mixed("torch", torch.bfloat16))
        optimizer = adamw(model)
        for step in range(3):
            loss = model(batch(rank, step))
            if looks:
                optimizer.zero_grad()
                assert all(parameter.mul(1).dtype == torch.float32 for parameter in model.blocks[0].parameters())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(whole(model))
    assert all(torch.equal(weight, found[1][name]) for name, weight in found[0].items())
