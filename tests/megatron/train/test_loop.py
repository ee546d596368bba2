"""What a run changes in its process and puts back (garbage collection, --deterministic); how long a rank waits for its
peers: long while a run starts, and as long as a step may take afterwards; and that steps at a learning rate of 0 are
announced at the start."""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron.config.cli import parse_args
from megatron.config.tree import build_config
from megatron.errors import ConfigError
from megatron.optim.schedulers import LR_STYLES, LRSchedule
from megatron.train import build
from megatron.train.loop import Trainer, periodic_gc, zero_lr_warning
from tests.distributed import run_ranks
from tests.megatron.helpers import TINY, steps, train


@contextmanager
def looks() -> Iterator[list[int]]:
    """Generations that were looked at inside, one after the other."""
    found: list[int] = []

    def note(phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            found.append(info["generation"])

    gc.callbacks.append(note)
    try:
        yield found
    finally:
        gc.callbacks.remove(note)


class Circle:
    def __init__(self) -> None:
        self.itself = self


@pytest.mark.parametrize("every, steps, at", [(4, 11, [4, 8]), (1, 3, [1, 2, 3]), (20, 5, [])])
def test_garbage_is_looked_for_at_these_steps_and_at_no_others(every: int, steps: int, at: list[int]) -> None:
    with periodic_gc(every) as collect_after:
        found = []
        for step in range(1, steps + 1):
            for _ in range(2000):  # Python would look for these
                Circle()
            with looks() as each:
                collect_after(step)
            found += [step] * len(each)
        with looks() as between:
            circles = [Circle() for _ in range(2000)]
        assert not between and len(circles) == 2000
    assert found == at
    assert gc.isenabled() and not gc.get_freeze_count()


def test_a_run_looks_at_its_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda: seen.append(gc.get_freeze_count()))
    train([*TINY, "--mock-data", "--train-iters", 7, "--gc-interval", 2])
    assert len(seen) == 4 and all(seen[1:]), "after steps 2, 4 and 6; objects from before the loop are frozen"
    assert gc.isenabled() and not gc.get_freeze_count()


def test_what_the_surrounding_program_has_set_stays_so() -> None:
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        for is_on in (True, False):
            (gc.enable if is_on else gc.disable)()
            with periodic_gc(2):
                pass
            assert gc.get_freeze_count() >= frozen > 0 and gc.isenabled() == is_on
    finally:
        gc.unfreeze()
        gc.enable()


def in_force() -> tuple[int, bool, str | None]:
    return (torch.get_deterministic_debug_mode(), torch.backends.cudnn.benchmark,
            os.environ.get("CUBLAS_WORKSPACE_CONFIG"))


@pytest.mark.parametrize(("mode", "workspace", "fails"), [(0, None, True), (1, ":16:8", False)])
def test_a_later_run_of_the_process_has_what_its_own_flags_say(mode: int, workspace: str | None, fails: bool,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    during: list[tuple[int, bool, str | None]] = []

    def step(trainer: Trainer, batches: list[Any]) -> Any:
        during.append(in_force())
        if fails:
            raise ZeroDivisionError
        return real(trainer, batches)

    real = Trainer.train_step
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if workspace:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", workspace)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    torch.use_deterministic_algorithms(mode > 0, warn_only=True)
    before = in_force()
    try:
        with patch.object(Trainer, "train_step", step):
            try:
                train([*TINY, "--mock-data", "--train-iters", 1, "--deterministic"])
            except ZeroDivisionError:
                assert fails
        assert in_force() == before and during == [(2, False, workspace or ":4096:8")]
    finally:
        torch.use_deterministic_algorithms(False)


LIMIT, LATE = 3.0, 4.0
"""Seconds. A machine with much to do pauses a rank for one now and then."""


def late(action: Callable[..., Any], rank: int, is_late: Callable[..., bool], wait: Callable[[], object]) -> Callable[
        ..., Any]:
    """Rank 1 comes late to it."""
    def wrapped(*arguments: Any) -> Any:
        if rank == 1 and is_late(*arguments):
            wait()
        return action(*arguments)
    return wrapped


def until_there(path: Path, at_most: float = 20) -> None:
    end = time.monotonic() + at_most
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.05)


def gives_up(rank: int, world: int, folder: Path, late_at: int, waits_for: str) -> bool:
    """Whether the rank ends by itself. Rank 1 is late to the step after `late_at`; where that is the first one, at the
    start as well."""
    gave_up = folder / "rank 0 gave up"
    waits = {"a while": lambda: time.sleep(LATE), "the other to give up": lambda: until_there(gave_up)}
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(build, "model", late(build.model, rank, lambda *arguments: late_at == 0, waits["a while"]))
        patching.setattr(Trainer, "train_step", late(Trainer.train_step, rank, lambda trainer, batches:
                                                     trainer.engine.global_steps == late_at, waits[waits_for]))
        try:
            train([*TINY, "--mock-data", "--train-iters", 4, "--log-interval", 1, "--metrics-file", folder / "metrics",
                   "--distributed-timeout-seconds", LIMIT, "--startup-timeout-seconds", 60])
        except RuntimeError:
            if rank == 0:
                gave_up.touch()
            return True
    return False


