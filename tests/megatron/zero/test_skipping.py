"""A gradient that is not finite, without a loss scale: skipped now and then, not in the first steps, never silently."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr
from io import StringIO
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from megatron.errors import NumericsError
from megatron.optim.schedulers import WarmupLR
from megatron.zero import step_result
from megatron.zero.api.engine import Engine
from megatron.zero.step_result import MAX_OVERFLOWS_IN_A_ROW, MAX_SKIPS_IN_A_ROW, STRICT_FIRST_STEPS
from mpu import groups
from mpu.groups import Groups
from tests.distributed import run_ranks
from tests.megatron.zero.run import configure, engine_around, master
from tests.megatron.zero.small import engine_of
from tests.wires import accelerator_side


@pytest.fixture(params=["cpu", "accelerator"])
def side(request: pytest.FixtureRequest) -> Iterator[str]:
    """On an accelerator the host learns of a step with the next one."""
    with accelerator_side(request.param == "accelerator"):
        yield request.param


def made(**settings: object) -> Engine:
    torch.manual_seed(0)
    return engine_around(nn.Linear(4, 4), configure(bf16=True, **settings), Groups())


def step(engine: Engine, factor: float = 1.0) -> None:
    x = torch.ones(2, 4, dtype=torch.bfloat16)
    engine.backward(engine(x * factor).float().square().mean())
    engine.step()


def weights(engine: Engine) -> list[Tensor]:
    return [master(bucket) for bucket in engine.core.buckets]


def test_after_the_first_steps_a_bad_gradient_is_skipped_and_said(side: str, capsys: pytest.CaptureFixture[str],
                                                                  ) -> None:
    engine = made()
    for _ in range(STRICT_FIRST_STEPS):
        step(engine)
    before = weights(engine)
    step(engine, torch.inf)
    assert all(map(torch.equal, before, weights(engine)))
    assert (engine.skipped_steps, engine.applied_steps) == (1, STRICT_FIRST_STEPS)
    engine.finish_step()
    said = capsys.readouterr().err
    assert f"gradient norm is nan at step {STRICT_FIRST_STEPS + 1}: first in " in said
    assert "the step was skipped" in said
    step(engine)
    assert engine.applied_steps == STRICT_FIRST_STEPS + 1 and not torch.equal(before[0], weights(engine)[0])


def spiky(precision: dict[str, Any], saved: dict[str, Any] | None = None,
          factors: Sequence[float] = ()) -> Engine:
    """After the factors an engine of a matrix that stays nearly as it is, so that a norm follows its factor."""
    torch.manual_seed(0)
    engine = engine_around(nn.Linear(4, 4), configure(skip_step_on_spike=6.0, **precision), Groups())
    if saved is not None:
        engine.core.state.restore_scalar_state(saved)
    dtype = next(engine.module.parameters()).dtype
    for factor in factors:
        engine.backward((engine(torch.ones(2, 4, dtype=dtype)).float() * factor).sum())
        engine.step()
    engine.finish_step()
    return engine


@pytest.mark.parametrize("precision", [{}, {"bf16": True}, {"fp16": True, "initial_loss_scale": 8.0}], ids=str)
def test_a_spike_of_the_norm_is_skipped_said_and_resumed(side: str, precision: dict[str, Any],
                                                         capsys: pytest.CaptureFixture[str]) -> None:
    calm = [1.0, 1.1] * 4
    with patch.object(step_result, "SPIKE_WINDOW", len(calm)):
        early = spiky(precision, factors=[1.0, 1.0, 1.1, 9.0])
        assert early.skipped_steps == 0, "too few steps to compare with"
        engine = spiky(precision, factors=[*calm, 9.0, 1.1])
        assert (engine.skipped_steps, engine.applied_steps) == (1, len(calm) + 1)
        assert "gradient norm is " in (said := capsys.readouterr().err) and said.count("the step was skipped") == 1
        assert engine.loss_scale == (8.0 if "fp16" in precision else 1.0), "a spike is no overflow"
        saved = spiky(precision, factors=calm).core.state.scalar_state()
        assert len(saved["recent_norms"]) == len(calm)
        resumed = spiky(precision, saved, [9.0, 1.1])
        assert resumed.core.state.counters.recent_norms == engine.core.state.counters.recent_norms
        assert resumed.skipped_steps == 1
        ever = spiky(precision, factors=[*calm, *[9.0] * len(calm)])
        assert 0 < ever.skipped_steps < len(calm), "where all norms are larger, the limit follows"


def test_an_accelerator_counts_the_steps_for_the_bias_correction_like_the_host() -> None:
    found = []
    for is_accelerator in (False, True):
        with accelerator_side(is_accelerator):
            engine = made()
            for factor in (*STRICT_FIRST_STEPS * [1.0], torch.inf, 1.0, 1.0):
                step(engine, factor)
            engine.finish_step()
            assert engine.core.is_deferred == is_accelerator
            found.append(weights(engine))
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-7)


def test_a_finite_loss_that_the_loss_scale_makes_infinite_is_not_blamed(side: str) -> None:
    """In half precision: its gradients are not made of it."""
    torch.manual_seed(0)
    engine = engine_around(nn.Linear(4, 4), configure(fp16=True, loss_scale=2.0**15), Groups())
    with pytest.raises(NumericsError, match="every loss is finite"):
        for _ in range(MAX_OVERFLOWS_IN_A_ROW + 2):
            loss = 100 * engine(torch.ones(2, 4, dtype=torch.float16)).square().sum()  # its gradient is too large
            assert loss.dtype == torch.float16 and loss.isfinite() and (loss * engine.loss_scale).isinf()
            engine.backward(loss)
            engine.step()
        engine.finish_step()


GOOD, MOST = STRICT_FIRST_STEPS * [1.0], MAX_SKIPS_IN_A_ROW * [torch.inf]


@pytest.mark.parametrize(("allowed", "factors", "why"), [
    (None, GOOD[1:], f"in the first {STRICT_FIRST_STEPS} steps this ends the run, unless --max-skipped"),
    (None, [*GOOD, *MOST, 1.0, *MOST, 1.0, *MOST], f"{MAX_SKIPS_IN_A_ROW + 1} in a row, --max-skipped-in-a-row is "
                                                   f"{MAX_SKIPS_IN_A_ROW};"),
    (0, [*GOOD, 1.0], "1 in a row, --max-skipped-in-a-row is 0;"),
    (2, 2 * [torch.inf], "3 in a row, --max-skipped-in-a-row is 2;")], ids=["first steps", "default", "0", "2"])
def test_so_many_in_a_row_end_the_run_and_the_first_steps_are_strict(side: str, allowed: int | None,
                                                                     factors: list[float], why: str) -> None:
    engine = made(**({} if allowed is None else {"max_skipped_in_a_row": allowed}))
    for factor in factors:
        step(engine, factor)
    with pytest.raises(NumericsError, match=f"at step {len(factors) + 1}: first in.*{re.escape(why)}"):
        step(engine, torch.inf)
        engine.finish_step()
    assert engine.global_steps == len(factors) + 1


QUESTIONS: dict[str, Callable[[Engine], object]] = {
    "the report": lambda engine: engine.core.last_report and engine.core.last_report.extra_scalars,
    "the norm": lambda engine: engine.get_global_grad_norm(),
    "whether it was applied": lambda engine: engine.was_step_applied(),
    "skipped steps": lambda engine: engine.skipped_steps,
    "steps of the optimizer": lambda engine: engine.core.counters.optimizer_steps,
    "an overflow": lambda engine: engine.optimizer.overflow,
}


def curve(optimizer: Any) -> Any:
    return WarmupLR(optimizer, warmup_max_lr=1e-2, warmup_num_steps=50, warmup_type="linear")


def cycle(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, 50)


def by_hand(optimizer: Any) -> Any:
    """One that is not known to go back."""
    class Halving:
        def step(self) -> None:
            for group in optimizer.param_groups:
                group["lr"] *= 0.5

        def state_dict(self) -> dict[str, Any]:
            return {"optimizer": optimizer}
    return Halving()


def scheduled(made_by: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    return engine_of(0, model, precision="bf16", given={
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2), "lr_scheduler": made_by})


@pytest.mark.parametrize("made_by", [curve, cycle, by_hand])
def test_a_scheduler_of_the_user_counts_steps_that_were_taken(made_by: Any, side: str) -> None:
    """And nothing waits for a step to be known, where the scheduler can go back."""
    ends = []
    for bad in (False, True):
        engine = scheduled(made_by)
        for number in range(STRICT_FIRST_STEPS + 4):
            if bad and number in (STRICT_FIRST_STEPS, STRICT_FIRST_STEPS + 2):
                step(engine, torch.inf)
            step(engine)
            report = engine.core.last_report
            assert report is not None
            assert ("values" in vars(report._host_scalars)) == (side == "cpu" or made_by is by_hand)
        engine.finish_step()
        group = engine.optimizer.param_groups[0]
        ends.append(({name: group[name] for name in ("lr", "betas")}, weights(engine),
                     engine.lr_scheduler.state_dict() if made_by is not by_hand else None))
    assert ends[0][0] == ends[1][0]
    assert all(map(torch.equal, ends[0][1], ends[1][1]))
    assert str(ends[0][2]) == str(ends[1][2])


@pytest.mark.parametrize("made_by", [curve, cycle])
def test_the_rate_that_one_asks_for_is_that_of_the_next_step(made_by: Any, side: str) -> None:
    engine = scheduled(made_by)
    for _ in range(STRICT_FIRST_STEPS):
        step(engine)
    before = engine.get_lr(), engine.get_mom()
    step(engine, torch.inf)
    assert (engine.get_lr(), engine.get_mom()) == before
    step(engine)
    assert engine.core.last_report is not None and engine.core.last_report.lr == before[0][0]
    assert engine.get_lr() != before[0] and engine.applied_steps == STRICT_FIRST_STEPS + 1
    step(engine, torch.inf)
    engine.optimizer.param_groups[0]["lr"] = 0.125
    engine.finish_step()
    assert engine.optimizer.param_groups[0]["lr"] == 0.125, "a rate that somebody has set since stays"


def asked_by_one(rank: int, world: int) -> list[tuple[str, str, object, str]]:
    """What a run ends with whose first rank alone asks after every step, by question; and what it printed."""
    seen = []
    for question, ask in QUESTIONS.items():
        with accelerator_side(), redirect_stderr(StringIO()) as printed:
            torch.manual_seed(0)
            engine = engine_around(nn.Linear(4, 4), configure(bf16=True), groups.build(1))
            engine.lr_scheduler = None  # the one of `engine_around` asks on every rank
            message = "no error"
            try:
                for number in range(STRICT_FIRST_STEPS + 3 * MAX_SKIPS_IN_A_ROW):
                    step(engine, torch.inf if rank == 1 and number >= STRICT_FIRST_STEPS else 1.0)
                    if rank == 0:
                        ask(engine)
            except NumericsError as error:
                message = str(error)
            seen.append((question, message, engine.skipped_steps, printed.getvalue()))
    return seen


def test_one_rank_alone_may_ask_what_became_of_a_step() -> None:
    first, second = run_ranks(asked_by_one, 2, timeout=120)
    last = STRICT_FIRST_STEPS + MAX_SKIPS_IN_A_ROW + 1
    for question, message, skipped, printed in first:
        assert f"at step {last}: first in" in message and skipped == MAX_SKIPS_IN_A_ROW + 1, question
        assert printed.count(f"gradient norm is nan at step {STRICT_FIRST_STEPS + 1}: first in ") == 1, question
    assert [end[:3] for end in first] == [end[:3] for end in second]
