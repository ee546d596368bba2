"""Stage 3 and FSDP: when a backward gathers a block and when it reshards it again."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron import zero
from megatron.fsdp import FSDP
from megatron.zero.api.engine import Engine
from megatron.zero.bucket import FlatBucket
from megatron.zero.partitioned_param import Placeholder

WIDTH = 8


class Blocks(nn.Module):
    def __init__(self, *, recomputes: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self._recomputes = recomputes

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True) if self._recomputes else block(x)
        return x.square().mean()


def engine_of(model: nn.Module) -> Engine:
    return zero.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0,
                              "overlap_comm": False, "ignore_unused_parameters": True}})[0]


def test_a_block_with_an_unused_parameter_is_resharded_when_the_backward_of_the_block_before_it_begins() -> None:
    """Its gradients are never complete, so only the order of the backward tells that it is over."""
    model = Blocks()
    model.blocks[2].unused = nn.Parameter(torch.ones(WIDTH))
    is_sharded: list[bool] = []
    model.blocks[1].weight.register_hook(
        lambda grad: is_sharded.append(isinstance(model.blocks[2].weight, Placeholder)))
    engine = engine_of(model)
    engine.backward(engine(torch.ones(2, WIDTH)))
    assert is_sharded == [True]


def test_a_recomputed_block_stays_gathered_for_its_backward() -> None:
    engine, gathered = engine_of(Blocks(recomputes=True)), list[str]()
    launch_gather = FlatBucket._launch_gather

    def record(bucket: FlatBucket) -> None:
        gathered.append(bucket.name)
        launch_gather(bucket)

    with patch.object(FlatBucket, "_launch_gather", record):
        engine.backward(engine(torch.ones(2, WIDTH, requires_grad=True)))
    forward = [f"blocks.{number}" for number in range(3)]
    assert gathered == [*forward, *reversed(forward)], "each once in the forward and once in the backward"


class FailsInRecomputation(nn.Linear):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 2:
            raise ZeroDivisionError("in the recomputation")
        return super().forward(x)


def test_a_recomputation_that_fails_leaves_no_block_running() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = FSDP(FailsInRecomputation(WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, x, use_reentrant=False)

    model = FSDP(Model())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ZeroDivisionError):
        model(torch.ones(2, WIDTH)).sum().backward()
    after = model.state_dict()  # refused while a forward or backward runs
    assert all(torch.equal(value, before[name]) for name, value in after.items())
