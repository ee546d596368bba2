"""Offloaded state is saved, loaded, gathered and changed by hand as state on the device is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.config.tree import Config, build_config
from megatron.plan.footprint import PlannedRun
from megatron.train.build import engine as build_engine, model as build_model
from megatron.zero import GatheredParameters
from megatron.zero.api.full_state_dict import gather_full_state_dict
from megatron.zero.api.engine import Engine
from megatron.zero.offload.storage import Location
from megatron.zero.utils import (safe_get_full_fp32_param, safe_get_full_optimizer_state,
                                 safe_set_full_fp32_param, safe_set_full_optimizer_state)
from mpu import groups
from tests.covering import pairs
from tests.distributed import on_ranks
from tests.late_copy_streams import late_copy_streams
from tests.megatron.zero.offload.test_equal import (PRECISIONS, alike, batches, everywhere, on_nvme, on_params, on_side,
                                                    outcome, storages, train)
from tests.megatron.zero.run import built, configure_gpt2
from tests.wires import accelerator_side

Change = Callable[[Engine], None]


def configured(folder: Path | None, **cell: Any) -> Config:
    cell = {"batch_size": 2, "zero_stage": 3, **cell}
    return configure_gpt2(**cell, **(everywhere(folder, cell["zero_stage"]) if folder else {}))


def edit(engine: Engine) -> None:
    with GatheredParameters(engine.module.parameters(), modifier_rank=0):
        engine.module.wte.weight[3:5] = 0.25
        engine.module.blocks[1].mlp.fc.bias.add_(1)


def put(engine: Engine) -> None:
    for weight in (engine.module.wte.weight, engine.module.blocks[0].attn.qkv.weight):
        value = safe_get_full_fp32_param(weight)
        assert value is not None
        safe_set_full_fp32_param(weight, value * 1.5)
        moment = safe_get_full_optimizer_state(weight, "exp_avg_sq")
        assert moment is not None and moment.any()
        safe_set_full_optimizer_state(weight, moment * 2, "exp_avg_sq")


def load(engine: Engine) -> None:
    with GatheredParameters(engine.module.parameters()):
        new = {name: value * 0.5 for name, value in engine.module.state_dict().items()}
    engine.load_module_state_dict(new)


def forget(engine: Engine) -> None:
    engine.core.state.reset_optimizer_state()


def test_an_engine_tells_what_it_has_used_its_drives_for(tmp_path: Path) -> None:
    on_host = {**on_params(tmp_path, 5000), "offload_param_max_in_cpu": 10**9}
    for config in (configured(None), configured(None, **on_host)):
        engine = built(config)
        assert engine.drive_use() is None
        engine.destroy()
    engine = built(configured(tmp_path))
    before = engine.drive_use()
    train(engine.core, batches(1))
    after = engine.drive_use()
    assert before is not None and after is not None
    used = after - before
    everything = 12 * sum(bucket.layout.shard_numel for bucket in engine.core.buckets)
    assert used.wait_seconds > 0 and used.read_bytes > 0 and used.written_bytes > everything, "weights go there, too"
    engine.destroy()


@on_ranks(2)
def test_every_kind_of_optimizer_keeps_its_state_there(rank: int, world: int, tmp_path: Path) -> None:
    """Rules of torch's optimizers; Lamb, which looks at whole parameters, and Muon, which does at whole matrices."""
    for stage, (name, rate) in enumerate({"lamb": 1e-2, "nadam": 1e-3, "muon": 1e-3}.items(), 1):
        ends = []
        for home in (None, tmp_path):
            engine = built(configured(home, optimizer=name, lr=rate, zero_stage=stage))
            ends.append(outcome(engine.core, batches(4)))
            engine.destroy()
        assert alike(*ends), name


@on_ranks(2)
def test_frozen_weights_live_there_too(rank: int, world: int, tmp_path: Path) -> None:
    def partly_frozen(home: Path | None) -> Engine:
        config, grid = configured(home, bf16=True), groups.build(1)
        model = build_model(config, grid)
        for weight in model.blocks[0].parameters():
            weight.requires_grad_(False)
        return build_engine(config, model, grid, torch.device("cpu"))

    ends = []
    for home in (None, tmp_path):
        engine = partly_frozen(home)
        ends.append([train(engine.core, batches(4)), [*gather_full_state_dict(engine.core).values()]])
        engine.save_checkpoint(tmp_path / f"saved {home is None}")
        engine.destroy()
        engine = partly_frozen(home)
        engine.load_checkpoint(tmp_path / "saved True")
        ends[-1].append(train(engine.core, batches(6)[4:]))
        engine.destroy()
    assert alike(*ends)


# ---- saves, loads and edits, on either side --------------------------------------------------------------------------

CELLS = {"stage 2 fp32": {"zero_stage": 2, "batch_size": 2},
         "stage 3 bf16": {"zero_stage": 3, "batch_size": 2, **PRECISIONS["bf16"]}}


def storages_of(folder: Path, stage: int, side: bool) -> dict[str, dict[str, Any]]:
    return storages(folder, stage, 0, True) if side else {"nvme": everywhere(folder, stage)}


