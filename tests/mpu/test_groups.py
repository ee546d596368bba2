"""Process groups: the grid as ranks see it, and the classic accessors."""

from __future__ import annotations

import pytest
import torch.distributed as dist

import mpu
from mpu.groups import SOLO, Groups, build, of_handle
from mpu.split import ParallelError
from tests.distributed import run_ranks


def _grid(rank: int, world: int, tp: int) -> list[tuple[int, int, tuple[int, ...]]]:
    groups = build(tp)
    return [(group.rank, group.size, group.ranks) for group in (groups.world, groups.tp, groups.dp)]


def test_four_ranks_in_pairs() -> None:
    everyone = (0, 1, 2, 3)
    assert run_ranks(_grid, 4, 2) == [
        [(0, 4, everyone), (0, 2, (0, 1)), (0, 2, (0, 2))],
        [(1, 4, everyone), (1, 2, (0, 1)), (0, 2, (1, 3))],
        [(2, 4, everyone), (0, 2, (2, 3)), (1, 2, (0, 2))],
        [(3, 4, everyone), (1, 2, (2, 3)), (1, 2, (1, 3))],
    ]


def test_without_torch_distributed_the_world_is_one_rank() -> None:
    assert not dist.is_initialized()
    assert build() == Groups(SOLO, SOLO, SOLO)
    with pytest.raises(ParallelError, match="size 2 needs 2 ranks"):
        build(2)


def _refused(rank: int, world: int) -> str:
    with pytest.raises(ParallelError) as caught:
        build(4)
    return str(caught.value)


def test_a_size_larger_than_the_world_is_an_error_and_not_clamped() -> None:
    assert all("size 4 does not divide the world size 2" in text for text in run_ranks(_refused, 2))


def _found_again(rank: int, world: int) -> bool:
    groups = build(2)
    assert of_handle(None) == SOLO
    return all(of_handle(group.handle) == group for group in (groups.world, groups.tp, groups.dp))


def test_a_group_is_found_again_from_torchs_handle() -> None:
    assert all(run_ranks(_found_again, 4))


def _classic(rank: int, world: int) -> list[int]:
    with pytest.raises(ParallelError, match="not initialised"):
        mpu.get_model_parallel_rank()
    mpu.initialize_model_parallel(2)
    with pytest.raises(ParallelError, match="already initialised"):
        mpu.initialize_model_parallel(2)
    assert dist.get_world_size(mpu.get_model_parallel_group()) == 2
    numbers = [
        mpu.get_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size(), mpu.get_model_parallel_src_rank(),
        mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size(),
    ]
    mpu.destroy_model_parallel()
    assert not mpu.model_parallel_is_initialized()
    return numbers


def test_classic_accessors() -> None:
    assert run_ranks(_classic, 4) == [[0, 2, 0, 0, 2], [1, 2, 0, 0, 2], [0, 2, 2, 1, 2], [1, 2, 2, 1, 2]]


def test_classic_vocabulary_ranges() -> None:
    assert mpu.VocabUtility.vocab_range_from_global_vocab_size(100, 1, 4) == (25, 50)
    assert mpu.VocabUtility.vocab_range_from_per_partition_vocab_size(25, 1, 4) == (25, 50)
