"""What is expected of drives, by the configuration: the bytes that will be there, or nothing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from megatron.config.tree import Config
from megatron.errors import StorageError
from megatron.optim.adam import AdamW
from megatron.zero.api.offload_plan import NvmeDrives, expected_nvme_usage
from megatron.zero.offload import capacity_check
from tests.megatron.zero.homes.test_equal import everywhere
from tests.megatron.zero.run import configure_gpt2


def test_two_folders_of_one_drive_share_its_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "weights").mkdir()
    apart = configured(tmp_path, offload_param_nvme_path=str(tmp_path / "weights"))
    monkeypatch.setattr(capacity_check, "free_space", lambda path: 162_000)
    assert "needs 121 kB" in told(apart)[0]
    monkeypatch.setattr(capacity_check, "free_space", lambda path: 161_000)
    with pytest.raises(StorageError, match="161 kB free, but this run needs 121 kB there and 40 kB in other folders"):
        told(apart)


def configured(folder: Path, **cell: Any) -> Config:
    return configure_gpt2(**{"batch_size": 2, "zero_stage": 3, **everywhere(folder, 3), **cell})


def told(config: Config, kinds: tuple[str, ...] = ("optimizer", "param")) -> list[str]:
    """Of a model of 100 x 100 + 100 numbers."""
    drives = NvmeDrives(config)
    try:
        for kind in kinds:
            drives.drive(kind)
        return drives.probe(expected_nvme_usage(config, AdamW(), nn.Linear(100, 100), 1))
    finally:
        drives.close()


@pytest.mark.parametrize("kinds, cell, expected", [
    (("optimizer", "param"), {}, " for optimizer state and weights: .* free, needs 162 kB; .* ms of a step"),
    (("param",), {}, " for weights: .* free, needs 40 kB; .* ms of a step"),
    (("param",), {"stage3_param_persistence_threshold": 101}, " for weights: .* free, needs 40 kB; .* ms of a step"),
    (("optimizer", "param"), {"stage3_param_persistence_threshold": 9**6}, " for optimizer state: .*, needs 121 kB.*"),
    (("optimizer", "param"), {"offload_param_max_in_cpu": 10_100}, " for optimizer state: .* needs 121 kB; .*"),
    (("param",), {"offload_param_max_in_cpu": 10_100}, ": nothing of this run will be there"),
])
def test_a_drive_is_told_of_by_what_it_will_keep(tmp_path: Path, kinds: tuple[str, ...], cell: dict[str, Any],
                                                 expected: str) -> None:
    [line] = told(configured(tmp_path, **cell), kinds)
    assert re.fullmatch(f" nvme {tmp_path}{expected}", line)
