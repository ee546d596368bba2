"""What only a GPU can show: training there equals training on the CPU, resumes bit for bit, and compiles; two ranks
that share one GPU over gloo, and NCCL between two GPUs, each beside the same run on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.train.build import engine as build_engine, model as build_model
from mpu import groups
from tests.megatron.helpers import ROOT, records, steps, train
from tests.megatron.zero.run import configure_gpt2

pytestmark = pytest.mark.gpu

SMALL = ["--preset", "tiny", "--mock-data", "--train-iters", "12", "--batch-size", "4", "--eval-interval", "0",
         "--log-interval", "0", "--seed", "7", "--no-compile"]


@pytest.mark.parametrize("precision", [[], ["--bf16"], ["--fp16"]], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("extra", [[], ["--checkpoint-activations"]], ids=["plain", "recompute"])
def test_a_run_resumed_on_a_gpu_equals_one_that_was_not(precision: list[str], extra: list[str], tmp_path: Path) -> None:
    argv = [*SMALL, *precision, *extra]
    train([*argv, "--metrics-file", str(tmp_path / "whole")])
    for _ in range(3):
        train([*argv, "--metrics-file", str(tmp_path / "parts"), "--save", str(tmp_path / "save"), "--load",
               str(tmp_path / "save"), "--exit-interval", "5"])
    assert records(tmp_path / "parts") == records(tmp_path / "whole")


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns about torch
@pytest.mark.parametrize("promised", [True, False], ids=["deterministic", "default"])
def test_the_default_run_again_and_resumed(promised: bool, tmp_path: Path, device: torch.device,
                                           capsys: pytest.CaptureFixture[str]) -> None:
    """As a user starts it: compiled, bf16, 124M with 1,024 tokens, whose attention kernels may add in any order. With
    --deterministic all bits are equal; without it the samples and the rates are, and the test says how far the losses
    are apart."""
    model = ["--preset", "124M", "--tokenizer-type", "ByteLevelTokenizer"] if device.type == "cuda" else SMALL[:2]
    argv = [*model, "--bf16", "--mock-data", "--train-iters", "8", "--batch-size", "8", "--eval-interval", "0",
            "--log-interval", "0", "--sample-tokens", "0", *["--deterministic"] * promised]
    for name in ("first", "again"):
        train([*argv, "--metrics-file", str(tmp_path / name)])
    for _ in range(2):
        train([*argv, "--metrics-file", str(tmp_path / "resumed"), "--save", str(tmp_path / "save"), "--load",
               str(tmp_path / "save"), "--exit-interval", "4"])
    first, *others = (steps(tmp_path / name) for name in ("first", "again", "resumed"))
    for name, other in zip(("again", "resumed"), others, strict=True):
        apart = max(abs(a["lm_loss"] - b["lm_loss"]) for a, b in zip(first, other, strict=True))
        with capsys.disabled():
            print(f"\n{' '.join(argv[-1:] * promised) or 'default'}, {name}: losses are at most {apart:.1e} apart, "
                  f"{'equal' if other == first else 'not equal'} in all fields")
        if promised:
            assert other == first
        same = [[(row["samples_digest"], row["learning_rate"]) for row in rows] for rows in (first, other)]
        assert same[0] == same[1] and apart < 0.05


@pytest.mark.parametrize("stage", ["0", "1", "2", "3"])
def test_every_stage_trains_alike_on_one_gpu(stage: str, tmp_path: Path) -> None:
    dropout = ["--attention-dropout", "0", "--hidden-dropout", "0"]
    for name, chosen in (("0", "0"), ("stage", stage)):
        train([*SMALL, *dropout, "--zero-stage", chosen, "--metrics-file", str(tmp_path / name)])
    other, first = records(tmp_path / "stage"), records(tmp_path / "0")
    # Rows are added in fp64 and the order of buckets: the last digit may differ, and the factor, in fp32, does not.
    norms = [[row.pop("grad_norm") for row in rows] for rows in (other, first)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-14) and other == first


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns about torch
def test_a_compiled_run_trains_like_an_eager_one(tmp_path: Path) -> None:
    dropout = ["--attention-dropout", "0", "--hidden-dropout", "0"]
    for name, flags in (("eager", []), ("compiled", ["--compile"])):
        train([*SMALL, *dropout, *flags, "--metrics-file", str(tmp_path / name)])
    eager, compiled = ([row["lm_loss"] for row in records(tmp_path / name)] for name in ("eager", "compiled"))
    # Fused kernels round elsewhere: 1e-4 over 12 fp32 steps.
    assert compiled == pytest.approx(eager, abs=1e-4)


@pytest.mark.parametrize("switches", ["--cpu-checkpointing", "--partition-activations --contiguous-checkpointing",
                                      "--partition-activations --contiguous-checkpointing --cpu-checkpointing"])
def test_inputs_that_wait_elsewhere_come_back_the_same(switches: str, tmp_path: Path) -> None:
    argv = [*SMALL, "--num-layers", "5", "--checkpoint-activations"]
    for name, flags in (("plain", []), ("elsewhere", switches.split())):
        train([*argv, *flags, "--metrics-file", str(tmp_path / name)])
    assert records(tmp_path / "elsewhere") == records(tmp_path / "plain")


def test_an_engine_takes_a_kind_of_device_without_a_number(device: torch.device) -> None:
    config, grid = configure_gpt2(compile=False), groups.build(1)
    engine = build_engine(config, build_model(config, grid), grid, torch.device(device.type))
    rows = torch.randint(0, config.model.known_vocab_size, (2, 9), device=device)
    loss = engine(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), grad_scale=engine.backward_scale)
    engine.backward(loss)
    engine.step()
    assert engine.device == loss.device == device and engine.global_steps == 1


def train_on_the_cpu(argv: list[str]) -> str:
    done = subprocess.run([sys.executable, "pretrain_gpt2.py", *argv], cwd=ROOT, capture_output=True, text=True,
                          timeout=300, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("written, asked, precision", [(train, train_on_the_cpu, "--bf16"),
                                                       (train_on_the_cpu, train, "--fp16")],
                         ids=["to the CPU", "from the CPU"])
def test_a_tag_goes_on_on_the_other_kind_of_device_and_one_line_says_what_starts_anew(
        written: Any, asked: Any, precision: str, tmp_path: Path, device: torch.device) -> None:
    argv = [*SMALL, "--attention-dropout", "0", "--hidden-dropout", "0", "--sample-tokens", "0", precision]
    again = [*argv, "--load", str(tmp_path / "s"), "--metrics-file"]
    written([*argv, "--save", str(tmp_path / "s"), "--exit-interval", "6"])
    said = asked([*again, str(tmp_path / "moved")])
    written([*again, str(tmp_path / "stayed")])
    assert said.count(" random streams start from the seed: saved on ") == (device.type == "cuda")
    moved, stayed = ([row["lm_loss"] for row in steps(tmp_path / name)] for name in ("moved", "stayed"))
    assert len(moved) == 6 and moved == pytest.approx(stayed, abs=0.02)  # products of 16-bit numbers in other kernels


# ---- several ranks ---------------------------------------------------------------------------------------------------

SMALL_RUN = ["--preset", "tiny", "--mock-data", "--train-iters", "6", "--batch-size", "2", "--eval-interval", "0",
             "--log-interval", "0", "--sample-tokens", "0", "--seed", "7", "--attention-dropout", "0",
             "--hidden-dropout", "0", "--no-compile", "--matmul-precision", "highest"]

NCCL = [(stage, accumulation, 1) for stage in range(4) for accumulation in (1, 2)] + [(0, 2, 2), (3, 1, 2)]
"""Stage, accumulation, tensor parallel ranks; of two ranks."""


def losses(metrics: Path, flags: list[str], gpus: str) -> list[float]:
    """Two ranks of a short run that see these GPUs."""
    result = subprocess.run(
        [sys.executable, "-m", "megatron.launch", "--nproc-per-node", "2", "pretrain_gpt2.py", *SMALL_RUN, *flags,
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
