"""The helpers of the tests: which cases are quick, jobs of several ranks, and the late wire."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from itertools import combinations, product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mpu.collectives import CollectiveWork, all_gather_into
from mpu.groups import Group, build
from tests.covering import cells, spread_out
from tests.distributed import RankError, run_ranks
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


@pytest.mark.parametrize("number, quick", [(1, [4]), (2, [1, 4]), (3, [0, 2, 4]), (5, [0, 1, 2, 3, 4]),
                                           (9, [0, 1, 2, 3, 4])])
def test_a_few_are_from_all_over_the_list(number: int, quick: list[int]) -> None:
    chosen, others = spread_out(range(5), number)
    assert chosen == quick and sorted(chosen + others) == list(range(5))


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


def orders(rank: int, world: int) -> list[list[str]]:
    """Many operations under way, waited for from the first to the last: in which order they really ended."""
    group = build().world
    found = []
    for seed in range(3):
        with late_wire(seed) as network:
            full = torch.full((4, 8), float("nan"))
            shards = [torch.full((4,), rank + 10.0 * number) for number in range(4)]
            pending = [all_gather_into(place, shard, group) for place, shard in zip(full, shards)]
            ended = []
            for number, operation in enumerate(pending):
                operation.wait()
                ended.append("".join(str(int(not place.isnan().any())) for place in full))
                wanted = torch.tensor([10.0 * number] * 4 + [10.0 * number + 1] * 4)
                assert torch.equal(full[number], wanted)
        assert not network.under_way
        found.append(ended)
    return found


def test_operations_end_in_random_orders_that_are_the_same_on_all_ranks() -> None:
    first, second = run_ranks(orders, 2)
    assert first == second and len({str(ended) for ended in first}) > 1


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


def misbehave(rank: int, world: int, deed: Callable[[Tensor, Tensor, CollectiveWork], None]) -> str:
    group: Group = build().world
    full, shard = torch.empty(8), torch.ones(4)
    with pytest.raises(AssertionError) as caught, late_wire():
        deed(full, shard, all_gather_into(full, shard, group))
    return str(caught.value)


@pytest.mark.parametrize("deed, said", [
    (write_to_source, "a source was written to"), (write_to_destination, "a destination was written to"),
    (resize, "memory moved"), (forget, "never waited for"),
])
def test_misuse_is_reported(deed: Callable[[Tensor, Tensor, CollectiveWork], None], said: str) -> None:
    assert all(said in text for text in run_ranks(misbehave, 2, deed))
