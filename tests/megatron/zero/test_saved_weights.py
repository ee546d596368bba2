"""What autograd saves of weights at stage 3: it keeps no gathered memory, and its checks are those of plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from megatron import recompute, zero
from megatron.errors import ConfigError
from megatron.zero.api.engine import Engine
from megatron.zero.bucket import FlatBucket
from tests.megatron.zero import small

WIDTH = 8

Run = Callable[[nn.Module, Tensor], Tensor]

RUNS: dict[str, Run] = {
    "plain": lambda block, x: block(x),
    "torch's checkpoint": lambda block, x: checkpoint(block, x, use_reentrant=False),
    "torch's reentrant checkpoint": lambda block, x: checkpoint(block, x, use_reentrant=True),
    "our checkpoint": lambda block, x: recompute.checkpoint(block, x),
}


class Block(nn.Module):
    """Has a view of a weight, a leaf and activations to save."""

    def __init__(self, after: Callable[[Tensor], object] = lambda y: None) -> None:
        super().__init__()
        self.linear, self.norm, self.after = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), after

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sigmoid(self.norm(self.linear(x)))
        z = y * 2
        self.after(y)
        return z


class Model(nn.Module):
    def __init__(self, run: Run = RUNS["plain"], **block: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(**block) for _ in range(4))
        self.head, self.run = nn.Linear(WIDTH, 1), run

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(x).square().mean()


def engine_of(model: nn.Module, stage: int = 3) -> Engine:
    return small.engine_of(stage, model)


def inputs() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2, WIDTH, requires_grad=True)


@contextmanager
def watched() -> Iterator[list[tuple[str, StorageWeakRef]]]:
    """The gathered memory of every unit but the root, which stays until its backward."""
    seen: list[tuple[str, StorageWeakRef]] = []
    real = FlatBucket._launch_gather

    def start(bucket: FlatBucket) -> None:
        seen.append((bucket.name, StorageWeakRef(bucket.gathered_params.untyped_storage())))
        real(bucket)

    with patch.object(FlatBucket, "_launch_gather", start):
        yield seen


def alive(seen: list[tuple[str, StorageWeakRef]]) -> set[str]:
    return {name for name, storage in seen if name != "root" and not storage.expired()}


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at that of every tensor
@pytest.mark.parametrize("run", [*RUNS, "compiled"])
def test_the_memory_of_a_unit_goes_with_its_forward(run: str) -> None:
    model = Model(RUNS.get(run, RUNS["plain"]))
    for block in model.blocks if run == "compiled" else ():
        block.compile(backend="aot_eager")
    engine = engine_of(model)
    with watched() as seen:
        loss = engine(inputs())
        assert len(alive(seen)) <= 1, "the last block may stay for its backward"
        engine.backward(loss)
        assert alive(seen) == set()


class Written(Block):
    """Its forward writes to a weight that has been used."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        with torch.no_grad():
            self.linear.weight.mul_(3)
        return y


@pytest.mark.parametrize("stage", [0, 3])
def test_what_changes_after_it_was_saved_is_an_error(stage: int) -> None:
    activations, weights = Model(after=lambda y: y.detach().add_(1)), Model()
    weights.blocks = nn.ModuleList(Written() for _ in range(4))
    for model in (activations, weights):
        engine = engine_of(model, stage)
        with pytest.raises((ConfigError, RuntimeError), match="modified by an inplace operation"):
            engine.backward(engine(inputs()))


USES: dict[str, Callable[[Tensor, nn.Parameter], Tensor]] = {
    "a negated view": lambda x, w: x * torch.view_as_complex(w.view(-1, 2)).conj().imag[:WIDTH],
    "a sparse matrix": lambda x, w: torch.sparse.mm(torch.eye(2).to_sparse(), x @ w),
    "torch.func.grad": lambda x, w: torch.func.grad(lambda v: (v @ w).tanh().sum())(x),
    "a second order": lambda x, w: torch.autograd.grad((x @ w).tanh().sum(), x, create_graph=True)[0],
    "parts": lambda x, w: torch.cat([x @ part.t() for part in w.chunk(2)], 1),
    "other bits": lambda x, w: x @ w * (w.detach().view(torch.int32) & 1).sum(),
}
KEEP_MEMORY = ("a negated view", "a second order")
"""The first is not replaced; the backward inside the second gathers the unit before."""


class Using(nn.Module):
    def __init__(self, use: Callable[[Tensor, nn.Parameter], Tensor]) -> None:
        super().__init__()
        self.weight, self.use = nn.Parameter(torch.randn(WIDTH, WIDTH)), use

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.use(x, self.weight))


@pytest.mark.parametrize("use", USES)
def test_gradients_are_those_of_stage_0_whatever_a_block_saves(use: str) -> None:
    gradients: list[list[Tensor]] = []
    for stage in (0, 3):
        torch.manual_seed(0)
        model = Model()
        model.blocks = nn.ModuleList(Using(USES[use]) for _ in range(3))
        engine, x = engine_of(model, stage), inputs()
        with watched() as seen:
            loss = engine(x)
            assert stage == 0 or use in KEEP_MEMORY or len(alive(seen)) <= 1
            engine.backward(loss)
        assert x.grad is not None
        engine.step()
        with zero.GatheredParameters(engine.module.parameters()):
            gradients.append([x.grad, *(p.detach() for p in engine.module.parameters())])
    assert all(map(torch.equal, *gradients))
