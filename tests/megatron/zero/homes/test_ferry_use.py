"""State beside an accelerator is used, changed, saved and loaded as state on it, however late copies are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.zero.api.engine import Engine
from tests.distributed import run_ranks
from tests.late_copy_streams import late_copy_streams
from tests.megatron.zero.homes.test_equal import PRECISIONS, alike, batches, outcome, train
from tests.megatron.zero.homes.test_ferry import homes
from tests.megatron.zero.homes.test_use import Change, built, edit, forget, load, put
from tests.megatron.zero.run import configure_gpt2
from tests.wires import accelerator_side

CELLS = {"stage 2 fp32": {"zero_stage": 2, "batch_size": 2},
         "stage 3 bf16": {"zero_stage": 3, "batch_size": 2, **PRECISIONS["bf16"]}}


def engine_at(cell: dict[str, Any], home: dict[str, Any]) -> Engine:
    return built(configure_gpt2(**cell, **home))


def moved(rank: int, world: int, folder: Path, cell: dict[str, Any]) -> list[str]:
    """A run that is saved and goes on in another home, through all of them."""
    rows = batches(2 + 2 * 9)
    with accelerator_side(), late_copy_streams():
        stayed = outcome(engine_at(cell, {}).core, rows)
        ways = [{}, *homes(folder / "drive", cell["zero_stage"], 0).values(), {}]
        losses: list[float] = []
        for number, home in enumerate(ways):
            engine = engine_at(cell, home)
            if number:
                engine.load_checkpoint(folder / str(number - 1))
            if number + 1 == len(ways):
                end = outcome(engine.core, rows[2 * number :])
                return [] if alike([losses + end[0], *end[1:]], stayed) else ["it ends elsewhere"]
            losses += train(engine.core, rows[2 * number : 2 * number + 2])
            engine.save_checkpoint(folder / str(number))
            engine.destroy()
    raise AssertionError


@pytest.mark.parametrize("cell", CELLS)
def test_a_run_moves_through_all_homes(tmp_path: Path, cell: str) -> None:
    (tmp_path / "drive").mkdir()
    assert run_ranks(moved, 2, tmp_path, CELLS[cell], timeout=300) == [[]] * 2


def changed(rank: int, world: int, folder: Path, change: Change, cell: dict[str, Any]) -> list[str]:
    rows, ends = batches(5), {}
    with accelerator_side(), late_copy_streams():
        for name, home in {"stays": {}, **homes(folder, cell["zero_stage"], 0)}.items():
            engine = engine_at(cell, home)
            train(engine.core, rows[:2])
            change(engine)
            ends[name] = outcome(engine.core, rows[2:])
            engine.destroy()
    return [name for name, end in ends.items() if not alike(end, ends["stays"])]


@pytest.mark.few(2)
@pytest.mark.parametrize("change, cell", [
    pytest.param(change, cell, marks=() if (place + other) % 2 else pytest.mark.slow)  # each change once, in turn
    for place, change in enumerate([edit, put, load, forget]) for other, cell in enumerate(CELLS)])
def test_what_is_changed_by_hand_lasts(tmp_path: Path, change: Change, cell: str) -> None:
    assert run_ranks(changed, 2, tmp_path, change, CELLS[cell], timeout=300) == [[]] * 2
