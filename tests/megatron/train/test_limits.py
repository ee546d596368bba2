"""How long a rank waits for its peers: long while a run starts, and as long as a step may take afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.config.cli import parse_args
from megatron.errors import ConfigError
from megatron.train import build
from megatron.train.loop import Trainer
from tests.distributed import run_ranks
from tests.megatron.helpers import TINY, steps, train

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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "model", late(build.model, rank, lambda *arguments: late_at == 0, waits["a while"]))
        patch.setattr(Trainer, "train_step", late(Trainer.train_step, rank, lambda trainer, batches:
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
