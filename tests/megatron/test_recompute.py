"""Recomputed activations are the same activations: gradients are bit-equal, dropout included."""

from __future__ import annotations

import pytest
import torch

from megatron import build, recompute
from megatron.config import TrainConfig
from megatron.model import GPT2
from mpu.groups import build as build_groups
from mpu.random import capture_rng
from tests.distributed import run_ranks
from tests.megatron.helpers import engine_of, tiny_model

LAYERS = 5
"""Chunks of 2 and 3 leave a short last one."""

Run = tuple[dict[str, torch.Tensor], dict[str, object], int]


def gradients(rank: int, world: int, tp: int, chunk: int | None, precision: str, accumulation: int = 1) -> Run:
    """Gradients after backward, every random stream after it, and how often blocks ran."""
    groups = build_groups(tp)
    build.seed_everything(TrainConfig(seed=3), groups, torch.device("cpu"))
    model = GPT2(tiny_model(num_layers=LAYERS, attention_dropout=0.1, hidden_dropout=0.1), groups.tp)
    if chunk is not None:
        model.run_blocks = recompute.in_chunks(chunk)
    engine = engine_of(model, groups, accumulation=accumulation, bf16=precision == "bf16")
    model.train()
    calls = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda *_: calls.append(1))  # torch leaves the last block early
    tokens = torch.randint(257, (accumulation, 2, 17), generator=torch.Generator().manual_seed(7 + groups.dp.rank))
    for rows in tokens:
        engine.backward(engine(rows[:, :-1], rows[:, 1:], grad_scale=engine.backward_scale))
        if not engine.at_boundary:
            engine.step(0.0)
    found = {segment.slot.name: grad.clone() for bucket in engine.buckets for segment, grad in bucket.grad_parts()}
    return found, capture_rng(), len(calls)


def same(first: object, second: object) -> bool:
    if isinstance(first, torch.Tensor):
        return isinstance(second, torch.Tensor) and first.equal(second)
    if isinstance(first, dict):
        return isinstance(second, dict) and first.keys() == second.keys() and all(same(first[k], second[k])
                                                                                  for k in first)
    return first == second


def every_chunk(rank: int, world: int, tp: int, precision: str) -> None:
    expected, streams, calls = gradients(rank, world, tp, None, precision)
    other_masks, _, _ = gradients(rank, world, tp, None, precision, accumulation=2)
    assert calls == LAYERS and all(grad.any() for grad in expected.values())
    assert not same(expected, other_masks)
    for chunk in (1, 2, 3, LAYERS, LAYERS + 1):
        found, streams_after, calls = gradients(rank, world, tp, chunk, precision)
        assert calls == 2 * LAYERS, "nothing was recomputed"
        assert same(found, expected), f"chunk {chunk}: gradients differ"
        assert same(streams_after, streams), f"chunk {chunk}: recomputation moved a random stream"
    twice = gradients(rank, world, tp, None, precision, accumulation=2)
    assert same(gradients(rank, world, tp, 2, precision, accumulation=2)[0], twice[0])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("tp", "world"), [(1, 1), (2, 2), (1, 2)])
def test_recomputation_with_dropout_gives_bit_equal_gradients(tp: int, world: int, precision: str) -> None:
    run_ranks(every_chunk, world, tp, precision)


def test_an_evaluation_recomputes_nothing() -> None:
    model = GPT2(tiny_model())
    model.run_blocks = recompute.in_chunks(1)
    calls: list[int] = []
    model.blocks[0].register_forward_hook(lambda *_: calls.append(1))
    rows = torch.zeros(1, 17, dtype=torch.long)
    with torch.no_grad():
        model(rows[:, :-1], rows[:, 1:])
    assert len(calls) == 1
