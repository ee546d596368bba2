"""Bytes that a step moves to a drive and back, and between device and host: those of the formula, none twice. Building
a model, and loading a checkpoint into it, take no more memory than training it does, wherever state lives: measured is
what the kernel counts as in use by a rank (VmHWM), above what it had before anything was built."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron import zero
from megatron.config.tree import Config, build_config
from megatron.zero.api.engine import Engine
from megatron.zero.engine import ZeroEngine
from megatron.zero.offload.chunk_sizes import CHUNK_ALIGNMENT
from megatron.zero.offload.nvme import NvmeStorage
from mpu import groups
from tests.covering import pairs
from tests.distributed import on_ranks, run_ranks
from tests.late_copy_streams import late_copy_streams
from tests.megatron.zero.offload.test_equal import (PRECISIONS, batches, everywhere, on_nvme, on_params, storages,
                                                    train)
from tests.megatron.zero.run import built, configure_gpt2, gpt2_engine, gpt2_loss
from tests.wires import accelerator_side

NOTHING_STAYS = {"stage3_max_reuse_distance": 0, "offload_param_buffer_size": 2048}
"""Neither a block from its forward to its backward (but the last one), nor a part in the three buffers until it is read
again: a block has four on each of two ranks."""


def told(engine: ZeroEngine) -> dict[str, dict[str, float]]:
    engine.engine_storage.wait_for_writes()
    return {name: asdict(home.stats)
            for name, home in vars(engine.engine_storage).items() if isinstance(home, NvmeStorage)}


def test_parts_of_weights_are_within_those_of_a_step(tmp_path: Path) -> None:
    """Where a buffer for weights is smaller: a step writes whole parts, and reads nothing of them. A block has ten
    grains on one rank."""
    of_step, of_weights = 5, 4
    cell = {"zero_stage": 3, "bf16": True, "hidden_size": 40, "batch_size": 2, "stage3_max_reuse_distance": 0,
            **everywhere(tmp_path, 3), "sub_group_size": of_step * CHUNK_ALIGNMENT, "offload_optimizer_buffer_count": 9,
            "offload_param_buffer_size": of_weights * CHUNK_ALIGNMENT, "offload_param_buffer_count": 1}
    engine = gpt2_engine(configure_gpt2(**cell), groups.build(1))
    rows = batches(2)
    train(engine, rows[:1])
    engine.backward(gpt2_loss(engine, rows[1]).mean())
    before = told(engine)["params"]
    engine.step()
    after = told(engine)["params"]
    everything = 2 * sum(bucket.layout.shard_numel for bucket in engine.buckets if bucket.params_are_sharded)
    engine.detach()
    assert [after[name] - before[name] for name in ("read_bytes", "written_bytes")] == [0, everything]


@pytest.mark.parametrize("stage, precision, accumulation", pairs([1, 2, 3], ["fp32", "bf16"], [1, 2], each=1))
@on_ranks(2)
def test_a_step_moves_each_byte_once(rank: int, world: int, tmp_path: Path, stage: int, precision: str,
                                     accumulation: int) -> None:
    home = {**everywhere(tmp_path, stage), **NOTHING_STAYS}
    engine = gpt2_engine(configure_gpt2(zero_stage=stage, **PRECISIONS[precision], batch_size=2 // accumulation,
                                        global_batch_size=4, **home), groups.build(1))
    rows = batches(3)
    train(engine, rows[:2])
    before = told(engine)
    train(engine, rows[2:])  # no step at which weights at work are compared with masters (1, 2, 4, ...)
    after = told(engine)
    seen = {(home, name): after[home][name] - before[home][name] for home in after for name in after[home]}
    everything = sum(bucket.layout.shard_numel for bucket in engine.buckets)
    assert seen["optimizer", "read_bytes"] == seen["optimizer", "written_bytes"] == 12 * everything
    if stage == 3:  # blocks come for the forward and for the backward; the last one, and the root, stay in between
        width = 4 if precision == "fp32" else 2
        sizes = {bucket.name: bucket.layout.shard_numel for bucket in engine.buckets if bucket.params_are_sharded}
        brought = 2 * sum(sizes.values()) - sizes["blocks.1"] - sizes["root"]
        assert seen["params", "read_bytes"] == width * accumulation * brought
        assert seen["params", "written_bytes"] == width * sum(sizes.values())
    engine.detach()


# ---- between a device and its host ----------------------------------------------------------------------------------

STATE = 3 * 4  # bytes of the masters and moments of a parameter


def copied(rank: int, world: int, folder: Path, cell: dict[str, Any]) -> tuple[int, int, dict[str, int]]:
    """Bytes up and down in one step, and this rank's parameters whose state is elsewhere, by bucket."""
    with accelerator_side(), late_copy_streams() as ferry:
        engine = gpt2_engine(configure_gpt2(**cell), groups.build(1))
        rows = batches(3)
        train(engine, rows[:2])
        before = ferry.to_device.copied, ferry.to_host.copied
        train(engine, rows[2:])  # no step at which weights at work are compared with masters (1, 2, 4, ...)
        after = ferry.to_device.copied, ferry.to_host.copied
        sizes = {bucket.name: bucket.layout.shard_numel for bucket in engine.buckets
                 if bucket.storage is engine.engine_storage.optimizer}
        engine.detach()
    return after[0] - before[0], after[1] - before[1], sizes


