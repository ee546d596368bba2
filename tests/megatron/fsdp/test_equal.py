"""A model trained through the FSDP face becomes what DistributedDataParallel makes of it.

Tolerance: sums over ranks and of squares are taken in another order. Losses above 1 are compared relatively.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.model import GPT2
from tests.distributed import run_ranks
from tests.megatron.fsdp.loops import CLIP, RATE, WAYS, by_ddp, by_masters, by_shards, mixed
from tests.megatron.zero import models
from tests.megatron.zero.run import configure_gpt2
from tests.wires import accelerator_side

STEPS, FEW, TOLERANCE = 50, 10, 1e-6
"""FEW steps show what a wrong gradient or order does; rounding that grows is seen in STEPS."""


class RealVocabulary(nn.Module):
    """GPT-2 with tied embeddings and 50,257 tokens, which three ranks do not divide."""

    def __init__(self) -> None:
        super().__init__()
        config = configure_gpt2(vocab_size=50257, make_vocab_size_divisible_by=1, hidden_size=8, num_attention_heads=2)
        self.gpt2 = GPT2(config.model)

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x.abs() * 20000).long() % 50257
        return self.gpt2(tokens[:, :-1], tokens[:, 1:])  # type: ignore[no-any-return]


class Convolutions(nn.Module):
    """With the running statistics of batch norms, which belong to a rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv1d(n, 4, 3, padding=1), nn.BatchNorm1d(4), nn.ReLU()) for n in (1, 4))
        self.head = nn.Linear(24, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None, :]
        for block in self.blocks:
            x = block(x)
        return (self.head(x.flatten(1)).float() - 1).square().mean()


class Gated(models.Net):
    """Like a mixture of experts at stage 3: each rank runs all blocks, and takes the result of one."""

    def middle(self, x: Tensor) -> Tensor:
        chosen = int(x.detach().sum() > 0)
        return sum((block(x) * (number == chosen) for number, block in enumerate(self.blocks)), x)


MODELS: dict[str, type[nn.Module]] = {
    "tied": models.Words, "vocabulary": RealVocabulary, "convolutions": Convolutions, "frozen": models.Frozen,
    "gated": Gated, "odd sizes": models.OddSizes, "dicts": models.Dicts, "layer drop": models.LayerDrop,
    "permuted": models.Permuted, "in place": models.InPlace, "three elements": models.ThreeElements,
    "no list": models.NoList, "all in blocks": models.AllInBlocks,
    "ends in a block": models.EndsInABlock, "root ends in a block": models.RootEndsInABlock,
    "slices": models.Slices, "passes": models.Passes, "twice": models.Twice, "frozen twice": models.FrozenTwice,
}


GROWS = {"permuted"}
"""Models in which rounding to fp32 grows to 8e-6 in 50 steps: in fp64 what is left is that of the loss (2e-7)."""


def rate_of(name: str) -> float:
    """GPT-2's is a usual one: what rounding does to its many small gradients grows with it."""
    return 3e-4 if name in ("tied", "vocabulary") else RATE


def difference(one: tuple[list[float], dict[str, Tensor]], other: tuple[list[float], dict[str, Tensor]]) -> float:
    losses = max(abs(a - b) / max(1, abs(a)) for a, b in zip(one[0], other[0], strict=True))
    assert one[1].keys() == other[1].keys()
    statistics = {name for name in one[1] if "running" in name}  # of each rank's own batches
    return max([losses, *(float((one[1][name].double() - other[1][name].double()).abs().max())
                          for name in one[1] if name not in statistics and one[1][name].numel())])


def both(rank: int, world: int, name: str, ways: Sequence[str], steps: int) -> dict[str, float]:
    """Each way's difference from DistributedDataParallel."""
    torch.manual_seed(1)
    torch.set_default_dtype(torch.float64 if name in GROWS else torch.float32)
    plain = by_ddp(MODELS[name], rank, steps, rate_of(name))
    if name == "vocabulary":
        table = "gpt2.wte.weight"
        assert (plain[1][table] != RealVocabulary().get_parameter(table)).any(1).all(), "every row is trained"
    return {way: difference(plain, by_shards(MODELS[name], way, rank, steps, rate_of(name))) for way in ways}


def check(found: list[dict[str, float]]) -> None:
    """Of all ranks."""
    assert not [(way, off) for rank in found for way, off in rank.items() if not off <= TOLERANCE]


@pytest.mark.few(1)
@pytest.mark.parametrize("name, steps", [("tied", FEW), ("convolutions", FEW), ("frozen", FEW), ("gated", FEW)])
def test_losses_and_weights_are_those_of_ddp(name: str, steps: int) -> None:
    check(run_ranks(both, 2, name, WAYS, steps))


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["root ends in a block", "slices", "passes", "frozen twice"])
def test_models_whose_blocks_hand_on_other_things_are_those_of_ddp(name: str) -> None:
    check(run_ranks(both, 2, name, ["twice nested", "torch"], FEW))


