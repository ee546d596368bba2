"""Ranks that do different things end with one error that names each of them; slow ranks are never ended. When the logs
of two ranks contradict each other, and how that is said.

Each rank runs its loop in a thread, as a loop that hangs cannot be left: what the watch writes before it would end the
process is what the rank returns.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from megatron.distributed import exit_codes, watchdog
from megatron.distributed.collective_log import (ENDED, MAX_ENTRIES, NO_ENTRY, SAVE, STEP, CollectiveLog,
                                                 CollectiveLogSnapshot, describe_positions,
                                                 describe_setting_differences, divergence_positions, logs_diverged)
from megatron.distributed.rank_text import format_ranks
from megatron.zero.api.engine import Engine
from tests.distributed import run_ranks
from tests.megatron.zero import small
from tests.megatron.zero.models import WIDTH, Block
from tests.wires import accelerator_side

ROOT = Path(__file__).parents[3]
LOOK = 0.1  # in place of a second
POLLS = {"CHECK_SECONDS": LOOK, "POLL_SECONDS": 0.05, "REPORTER_POLLS": 200, "REPORTER_TIMEOUT_POLLS": 400}
"""The reporter waits for ten seconds for the logs of ranks that are slow."""


class Model(nn.Module):
    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(size) for size in sizes)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, plan: tuple[int, ...]) -> Tensor:
        for index in plan:
            x = self.blocks[index](x)
        return self.head(x).square().mean()


SAME, LARGER = (16, 16, 16, 16), (16, 700, 5000, 9000)
ALL = (0, 1, 2, 3)


def engine_of(sizes: tuple[int, ...], stage: int = 3, **section: Any) -> Engine:
    return small.engine_of(stage, Model(sizes), lr=0.01, **section)


def rows() -> Tensor:
    return torch.randn(2, WIDTH)


def train(engine: Engine, plan: tuple[int, ...] = ALL) -> None:
    engine.backward(engine(rows(), plan))
    engine.step()


Loop = Callable[[Engine, int], None]


def ends_of(loop: Loop, world: int, *how: Any, **section: Any) -> list[str]:
    return run_ranks(_watched, world, loop, section, *how, timeout=20)


def _watched(rank: int, world: int, loop: Loop, section: dict[str, Any], sizes: tuple[int, ...], stage: int = 3,
             side: bool = False) -> str:
    """What the loop ended with: the error of the watch or its own, or nothing."""
    ends: SimpleQueue[str] = SimpleQueue()

    def leave(code: int) -> None:
        ends.put(f"{code} {told[-1]}")
        Event().wait()

    def run() -> None:
        try:
            loop(engine, rank)
            ends.put("")
        except BaseException as error:
            failure = exit_codes.exit_reason_of(error)
            ends.put(f"{failure.code} {failure.text}")

    told: list[str] = []
    with patch.multiple(watchdog, **POLLS), \
            accelerator_side(side), patch.multiple(exit_codes, write_error=told.append, exit_now=leave):
        engine = engine_of(sizes, stage, **section)
        Thread(target=run, daemon=True).start()
        return ends.get()


def one_error(ends: list[str]) -> str:
    assert len(set(ends)) == 1, ends
    assert ends[0].startswith("2 "), ends
    return ends[0]


# ---- ranks that do different things --------------------------------------------------------------------------------


def with_plan(plan: tuple[int, ...], engine: Engine, rank: int) -> None:
    """The last rank runs other blocks in the second step."""
    last = torch.distributed.get_world_size() - 1
    train(engine)
    train(engine, plan if rank == last else ALL)
    train(engine)


PLANS = {"another block": ((0, 1, 3), "blocks.2 (forward)", "blocks.3 (forward)"),
         "another order": ((0, 2, 1, 3), "blocks.1 (forward)", "blocks.2 (forward)"),
         "a block again": ((0, 1, 2, 3, 0), "", "blocks.0 (forward)")}


@pytest.mark.parametrize("what, side", [("another block", False), ("a block again", True)])
def test_blocks_that_one_rank_runs(what: str, side: bool) -> None:
    plan, others, own = PLANS[what]
    alone = {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}
    error = one_error(ends_of(partial(with_plan, plan), 2, SAME, 3, side, **alone))
    assert f"rank 0 is at {others}" in error and f"rank 1 is at {own}" in error


@pytest.mark.parametrize("world, side, what", [(2, True, "another block"), (3, False, "another order")])
def test_blocks_that_are_gathered_ahead(world: int, side: bool, what: str) -> None:
    plan, theirs, own = PLANS[what]
    error = one_error(ends_of(partial(with_plan, plan), world, LARGER, 3, side))
    assert f"{'rank 0 is' if world == 2 else 'ranks 0-1 are'} at {theirs}, rank {world - 1} is at {own}" in error


def saves_early(engine: Engine, rank: int, folder: str) -> None:
    train(engine)
    if rank == 1:
        engine.save_checkpoint(folder)
    else:
        train(engine)


def test_a_save_that_one_rank_makes_early(tmp_path: Path) -> None:
    error = one_error(ends_of(partial(saves_early, folder=str(tmp_path)), 2, LARGER, 3, stage3_max_reuse_distance=0))
    assert "rank 0 is at " in error and "rank 1 is at a save" in error


# ---- ranks that give up --------------------------------------------------------------------------------------------


def is_interrupted(engine: Engine, rank: int) -> None:
    train(engine)
    loss = engine(rows(), ALL)
    if rank == 1:
        loss.register_hook(_interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.backward(loss)
        time.sleep(8 * LOOK)  # a user who thinks about it
        return
    engine.backward(loss)


def _interrupt(gradient: Tensor) -> None:
    raise KeyboardInterrupt


def test_nobody_waits_for_a_rank_that_was_interrupted() -> None:
    first, second, third = ends_of(is_interrupted, 3, SAME, 3)
    assert second == "" and first == third
    assert first.startswith("5 ") and "rank 1 is at an interruption (Ctrl-C)" in first


# ---- ranks that are slow -------------------------------------------------------------------------------------------


def spares_a_parameter(block: int, engine: Engine, rank: int) -> None:
    """On rank 1 the gradients of a block, and of those before it, leave when all others have been made."""
    for number in range(2):
        layer = engine.module.blocks[block].narrow
        without_bias = patch.object(layer, "forward", lambda x: nn.functional.linear(x, layer.weight))
        with without_bias if rank == 1 else nullcontext():
            engine.backward(engine(rows(), ALL))
        engine.step()
        time.sleep(20 * LOOK if rank == number else 0.0)


@pytest.mark.parametrize("block, side", [(1, False), (3, True)], ids=["leave later", "leave in their turn"])
def test_a_slow_rank_and_gradients_that_leave_later_on_one_rank_are_no_fault(block: int, side: bool) -> None:
    assert ends_of(partial(spares_a_parameter, block), 2, LARGER, 3, side) == ["", ""]


# ---- as a user sees it ---------------------------------------------------------------------------------------------

PROGRAM = """
import os, sys
from megatron.distributed.exit_codes import run
from tests.megatron.zero import test_watch