@pytest.mark.parametrize("world, stage, accumulation, name", pairs(
    [1, 2], [1, 2, 3], [1, 2], ["host", "device", "nvme", "host, a part"]))
def test_copies_of_optimizer_state(tmp_path: Path, world: int, stage: int, accumulation: int, name: str) -> None:
    """In 16 bits: gradients down and weights up where the host updates, the state both ways where the device does.
    Sums over micro-batches are fp32 and come up for the second one (at stage 1 they are taken where they are)."""
    home = storages(tmp_path, stage, 0, True)[name] | {"offload_param_device": "none"}
    cell = {"zero_stage": stage, "bf16": True, "batch_size": 4 // world // accumulation, "global_batch_size": 4, **home}
    for up, down, sizes in run_ranks(copied, world, tmp_path, cell):
        everything = sum(sizes.values())
        if name == "device":
            assert (up, down) == (STATE * everything, STATE * everything)
        elif accumulation == 1:
            assert (up, down) == (2 * everything, 2 * everything)
        elif stage == 1:
            assert (up, down) == (2 * everything, 4 * everything)
        else:
            assert (up, down) == ((4 + 2) * everything, 2 * 4 * everything)


def test_copies_of_weights_on_the_host(tmp_path: Path) -> None:
    """Up for the forward and again for the backward, but for the root and the last block, which stay; and down never:
    the host has made them. Where the device makes them, once."""
    for world, name in ((2, "host, params"), (1, "device, params")):
        cell = {"zero_stage": 3, "bf16": True, "batch_size": 4 // world, "global_batch_size": 4,
                "num_layers": 4, "stage3_max_reuse_distance": 0, **storages(tmp_path, 3, 0, True)[name]}
        for up, down, sizes in run_ranks(copied, world, tmp_path, cell):
            everything = sum(sizes.values())
            brought = 2 * (2 * everything - sizes["root"] - sizes["blocks.3"])
            if name.startswith("host"):
                assert (up, down) == (brought, 2 * everything)
            else:
                assert (up, down) == (brought + STATE * everything, (STATE + 2) * everything)


# ---- memory ----------------------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "num_layers": 6, "hidden_size": 256, "num_attention_heads": 4, "vocab_size": 4096, "max_position_embeddings": 64,
    "sub_group_size": 1 << 18}
TINY: dict[str, Any] = {**SMALL, "num_layers": 1, "hidden_size": 32, "vocab_size": 64, "sub_group_size": 4096}
M_MMAP_THRESHOLD = -3
LENGTH = 32


def configured(shape: dict[str, Any], stage: int, home: str, folder: Path) -> Config:
    optimizer = on_nvme("optimizer", folder)
    params = {**on_params(folder, shape["sub_group_size"]), "offload_param_buffer_count": 4}
    homes = {"none": {}, "optimizer": optimizer, "both": {**optimizer, **params}}
    return build_config({**shape, "attention_dropout": 0.0, "hidden_dropout": 0.0, "zero_stage": stage,
                         "batch_size": 1, **homes[home]})