@pytest.mark.parametrize("cell, side", pairs([*CELLS], [False, True]))
@on_ranks(2, timeout=300)
def test_a_run_moves_through_all_homes(rank: int, world: int, tmp_path: Path, cell: str, side: bool) -> None:
    with on_side(side):
        ways = [{}, *storages_of(tmp_path / "drive", CELLS[cell]["zero_stage"], side).values(), {}]
        ways = ways if side else [*ways[:-1], *ways[1:]]  # also from a drive to a drive
        (tmp_path / "drive").mkdir(exist_ok=True)
        rows = batches(2 + 2 * 9)
        stayed = outcome(built(configure_gpt2(**CELLS[cell])).core, rows)
        losses: list[float] = []
        for number, home in enumerate(ways):
            engine = built(configure_gpt2(**CELLS[cell], **home))
            if number:
                engine.load_checkpoint(tmp_path / str(number - 1))
            if number + 1 == len(ways):
                end = outcome(engine.core, rows[2 * number :])
                assert alike([losses + end[0], *end[1:]], stayed)
                return
            losses += train(engine.core, rows[2 * number : 2 * number + 2])
            engine.save_checkpoint(tmp_path / str(number))
            engine.destroy()


@pytest.mark.parametrize("change, cell, side", pairs([edit, put, load, forget], [*CELLS], [False, True], each=1))
@on_ranks(2, timeout=300)
def test_what_is_changed_by_hand_lasts(rank: int, world: int, tmp_path: Path, change: Change, cell: str,
                                       side: bool) -> None:
    rows, ends = batches(5), {}
    with on_side(side):
        for name, home in {"stays": {}, **storages_of(tmp_path, CELLS[cell]["zero_stage"], side)}.items():
            engine = built(configure_gpt2(**CELLS[cell], **home))
            train(engine.core, rows[:2])
            change(engine)
            ends[name] = outcome(engine.core, rows[2:])
            engine.destroy()
    assert [name for name, end in ends.items() if not alike(end, ends["stays"])] == []


# ---- what an engine says of it ---------------------------------------------------------------------------------------


ON_HOST = {"offload_optimizer_device": "cpu"}
NOTES: list[tuple[Callable[[Path], dict[str, Any]], str]] = [
    (lambda drive: {**on_params(drive, 5000), "stage3_param_persistence_threshold": 10**6},
     "every parameter is smaller than --stage3-param-persistence-threshold 1000000"),
    (lambda drive: {**on_params(drive, 5000), "offload_param_max_in_cpu": 10**9},
     "within --offload-param-max-in-cpu 1000000000, and stay on the host"),
    (lambda drive: {**on_nvme("optimizer", drive), "offload_optimizer_ratio": 0.5},
     " offload: 0.55 of the optimizer's state leaves the device, by whole blocks (--offload-optimizer-ratio 0.5)"),
    (lambda drive: {**ON_HOST, "offload_optimizer_ratio": 0.5},
     " note: --offload-optimizer-ratio 0.5 has no effect here: the device is the host"),
    (lambda drive: {**ON_HOST, "delayed_param_update": True}, "--delayed-param-update has no effect here"),
    (lambda drive: on_params(drive, 5000), "")]
"""Settings, and what is said of them, if anything."""


def test_what_does_not_do_what_its_name_says_is_told(tmp_path: Path) -> None:
    for settings, said in NOTES:
        engine = built(configured(None, **settings(tmp_path)))
        notes = [note for note in engine.notes if note.startswith((" note:", " offload:"))]
        assert any(said in note for note in notes) if said else notes == [], said
        engine.destroy()


# ---- a part of the state ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage, ratio, home", pairs([1, 2, 3], [0.0, 0.25, 0.6, 1.0], ["cpu", "nvme"], each=1))
def test_the_ratio_is_that_of_whole_buckets_and_the_plan_knows_which(tmp_path: Path, stage: int, ratio: float,
                                                                     home: str) -> None:
    where = {"offload_optimizer_device": "cpu"} if home == "cpu" else on_nvme("optimizer", tmp_path)
    config = build_config({"num_layers": 5, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 500,
                           "bf16": True, "seq_length": 16, "max_position_embeddings": 16, "batch_size": 1,
                           "zero_stage": stage,
                           "stage3_param_persistence_threshold": 100, "offload_optimizer_ratio": ratio, **where})
    with accelerator_side(), late_copy_streams():
        core = built(config).core
        away = [bucket for bucket in core.buckets
                if bucket.storage is core.engine_storage.optimizer and bucket.storage.location is not Location.DEVICE]
        run = PlannedRun(config, 1, "cuda")
        assert [leaves for _, leaves in run.bucket_offload] == [bucket in away for bucket in core.buckets]
        sizes = [bucket.layout.shard_numel for bucket in core.buckets]
        assert run.offloaded_numel == sum(bucket.layout.shard_numel for bucket in away)
        assert abs(run.offloaded_numel - ratio * sum(sizes)) <= (max(sizes) / 2 if 0 < ratio < 1 else 0)
        core.detach()
