"""The gradients that a rank sends by the plan, beside those that the engine hands to the accelerator's wire."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from megatron.config.cli import parse_args
from megatron.plan.footprint import PlannedRun
from megatron.train import build
from megatron.train.batches import Batch
from mpu import groups
from tests.distributed import run_ranks
from tests.megatron.helpers import NO_DROPOUT, TINY
from tests.wires import accelerator_side, counted

CPU = torch.device("cpu")
WAYS = {"all_reduce": 2, "reduce_scatter": 1}
"""Times that all but a rank's own part goes out, by rings."""
LARGE = 128
"""Elements of a unit, at least; the norm and flags are smaller."""


def bytes_of_gradients(rank: int, world: int, stage: int, flags: list[str]) -> tuple[int, int]:
    """(planned, sent)"""
    config = parse_args([*TINY, *NO_DROPOUT, "--mock-data", "--vocab-size", "512", "--zero-stage", str(stage), *flags],
                        world)
    with accelerator_side():
        grid = groups.build(1)
        engine = build.engine(config, build.model(config, grid), grid, CPU)
        rows = torch.zeros(config.train.batch_size, config.seq_length + 1, dtype=torch.int64)
        batch = Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
        with counted() as sent:
            for _ in range(config.accumulation(world)):
                engine.backward(engine(*batch, grad_scale=engine.backward_scale))
                engine.step()
    found = sum(WAYS[kind] * numel * dtype.itemsize * (world - 1) // world for kind, numel, dtype in sent
                if kind in WAYS and numel >= LARGE)
    return PlannedRun(config, world, "cuda").traffic().gradients, found


@pytest.mark.few(2)
@pytest.mark.parametrize("stage", range(4))
def test_the_plan_of_gpus_counts_the_bytes_that_travel(stage: int) -> None:
    for accumulation, flags in product((1, 2), ([], ["--bf16"], ["--bf16", "--communication-data-type", "bf16"])):
        more = ["--batch-size", "2", "--global-batch-size", str(4 * accumulation)]
        for planned, sent in run_ranks(bytes_of_gradients, 2, stage, [*flags, *more]):
            assert planned == sent, (accumulation, flags)
