"""Process groups: the grid as ranks see it, and the classic accessors."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist

import mpu
from mpu.collectives import all_gather_into, all_gather_json, all_reduce_scalar, barrier
from mpu.groups import SOLO, Group, Groups, build, group_from_process_group, duplicate_group, set_timeout
from mpu.split import ParallelError
from tests.distributed import on_ranks, run_ranks


def _grid(rank: int, world: int) -> tuple[list[tuple[int, int, tuple[int, ...]]], list[list[int]]]:
    """(rank, size and ranks of each group, the process groups that this rank makes)"""
    with patch.object(dist, "new_group", Mock(wraps=dist.new_group)) as new_group:
        groups = build(2)
    mine = groups.world, groups.tp, groups.dp
    assert all(group_from_process_group(group.process_group_or_none) == group for group in mine)
    assert group_from_process_group(None) == SOLO
    assert all(group.name == group.control_name and group.own_backend_serves_cpu for group in mine), "over gloo"
    made = [call.args[0] for call in new_group.call_args_list]
    return [(group.rank, group.size, group.ranks) for group in mine], made


def test_four_ranks_in_pairs() -> None:
    """A rank makes its own groups only, and finds them again from torch's handles."""
    everyone = (0, 1, 2, 3)
    assert run_ranks(_grid, 4) == [
        ([(0, 4, everyone), (0, 2, (0, 1)), (0, 2, (0, 2))], [[0, 1], [0, 2]]),
        ([(1, 4, everyone), (1, 2, (0, 1)), (0, 2, (1, 3))], [[0, 1], [1, 3]]),
        ([(2, 4, everyone), (0, 2, (2, 3)), (1, 2, (0, 2))], [[2, 3], [0, 2]]),
        ([(3, 4, everyone), (1, 2, (2, 3)), (1, 2, (1, 3))], [[2, 3], [1, 3]])]


def test_without_torch_distributed_the_world_is_one_rank() -> None:
    assert not dist.is_initialized()
    assert build() == Groups(SOLO, SOLO, SOLO)
    with pytest.raises(ParallelError, match="size 2 needs 2 ranks"):
        build(2)


def _split(rank: int, world: int) -> list[Any]:
    """A world that is connected, as NCCL's is, with groups of gloo in the place of its splits."""
    def split(split_ranks: list[list[int]], timeout: timedelta) -> dist.ProcessGroup | None:
        made.append((split_ranks, timeout))
        everyone.bound_device_id = None
        mine = next(ranks for ranks in split_ranks if rank in ranks)
        try:
            return new_group(mine, timeout=timeout, backend="gloo", use_local_synchronization=True)
        finally:
            everyone.bound_device_id = torch.device("cuda", 0)

    everyone: Any = dist.group.WORLD
    made: list[Any] = []
    new_group, minute = dist.new_group, timedelta(minutes=1)
    everyone.bound_device_id = torch.device("cuda", 0)
    with patch.object(dist, "split_group", split):
        groups = build(2, minute)
    assert all(timeout == minute for _, timeout in made)
    return [[ranks for ranks, _ in made], groups.tp.ranks, groups.dp.ranks, all_gather_json(rank, groups.dp)]


def test_a_connected_world_is_split_once_for_each_axis() -> None:
    calls = [[[0, 1], [2, 3]], [[0, 2], [1, 3]]]
    assert run_ranks(_split, 4)[3] == [calls, (2, 3), (1, 3), [1, 3]]


def _devices_only() -> Any:
    """Inside, the world is one whose backend sends from devices only, as NCCL's is."""
    return patch("mpu.groups.backend_by_device", lambda handle: {"cuda": "nccl"})


@on_ranks(4)
def test_each_group_of_a_backend_for_devices_has_one_control_group(rank: int, world: int) -> None:
    with _devices_only():
        groups = build(2)
        mine = [groups.world, groups.tp, groups.dp]
        again = [group_from_process_group(group.process_group_or_none) for group in mine]
    assert len({name for group in mine for name in (group.name, group.control_name)}) == 6
    assert [group.control_name for group in mine] == [group.control_name for group in again]
    assert not any(group.own_backend_serves_cpu for group in mine)
    assert all(dist.get_process_group_ranks(group.control_process_group) == list(group.ranks) for group in mine)


@on_ranks(2)
def test_a_second_run_waits_as_long_at_its_start_as_the_first(rank: int, world: int) -> None:
    for seconds in (7, 1):
        groups = build(2, timedelta(seconds=7))
        for group in (groups.world, groups.tp):
            assert group.process_group_or_none is not None
            options = group.process_group_or_none._get_backend(torch.device("cpu")).options
            assert options._timeout == timedelta(seconds=7)
        set_timeout(groups, timedelta(seconds=seconds))


@on_ranks(2)
def test_control_never_waits_for_the_backend_of_tensors(rank: int, world: int) -> None:
    """Words are exchanged, and a tensor of the host, while an operation on the group waits for the other rank."""
    with _devices_only():
        group = build().world
    x, full = torch.ones(1), torch.empty(2)
    waiting = dist.all_reduce(x, group=group.process_group_or_none, async_op=True) if rank == 0 else None
    barrier(group)
    assert all_gather_json({"rank": rank}, group) == [{"rank": 0}, {"rank": 1}]
    assert all_reduce_scalar(rank, group) == 1.0
    all_gather_into(full, torch.tensor([float(rank)]), group).wait()
    waiting = waiting or dist.all_reduce(x, group=group.process_group_or_none, async_op=True)
    assert waiting is not None
    waiting.wait()
    assert full.tolist() == [0.0, 1.0] and x.item() == 2.0