def uneven(rank: int, world: int) -> tuple[bool, bool, bool]:
    """On an accelerator; rank 1 does not use a layer of the root, and nobody a block's."""
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
    return (difference(plain, found) <= TOLERANCE, torch.equal(found[1]["never.weight"], start["never.weight"]),
            not torch.equal(found[1]["sometimes.weight"], start["sometimes.weight"]))


def test_ranks_beside_accelerators_may_use_other_layers_of_the_root() -> None:
    assert run_ranks(uneven, 2) == [(True, True, True)] * 2


def test_every_row_of_a_table_that_three_ranks_do_not_divide_is_that_of_ddp() -> None:
    check(run_ranks(both, 3, "vocabulary", ["torch"], FEW))


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_losses_and_weights_are_those_of_ddp_of_every_model(name: str, world: int) -> None:
    check(run_ranks(both, world, name, WAYS, STEPS, timeout=300))


def both_in_16_bits(rank: int, world: int, name: str, ways: Sequence[str], steps: int) -> dict[str, float]:
    """Three shards have the norm of one in another last bit, and what it clips grows where a 16-bit weight is rounded
    the other way: there nothing is clipped."""
    limit = CLIP if world == 2 else 1e9
    plain = by_masters(MODELS[name], torch.bfloat16, rank, steps, rate_of(name), limit)
    return {way: difference(plain, by_shards(MODELS[name], way, rank, steps, rate_of(name), limit,
                                             **mixed(way, torch.bfloat16))) for way in ways}


@pytest.mark.few(2)
@pytest.mark.parametrize("name, way, world, steps", [("tied", "torch", 2, FEW), ("frozen", "nested", 2, STEPS),
                                                     ("odd sizes", "whole", 3, FEW),
                                                     ("twice", "nested", 2, FEW), ("tied", "torch", 3, FEW)])
def test_bf16_is_that_of_masters_by_hand(name: str, way: str, world: int, steps: int) -> None:
    check(run_ranks(both_in_16_bits, world, name, [way], steps))


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", sorted(set(MODELS) - {"layer drop", "gated"}))
def test_bf16_is_that_of_masters_by_hand_for_every_model(name: str, world: int) -> None:
    """A policy of torch's says nothing of buffers, and its batch norm takes no 16-bit weights beside fp32 statistics:
    under torch's own fully_shard it raises the same."""
    ways = [way for way in WAYS if (name, way) != ("convolutions", "torch")]
    check(run_ranks(both_in_16_bits, world, name, ways, STEPS, timeout=300))


def bits(rank: int, world: int, way: str) -> Any:
    losses, weights = by_shards(models.Net, way, rank, 10)
    return losses, {name: tensor.tolist() for name, tensor in weights.items()}


def test_wrapping_at_any_depth_gives_equal_bits() -> None:
    first, *others = [run_ranks(bits, 2, way) for way in WAYS]
    assert all(other == first for other in others)


def alone(rank: int, world: int, way: str) -> float:
    """One process, with no process group: nothing travels."""
    model = models.Net()
    from tests.megatron.fsdp.loops import around, train, whole
    plain = models.Net()
    losses = train(plain, lambda: torch.nn.utils.clip_grad_norm_(plain.parameters(), CLIP), 0, 10)
    sharded = around(model, way)
    from megatron.fsdp import clip_grad_norm_
    found = train(sharded, lambda: clip_grad_norm_(sharded.parameters(), CLIP), 0, 10)
    return difference((losses, dict(plain.state_dict())), (found, whole(sharded)))


@pytest.mark.parametrize("way", WAYS)
def test_one_process_without_a_group_is_the_plain_loop(way: str) -> None:
    assert run_ranks(alone, 1, way, init=False)[0] <= TOLERANCE


def looked_at(rank: int, world: int, looks: bool) -> dict[str, Tensor]:
    """Of a 16-bit run: who looks at parameters between a forward and its backward finds what they are at rest."""
    from tests.megatron.fsdp.loops import adamw, around, batch, whole

    model = around(models.Net(), "torch", **mixed("torch", torch.bfloat16))
    optimizer = adamw(model)
    for step in range(3):
        loss = model(batch(rank, step))
        if looks:
            optimizer.zero_grad()
            assert all(parameter.mul(1).dtype == torch.float32 for parameter in model.blocks[0].parameters())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole(model)


def test_parameters_that_are_looked_at_within_a_pass_train_the_same_bits() -> None:
    for one, other in zip(*(run_ranks(looked_at, 2, looks) for looks in (False, True)), strict=True):
        assert all(torch.equal(weight, other[name]) for name, weight in one.items())
