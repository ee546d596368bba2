"""fp16 without a GradScaler: the loss is scaled inside, and a step with gradients that overflowed changes nothing."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from megatron.fsdp import FSDP, clip_grad_norm_
from megatron.fsdp.gradients import INITIAL_SCALE
from megatron.fsdp.sharded_tensor import local_tensor
from megatron.fsdp.sharding import require_fsdp_state
from tests.distributed import on_ranks
from tests.megatron.fsdp.loops import CLIP, adamw, around, batch, by_shards, mixed, whole
from tests.megatron.zero.models import Net


class Small(Net):
    """Its gradients are below fp16's smallest number, unless they are scaled."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1e-7


@on_ranks(2)
def test_small_gradients_arrive(rank: int, world: int) -> None:
    start = Small().state_dict()
    for way in ("nested", "torch"):
        weights = by_shards(Small, way, rank, 3, **mixed(way, torch.float16))[1]
        assert all((weights[name] != start[name]).any() for name in start), way


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
