"""Which shelves leave the device where only a share of the numbers is to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.config.tree import build_config
from megatron.plan.footprint import PlannedRun
from megatron.train.build import engine as build_engine, model as build_model
from megatron.zero.offload.chunk_sizes import OffloadRatio
from megatron.zero.offload.storage import Location
from mpu import groups
from tests.late_copy_streams import late_copy_streams
from tests.megatron.zero.offload.test_equal import on_nvme
from tests.megatron.zero.offload.test_use import built, configured
from tests.wires import accelerator_side

SIZES = [39_000, *[7_000] * 12]


@pytest.mark.parametrize("tenths", range(11))
def test_whole_shelves_come_as_near_to_the_share_as_they_can(tenths: int) -> None:
    share = OffloadRatio(tenths / 10)
    away = sum(size for size in SIZES if share.offloads_next(size))
    assert abs(away - tenths / 10 * sum(SIZES)) <= 7_000 / 2
    if tenths in (0, 10):
        assert away == tenths // 10 * sum(SIZES)


@pytest.mark.parametrize(("where", "line"), [
    ("nvme", " offload: 0.55 of the optimizer's state leaves the device, by whole blocks (--offload-optimizer-ratio "
             "0.5)"),
    ("cpu", " note: --offload-optimizer-ratio 0.5 has no effect here: the optimizer's state is where the model is")])
def test_a_line_says_what_it_came_to(tmp_path: Path, where: str, line: str) -> None:
    place = {"offload_optimizer_device": "cpu"} if where == "cpu" else on_nvme("optimizer", tmp_path)
    engine = built(configured(None, **place, offload_optimizer_ratio=0.5))
    assert line in engine.notes
    engine.destroy()


def test_they_take_turns() -> None:
    share = OffloadRatio(0.5)
    assert [share.offloads_next(10) for _ in range(6)] == [True, False] * 3


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("ratio", [0.0, 0.25, 0.6, 1.0])
@pytest.mark.parametrize("home", ["cpu", "nvme"])
def test_the_plan_knows_which(tmp_path: Path, stage: int, ratio: float, home: str) -> None:
    where = {"offload_optimizer_device": "cpu"} if home == "cpu" else on_nvme("optimizer", tmp_path)
    config = build_config({"num_layers": 5, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 500,
                           "bf16": True, "seq_length": 16, "max_position_embeddings": 16, "batch_size": 1,
                           "zero_stage": stage,
                           "stage3_param_persistence_threshold": 100, "offload_optimizer_ratio": ratio, **where})
    grid = groups.build(1)
    with accelerator_side(), late_copy_streams():
        core = build_engine(config, build_model(config, grid), grid, torch.device("cpu")).core
        away = [bucket for bucket in core.buckets
                if bucket.storage is core.engine_storage.optimizer and bucket.storage.location is not Location.DEVICE]
        run = PlannedRun(config, 1, "cuda")
        assert [leaves for _, leaves in run.bucket_offload] == [bucket in away for bucket in core.buckets]
        assert run.offloaded_numel == sum(bucket.layout.shard_numel for bucket in away)
        core.detach()
