"""The late wire itself: what it lets pass, and what it reports."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mpu.collectives import CollectiveWork, all_gather_into, all_reduce_into, broadcast_into, reduce_scatter_into
from mpu.groups import Group, build
from tests.distributed import run_ranks
from tests.late_wire import late_wire


def results(rank: int, world: int) -> None:
    group = build().world
    mine = torch.arange(8.0) + rank
    with late_wire():
        flat, shard, within, word = mine.clone(), torch.empty(4), mine.clone(), torch.tensor(float(rank))
        own = within[4 * rank:4 * rank + 4]
        pending = [all_reduce_into(flat, group), reduce_scatter_into(shard, mine, group),
                   reduce_scatter_into(own, within, group), broadcast_into(word, 1, group)]
        assert shard.isnan().all() or not shard.isnan().any(), "at once, or not yet"
        for operation in pending:
            operation.wait()
    total = 2 * torch.arange(8.0) + 1
    assert torch.equal(flat, total) and torch.equal(shard, total[4 * rank:4 * rank + 4])
    assert torch.equal(own, shard) and word == 1


def test_every_operation_gives_what_the_real_wire_gives() -> None:
    run_ranks(results, 2)


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
