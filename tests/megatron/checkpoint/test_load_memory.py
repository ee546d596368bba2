"""A load takes no memory of its own, whatever layout wrote the tag: runs are read into the state that is there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.config.tree import build_config
from megatron.train import build
from megatron.zero.api.engine import Engine
from megatron.zero.partitioned_param import Placeholder
from mpu import groups
from tests.distributed import run_ranks
from tests.megatron.live_bytes import STEP, LiveBytes

SHAPE = {"num_layers": 2, "hidden_size": 128, "num_attention_heads": 4, "max_position_embeddings": 64,
         "vocab_size": 2048, "batch_size": 1}
LARGEST = 2048 * 128 * 4
"""Bytes of the word embedding, the largest parameter: a load that kept copies would rise by this at least."""

SMALL = LARGEST // 8


def engine(tp: int, stage: int) -> Engine:
    config = build_config({**SHAPE, "model_parallel_size": tp, "zero_stage": stage})
    grid = groups.build(tp)
    return build.engine(config, build.model(config, grid), grid, torch.device("cpu"))


def save(rank: int, world: int, folder: Path, tp: int, stage: int) -> None:
    engine(tp, stage).save_checkpoint(folder)


def rise(rank: int, world: int, folder: Path, tp: int, stage: int) -> int:
    """Bytes alive at the peak of a load, above those before it."""
    asking, live = engine(tp, stage), LiveBytes()
    with live:
        for _, _, run in asking.core.state.segments_to_save(("weight", *asking.core.rule.states)):
            run.fetch()  # so that the meter knows the state
        for weight in asking.core.module.parameters():
            if not isinstance(weight, Placeholder):  # one without elements
                weight.view(-1)
        before = live.sample()
        live.reset_peak()
        asking.load_checkpoint(folder)
    assert before > SMALL
    return live.peak - before


@pytest.mark.parametrize(("written", "asked"), [
    pytest.param((1, 1, 0), (1, 1, 0), id="same"),
    pytest.param((1, 1, 0), (1, 2, 3), id="split"),
    pytest.param((1, 2, 3), (1, 1, 0), id="joined"),
    pytest.param((1, 1, 0), (2, 1, 1), id="cut for tensor parallelism"),
    pytest.param((2, 1, 1), (1, 2, 2), id="tensor parallelism undone"),
])
def test_a_load_takes_no_memory_beside_the_state(written: tuple[int, int, int], asked: tuple[int, int, int],
                                                 tmp_path: Path) -> None:
    (tp, dp, stage) = written
    run_ranks(save, tp * dp, tmp_path, tp, stage)
    (tp, dp, stage) = asked
    rises = run_ranks(rise, tp * dp, tmp_path, tp, stage)
    assert max(rises) < SMALL + STEP, rises
