"""Offloaded state is saved, loaded and changed by hand as state on the device, however late copies are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from megatron.zero.api.engine import Engine
from tests.distributed import run_ranks
from tests.late_copy_streams import late_copy_streams
from tests.megatron.zero.offload.test_equal import PRECISIONS, alike, batches, everywhere, outcome, train
from tests.megatron.zero.offload.test_ferry import homes
from tests.megatron.zero.offload.test_use import Change, built, edit, forget, load, put
from tests.megatron.zero.run import configure_gpt2
from tests.wires import accelerator_side

CELLS = {"stage 2 fp32": {"zero_stage": 2, "batch_size": 2},
         "stage 3 bf16": {"zero_stage": 3, "batch_size": 2, **PRECISIONS["bf16"]}}


def engine_at(cell: dict[str, Any], home: dict[str, Any]) -> Engine:
    return built(configure_gpt2(**cell, **home))


@contextmanager
def on_side(is_accelerator: bool) -> Iterator[None]:
    """The device is an accelerator whose copies are late; or the host."""
    with accelerator_side(is_accelerator), late_copy_streams() if is_accelerator else nullcontext():
        yield


def homes_of(folder: Path, stage: int, side: bool) -> dict[str, dict[str, Any]]:
    return homes(folder, stage, 0) if side else {"nvme": everywhere(folder, stage)}


def moved(rank: int, world: int, folder: Path, cell: dict[str, Any], side: bool) -> list[str]:
    """A run that is saved and goes on in another home, through all of them."""
    with on_side(side):
        ways = [{}, *homes_of(folder / "drive", cell["zero_stage"], side).values(), {}]
        ways = ways if side else [*ways[:-1], *ways[1:]]  # also from a drive to a drive
        rows = batches(2 + 2 * 9)
        stayed = outcome(engine_at(cell, {}).core, rows)
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


@pytest.mark.parametrize("side", [False, True])
@pytest.mark.parametrize("cell", CELLS)
def test_a_run_moves_through_all_homes(tmp_path: Path, cell: str, side: bool) -> None:
    (tmp_path / "drive").mkdir()
    assert run_ranks(moved, 2, tmp_path, CELLS[cell], side, timeout=300) == [[]] * 2


def changed(rank: int, world: int, folder: Path, change: Change, cell: dict[str, Any], side: bool) -> list[str]:
    rows, ends = batches(5), {}
    with on_side(side):
        for name, home in {"stays": {}, **homes_of(folder, cell["zero_stage"], side)}.items():
            engine = engine_at(cell, home)
            train(engine.core, rows[:2])
            change(engine)
            ends[name] = outcome(engine.core, rows[2:])
            engine.destroy()
    return [name for name, end in ends.items() if not alike(end, ends["stays"])]


@pytest.mark.few(4)
@pytest.mark.parametrize("change, cell, side", [
    pytest.param(change, cell, side, marks=() if (place + other + side) % 2 else pytest.mark.slow)  # each change twice
    for place, change in enumerate([edit, put, load, forget]) for other, cell in enumerate(CELLS)
    for side in (False, True)])
def test_what_is_changed_by_hand_lasts(tmp_path: Path, change: Change, cell: str, side: bool) -> None:
    assert run_ranks(changed, 2, tmp_path, change, CELLS[cell], side, timeout=300) == [[]] * 2
