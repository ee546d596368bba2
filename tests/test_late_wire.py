"""The late wire itself: what it lets pass, and what it reports."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mpu.collectives import CollectiveWork, all_gather_into
from mpu.groups import Group, build
from tests.distributed import run_ranks
from tests.late_wire import late_wire


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
