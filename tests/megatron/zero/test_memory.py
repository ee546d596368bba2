"""What a rank holds between backward and step is what the ZeRO paper says, in bytes of the tensors themselves."""

from __future__ import annotations

import pytest
import torch

from megatron.arguments import build_config
from megatron.build import engine as build_engine
from megatron.build import model as build_model
from megatron.zero.engine import ZeroEngine
from mpu import groups
from tests.distributed import run_ranks

# Bytes per parameter with 16-bit weights and gradients, fp32 master and two moments; n data parallel ranks.
PAPER = {0: lambda n: 16.0, 1: lambda n: 4 + 12 / n, 2: lambda n: 2 + 14 / n, 3: lambda n: 16 / n}


def live_bytes(engine: ZeroEngine) -> int:
    """Every storage of the engine's state, once."""
    storages = {}
    for bucket, states in zip(engine.buckets, engine._states, strict=True):
        held = [bucket._whole, bucket.shard, bucket.master, bucket._grads, bucket._grad_shard, *states.values()]
        for tensor in held:
            if tensor is not None and tensor.untyped_storage().nbytes():
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


def bytes_per_parameter(rank: int, world: int, stage: int) -> float:
    """Live bytes of this rank between backward and step."""
    grid = groups.build(1)
    config = build_config({
        "num_layers": 4, "hidden_size": 128, "num_attention_heads": 4, "max_position_embeddings": 128,
        "vocab_size": 1024, "attention_dropout": 0.0, "hidden_dropout": 0.0, "bf16": True, "zero_stage": stage})
    model = build_model(config, grid, torch.device("cpu"))
    engine = build_engine(config, model, grid)
    rows = torch.randint(0, 1024, (1, 33))
    for _ in range(2):
        engine.backward(engine(rows[:, :-1], rows[:, 1:]))
        held = live_bytes(engine)
        engine.step(1e-3)
        engine.settle()
    return held / config.model.parameters()


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_live_state_is_what_the_paper_says(stage: int, world: int) -> None:
    for held in run_ranks(bytes_per_parameter, world, stage):
        # 2 %: slots and shards are padded to multiples of 128 elements.
        assert held == pytest.approx(PAPER[stage](world), rel=0.02)


def most_units_at_once(rank: int, world: int, prefetch: int, recompute: bool) -> int:
    """The most units of a stage 3 run whose parameters were whole at the same time, counted at every gather."""
    grid = groups.build(1)
    config = build_config({
        "num_layers": 6, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 16, "vocab_size": 61,
        "zero_stage": 3, "stage3_prefetch_bucket_size": prefetch, "checkpoint_activations": recompute})
    engine = build_engine(config, build_model(config, grid, torch.device("cpu")), grid)
    counts = []
    for bucket in engine.buckets:
        def gather(gather=bucket.gather) -> None:  # type: ignore[no-untyped-def]
            gather()
            counts.append(sum(other.is_here for other in engine.buckets))

        bucket.gather = gather  # type: ignore[method-assign]
    rows = torch.randint(0, 61, (2, 17))
    for _ in range(2):
        engine.backward(engine(rows[:, :-1], rows[:, 1:]))
        assert not any(bucket.is_here for bucket in engine.buckets), "something stays whole between passes"
        engine.step(1e-3)
    return max(counts)


@pytest.mark.parametrize("recompute", [False, True])
def test_stage_3_gathers_a_block_at_a_time_and_one_ahead(recompute: bool) -> None:
    # The root (embeddings, final norm) stays for the whole pass.
    assert run_ranks(most_units_at_once, 2, 0, recompute) == [2, 2]
    assert run_ranks(most_units_at_once, 2, 50_000_000, recompute) == [3, 3]
