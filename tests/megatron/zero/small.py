"""The small model of tests that need no other one, its engine, its batches and its weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron import zero
from megatron.zero.api.engine import Engine

WIDTH, STAGES = 8, (0, 1, 2, 3)


class Model(nn.Module):
    """Three blocks; of the second `unused` parameters never reach the loss."""

    def __init__(self, *, unused: bool = False, width: int = WIDTH, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        if unused:
            self.blocks[1].extra = nn.Linear(width, 1)
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x).square().mean()


def engine_of(stage: int, model: nn.Module | None = None, accumulation: int = 1, precision: str = "fp32",
              lr: float = 0.1, keys: dict[str, Any] | None = None, given: dict[str, Any] | None = None,
              **section: Any) -> Engine:
    """`keys`: of the configuration; `section`: of its zero_optimization; `given`: to `zero.initialize`."""
    optimizer = {} if "optimizer" in (given or {}) else {"optimizer": {"type": "SGD", "params": {"lr": lr}}}
    return zero.initialize(model=model or Model(), **(given or {}), config={
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": accumulation, **optimizer,
        **({precision: {"enabled": True}} if precision != "fp32" else {}),
        **(keys or {}), "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **section}})[0]


def rows(rank: int, number: int) -> Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * rank + number))


def backward(engine: Engine, *numbers: int, rank: int = 0) -> None:
    for number in numbers:
        engine.backward(engine(rows(rank, number).to(engine.working_dtype)))


def train(engine: Engine, *numbers: int, rank: int = 0) -> None:
    """A backward of each batch and a step after it."""
    for number in numbers:
        backward(engine, number, rank=rank)
        engine.step()


def gathered(module: nn.Module) -> list[Tensor]:
    """Copies of all weights."""
    with zero.GatheredParameters(module.parameters()):
        return [p.detach().clone() for p in module.parameters()]


def whole(engine: Engine) -> Tensor:
    """All weights, one behind the other."""
    return torch.cat([weight.flatten() for weight in gathered(engine.module)])
