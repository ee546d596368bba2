"""fp16 without a GradScaler: the loss is scaled inside, and a step with gradients that overflowed changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.fsdp import clip_grad_norm_
from megatron.fsdp.grad_sync import INITIAL_SCALE
from megatron.fsdp.sharded_tensor import local_tensor
from megatron.fsdp.sharding import require_fsdp_state
from tests.distributed import run_ranks
from tests.megatron.fsdp.loops import CLIP, adamw, around, batch, by_shards, mixed, whole
from tests.megatron.zero.models import Net


class Small(Net):
    """Its gradients are below fp16's smallest number, unless they are scaled."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1e-7


def moved(rank: int, world: int, way: str) -> float:
    start = Small().state_dict()
    _, weights = by_shards(Small, way, rank, 3, **mixed(way, torch.float16))
    return min(float((weights[name] - start[name]).abs().max()) for name in start)


@pytest.mark.parametrize("way", ["nested", "torch"])
def test_small_gradients_arrive(way: str) -> None:
    assert min(run_ranks(moved, 2, way)) > 0


def overflow(rank: int, world: int, way: str) -> Any:
    """The loss of one rank is so large that its gradients overflow, once."""
    model = around(Net(), way, **mixed(way, torch.float16))
    scaling = require_fsdp_state(getattr(model, "module", model)).root.loss_scaler
    optimizer = adamw(model)
    found = []
    for number in range(3):
        before = whole(model)
        (model(batch(rank, number)) * (1e9 if (rank, number) == (1, 1) else 1)).backward()
        has_gradients = any(parameter.grad is not None for parameter in model.parameters())
        norm = float(clip_grad_norm_(model.parameters(), CLIP))
        optimizer.step()
        optimizer.zero_grad()
        after = whole(model)
        found.append((has_gradients, norm > 0, any(not torch.equal(before[name], after[name]) for name in before),
                      scaling.scale))
    return found


@pytest.mark.parametrize("way", ["whole", "torch"])
def test_a_gradient_that_overflows_skips_the_step_on_all_ranks(way: str) -> None:
    expected = [(True, True, True, INITIAL_SCALE), (False, False, False, INITIAL_SCALE / 2),
                (True, True, True, INITIAL_SCALE / 2)]
    assert run_ranks(overflow, 2, way) == [expected] * 2


class PartlyWide(Net):
    """A layer that stays in fp32 inside of a 16-bit model."""

    def middle(self, x: Tensor) -> Tensor:
        self.seen = [self.last.weight.dtype, self.blocks[0].wide.weight.dtype, self.blocks[1].wide.weight.dtype]
        return super().middle(x)


def wide_layers(rank: int, world: int) -> tuple[list[torch.dtype], bool]:
    from megatron.fsdp import FSDP
    model = PartlyWide()
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
    start = Net().state_dict()
    changed = all(not torch.equal(value, start[name]) for name, value in whole(wrapped).items())
    return seen, changed


def test_a_layer_can_stay_in_fp32() -> None:
    seen, changed = run_ranks(wide_layers, 2)[0]
    assert seen == [torch.bfloat16, torch.float32, torch.bfloat16] and changed


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


def ratio(rank: int, world: int, kind: str, way: str, small: float) -> float:
    """Of the gradients' norm and that in fp32."""
    norms = []
    for given in ({}, mixed(way, torch.float16)):
        model = around(Both(kind), way, **given)
        (loss_of(model(batch(rank, 0))) * small).backward()
        norms.append(float(clip_grad_norm_(model.parameters(), 1e9)))
    return norms[1] / norms[0]


@pytest.mark.parametrize("way", ["whole", "torch"])
@pytest.mark.parametrize("kind", ["loss", "tuple", "dict", "logits"])
def test_a_gradient_is_scaled_once_whatever_is_returned(kind: str, way: str) -> None:
    """Also one that is below fp16's smallest number before it is scaled: the scale comes in where the loss is fp32."""
    for small in (1.0, 1e-7):
        assert all(abs(found - 1) < 5e-3 for found in run_ranks(ratio, 2, kind, way, small))


def summed(rank: int, world: int, dtype: torch.dtype, syncs: bool) -> float:
    """256 and nine times 1: in bf16 that is 256; in fp16 the same one octave further."""
    model: Any = around(nn.Linear(1, 1, bias=False), "torch", **mixed("torch", dtype))
    small = 1.0 if dtype == torch.bfloat16 else 2.0**-11
    start = 256.0 if dtype == torch.bfloat16 else 1.0
    for number, size in enumerate([start, *[small] * 9]):
        model.set_requires_gradient_sync(syncs or number == 9)
        model(torch.full((1, 1), size)).sum().backward()
    gradient = local_tensor(model.weight.grad)
    return float(gradient - start) / small if gradient.numel() else 9.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_are_added_up_in_fp32_with_and_without_sums_in_between(dtype: torch.dtype) -> None:
    for syncs in (True, False):
        assert run_ranks(summed, 2, dtype, syncs) == [9.0, 9.0], syncs
