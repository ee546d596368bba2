"""Which GPUs a process would see, on machines that are made up."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.errors import ConfigError
from megatron.plan import gpus, rate_cache
from megatron.plan.gpus import Gpu, apply_visible_devices

EIGHT = [Gpu("H100", f"GPU-{number}{number}aa") for number in range(8)]


@pytest.mark.parametrize("variable, numbers", [
    (None, range(8)), ("", []), ("-1", []), ("0,1", [0, 1]), (" 3 , 2 ", [3, 2]), ("1,8,2", [1]), ("0,-1,1", [0]),
    ("GPU-55", [5]), ("GPU-55aa,GPU-1", [5, 1]), ("GPU-99", []), ("none", []), ("GPU", []),
])
def test_the_variable_is_read_as_cuda_reads_it(variable: str | None, numbers: list[int]) -> None:
    assert apply_visible_devices(EIGHT, variable) == [EIGHT[number] for number in numbers]


def test_a_part_of_a_gpu_is_one_device_and_there_is_none_beside_it() -> None:
    assert len(apply_visible_devices(EIGHT, "MIG-1234,MIG-5678")) == 1
    assert apply_visible_devices([], "MIG-1234") == []


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Three GPUs, in the order of their places on the bus."""
    for place, model in (("0000:0a:00.0", "H100"), ("0000:02:00.0", "L4"), ("0000:0b:00.0", "H100")):
        (tmp_path / place).mkdir()
        (tmp_path / place / "information").write_text(
            f"Model: \t\t NVIDIA {model}\nIRQ:   \t\t 42\nGPU UUID: \t GPU-{place[5:7]}\nBus Type: \t PCIe\n")
    monkeypatch.setattr(gpus, "DRIVER", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def test_the_driver_lists_them_and_the_variable_chooses(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpus.visible_gpus() == [Gpu("NVIDIA L4", "GPU-02"), Gpu("NVIDIA H100", "GPU-0a"),
                                   Gpu("NVIDIA H100", "GPU-0b")]
    assert rate_cache.num_local_ranks("cuda") == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-0a,0")
    assert [gpu.model for gpu in gpus.visible_gpus()] == ["NVIDIA H100", "NVIDIA L4"]
    assert rate_cache.num_local_ranks("cuda") == 2


def test_where_the_driver_shows_no_files_its_tool_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H100 80GB HBM3, GPU-1'\necho 'NVIDIA L4, GPU-2'\n")
    tool.chmod(0o755)
    monkeypatch.setattr(gpus, "DRIVER", tmp_path / "absent")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert gpus.visible_gpus() == [Gpu("NVIDIA L4", "GPU-2")]
    monkeypatch.setattr(gpus, "DRIVER_SECONDS", 0.2)
    tool.write_text("#!/bin/sh\nexec sleep 5\n")
    with pytest.raises(ConfigError, match="nvidia-smi has not answered in 0.2 s"):
        gpus.visible_gpus()
    tool.write_text("#!/bin/sh\nexit 9\n")
    monkeypatch.setattr(gpus, "DRIVER_SECONDS", 60.0)
    assert gpus.visible_gpus() == []
    monkeypatch.setenv("PATH", str(tmp_path / "absent"))
    assert gpus.visible_gpus() == []
