"""Steps that remain at a learning rate of 0 are announced at the start; nothing else is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.config.tree import build_config
from megatron.errors import ConfigError
from megatron.optim.schedulers import LR_STYLES, LRSchedule
from megatron.train.loop import zero_lr_warning
from tests.megatron.helpers import TINY, steps, train


def warnings(said: str) -> list[str]:
    return [line for line in said.splitlines() if "learning rate" in line and "warning" in line]


@pytest.mark.parametrize("style", LR_STYLES)
@pytest.mark.parametrize("floor", [0.0, 1e-5])
def test_idle_steps_are_those_a_count_finds(style: str, floor: float) -> None:
    """Every end of the warm-up and of the decay, every length of the run, every step a resume may start at, with and
    without skipped steps."""
    for peak, decay, warm, last, start, skipped in [
            (peak, decay, warm, last, start, skipped)
            for peak in (0.0, 1e-3) for decay in (1, 4, 6) for warm in {0, 1, decay} for last in (0, 1, 4, 7)
            for start in (0, 3, 4, 7) for skipped in (0, 2) if skipped <= start]:
        schedule = LRSchedule(style, peak, min(floor, peak), warm, decay)
        config = build_config({"train_iters": last, "lr": peak, "min_lr": min(floor, peak)})
        rates = [schedule(step) for step in range(start - skipped, start - skipped + max(0, last - start))]
        tail = next((k for k in range(len(rates) + 1) if not any(rates[k:])), 0)
        found = zero_lr_warning(config, schedule, start - skipped, start)
        idle = f"0 from iteration {start + tail + 1} on: the last {last - start - tail} of {last} iterations"
        assert found == "" if tail == len(rates) else idle in found


@pytest.mark.parametrize(("values", "iteration", "remedy"), [
    ({}, 0, "give --lr-decay-iters 40 (in a JSON file: total_num_steps), or a --min-lr above 0"),
    ({}, 30, "give --override-lr-scheduler --lr-decay-iters 40, or with it a --min-lr above 0"),
    ({"override_lr_scheduler": True}, 30, "give --lr-decay-iters 40 (in a JSON file: total_num_steps)"),
    ({"use_checkpoint_lr_scheduler": True}, 30,
     "give --override-lr-scheduler --lr-decay-iters 40 in place of --use-checkpoint-lr-scheduler"),
    ({"lr": 0.0}, 0, "give --lr above 0"),
])
def test_the_remedy_is_one_that_helps_here(values: dict[str, Any], iteration: int, remedy: str) -> None:
    found = zero_lr_warning(build_config({"train_iters": 40, **values}), lambda step: float(step < 20), iteration,
                            iteration)
    assert remedy in found and "\n" not in found


RUN = [*TINY, "--mock-data", "--lr", "1e-3", "--warmup", "0"]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    assert not warnings(train([*RUN, "--train-iters", 4, "--save", tmp_path / "s"])), "every step of it trains"
    return tmp_path / "s"


def test_the_longer_run_that_used_to_be_documented_warns(saved: Path, tmp_path: Path) -> None:
    longer = [*RUN, "--train-iters", 8, "--load", saved, "--metrics-file", tmp_path / "m"]
    note, = warnings(train([*longer, "--lr-decay-iters", 4]))
    assert "0 from iteration 5 on: the last 4 of 8" in note
    note, = warnings(train([*longer, "--use-checkpoint-lr-scheduler"]))
    assert "0 from iteration 5 on" in note and "--override-lr-scheduler" in note
    assert [step["learning_rate"] for step in steps(tmp_path / "m")] == [0.0] * 8


@pytest.mark.parametrize("flags", [["--override-lr-scheduler"], ["--override-lr-scheduler", "--lr-decay-iters", 8],
                                   ["--override-lr-scheduler", "--lr-decay-iters", 4, "--min-lr", 1e-4]])
def test_what_the_warning_recommends_trains_to_the_end(saved: Path, flags: list[object], tmp_path: Path) -> None:
    said = train([*RUN, "--train-iters", 8, "--load", saved, "--metrics-file", tmp_path / "m", *flags])
    assert not warnings(said) and min(step["learning_rate"] for step in steps(tmp_path / "m")) > 0


def test_a_finished_schedule_of_a_json_file_warns(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({
        "train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 3, "warmup_num_steps": 1}}}))
    first, = warnings(train([*TINY, "--mock-data", "--train-iters", 5, "--deepspeed_config", tmp_path / "ds.json"]))
    assert "0 from iteration 4 on" in first and "total_num_steps" in first


@pytest.mark.parametrize("shape", ["exponential", pytest.param("minus_sqrt", marks=pytest.mark.slow)])
def test_a_run_of_wsd_resumes_bit_for_bit_within_every_phase(shape: str, tmp_path: Path) -> None:
    wsd = [*RUN[:-2], "--lr-decay-style", "WSD", "--lr-wsd-decay-style", shape, "--lr-wsd-decay-iters", 3,
           "--lr-warmup-iters", 2, "--train-iters", 8]
    train([*wsd, "--metrics-file", tmp_path / "whole"])
    part = [*wsd, "--save", tmp_path / "s", "--load", tmp_path / "s", "--metrics-file", tmp_path / "parts"]
    for _ in range(8):
        train([*part, "--exit-interval", 1])
    assert steps(tmp_path / "parts") == steps(tmp_path / "whole")
    rates = [step["learning_rate"] for step in steps(tmp_path / "whole")]
    assert rates[:6] == [5e-4, *[1e-3] * 5] and rates[6] > rates[7] > 0
    with pytest.raises(ConfigError, match="--lr-wsd-decay-iters 3 in the checkpoint, 4 here"):
        train([*part, "--train-iters", 9, "--lr-decay-iters", 8, "--lr-wsd-decay-iters", 4])
