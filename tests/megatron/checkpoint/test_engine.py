"""engine.save_checkpoint and load_checkpoint: buffers, memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from megatron import zero
from megatron.config.tree import build_config
from megatron.errors import CheckpointError
from megatron.train import build
from megatron.zero.api.engine import Engine
from megatron.zero.partitioned_param import Placeholder
from megatron.zero.state import persistent_buffers
from mpu import groups
from tests.distributed import run_ranks
from tests.megatron.live_bytes import STEP, LiveBytes

CONFIG = {"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}


class Scaled(nn.Linear):
    """With a buffer that its state dict holds, and one that the model computes."""

    def __init__(self, name: str = "scale", size: int = 1) -> None:
        super().__init__(3, 1)
        self.register_buffer(name, torch.full((size,), float(size)))
        self.register_buffer("computed", torch.tensor([float(size)]), persistent=False)


def test_buffers_are_loaded_by_name_and_shape_and_computed_ones_stay(tmp_path: Path) -> None:
    def load(model: Scaled, *, strict: bool = True) -> Scaled:
        run: Engine = zero.initialize(model=model, config=CONFIG)[0]
        run.load_checkpoint(tmp_path, load_module_strict=strict)
        return model

    saved: Engine = zero.initialize(model=Scaled(), config=CONFIG)[0]
    saved.module.scale.fill_(7.0)
    saved.module.computed.fill_(8.0)
    saved.save_checkpoint(tmp_path)
    model = load(Scaled())
    assert (model.scale, model.computed) == (torch.tensor([7.0]), torch.tensor([1.0]))
    for other, words in ((Scaled("shift"), "buffers are not in the checkpoint, shift"),
                         (Scaled(size=2), "'scale': shape")):
        with pytest.raises(CheckpointError, match=words):
            load(other)
    assert load(Scaled("shift"), strict=False).shift == torch.tensor([1.0])


def test_a_buffer_that_one_of_two_modules_keeps_is_saved() -> None:
    for keeps_first in (True, False):
        model, table = nn.Sequential(nn.Module(), nn.Module()), torch.ones(1)
        model[0].register_buffer("scale", table, persistent=keeps_first)
        model[1].register_buffer("scale", table, persistent=not keeps_first)
        assert persistent_buffers(model) == {"0.scale": table}


# ---- a load takes no memory of its own -------------------------------------------------------------------------------

SHAPE = {"num_layers": 2, "hidden_size": 128, "num_attention_heads": 4, "max_position_embeddings": 64,
         "vocab_size": 2048, "batch_size": 1}
LARGEST = 2048 * 128 * 4
"""Bytes of the word embedding, the largest parameter: a load that kept copies would rise by this at least."""

SMALL = LARGEST // 8


def engine_of(tp: int, stage: int) -> Engine:
    config = build_config({**SHAPE, "model_parallel_size": tp, "zero_stage": stage})
    grid = groups.build(tp)
    return build.engine(config, build.model(config, grid), grid, torch.device("cpu"))


def save(rank: int, world: int, folder: Path, tp: int, stage: int) -> None:
    engine_of(tp, stage).save_checkpoint(folder)


def rise(rank: int, world: int, folder: Path, tp: int, stage: int) -> int:
    """Bytes alive at the peak of a load, above those before it."""
    asking, live = engine_of(tp, stage), LiveBytes()
    with live:
        for bucket in asking.core.all_buckets:
            for kind in bucket.master_state.kinds:
                bucket.master_state.view(kind).view(-1)  # so that the meter knows the state
        for weight in asking.core.module.parameters():
            if not isinstance(weight, Placeholder):  # one without elements
                weight.view(-1)
        before = live.sample()
        live.reset_peak()
        asking.load_checkpoint(folder)
    assert before > SMALL
    return live.peak - before


@pytest.mark.parametrize(("written", "asked"), [
    pytest.param((1, 1, 0), (1, 2, 3), id="split"),
    pytest.param((2, 1, 1), (1, 2, 2), id="tensor parallelism undone"),
])
def test_a_load_takes_no_memory_beside_the_state(written: tuple[int, int, int], asked: tuple[int, int, int],
                                                 tmp_path: Path) -> None:
    (tp, dp, stage) = written
    run_ranks(save, tp * dp, tmp_path, tp, stage)
    (tp, dp, stage) = asked
    rises = run_ranks(rise, tp * dp, tmp_path, tp, stage)
    assert max(rises) < SMALL + STEP, rises
