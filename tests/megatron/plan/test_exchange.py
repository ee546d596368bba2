"""How often ranks meet in a step: what the plan says, beside what the engine does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron.config.tree import Config, build_config
from megatron.plan.footprint import PlannedRun
from megatron.plan.step_time import num_collectives, num_tp_collectives
from megatron.train import build
from megatron.train.batches import Batch
from megatron.train.evaluation import forward_loss
from mpu import backends, groups
from tests.distributed import run_ranks
from tests.wires import accelerator_side, counted

SMALL = 64
"""Numbers that no unit is as small as: norms, and what ranks agree on."""


def config(**settings: object) -> Config:
    return build_config({
        "num_layers": 4, "hidden_size": 128, "num_attention_heads": 2, "max_position_embeddings": 48, "batch_size": 2,
        "vocab_size": 512, "lr": 1e-6, "attention_dropout": 0.0, "hidden_dropout": 0.0, "mock_data": True,
        "tokenizer_type": "ByteLevelTokenizer", "compile": False, **settings})


def met(rank: int, world: int, settings: dict[str, object], on_gpu: bool) -> list[tuple[str, int]]:
    """(kind, numel) of what travels in a second step."""
    asked = config(**settings)
    with accelerator_side(on_gpu):
        place = groups.build(asked.parallel.model_parallel_size)
        engine = build.engine(asked, build.model(asked, place), place, torch.device("cpu"))
        engine.train()
        rows = (torch.arange(2 * 49) % 512).reshape(2, -1)
        batch = Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())

        def step() -> None:
            for _ in range(asked.global_batch_size(place.dp.size) // (2 * place.dp.size)):
                engine.backward(forward_loss(engine, batch))
                engine.step()

        step()
        with counted() as sent, inside() as within:
            step()
            engine.settle()
    return [(kind, numel) for kind, numel, _ in sent] + within


@contextmanager
def inside() -> Iterator[list[tuple[str, int]]]:
    """The same, of what layers send."""
    sent, kinds = list[tuple[str, int]](), ("all_reduce", "all_gather")

    def noted(kind: str, made: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, *args: (sent.append((f"inside {kind}", x.numel())), made(x, *args))[1]

    with ExitStack() as stack:
        for kind in kinds:
            name = f"functional_{kind}"
            stack.enter_context(patch.object(backends, name, noted(kind, getattr(backends, name))))
        yield sent


@pytest.mark.parametrize("stage, accumulation, threshold", [
    (0, 1, 0), (0, 3, 0), (1, 1, 0), (1, 3, 0), (2, 1, 0), (2, 3, 0), (3, 1, 0), (3, 3, 0), (3, 1, 10**9),
    (3, 3, 10**9), (3, 3, 1000)])
def test_data_parallel_ranks_meet_as_often_as_the_plan_says(stage: int, accumulation: int, threshold: int) -> None:
    settings = {"zero_stage": stage, "global_batch_size": 4 * accumulation,
                "stage3_param_persistence_threshold": threshold}
    sent = run_ranks(met, 2, settings, True)[0]
    assert sum(numel > SMALL for _, numel in sent) == num_collectives(PlannedRun(config(**settings), 2, "cuda"))


@pytest.mark.parametrize("chunk", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("device, dropout", [("cpu", 0.0), ("cpu", 0.1), ("cuda", 0.0)])
def test_tensor_parallel_ranks_meet_as_often_as_the_plan_says(device: Any, dropout: float, chunk: int) -> None:
    settings: dict[str, object] = {"model_parallel_size": 2, "hidden_dropout": dropout}
    if chunk:
        settings |= {"checkpoint_activations": True, "checkpoint_num_layers": chunk}
    sent = run_ranks(met, 2, settings, device == "cuda")[0]
    inside = [kind for kind, numel in sent if kind.startswith("inside")]
    assert len(inside) == num_tp_collectives(PlannedRun(config(**settings), 2, device))
    assert ("inside all_gather" in inside) == (device == "cuda")
