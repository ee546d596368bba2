"""When garbage is looked for in a run."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from megatron.train.loop import periodic_gc
from tests.megatron.helpers import TINY, train


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


def test_left_alone_it_is_looked_for_when_python_wants_to() -> None:
    with periodic_gc(0) as collect_after, looks() as found:
        collect_after(1)
        assert not found
        circles = [Circle() for _ in range(20000)]
    assert found and circles


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
