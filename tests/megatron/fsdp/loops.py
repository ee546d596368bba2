"""How the proofs of the FSDP face wrap a model and train it, and the loops that they compare it with.

`train` is a script of a user: it knows a model, an optimizer of torch and a way to clip. What it is given is a sharded
model, or the same in DistributedDataParallel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megatron.fsdp import FSDP, MixedPrecisionPolicy, clip_grad_norm_, fully_shard

WAYS = ("whole", "nested", "twice nested", "torch")
CLIP, DECAY, RATE, EPS = 0.5, 0.1, 1e-2, 1e-3
"""Adam divides by a moment plus epsilon: the gradient of a key bias is zero but for rounding, which a smaller one would
blow up."""


def around(model: nn.Module, way: str, **given: Any) -> nn.Module:
    """The model sharded: in one wrapper, or with wrappers inside, or by torch's function."""
    if way == "torch":
        for block in blocks(model):
            fully_shard(block, **given)
        return cast(nn.Module, fully_shard(model, **given))
    for module in [*model.modules()] if way != "whole" else []:
        if isinstance(module, nn.ModuleList):
            for number, child in enumerate(module):
                if way == "twice nested":
                    for name, inner in [*child.named_children()]:
                        if not isinstance(inner, nn.ModuleList) and any(True for _ in inner.parameters()):
                            setattr(child, name, FSDP(inner, **given))
                module[number] = FSDP(child, **given)
    return FSDP(model, **given)


def blocks(model: nn.Module) -> list[nn.Module]:
    return [child for module in model.modules() if isinstance(module, nn.ModuleList) for child in module]


def mixed(way: str, dtype: torch.dtype) -> dict[str, Any]:
    """The arguments for that precision, gradients summed in fp32."""
    if way == "torch":
        return {"mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)}
    return {"mixed_precision": True, "compute_dtype": dtype, "fp32_reduce_scatter": True}


def batch(rank: int, number: int, width: int = 6, rows: int = 4) -> Tensor:
    """The last column is the number of the step."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    x = torch.randn(rows, width, generator=generator)
    x[:, -1] = number
    return x


def adamw(model: nn.Module, rate: float = RATE) -> torch.optim.Optimizer:
    """Two groups, that cross every flat buffer."""
    found = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW([{"params": [p for p in found if p.dim() >= 2], "weight_decay": DECAY},
                              {"params": [p for p in found if p.dim() < 2], "weight_decay": 0.0}], lr=rate, eps=EPS)


def train(model: nn.Module, clip: Callable[[], Any], rank: int, steps: int, accumulation: int = 2,
          optimizer: torch.optim.Optimizer | None = None, learn: Callable[[int], None] | None = None) -> list[float]:
    """Losses of this rank. `learn` makes the gradients of a step, instead of a backward after each forward."""
    optimizer = optimizer or adamw(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses: list[float] = []

    def forwards_and_backwards(number: int) -> None:
        for micro in range(accumulation):
            loss = model(batch(rank, accumulation * number + micro)) / accumulation
            loss.backward()
            losses.append(float(loss.detach()))

    for number in range(steps):
        (learn or forwards_and_backwards)(number)
        clip()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return losses


def by_ddp(make: Callable[[], nn.Module], rank: int, steps: int, rate: float = RATE,
           ) -> tuple[list[float], dict[str, Tensor]]:
    model = DistributedDataParallel(make(), find_unused_parameters=True)
    losses = train(model, lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP), rank, steps,
                   optimizer=adamw(model, rate))
    return losses, {name: tensor.detach().clone() for name, tensor in model.module.state_dict().items()}


def by_shards(make: Callable[[], nn.Module], way: str, rank: int, steps: int, rate: float = RATE, limit: float = CLIP,
              **given: Any) -> tuple[list[float], dict[str, Tensor]]:
    model = around(make(), way, **given)
    losses = train(model, lambda: clip_grad_norm_(model.parameters(), limit), rank, steps,
                   optimizer=adamw(model, rate))
    return losses, whole(model)


def whole(model: nn.Module) -> dict[str, Tensor]:
    from megatron.fsdp.state_dict import full_state_dict
    return full_state_dict(getattr(model, "module", model))
