"""What a run changes in its process and puts back (garbage collection, --deterministic), and how long a rank waits for
its peers: long while a run starts, and as long as a step may take afterwards."""

from __future__ import annotations

import gc
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
from megatron.errors import ConfigError
from megatron.train import build
from megatron.train.loop import Trainer, periodic_gc
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


def test_who_has_switched_it_off_keeps_it_off() -> None:
    gc.disable()
    try:
        with periodic_gc(1) as collect_after, looks() as found:
            collect_after(1)
        assert not found and not gc.isenabled()
    finally:
        gc.enable()


def test_a_run_looks_at_its_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda: seen.append(gc.get_freeze_count()))
    train([*TINY, "--mock-data", "--train-iters", 7, "--gc-interval", 2])
    assert len(seen) == 4 and all(seen[1:]), "after steps 2, 4 and 6; objects from before the loop are frozen"
    assert gc.isenabled() and not gc.get_freeze_count()


def test_what_the_program_around_it_has_frozen_stays_so() -> None:
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with periodic_gc(2):
            pass
        assert gc.get_freeze_count() >= frozen > 0
    finally:
        gc.unfreeze()


def in_force() -> tuple[int, bool, str | None]:
    return (torch.get_deterministic_debug_mode(), torch.backends.cudnn.benchmark,
            os.environ.get("CUBLAS_WORKSPACE_CONFIG"))


@pytest.mark.parametrize(("mode", "workspace"), [(0, None), (1, ":16:8")])
@pytest.mark.parametrize("fails", [False, True])
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