GROUP_ACCESSORS = ("get_model_parallel_group", "get_tensor_model_parallel_group", "get_data_parallel_group",
                   "get_pipeline_model_parallel_group")


def _classic(rank: int, world: int, tp: int) -> None:
    for accessor in (mpu.get_model_parallel_rank, mpu.is_pipeline_first_stage):
        with pytest.raises(ParallelError, match="not initialised"):
            accessor()
    assert mpu.is_unitialized()
    mpu.initialize_model_parallel(tp)
    with pytest.raises(ParallelError, match="already initialised"):
        mpu.initialize_model_parallel(tp)
    assert (mpu.get_pipeline_model_parallel_rank(), mpu.get_pipeline_model_parallel_world_size()) == (0, 1)
    assert mpu.is_pipeline_first_stage(ignore_virtual=True) and mpu.is_pipeline_last_stage()
    assert mpu.get_virtual_pipeline_model_parallel_rank() is None
    of_tp, of_dp = [*range(rank // tp * tp, (rank // tp + 1) * tp)], [*range(rank % tp, world, tp)]
    for accessor, ranks in zip(GROUP_ACCESSORS, (of_tp, of_tp, of_dp, [rank]), strict=True):
        group = getattr(mpu, accessor)()
        assert group is getattr(mpu, accessor)() and dist.get_world_size(group) == group.size()
        dist.all_reduce(total := torch.tensor([2.0**rank]), group=group)
        assert dist.get_process_group_ranks(group) == ranks and total.item() == sum(2.0**one for one in ranks)
    numbers = [
        mpu.get_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size(), mpu.get_model_parallel_src_rank(),
        mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size(), mpu.get_data_parallel_src_rank()]
    assert numbers == [rank % tp, tp, of_tp[0], rank // tp, world // tp, of_dp[0]]
    mpu.destroy_model_parallel()
    assert not mpu.model_parallel_is_initialized()


@pytest.mark.parametrize("world, tp", [(1, 1), (2, 1), (2, 2), (4, 2)])
def test_classic_accessors(world: int, tp: int) -> None:
    run_ranks(_classic, world, tp)
    assert mpu.VocabUtility.vocab_range_from_global_vocab_size(100, 1, 4) == (25, 50) \
        == mpu.VocabUtility.vocab_range_from_per_partition_vocab_size(25, 1, 4)


def _made_late(rank: int, world: int) -> list[str]:
    """Groups of one that were made before torch.distributed was there."""
    with patch.object(dist, "is_initialized", lambda: False):
        alone = mpu.initialize_model_parallel(1)
    told = []
    for ask in (mpu.get_data_parallel_group, mpu.get_model_parallel_rank, lambda: alone.dp.process_group)[:2 + rank]:
        with pytest.raises(ParallelError) as caught:
            ask()
        told.append(str(caught.value))
    return told


def test_a_group_is_never_none() -> None:
    mpu.initialize_model_parallel(1)
    try:
        for accessor in GROUP_ACCESSORS:
            with pytest.raises(ParallelError, match="call torch.distributed.init_process_group before"):
                getattr(mpu, accessor)()
        assert mpu.get_data_parallel_world_size() == 1
    finally:
        mpu.destroy_model_parallel()
    told = run_ranks(_made_late, 2)
    assert all("initialised for 1 ranks, and torch.distributed has 2" in text for text in (*told[0][:2], *told[1][:2]))
    assert "there is no process group" in told[1][2]


@on_ranks(3)
def test_some_ranks_make_a_group_without_the_others(rank: int, world: int) -> None:
    """Where ranks have bound their devices, the world is not split for it: the others would have to come too."""
    everyone: Any = dist.group.WORLD
    everyone.bound_device_id = torch.device("cuda", 0)
    made = dist.new_group

    def new_group(*given: Any, **named: Any) -> Any:
        assert everyone.bound_device_id is None
        return made(*given, **named)

    if rank < 2:
        with patch.object(dist, "new_group", new_group):
            assert dist.get_process_group_ranks(Group(0, 1, (rank,)).process_group) == [rank]
            pair = Group(rank, 2, (0, 1), everyone.group_name, everyone.group_name)
            assert duplicate_group(pair).ranks == (0, 1) and duplicate_group(pair).name != pair.name
    assert everyone.bound_device_id == torch.device("cuda", 0)


# ---- broadcast_data ----------------------------------------------------------------------------------------------

SHAPES = {"text": (2, 5), "mask": (1,), "deep": (2, 1, 3, 1, 2), "empty": (0, 4)}


def _batch(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {key: torch.randint(0, 99, shape, generator=generator) for key, shape in (SHAPES | {"other": (7,)}).items()}


@on_ranks(4)
def test_each_group_gets_the_batch_of_its_first_rank_and_all_hear_what_is_wrong(rank: int, world: int) -> None:
    groups, expected = build(2), _batch(rank // 2)
    data = _batch(groups.dp.rank) if groups.tp.rank == 0 else None
    for key, dtype, words in (("missing", torch.int64, "'missing' is not in the batch"),
                              ("text", torch.float32, "'text' is torch.int64, expected torch.float32")):
        with pytest.raises(ParallelError, match=words):
            mpu.broadcast_data([key], data, dtype, groups.tp)
    received = mpu.broadcast_data(list(SHAPES), data, torch.int64, groups.tp)
    assert list(received) == list(SHAPES) and all(torch.equal(received[key], expected[key]) for key in SHAPES)