def main():
    engine = test_watch.engine_of(test_watch.SAME)
    sys.engine = engine  # what refers to the engine does so to the end
    for _ in range(3 if os.environ["RANK"] == "1" else 5):
        test_watch.train(engine)

sys.exit(run(main))
"""


def test_a_job_ends_by_itself_where_a_rank_leaves_early_and_keeps_the_engine(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    job = subprocess.run([sys.executable, "-m", "megatron.launch", "--nproc-per-node", "2", str(script)], cwd=ROOT,
                         text=True, capture_output=True, timeout=60, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert job.returncode == 2
    line, = [line for line in job.stderr.splitlines() if line.startswith("error:")]
    assert "rank 0 is at " in line and "rank 1 is at " in line


# ---- the logs, without ranks ---------------------------------------------------------------------------------------


def log_of(*entries: str, sums: int = 0, in_order: bool = False) -> CollectiveLog:
    log = CollectiveLog(reductions_in_order=in_order)
    log.purpose = "forward"
    for entry in entries:
        log.record_collective(entry)
    for number in range(sums):
        log.record_reduction(f"block {number}")
    return log


def test_logs_contradict_each_other_from_their_first_difference_and_not_where_one_is_only_shorter() -> None:
    for before in (0, 1, MAX_ENTRIES - 1, MAX_ENTRIES, 3 * MAX_ENTRIES + 5):
        common = [str(number % 7) for number in range(before)]
        short, first, second = (log_of(*common, *more).snapshot(rank)
                                for rank, more in enumerate(["", ("x", "y"), ("x", "z", "y")]))
        assert not logs_diverged(short, second) and not logs_diverged(second, short)
        assert logs_diverged(first, second) and logs_diverged(second, first)
        assert describe_positions(
            divergence_positions([first, second])) == "rank 1 is at y (forward), rank 2 is at z (forward)"
    far = log_of(*"ab" * MAX_ENTRIES).snapshot(1)
    assert not logs_diverged(short, far), "of logs that are too far apart nothing is known"


def log_ahead(events: str) -> CollectiveLog:
    """`+a` gathers block a, `a` runs it, `>` turns to the backward, `|` is a step."""
    log = CollectiveLog(reductions_in_order=False)
    log.purpose = "forward"
    for event in events.split():
        name = event.lstrip("+")
        if event == ">":
            log.purpose = "backward"
        elif event == "|":
            log.record_barrier(STEP)
            log.purpose = "forward"
        elif event[0] == "+":
            log.record_collective(name)
        else:
            log.awaited_entry = max(n for n in range(log.entry_count) if log._entries[n % MAX_ENTRIES][0] == name)
            log.awaited_entry = NO_ENTRY
    return log


def places(*events: str) -> str:
    """What is said of ranks with these logs, as they read them from the store."""
    packed = [json.dumps(log_ahead(one).snapshot(rank).pack()) for rank, one in enumerate(events)]
    return describe_positions(divergence_positions([CollectiveLogSnapshot.unpack(json.loads(one)) for one in packed]))


def test_the_place_is_where_ranks_ran_another_block_though_it_was_gathered_ahead() -> None:
    for steps in (0, 3, MAX_ENTRIES):
        before = "+a a | " * steps
        without_c, without_d = before + "+a +b a b +c +d d > +d d", before + "+a +b a b +c c +d > +c c"
        assert places(without_c, without_d) == "rank 0 is at d (forward), rank 1 is at c (forward)"


def test_a_use_that_is_no_cause_is_no_place() -> None:
    apart = "rank 0 is at x (backward), rank 1 is at y (backward)"
    assert places("+a +b a | > +x x", "+a +b b | > +y y") == apart  # the ranks have met since
    assert places("+a +b a > +x a", "+a +b a > +y b") == apart  # what followed the difference
    many = "+a +b " + "a " * MAX_ENTRIES
    assert places(f"{many} a > +x", f"{many} b > +y") == apart  # what came before is forgotten
    assert places("+a +b a > +x", "+a +b > +y") == apart  # one rank is slow


@pytest.mark.parametrize("waits", ["entry", SAVE, ENDED])
def test_two_ranks_that_wait_for_each_other(waits: str) -> None:
    mine, other = log_of("a", sums=2), log_of("a", "b", sums=1)
    mine.awaited_reduction = 1, "block 1"
    if waits == "entry":
        assert not logs_diverged(mine.snapshot(0), other.snapshot(1))  # it may be slow on its way to the sum
        other.awaited_entry = 1
    else:
        other.record_barrier(waits)
    records = [mine.snapshot(0), other.snapshot(1)]
    assert logs_diverged(*records)
    place = "b (forward)" if waits == "entry" else waits
    said = describe_positions(divergence_positions(records))
    assert said == f"rank 0 is at the gradients of block 1, rank 1 is at {place}"
    if waits == "entry":
        mine.record_collective("b")
        mine.record_collective("another")
        assert not logs_diverged(mine.snapshot(0), other.snapshot(1))  # it has begun what the other waits for


def test_what_is_known_of_a_rank_survives_its_way_and_is_told_briefly() -> None:
    log = log_of(*random.Random(0).choices("abc", k=2 * MAX_ENTRIES), sums=3)
    log.awaited_reduction = 2, "block 2"
    record = log.snapshot(7)
    assert CollectiveLogSnapshot.unpack(json.loads(json.dumps(record.pack()))) == record
    assert len(json.dumps(record.pack())) < 8 * MAX_ENTRIES
    records = [CollectiveLogSnapshot(rank, 0, [], accumulation_setting=f"accumulation {1 + rank // 2}")
               for rank in (3, 0, 2, 1)]
    told = "; they have set accumulation 1 on ranks 0-1, accumulation 2 on ranks 2-3"
    assert describe_setting_differences(records) == told
    assert describe_setting_differences(records[1:2] + records[3:]) == ""
    assert [format_ranks(ranks) for ranks in ([3], [0, 1, 2, 5], range(1000))] == [
        "rank 3", "ranks 0-2, 5", "ranks 0-999"]
    assert format_ranks(range(0, 4000, 2)) == f"ranks {', '.join(map(str, range(0, 32, 2)))} and 1984 others"
