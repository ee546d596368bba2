"""A model trained through the FSDP face becomes what DistributedDataParallel makes of it. In fp16 without a GradScaler
the loss is scaled inside, and a step with gradients that overflowed changes nothing.

Tolerance: sums over ranks and of squares are taken in another order. Losses above 1 are compared relatively.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.fsdp import FSDP, clip_grad_norm_
from megatron.fsdp.gradients import INITIAL_SCALE
from megatron.fsdp.sharded_tensor import local_tensor
from megatron.fsdp.sharding import require_fsdp_state
from tests.distributed import on_ranks, run_ranks
from tests.megatron.fsdp.loops import CLIP, RATE, WAYS, adamw, around, batch, by_ddp, by_shards, mixed, train, whole
from tests.megatron.zero import models
from tests.megatron.zero.models import Net
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
    "three elements": models.ThreeElements, "ends in a block": models.EndsInABlock,
    "root ends in a block": models.RootEndsInABlock, "passes": models.Passes, "frozen twice": models.FrozenTwice,
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
    assert not [(way, off) for rank in found for way, off in rank.items() if not off <= TOLERANCE]


@pytest.mark.parametrize("name, world, ways", [
    ("gated", 2, WAYS), ("dicts", 2, ["twice nested"]), ("frozen twice", 2, ["torch"]), ("tied", 3, ["torch"])])
def test_losses_and_weights_are_those_of_ddp(name: str, world: int, ways: Sequence[str]) -> None:
    check(run_ranks(both, world, name, ways, FEW))


@on_ranks(2)
def test_ranks_beside_accelerators_may_use_other_layers_of_the_root(rank: int, world: int) -> None:
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


# ---- fp16 ------------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_gradient_that_overflows_skips_the_step_on_all_ranks(rank: int, world: int) -> None:
    """The loss of one rank is so large that its gradients overflow, once."""
    for way in ("whole", "torch"):
        model = around(Net(), way, **mixed(way, torch.float16))
        scaling = require_fsdp_state(getattr(model, "module", model)).root.loss_scaler
        optimizer = adamw(model)
        for number, is_applied, scale in ((0, True, INITIAL_SCALE), (1, False, INITIAL_SCALE / 2),
                                          (2, True, INITIAL_SCALE / 2)):
            before = whole(model)
            (model(batch(rank, number)) * (1e9 if (rank, number) == (1, 1) else 1)).backward()
            assert any(parameter.grad is not None for parameter in model.parameters()) == is_applied
            assert (float(clip_grad_norm_(model.parameters(), CLIP)) > 0) == is_applied
            optimizer.step()
            optimizer.zero_grad()
            after = whole(model)
            assert any(not torch.equal(before[name], after[name]) for name in before) == is_applied
            assert scaling.scale == scale


@on_ranks(2)
def test_a_layer_can_stay_in_fp32(rank: int, world: int) -> None:
    model, start = Net(), Net().state_dict()
    seen: list[torch.dtype] = []

    def look(block: nn.Module, args: Any) -> None:
        seen.append(block.wide.weight.dtype)  # type: ignore[union-attr]

    for number, block in enumerate(model.blocks):
        block.register_forward_pre_hook(look)
        is_wide = number == 1
        model.blocks[number] = FSDP(block, mixed_precision=not is_wide, force_input_to_fp32=is_wide,
                                    compute_dtype=None if is_wide else torch.bfloat16)
    wrapped = FSDP(model, mixed_precision=True, compute_dtype=torch.bfloat16)
    optimizer = adamw(wrapped)
    wrapped(batch(rank, 0)).backward()
    optimizer.step()
    assert seen == [torch.bfloat16, torch.float32, torch.bfloat16]
    assert all(not torch.equal(value, start[name]) for name, value in whole(wrapped).items())


# ---- where the scale comes in ------------------------------------------------------------------------------------


class Both(nn.Module):
    """Returns its logits and the loss that is made of them; sharded it returns fp32."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.kind, self.layer = kind, nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Any:
        logits = self.layer(x)
        loss = logits.float().square().mean()
        return {"loss": loss, "tuple": (logits, loss), "dict": {"logits": logits, "loss": loss},
                "logits": logits}[self.kind]


def loss_of(output: Any) -> Tensor:
    if isinstance(output, dict):
        return output["loss"]  # type: ignore[no-any-return]
    if isinstance(output, tuple):
        return output[1]  # type: ignore[no-any-return]
    return output if output.dim() == 0 else output.float().square().mean()


@on_ranks(2)
def test_a_gradient_is_scaled_once_whatever_is_returned(rank: int, world: int) -> None:
    """Also one that is below fp16's smallest number before it is scaled: the scale comes in where the loss is fp32."""
    for kind, way, small in product(("loss", "tuple", "dict", "logits"), ("whole", "torch"), (1.0, 1e-7)):
        norms = []
        for given in ({}, mixed(way, torch.float16)):
            model = around(Both(kind), way, **given)
            (loss_of(model(batch(rank, 0))) * small).backward()
            norms.append(float(clip_grad_norm_(model.parameters(), 1e9)))
        assert abs(norms[1] / norms[0] - 1) < 5e-3, (kind, way, small)


@on_ranks(2)
def test_gradients_are_added_up_in_fp32_with_and_without_sums_in_between(rank: int, world: int) -> None:
    """256 and nine times 1: in bf16 that is 256; in fp16 the same one octave further."""
    for (dtype, start, small), syncs in product(((torch.bfloat16, 256.0, 1.0), (torch.float16, 1.0, 2.0**-11)),
                                                (True, False)):
        model: Any = around(nn.Linear(1, 1, bias=False), "torch", **mixed("torch", dtype))
        for number, size in enumerate([start, *[small] * 9]):
            model.set_requires_gradient_sync(syncs or number == 9)
            model(torch.full((1, 1), size)).sum().backward()
        gradient = local_tensor(model.weight.grad)  # one rank has it
        assert not gradient.numel() or float(gradient) == start + 9 * small, (dtype, syncs)
