"""What an optimizer step sends on the accelerator's wire: every collective and its size, by a formula.

A unit travels in one piece: for K units, each step sends at

    stage 0    K all-reduces                    at the accumulation boundary
    stage 1    K reduce-scatters there          and K all-gathers after the optimizer
    stage 2    K reduce-scatters a micro-batch  and K all-gathers after the optimizer
    stage 3    K reduce-scatters a micro-batch  and 2 K - 2 all-gathers: each block for its forward and its backward,
               but the last block once, and the root once
"""

from __future__ import annotations

from collections import Counter
from itertools import product
from pathlib import Path

import pytest
import torch

from megatron import zero
from megatron.config.cli import parse_args
from megatron.config.tree import build_config
from megatron.train.build import engine as build_engine, model as build_model
from mpu import groups
from tests.distributed import run_ranks
from tests.megatron.plan.fake_rank import CPU, rank_0_of
from tests.megatron.zero.test_keys import BLOCKS, WIDTH, Model
from tests.wires import Sent, accelerator_side, counted

UNITS = {"block": 768, "root": 256}
"""Elements, padded to 128 for each of two ranks: a matrix of 24 x 24 and a bias; a head of 24 and a bias of 1."""

EXAMPLE = Path(__file__).parents[3] / "scripts" / "configs" / "ds_zero2_10B_config.json"

Traffic = dict[tuple[str, int, str], int]
"""(kind, elements, dtype) -> how often."""


def formula(stage: int, accumulation: int, work: str) -> Traffic:
    sums = "all_reduce" if stage == 0 else "reduce_scatter"
    rounds = accumulation if stage >= 2 else 1
    forward_and_backward = 2 * BLOCKS - 1
    found = {(sums, UNITS["block"], "float32"): rounds * BLOCKS, (sums, UNITS["root"], "float32"): rounds}
    if stage in (1, 2):
        found |= {("all_gather", UNITS["block"], work): BLOCKS, ("all_gather", UNITS["root"], work): 1}
    if stage == 3:
        found |= {("all_gather", UNITS["block"], work): rounds * forward_and_backward,
                  ("all_gather", UNITS["root"], work): rounds}
    return found


def traffic(sent: list[Sent]) -> Traffic:
    """Of units; the norm, the loss and flags are small."""
    large = [operation for operation in sent if operation.numel >= 128]
    return dict(Counter((kind, numel, str(dtype).removeprefix("torch.")) for kind, numel, dtype in large))


def step_traffic(rank: int, world: int, stage: int, accumulation: int, bf16: bool) -> Traffic:
    with accelerator_side():
        config = build_config({"zero_stage": stage, "lr": 1e-2, "batch_size": 4, "bf16": bf16,
                               "global_batch_size": 4 * world * accumulation, "stage3_param_persistence_threshold": 0,
                               "reduce_bucket_size": 100, "allgather_bucket_size": 100})
        engine = zero.initialize(model=Model(), config=config, mpu=groups.build(1))[0]
        x = torch.randn(4, WIDTH, dtype=torch.bfloat16 if bf16 else torch.float32)
        for _ in range(2):
            with counted() as sent:
                for _ in range(accumulation):
                    engine.backward(engine(x))
                    engine.step()
        return traffic(sent)


@pytest.mark.parametrize("stage", range(4))
def test_the_collectives_of_a_step_are_those_of_the_formula(stage: int) -> None:
    for accumulation, bf16 in product((1, 3), (False, True)):
        for found in run_ranks(step_traffic, 2, stage, accumulation, bf16):
            assert found == formula(stage, accumulation, "bfloat16" if bf16 else "float32")


def first_step_of_the_ten_billion(layers: int) -> tuple[int, Traffic]:
    """(elements of a block, what rank 0 of two sends in a step) of the shipped example, cut to a few layers: on fake
    tensors, which have the real sizes and no memory."""
    config = parse_args(["--deepspeed", "--deepspeed_config", str(EXAMPLE), "--preset", "10B", "--num-layers",
                         str(layers), "--bf16", "--vocab-size", "512", "--batch-size", "1",
                         "--checkpoint-activations"], 2)
    with accelerator_side(), rank_0_of(2):
        grid = groups.build(1)
        engine = build_engine(config, build_model(config, grid), grid, CPU).core
        tokens = torch.zeros(1, config.seq_length, dtype=torch.int64)
        with counted() as sent:
            report = None
            while report is None:
                engine.backward(engine(tokens, tokens.clone(), grad_scale=engine.backward_scale))
                report = engine.step(1e-3)
        block = max(bucket.layout.numel for bucket in engine.buckets)
        assert engine.accumulation_steps == 4
        return block, traffic(sent)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_the_shipped_ten_billion_sends_each_block_in_one_piece() -> None:
    """Its bucket sizes, 2e8, are below the size of a block."""
    block, found = first_step_of_the_ten_billion(2)
    assert block > 2e8
    of_blocks = {(kind, dtype): count for (kind, numel, dtype), count in found.items() if numel == block}
    assert of_blocks == {("reduce_scatter", "float32"): 2 * 4, ("all_gather", "bfloat16"): 2}
    assert {kind for kind, _, _ in found} == {"reduce_scatter", "all_gather"}