def one_step(engine: Engine) -> None:
    rows = torch.randint(0, 64, (1, LENGTH + 1))
    engine.backward(engine(rows[:, :-1], rows[:, 1:]).mean())
    engine.step()


def high_water(action: Callable[[], object]) -> int:
    """Bytes, at most, while it ran; what was there before is given back to the system as far as it is free."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    action()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def lived(config: Config, saved: Path) -> dict[str, int]:
    """The most memory in each phase of an engine's life, beginning with none."""
    engines: list[Engine] = []
    base = high_water(lambda: None)
    found = {"build": high_water(lambda: engines.append(built(config)))}
    found["train"] = high_water(lambda: one_step(engines[0]))
    engines[0].save_checkpoint(saved)
    engines.pop().destroy()
    found["build again"] = high_water(lambda: engines.append(built(config)))
    found["load"] = high_water(lambda: engines[0].load_checkpoint(saved))
    engines.pop().destroy()
    return {name: peak - base for name, peak in found.items()}


def peaks(rank: int, world: int, shape: dict[str, Any], stage: int, home: str, folder: Path) -> dict[str, int]:
    (folder / "drive").mkdir(exist_ok=True)
    lived(configured(TINY, stage, home, folder / "drive"), folder / "warm")  # libraries are there now
    return lived(configured(shape, stage, home, folder / "drive"), folder / "saved")


def test_building_and_loading_take_no_more_than_training_and_a_drive_takes_a_part_of_it(tmp_path: Path) -> None:
    trained = {}
    for world, stage, home in ((1, 2, "optimizer"), (2, 3, "none"), (2, 3, "both")):
        (tmp_path / home).mkdir()
        for found in run_ranks(peaks, world, SMALL, stage, home, tmp_path / home, timeout=300):
            trained[home] = most = found.pop("train")
            assert max(found.values()) <= most, (found, most)
    assert trained["both"] < 0.8 * trained["none"], trained


def taken_over(rank: int, world: int, folder: Path, waits: str | None) -> dict[str, float]:
    """The most memory of building a plain model and of bringing it to a drive, as shares of its size."""
    home = {"device": "nvme", "nvme_path": str(folder)}
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam"}, "zero_optimization": {
        "stage": 3, "sub_group_size": 1 << 18, "offload_optimizer": home, "stage3_param_persistence_threshold": 0,
        "offload_param": {**home, "max_in_cpu": 0, "buffer_size": 1 << 18, "buffer_count": 2}}}
    init = {"enabled": waits is not None, "remote_device": waits, "config_dict_or_path": config if waits == "nvme" else
            None}
    with zero.Init(**init):  # type: ignore[arg-type]  # libraries are there now
        small = nn.Linear(8, 8)
    zero.initialize(model=small, config=config)[0].destroy()

    def build() -> None:
        with zero.Init(**init):  # type: ignore[arg-type]
            models.append(nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(24))))

    models: list[nn.Module] = []
    base = high_water(lambda: None)
    found = {"build": high_water(build) - base}
    if waits != "nvme":
        base = high_water(lambda: None)
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)  # the holes that freed memory leaves are not of interest here
    found["take over"] = high_water(lambda: zero.initialize(model=models[0], config=config)) - base
    return {name: most / (24 << 22) for name, most in found.items()}


@pytest.mark.parametrize("world, waits, build, take_over", [
    (1, None, 2, 1 / 3), (2, "cpu", 1 / 2 + 1 / 4, 1 / 2), (1, "nvme", 1 / 2, 1 / 2)])
def test_a_model_of_zero_init_never_stands_whole_and_a_plain_one_goes_to_a_drive_piece_by_piece(
        tmp_path: Path, world: int, waits: str | None, build: float, take_over: float) -> None:
    for found in run_ranks(taken_over, world, tmp_path, waits):
        assert found["build"] < build and found["take over"] < take_over, found
