"""A compiled block is one graph: no break at tensor parallel 1 and 2, alone and inside the engine, at every stage.

The compiler's back end does not matter to that, and torch's own operations stand in for its kernels (aot_eager), so
results must be equal to the bit to those of the blocks as they are.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from megatron.model import GPT2
from megatron.train.compile import compile_model
from mpu import groups
from mpu.random import model_parallel_cuda_manual_seed
from tests.distributed import run_ranks
from tests.megatron.zero.run import configure_gpt2, gpt2_engine, gpt2_loss, weights

TRACED = partial(torch.compile, backend="aot_eager")
Found = tuple[int, int, list[Tensor]]
"""(breaks, graphs, results)"""


def seen() -> tuple[int, int]:
    return sum(counters["graph_break"].values()), counters["stats"]["unique_graphs"]


def block_alone(rank: int, world: int, compiled: bool) -> Found:
    counters.clear()
    grid = groups.build(world)
    model_parallel_cuda_manual_seed(1, grid)
    config = configure_gpt2(model_parallel_size=world, compile=compiled, compile_scope="blocks")
    model = GPT2(config.model, grid.tp, config.train.seed)  # with its weights: there is no engine to draw them
    with patch("torch.compile", TRACED):
        compile_model(model, config, 1, torch.device("cpu"))
    block = model.blocks[0]
    x = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(1), requires_grad=True)
    y = block(x, None)
    y.square().sum().backward()
    assert x.grad is not None
    return *seen(), [y.detach(), x.grad, *(p.grad for p in block.parameters() if p.grad is not None)]


@pytest.mark.parametrize("tp", [1, 2])
def test_a_block_is_one_graph(tp: int) -> None:
    traced, plain = (run_ranks(block_alone, tp, compiled, timeout=300) for compiled in (True, False))
    for (breaks, graphs, results), (_, none, wanted) in zip(traced, plain, strict=True):
        assert (breaks, graphs, none) == (0, 1, 0)
        assert all(map(torch.equal, results, wanted)) and len(results) == len(wanted)


def trained(rank: int, world: int, stage: int, tp: int, compiled: bool) -> Found:
    counters.clear()
    grid = groups.build(tp)
    model_parallel_cuda_manual_seed(1, grid)
    settings: dict[str, Any] = {"model_parallel_size": tp, "zero_stage": stage, "compile": compiled,
                                "compile_scope": "blocks", "lr": 1e-2, "lr_warmup_iters": 0, "batch_size": 2}
    with patch("torch.compile", TRACED):
        engine = gpt2_engine(configure_gpt2(**settings), grid)
    draw = torch.Generator().manual_seed(grid.dp.rank)
    for _ in range(2):
        engine.backward(gpt2_loss(engine, torch.randint(0, 61, (2, 17), generator=draw)))
        engine.step()
    return *seen(), [*weights(engine).values()]


@pytest.mark.parametrize(("stage", "tp"), [(3, 2), *(
    pytest.param(stage, tp, marks=pytest.mark.slow) for stage, tp in ((0, 2), (1, 1), (2, 2)))])
def test_blocks_inside_the_engine_are_one_graph_each(stage: int, tp: int) -> None:
    traced, plain = (run_ranks(trained, 2 * tp, stage, tp, compiled, timeout=300) for compiled in (True, False))
    for (breaks, graphs, results), (_, none, wanted) in zip(traced, plain, strict=True):
        assert (breaks, none) == (0, 0) and 1 <= graphs <= 2
        assert all(map(torch.equal, results, wanted))
