"""Building a model, and loading a checkpoint into it, take no more memory than training it does, wherever state lives.

Measured is what the kernel counts as in use by a rank (VmHWM), above what it had before anything was built.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron import zero
from megatron.config.tree import Config, build_config
from megatron.train.build import engine as build_engine
from megatron.train.build import model as build_model
from megatron.zero.api.engine import Engine
from mpu import groups
from tests.distributed import run_ranks
from tests.megatron.zero.offload.test_equal import on_nvme

SMALL: dict[str, Any] = {
    "num_layers": 6, "hidden_size": 256, "num_attention_heads": 4, "vocab_size": 4096, "max_position_embeddings": 64,
    "sub_group_size": 1 << 18}
TINY: dict[str, Any] = {**SMALL, "num_layers": 1, "hidden_size": 32, "vocab_size": 64, "sub_group_size": 4096}
M_MMAP_THRESHOLD = -3
LENGTH = 32


def settings(home: str, folder: Path, size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if home != "none":
        found |= on_nvme("optimizer", folder)
    if home == "both":
        found |= {**on_nvme("param", folder), "offload_param_max_in_cpu": 0, "offload_param_buffer_count": 4,
                  "offload_param_buffer_size": size}
    return found


def configured(shape: dict[str, Any], stage: int, home: str, folder: Path, **more: Any) -> Config:
    return build_config({**shape, "attention_dropout": 0.0, "hidden_dropout": 0.0, "zero_stage": stage,
                         "batch_size": 1, **settings(home, folder, shape["sub_group_size"]), **more})


def built(config: Config) -> Engine:
    grid = groups.build(1)
    return build_engine(config, build_model(config, grid), grid, torch.device("cpu"))


def one_step(engine: Engine) -> None:
    rows = torch.randint(0, 64, (1, LENGTH + 1))
    engine.backward(engine(rows[:, :-1], rows[:, 1:]).mean())
    engine.step()


def in_use(what: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(what))


def high_water(action: Callable[[], object]) -> int:
    """Bytes, at most, while it ran; what was there before is given back to the system as far as it is free."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    action()
    return in_use("VmHWM")


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


def stack() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(24)))


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
            models.append(stack())

    models: list[nn.Module] = []
    base = high_water(lambda: None)
    found = {"build": high_water(build) - base}
    if waits != "nvme":
        base = high_water(lambda: None)
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)  # the holes that freed memory leaves are not of interest here
    found["take over"] = high_water(lambda: zero.initialize(model=models[0], config=config)) - base
    return {name: most / (24 << 22) for name, most in found.items()}


def test_a_plain_model_goes_to_a_drive_piece_by_piece(tmp_path: Path) -> None:
    (found,) = run_ranks(taken_over, 1, tmp_path, None)
    assert found["take over"] < 1 / 3


@pytest.mark.parametrize(("world", "waits"), [(2, "cpu"), (1, "nvme")])
def test_a_model_of_zero_init_never_stands_whole(tmp_path: Path, world: int, waits: str) -> None:
    for found in run_ranks(taken_over, world, tmp_path, waits):
        assert found["build"] < (1 / 2 if waits == "nvme" else 1 / world + 1 / 4), found
        assert found["take over"] < 1 / 2, found
