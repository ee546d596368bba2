"""What is expected of drives, by the configuration: the bytes that will be there, or nothing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from megatron.config.tree import Config
from megatron.optim.adam import AdamW
from megatron.zero.api.drives import Drives, expected_of_drives
from mpu import groups
from tests.megatron.zero.homes.test_equal import everywhere
from tests.megatron.zero.run import configure_gpt2


def configured(folder: Path, **cell: Any) -> Config:
    return configure_gpt2(**{"batch_size": 2, "zero_stage": 3, **everywhere(folder, 3), **cell})


def line(config: Config, kinds: tuple[str, ...] = ("optimizer", "param")) -> str:
    """Of a model of 100 x 100 + 100 numbers."""
    drives = Drives(config, groups.build(1))
    try:
        for kind in kinds:
            drives.folder(kind)
        [told] = drives.examine(expected_of_drives(config, AdamW(), nn.Linear(100, 100), 1))
    finally:
        drives.close()
    return told.removeprefix(f" nvme {config.offload.offload_optimizer_nvme_path}")


@pytest.mark.parametrize("kinds, cell, told", [
    (("optimizer", "param"), {}, " for optimizer state and weights: .* free, needs 162 kB; .* ms of a step"),
    (("param",), {}, " for weights: .* free, needs 40 kB; .* ms of a step"),
    (("param",), {"stage3_param_persistence_threshold": 101}, " for weights: .* free, needs 40 kB; .* ms of a step"),
    (("optimizer", "param"), {"stage3_param_persistence_threshold": 9**6}, " for optimizer state: .*, needs 121 kB.*"),
    (("optimizer", "param"), {"offload_param_max_in_cpu": 10_100}, " for optimizer state: .* needs 121 kB; .*"),
    (("param",), {"offload_param_max_in_cpu": 10_100}, ": nothing of this run will be there"),
])
def test_a_drive_is_told_of_by_what_it_will_keep(tmp_path: Path, kinds: tuple[str, ...], cell: dict[str, Any],
                                                 told: str) -> None:
    assert re.fullmatch(told, line(configured(tmp_path, **cell), kinds))
