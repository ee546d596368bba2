"""What autograd saves of weights at stage 3: it keeps no gathered memory, and its checks are those of plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from megatron import recompute, zero
from megatron.errors import ConfigError
from megatron.zero.api.engine import Engine
from megatron.zero.bucket import FlatBucket
from megatron.zero.saved_weights import SavedWeightHooks
from mpu import groups
from tests.megatron.zero.run import configure_gpt2, gpt2_engine

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
    return zero.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}})[0]


def inputs() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2, WIDTH, requires_grad=True)


@contextmanager
def watched() -> Iterator[list[tuple[str, StorageWeakRef]]]:
    """The gathered memory of every unit but the root, which stays until its backward."""
    seen: list[tuple[str, StorageWeakRef]] = []
    real = FlatBucket._start_gather

    def start(bucket: FlatBucket) -> None:
        seen.append((bucket.name, StorageWeakRef(bucket.gathered.untyped_storage())))
        real(bucket)

    with patch.object(FlatBucket, "_start_gather", start):
        yield seen


def alive(seen: list[tuple[str, StorageWeakRef]]) -> set[str]:
    return {name for name, storage in seen if name != "root" and not storage.expired()}


@pytest.mark.parametrize("run", RUNS)
def test_the_memory_of_a_unit_goes_with_its_forward(run: str) -> None:
    engine = engine_of(Model(RUNS[run]))
    with watched() as seen:
        loss = engine(inputs())
        assert len(alive(seen)) <= 1, "the last block may stay for its backward"
        engine.backward(loss)
        assert alive(seen) == set()


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at that of every tensor
def test_so_does_that_of_compiled_blocks() -> None:
    model = Model()
    for block in model.blocks:
        block.compile(backend="aot_eager")
    engine = engine_of(model)
    with watched() as seen:
        loss = engine(inputs())
        assert len(alive(seen)) <= 1
        engine.backward(loss)
        assert alive(seen) == set()


@pytest.mark.parametrize("checkpoints", [False, True])
def test_so_does_that_of_gpt2(checkpoints: bool) -> None:
    config = configure_gpt2(num_layers=4, zero_stage=3, checkpoint_activations=checkpoints)
    engine = gpt2_engine(config, groups.build(1))
    rows = torch.randint(0, 61, (1, 17))
    with watched() as seen:
        loss = engine(rows[:, :-1], rows[:, 1:], grad_scale=1.0)
        assert len(seen) >= 4 and len(alive(seen)) <= 1
        engine.backward(loss)
        assert alive(seen) == set()


@pytest.mark.parametrize("stage", [0, 3])
def test_a_tensor_that_changes_after_it_was_saved_is_an_error(stage: int) -> None:
    engine = engine_of(Model(after=lambda y: y.detach().add_(1)), stage)
    with pytest.raises((ConfigError, RuntimeError), match="modified by an inplace operation"):
        engine.backward(engine(inputs()))


def test_a_weight_that_is_written_to_before_its_backward_is_an_error() -> None:
    model = Model()
    engine = engine_of(model)

    def write(linear: nn.Module, gradient: object) -> None:
        linear.weight.detach().add_(1)

    model.blocks[1].linear.register_full_backward_pre_hook(write)
    loss = engine(inputs())
    with pytest.raises(ConfigError, match="'blocks.1.linear.weight' .*after it was written to"):
        engine.backward(loss)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("hooks", [SavedWeightHooks.enter, SavedWeightHooks.leave], ids=["with", "without"])
def test_gradients_do_not_depend_on_the_hooks(run: str, hooks: object) -> None:
    """Stage 0 has none of them."""
    weights = []
    for stage in (0, 3):
        torch.manual_seed(0)
        model = Model(RUNS[run])
        engine = engine_of(model, stage)
        with patch.object(SavedWeightHooks, "enter", SavedWeightHooks.enter if hooks is SavedWeightHooks.enter
                          else lambda self: self._entered.append(None)):
            for _ in range(3):
                engine.backward(engine(inputs()))
                engine.step()
        with zero.GatheredParameters(model.parameters()):
            weights.append([p.detach() for p in model.parameters()])
    assert all(map(torch.equal, *weights))


def test_hooks_of_the_user_have_every_tensor() -> None:
    torch.manual_seed(0)
    seen, plain = [], []
    for stage in (0, 3):
        engine = engine_of(Model(), stage)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: (seen if stage else plain).append(x.shape) or x,
                                                      lambda x: x):
            loss = engine(inputs())
        engine.backward(loss)
    assert seen == plain and seen
    engine = engine_of(Model())
    with save_on_cpu():
        loss = engine(inputs())
    engine.backward(loss)


def test_a_forward_that_fails_leaves_no_hooks_on() -> None:
    def fail(y: Tensor) -> None:
        raise ValueError("in the middle of a block")

    engine = engine_of(Model(after=fail))
    with pytest.raises(ValueError, match="in the middle"):
        engine(inputs())
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
