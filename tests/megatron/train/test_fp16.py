"""16-bit training: when overflows end a run, what a skipped step tells, and losses near those of fp32. (What an
overflow on one rank changes is tests/megatron/zero/test_overflow.py.)"""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.config.tree import PrecisionConfig
from megatron.errors import NumericsError
from megatron.model import GPT2
from megatron.zero.engine import ZeroEngine
from megatron.zero.step_result import MAX_OVERFLOWS_IN_A_ROW
from mpu.groups import build
from tests.megatron import helpers
from tests.megatron.helpers import NO_DROPOUT, TINY, steps, tiny_model, train, write_corpus


def engine_of(precision: PrecisionConfig) -> ZeroEngine:
    groups = build(1)
    return helpers.engine_of(GPT2(tiny_model(), groups.tp), groups, **asdict(precision))


def step(engine: ZeroEngine, bad: float | None = None) -> Any:
    """One optimizer step; with `bad`, one element of one gradient becomes that value during backward."""
    rows = torch.randint(257, (2, 17), generator=torch.Generator().manual_seed(1))

    def spoil(grad: torch.Tensor) -> torch.Tensor:
        spoilt = grad.clone()
        spoilt.view(-1)[5] = bad
        return spoilt

    parameter = engine.module.get_parameter("blocks.1.mlp.proj.weight")
    handle = parameter.register_hook(spoil) if bad is not None else None
    for group in engine.param_groups:
        group["lr"] = 1e-2
    engine.backward(engine(rows[:, :-1], rows[:, 1:], grad_scale=engine.backward_scale))
    report = engine.step()
    if handle is not None:
        handle.remove()
    return report


def test_a_static_scale_that_always_overflows_ends_the_run() -> None:
    engine = engine_of(PrecisionConfig(fp16=True, loss_scale=128.0))
    for _ in range(MAX_OVERFLOWS_IN_A_ROW):
        assert not step(engine, math.inf).applied
    with pytest.raises(NumericsError, match=r"loss scale 128.*first in blocks\.1\.mlp\.proj\.weight \(every "
                       r"loss is finite\);"):
        step(engine, math.inf)


def test_overflows_at_the_smallest_scale_end_the_run_only_when_they_follow_each_other() -> None:
    engine = engine_of(PrecisionConfig(fp16=True, initial_loss_scale=2.0, hysteresis=1, loss_scale_window=1000))
    assert [step(engine, math.inf).loss_scale for _ in range(2)] == [2.0, 1.0]
    for _ in range(MAX_OVERFLOWS_IN_A_ROW - 1):
        step(engine, math.inf)
    assert step(engine).applied
    for _ in range(MAX_OVERFLOWS_IN_A_ROW):
        step(engine, math.inf)
    with pytest.raises(NumericsError, match="cannot shrink"):
        step(engine, math.inf)


def test_16_bit_training_follows_fp32(tmp_path: Path) -> None:
    """Rounding of 2^-9 (bf16) and 2^-12 (fp16) of weights and activations; the loss falls by several units. At
    higher rates the difference grows with the order of the samples, not with the rounding."""
    common = [*TINY, *NO_DROPOUT, "--train-data", write_corpus(tmp_path / "corpus"), "--train-iters", 60, "--lr", 2e-3,
              "--batch-size", 8, "--global-batch-size", 16]
    train([*common, "--metrics-file", tmp_path / "fp32"])
    exact = [step["lm_loss"] for step in steps(tmp_path / "fp32")]
    assert exact[-1] < exact[0] - 2
    for flags, tolerance in ((["--bf16"], 0.02), (["--fp16", "--initial-loss-scale", "4096"], 0.002)):
        train([*common, *flags, "--metrics-file", tmp_path / flags[0]])
        rough = steps(tmp_path / flags[0])
        assert not any(step["skipped"] for step in rough)
        assert [step["lm_loss"] for step in rough] == pytest.approx(exact, abs=tolerance)


def test_a_skipped_step_is_told_in_the_metrics_and_keeps_the_learning_rate(tmp_path: Path) -> None:
    train([*TINY, "--mock-data", "--train-iters", 8, "--fp16", "--initial-loss-scale", 2**20, "--hysteresis", 1,
           "--warmup", 1,
           "--lr", 1e-3, "--metrics-file", tmp_path / "m"])
    found = steps(tmp_path / "m")
    skipped = [s for s in found if s["skipped"]]
    assert skipped and len(skipped) < len(found)
    assert all(s["grad_norm"] is None for s in skipped) and all(isinstance(s["grad_norm"], float) for s in found
                                                                if not s["skipped"])
    applied = 0
    for s in found:
        assert s["learning_rate"] == pytest.approx(1e-3 * (applied + 1) / 8)
        applied += not s["skipped"]
    assert [s["consumed_samples"] for s in found] == [4 * k for k in range(1, 9)], "the data moves on"
