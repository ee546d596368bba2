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

import pytest
import torch

from megatron import zero
from megatron.config.tree import build_config
from mpu import groups
from tests.distributed import run_ranks
from tests.megatron.zero.test_keys import BLOCKS, WIDTH, Model
from tests.wires import Sent, accelerator_side, counted

UNITS = {"block": 768, "root": 256}
"""Elements, padded to 128 for each of two ranks: a matrix of 24 x 24 and a bias; a head of 24 and a bias of 1."""

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
