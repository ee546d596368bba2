"""The arithmetic of who owns what."""

from __future__ import annotations

import pytest
import torch

from mpu.partition import join_local_slices, local_slice
from mpu.split import ParallelError, Partition, divide, pad_vocab, rank_grid, split_range


@pytest.mark.parametrize(("parts", "length"), [(1, 7), (2, 8), (4, 8), (3, 0)])
def test_ranges_cover_the_length_once(parts: int, length: int) -> None:
    ranges = [split_range(rank, parts, length) for rank in range(parts)]
    assert [i for start, stop in ranges for i in range(start, stop)] == list(range(length))


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_padded_vocabulary_is_the_smallest_that_fits(tp: int) -> None:
    size = pad_vocab(50257, 128, tp)
    assert size % (128 * tp) == 0 and 0 <= size - 50257 < 128 * tp
    assert pad_vocab(size, 128, tp) == size


@pytest.mark.parametrize(("world", "tp"), [(1, 1), (6, 3), (8, 8), (12, 4)])
def test_every_rank_is_in_one_group_of_each_kind_and_they_meet_once(world: int, tp: int) -> None:
    tp_groups, dp_groups = rank_grid(world, tp)
    for groups in (tp_groups, dp_groups):
        assert sorted(rank for group in groups for rank in group) == list(range(world))
    assert all(len(set(a) & set(b)) == 1 for a in tp_groups for b in dp_groups)


@pytest.mark.parametrize(("world", "tp"), [(4, 3), (2, 4), (4, 0)])
def test_an_impossible_grid_is_refused_with_both_numbers(world: int, tp: int) -> None:
    with pytest.raises(ParallelError, match=f"{tp}.*{world}"):
        rank_grid(world, tp)
    with pytest.raises(ParallelError, match="heads 7 .* 2"):
        divide(7, 2, "heads")


@pytest.mark.parametrize("partition", [Partition(0), Partition(1), Partition(0, 3), Partition(1, 2)])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_slices_join_to_the_whole(partition: Partition, tp: int) -> None:
    full = torch.arange(24 * 16).view(24, 16)
    pieces = [local_slice(full, partition, rank, tp) for rank in range(tp)]
    assert torch.equal(join_local_slices(pieces, partition), full)


def test_stride_gives_each_rank_a_slice_of_each_part() -> None:
    qkv = torch.tensor([0, 1, 10, 11, 20, 21])
    assert local_slice(qkv, Partition(0, 3), 1, 2).tolist() == [1, 11, 21]