def test_a_rank_that_is_late_at_the_start_and_to_the_first_step_is_waited_for(tmp_path: Path) -> None:
    assert run_ranks(gives_up, 2, tmp_path, 0, "a while") == [False, False]
    assert len(steps(tmp_path / "metrics")) == 4


def test_a_rank_that_is_late_to_a_later_step_is_not(tmp_path: Path) -> None:
    assert run_ranks(gives_up, 2, tmp_path, 2, "the other to give up") == [True, True]
    assert len(steps(tmp_path / "metrics")) == 2


def test_a_run_may_take_three_times_as_long_to_start_unless_told_otherwise() -> None:
    assert parse_args([*TINY, "--mock-data"]).parallel.startup_limit == 1800
    told = parse_args([*TINY, "--mock-data", "--startup-timeout-seconds", "7", "--distributed-timeout-seconds", "9"])
    assert told.parallel.startup_limit == 7
    with pytest.raises(ConfigError, match="--startup-timeout-seconds"):
        parse_args([*TINY, "--mock-data", "--startup-timeout-seconds", "0"])


def warnings(said: str) -> list[str]:
    return [line for line in said.splitlines() if "learning rate" in line and "warning" in line]


@pytest.mark.parametrize("style", LR_STYLES)
def test_idle_steps_are_those_a_count_finds(style: str) -> None:
    """Every end of the warm-up and of the decay, every length of the run, every step a resume may start at, with and
    without skipped steps."""
    for floor, peak, decay, warm, last, start, skipped in [
            (floor, peak, decay, warm, last, start, skipped)
            for floor in (0.0, 1e-5) for peak in (0.0, 1e-3) for decay in (1, 4, 6) for warm in {0, 1, decay}
            for last in (0, 1, 4, 7)
            for start in (0, 3, 4, 7) for skipped in (0, 2) if skipped <= start]:
        schedule = LRSchedule(style, peak, min(floor, peak), warm, decay)
        config = build_config({"train_iters": last, "lr": peak, "min_lr": min(floor, peak)})
        rates = [schedule(step) for step in range(start - skipped, start - skipped + max(0, last - start))]
        tail = next((k for k in range(len(rates) + 1) if not any(rates[k:])), 0)
        found = zero_lr_warning(config, schedule, start - skipped, start)
        idle = f"0 from iteration {start + tail + 1} on: the last {last - start - tail} of {last} iterations"
        assert found == "" if tail == len(rates) else idle in found


REMEDIES: list[tuple[dict[str, Any], int, str]] = [
    ({}, 0, "give --lr-decay-iters 40 (in a JSON file: total_num_steps), or a --min-lr above 0"),
    ({}, 30, "give --override-lr-scheduler --lr-decay-iters 40, or with it a --min-lr above 0"),
    ({"override_lr_scheduler": True}, 30, "give --lr-decay-iters 40 (in a JSON file: total_num_steps)"),
    ({"use_checkpoint_lr_scheduler": True}, 30,
     "give --override-lr-scheduler --lr-decay-iters 40 in place of --use-checkpoint-lr-scheduler"),
    ({"lr": 0.0}, 0, "give --lr above 0")]


def test_the_remedy_is_one_that_helps_here() -> None:
    for values, iteration, remedy in REMEDIES:
        found = zero_lr_warning(build_config({"train_iters": 40, **values}), lambda step: float(step < 20), iteration,
                                iteration)
        assert remedy in found and "\n" not in found


RUN = [*TINY, "--mock-data", "--lr", "1e-3", "--warmup", "0"]


def test_the_longer_run_that_used_to_be_documented_warns_and_what_the_warning_recommends_trains_to_the_end(
        tmp_path: Path) -> None:
    saved = tmp_path / "s"
    assert not warnings(train([*RUN, "--train-iters", 4, "--save", saved])), "every step of it trains"
    longer = [*RUN, "--train-iters", 8, "--load", saved, "--metrics-file", tmp_path / "m"]
    note, = warnings(train([*longer, "--lr-decay-iters", 4]))
    assert "0 from iteration 5 on: the last 4 of 8" in note
    note, = warnings(train([*longer, "--use-checkpoint-lr-scheduler"]))
    assert "0 from iteration 5 on" in note and "--override-lr-scheduler" in note
    assert [step["learning_rate"] for step in steps(tmp_path / "m")] == [0.0] * 8
    for flags in ([], ["--lr-decay-iters", 8], ["--lr-decay-iters", 4, "--min-lr", 1e-4]):
        (tmp_path / "m").unlink()
        assert not warnings(train([*longer, "--override-lr-scheduler", *flags]))
        assert min(step["learning_rate"] for step in steps(tmp_path / "m")) > 0


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
