"""The harness itself: results in rank order, the culprit named, nothing left behind."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed import RankError, run_ranks


def _sum(rank: int, world_size: int, factor: float) -> torch.Tensor:
    x = torch.full((3,), rank * factor)
    dist.all_reduce(x)
    return x


def _culprit(rank: int, world_size: int, how: str) -> None:
    if rank == 1:
        if how == "raise":
            raise ValueError("the real reason")
        os._exit(3)
    dist.barrier()


def _sleep(rank: int, world_size: int) -> None:
    if rank == 1:
        time.sleep(60)


def test_results_come_back_in_rank_order() -> None:
    results = run_ranks(_sum, 2, 2.0)
    assert [result.tolist() for result in results] == [[2.0] * 3] * 2


@pytest.mark.parametrize(("how", "text"), [("raise", "the real reason"), ("exit", "exit code 3")])
def test_the_culprit_is_named_and_not_its_victims(how: str, text: str) -> None:
    with pytest.raises(RankError, match=text) as caught:
        run_ranks(_culprit, 2, how)
    assert caught.value.rank == 1


def test_a_stuck_rank_is_ended_and_its_stack_shown() -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match="in _sleep") as caught:
        run_ranks(_sleep, 2, timeout=5)  # the ranks have to meet before it
    assert caught.value.rank == 1 and time.monotonic() - start < 30
