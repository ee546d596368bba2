"""Stage 3 and FSDP: when a backward gathers a block and when it reshards it again. What autograd saves of weights keeps
no gathered memory, and its checks are those of plain torch."""

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

from megatron import recompute
from megatron.errors import ConfigError
from megatron.fsdp import FSDP
from megatron.zero.api.engine import Engine
from megatron.zero.bucket import FlatBucket
from megatron.zero.partitioned_param import Placeholder
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


def engine_of(model: nn.Module, stage: int = 3, **section: Any) -> Engine:
    return small.engine_of(stage, model, **section)


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
        gradients.append([x.grad, *small.gathered(engine.module)])
    assert all(map(torch.equal, *gradients))


# ---- when a backward gathers and reshards ----------------------------------------------------------------------------

NOTHING_AHEAD = {"stage3_max_reuse_distance": 0, "overlap_comm": False, "ignore_unused_parameters": True}


def test_a_block_with_an_unused_parameter_is_resharded_when_the_backward_of_the_block_before_it_begins() -> None:
    """Its gradients are never complete, so only the order of the backward tells that it is over."""
    model, is_sharded = small.Model(), list[bool]()
    model.blocks[2].unused = nn.Parameter(torch.ones(WIDTH))
    model.blocks[1].weight.register_hook(
        lambda grad: is_sharded.append(isinstance(model.blocks[2].weight, Placeholder)))
    engine = engine_of(model, **NOTHING_AHEAD)
    engine.backward(engine(inputs()))
    assert is_sharded == [True]


def test_a_recomputed_block_stays_gathered_for_its_backward() -> None:
    engine = engine_of(Model(RUNS["torch's reentrant checkpoint"]), **NOTHING_AHEAD)
    with watched() as seen:
        engine.backward(engine(inputs()))
    forward = [f"blocks.{number}" for number in range(4)]
    assert [name for name, _ in seen if name != "root"] == [*forward, *reversed(forward)], "each once in each direction"


class FailsInRecomputation(nn.Linear):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 2:
            raise ZeroDivisionError("in the recomputation")
        return super().forward(x)


def test_a_recomputation_that_fails_leaves_no_block_running() -> None:
    plain = Model(RUNS["torch's checkpoint"])
    plain.blocks[1] = FSDP(FailsInRecomputation(WIDTH, WIDTH))
    model = FSDP(plain)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ZeroDivisionError):
        model(inputs()).backward()
    after = model.state_dict()  # refused while a forward or backward runs
    assert all(torch.equal(value, before[name]) for name, value in after.items())
