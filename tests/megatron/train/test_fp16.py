"""Overflow, loss scale and non-finite numbers: a bad step changes nothing, on any rank."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.config.tree import PrecisionConfig
from megatron.distributed import exit_codes
from megatron.errors import NumericsError
from megatron.model import GPT2
from megatron.zero.engine import ZeroEngine
from megatron.zero.step import MAX_OVERFLOWS_IN_A_ROW
from mpu.groups import build
from tests.distributed import run_ranks
from tests.megatron import helpers
from tests.megatron.helpers import NO_DROPOUT, TINY, steps, tiny_model, train, write_corpus

FP16 = PrecisionConfig(fp16=True, initial_loss_scale=1024.0, hysteresis=2, loss_scale_window=3)


def engine_of(precision: PrecisionConfig, tp: int = 1, accumulation: int = 1) -> ZeroEngine:
    groups = build(tp)
    return helpers.engine_of(GPT2(tiny_model(), groups.tp), groups, accumulation=accumulation, **asdict(precision))


def state_of(engine: ZeroEngine) -> dict[str, torch.Tensor]:
    """Masters, moments and working weights."""
    runs = {f"{run.kind} {slot.name} {offset}": run.fetch().clone()
            for slot, offset, run in engine.state.segments_to_save(("weight", *engine.rule.states))}
    return runs | {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(first[name].equal(second[name]) for name in first)


def step(engine: ZeroEngine, bad: float | None = None, only: str = "blocks.1.mlp.proj.weight", lr: float = 1e-2) -> Any:
    """One optimizer step; with `bad`, one element of one gradient of this rank becomes that value during backward."""
    rows = torch.randint(257, (2, 17), generator=torch.Generator().manual_seed(1))
    parameter = dict(engine.module.named_parameters())[only]

    def spoil(grad: torch.Tensor) -> torch.Tensor:
        spoilt = grad.clone()
        spoilt.view(-1)[5] = bad
        return spoilt

    handle = parameter.register_hook(spoil) if bad is not None else None
    for group in engine.param_groups:
        group["lr"] = lr
    report = None
    for _ in range(engine.accumulation_steps):
        engine.backward(engine(rows[:, :-1], rows[:, 1:], grad_scale=engine.backward_scale))
        report = engine.step()
    if handle is not None:
        handle.remove()
    return report


def overflow_on_one_rank(rank: int, world: int, tp: int, culprit: int,
                         accumulation: int) -> list[tuple[bool, float, float]]:
    engine = engine_of(FP16, tp, accumulation)
    engine.module.train()
    said = []

    def take(bad: bool) -> None:
        before, taken = state_of(engine), engine.counters.applied_steps
        report = step(engine, math.inf if bad and rank == culprit else None)
        assert equal(before, state_of(engine)) == (not report.applied)
        assert engine.counters.applied_steps == taken + report.applied, "the schedule counts steps that were taken"
        said.append((report.applied, report.loss_scale, engine.state.counters.scaler.scale))

    for bad in (False, True, True, False, False, False, False, True):
        take(bad)
    return said


@pytest.mark.parametrize(("tp", "world", "accumulation"), [(1, 1, 1), (2, 2, 1), (1, 2, 1), (1, 2, 2)])
def test_an_overflow_on_one_rank_skips_the_step_on_all_and_changes_no_weight_or_moment(tp: int, world: int,
                                                                                       accumulation: int) -> None:
    expected = [
        (True, 1024, 1024),
        (False, 1024, 1024), (False, 1024, 512),  # the second overflow uses up the hysteresis
        (True, 512, 512), (True, 512, 512), (True, 512, 1024),  # three clean steps double it
        (True, 1024, 1024), (False, 1024, 1024),  # and the hysteresis is whole again
    ]
    for ranks in [run_ranks(overflow_on_one_rank, world, tp, world - 1, accumulation)]:
        assert all(said == expected for said in ranks)


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


def numerics_error(rank: int, world: int, tp: int) -> tuple[str, int, bool]:
    """(message, exit code, is the state untouched) on each rank, when the last rank's gradient is bad."""
    engine = engine_of(PrecisionConfig(), tp)
    assert step(engine).applied
    before = state_of(engine)
    with pytest.raises(NumericsError) as caught:
        step(engine, math.nan if rank == world - 1 else None, only="blocks.0.attn.proj.weight")
    return str(caught.value), exit_codes.exit_reason_of(caught.value).code, equal(before, state_of(engine))


@pytest.mark.parametrize(("tp", "where"), [(1, ", in the sum over the ranks"), (2, " on tensor parallel rank 1")])
def test_a_non_finite_gradient_without_scaling_names_parameter_and_step(tp: int, where: str) -> None:
    for message, code, untouched in run_ranks(numerics_error, 2, tp):
        assert f"first in blocks.0.attn.proj.weight{where} (every loss is finite); weights" in message
        assert "at step 2" in message and code == 6 and untouched


@pytest.mark.few(1)
@pytest.mark.parametrize(("flags", "tolerance"), [
    pytest.param(["--bf16"], 0.05, id="bf16"),
    pytest.param(["--fp16", "--initial-loss-scale", "4096"], 0.01, id="fp16")])
def test_16_bit_training_follows_fp32(flags: list[str], tolerance: float, tmp_path: Path) -> None:
    """Rounding of 2^-9 (bf16) and 2^-12 (fp16) of weights and activations; the loss falls by several units."""
    corpus = write_corpus(tmp_path / "corpus")
    common = [*TINY, *NO_DROPOUT, "--train-data", corpus, "--train-iters", 60, "--lr", 5e-3, "--batch-size", 8,
              "--global-batch-size", 16]
    train([*common, "--metrics-file", tmp_path / "fp32"])
    train([*common, *flags, "--metrics-file", tmp_path / "16"])
    exact, rough = steps(tmp_path / "fp32"), steps(tmp_path / "16")
    assert exact[-1]["lm_loss"] < exact[0]["lm_loss"] - 2
    assert not any(step["skipped"] for step in rough)
    assert [s["lm_loss"] for s in rough] == pytest.approx([s["lm_loss"] for s in exact], abs=tolerance)


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
