"""The helpers of the tests: which cases are quick, jobs of several ranks, and the late wire."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import combinations, product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mpu.collectives import all_gather_into
from mpu.groups import build
from tests.covering import cells, pairs
from tests.distributed import RankError, on_ranks, run_ranks
from tests.late_wire import late_wire

AXES = (("a", "b"), (1, 2, 3), (True, False, None), ("x", "y"))


@pytest.mark.parametrize("each, most", [(1, 3), (2, 12)])
def test_quick_cells_have_every_value_or_pair(each: int, most: int) -> None:
    found = cells(*AXES, each=each)
    assert [cell.values for cell in found] == list(product(*AXES))
    quick = [cell.values for cell in found if not cell.marks]
    assert len(quick) <= most
    for places in combinations(range(len(AXES)), each):
        wanted = set(product(*(AXES[place] for place in places)))
        assert {tuple(cell[place] for place in places) for cell in quick} == wanted
    assert [cell.values for cell in pairs(*AXES, each=each)] == quick


def _culprit(rank: int, world_size: int, how: str) -> None:
    if rank == 1:
        if how == "raise":
            raise ValueError("the real reason")
        os._exit(3)
    dist.barrier()


@pytest.mark.parametrize(("how", "text"), [("raise", "the real reason"), ("exit", "exit code 3")])
def test_the_culprit_is_named_and_not_its_victims(how: str, text: str) -> None:
    with pytest.raises(RankError, match=text) as caught:
        run_ranks(_culprit, 2, how)
    assert caught.value.rank == 1


@pytest.mark.parametrize("wanted", [{0, 1}])
@on_ranks(2)
def test_a_body_runs_on_every_rank_with_fixtures_and_parameters(rank, world, tmp_path, wanted):
    (tmp_path / str(rank)).touch()
    dist.barrier()
    assert {int(file.name) for file in tmp_path.iterdir()} == wanted


@on_ranks(2)
def _fails(rank: int, world: int) -> None:
    assert rank == 0, "not here"


def test_a_body_that_fails_on_one_rank_fails() -> None:
    with pytest.raises(RankError, match="not here"):
        _fails()


MISUSES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "a source was written to": lambda full, shard: shard.add_(1),
    "a destination was written to": lambda full, shard: full.zero_(),
    "memory moved": lambda full, shard: full.untyped_storage().resize_(0)}


def misuse(rank: int, world: int) -> None:
    group = build().world
    for said, act in MISUSES.items():
        full, shard = torch.empty(8), torch.ones(4)
        with pytest.raises(AssertionError, match=said), late_wire():
            pending = all_gather_into(full, shard, group)
            act(full, shard)
            pending.wait()
    with pytest.raises(AssertionError, match="never waited for"), late_wire():
        all_gather_into(torch.empty(8), torch.ones(4), group)


def test_misuse_of_the_late_wire_is_reported() -> None:
    run_ranks(misuse, 2)
