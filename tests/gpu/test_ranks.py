"""Several ranks: two that share one GPU over gloo, and NCCL between two GPUs, each beside the same run on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.megatron.helpers import ROOT, steps

pytestmark = pytest.mark.gpu

SMALL = ["--preset", "tiny", "--mock-data", "--train-iters", "6", "--batch-size", "2", "--eval-interval", "0",
         "--log-interval", "0", "--sample-tokens", "0", "--seed", "7", "--attention-dropout", "0",
         "--hidden-dropout", "0", "--no-compile", "--matmul-precision", "highest"]

NCCL = [(stage, accumulation, 1) for stage in range(4) for accumulation in (1, 2)] + [(0, 2, 2), (3, 1, 2)]
"""Stage, accumulation, tensor parallel ranks; of two ranks."""


def losses(metrics: Path, flags: list[str], gpus: str) -> list[float]:
    """Two ranks of a short run that see these GPUs."""
    result = subprocess.run(
        [sys.executable, "-m", "megatron.launch", "--nproc-per-node", "2", "pretrain_gpt2.py", *SMALL, *flags,
         "--metrics-file", str(metrics)], cwd=ROOT, env=os.environ | {"CUDA_VISIBLE_DEVICES": gpus},
        capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-2000:]
    return [row["lm_loss"] for row in steps(metrics)]


def flags_of(stage: int, accumulation: int, tp: int) -> list[str]:
    batch = 2 * accumulation * (2 // tp)
    return ["--zero-stage", str(stage), "--global-batch-size", str(batch), "--model-parallel-size", str(tp)]


@pytest.mark.parametrize("stage, accumulation, tp", [(0, 1, 1), (3, 2, 1), (0, 1, 2)])
def test_two_ranks_share_a_gpu_over_gloo(stage: int, accumulation: int, tp: int, tmp_path: Path) -> None:
    flags = [*flags_of(stage, accumulation, tp), "--distributed-backend", "gloo"]
    shared, on_cpu = (losses(tmp_path / name, flags, gpus) for name, gpus in (("shared", "0"), ("cpu", "")))
    assert shared == pytest.approx(on_cpu, rel=1e-4)  # fp32, other kernels


@pytest.mark.parametrize("stage, accumulation, tp", NCCL)
def test_nccl_trains_as_gloo_does_on_the_cpu(stage: int, accumulation: int, tp: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs two GPUs")
    flags = flags_of(stage, accumulation, tp)
    on_gpus, on_cpu = (losses(tmp_path / name, flags, gpus) for name, gpus in (("gpus", "0,1"), ("cpu", "")))
    assert on_gpus == pytest.approx(on_cpu, rel=1e-4)
