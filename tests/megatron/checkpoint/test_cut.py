"""Local <-> logical arithmetic against plain slicing of an index tensor."""

from __future__ import annotations

from math import prod

import pytest
import torch

from megatron.checkpoint.reshard import tp_sharding_of
from megatron.checkpoint.reshard import TPSharding
from tests.megatron.checkpoint.made import SHAPES, local


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", SHAPES)
def test_runs_map_every_element_to_where_slicing_puts_it(name: str, tp: int) -> None:
    shape, partition = SHAPES[name]
    index = torch.arange(float(prod(shape))).view(shape)
    for rank in range(tp):
        expected = local(index, partition, rank, tp, padding=-1)
        found = torch.full((expected.numel(),), -1.0)
        for run in tp_sharding_of(tuple(expected.shape), partition, tp).to_logical(
                0 if partition is None else rank, 0, expected.numel()):
            found[run.local_start:run.local_start + run.count] = index.flatten()[run.logical_start:run.logical_start +
                                                                                 run.count]
        assert torch.equal(found, expected.flatten())


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", SHAPES)
def test_logical_runs_are_the_inverse(name: str, tp: int) -> None:
    shape, partition = SHAPES[name]
    index = torch.arange(prod(shape)).view(shape)
    parts = [local(index, partition, rank, tp).flatten() for rank in range(tp)]
    cut = tp_sharding_of(tuple(local(index, partition, 0, tp).shape), partition, tp)
    for start, stop in [(0, prod(shape)), (3, prod(shape) - 1), (5, 6), (4, 4)]:
        found = [parts[run.tp_rank][run.local_start:run.local_start + run.count] for run in cut.to_local(start, stop)]
        assert torch.cat([torch.empty(0), *found]).tolist() == list(range(start, stop))


def test_the_logical_shape_has_no_padding() -> None:
    assert TPSharding((16, 8), 0, 1, 50, 4).logical_shape == (50, 8)
    assert TPSharding((12, 8), 0, 3, None, 4).logical_shape == (48, 8)
    assert TPSharding((16, 8), None, 1, None, 1).logical_shape == (16, 8)


@pytest.mark.parametrize("impossible", [
    TPSharding((4,), 1, 1, None, 2), TPSharding((4,), 0, 3, None, 2), TPSharding((4,), 0, 1, 9, 2),
    TPSharding((4,), 0, 2, 3, 2), TPSharding((4,), 0, 1, None, 0), TPSharding((4,), 0, 0, None, 1),
    TPSharding((4,), None, 1, None, 2),
])
def test_an_impossible_cut_is_refused(impossible: TPSharding) -> None:
    assert not impossible.can_exist
