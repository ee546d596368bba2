"""The helpers of the tests: which cases are quick, jobs of several ranks, and the late wire."""

from __future__ import annotations

import os
from itertools import combinations, product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mpu.collectives import CollectiveWork, all_gather_into
from mpu.groups import build
from tests.covering import cells, pairs, spread_out
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


def test_a_few_are_from_all_over_the_list() -> None:
    for number, quick in ((1, [4]), (2, [1, 4]), (3, [0, 2, 4]), (9, [0, 1, 2, 3, 4])):
        chosen, others = spread_out(range(5), number)
        assert chosen == quick and sorted(chosen + others) == list(range(5))


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
def test_a_body_runs_on_every_rank_with_fixtures_and_parameters(rank: int, world: int, tmp_path: Path,
                                                                wanted: set[int]) -> None:
    (tmp_path / str(rank)).touch()
    dist.barrier()
    assert {int(file.name) for file in tmp_path.iterdir()} == wanted


@on_ranks(2)
def _fails(rank: int, world: int) -> None:
    assert rank == 0, "not here"


def test_a_body_that_fails_on_one_rank_fails() -> None:
    with pytest.raises(RankError, match="not here"):
        _fails()


def write_to_source(full: Tensor, shard: Tensor, pending: CollectiveWork) -> None:
    shard.add_(1)
    pending.wait()


def write_to_destination(full: Tensor, shard: Tensor, pending: CollectiveWork) -> None:
    full.zero_()
    pending.wait()


def resize(full: Tensor, shard: Tensor, pending: CollectiveWork) -> None:
    full.untyped_storage().resize_(0)
    pending.wait()


def forget(full: Tensor, shard: Tensor, pending: CollectiveWork) -> None:
    pass


def misbehave(rank: int, world: int) -> list[str]:
    group, said = build().world, []
    for deed in DEEDS:
        full, shard = torch.empty(8), torch.ones(4)
        with pytest.raises(AssertionError) as caught, late_wire():
            deed(full, shard, all_gather_into(full, shard, group))
        said.append(str(caught.value))
    return said


DEEDS = {write_to_source: "a source was written to", write_to_destination: "a destination was written to",
         resize: "memory moved", forget: "never waited for"}


def test_misuse_is_reported() -> None:
    for found in run_ranks(misbehave, 2):
        assert all(said in text for said, text in zip(DEEDS.values(), found, strict=True)), found
