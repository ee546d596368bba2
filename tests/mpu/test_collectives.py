"""Every collective against the same thing done by hand on the inputs of all ranks, and the two numbers that say whether
this process is in one and how many it has begun. What the mean at one bit a number sends (its numbers:
tests/megatron/zero/test_one_bit.py)."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor

from mpu import collective_tracker
from mpu.collective_tracker import CollectiveState
from mpu.collectives import (all_gather, all_gather_into, all_gather_json, all_reduce, all_reduce_into,
                             all_reduce_scalar, all_to_all_into, barrier, broadcast_into, broadcast_json,
                             reduce_scatter_into, via_host)
from mpu.compressed_all_reduce import CompressedAllReduce
from mpu.groups import SOLO, Group, build, group_from_process_group
from mpu.split import ParallelError
from tests.distributed import on_ranks, run_ranks
from tests.wires import accelerator_side


def _input(rank: int, dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-8, 9, shape, generator=generator).to(dtype)  # small integers: every sum is exact


def _every_dtype(rank: int, world: int) -> None:
    group = build(world).tp
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64):
        _out_of_place(rank, world, group, dtype)
        _into(rank, world, group, dtype)


@pytest.mark.parametrize("world", [1, 3])
def test_collectives_equal_the_plain_reference(world: int) -> None:
    run_ranks(_every_dtype, world)


def _out_of_place(rank: int, world: int, tp: Group, dtype: torch.dtype) -> None:
    inputs = [_input(r, dtype, 3, 2, 4 * world) for r in range(world)]
    x = inputs[rank].clone()
    total = torch.stack(inputs).sum(0).to(dtype)
    assert torch.equal(all_reduce(x, tp), total)
    assert torch.equal(all_reduce(x, tp, "max"), torch.stack(inputs).amax(0))
    assert torch.equal(all_reduce(x, tp, "min"), torch.stack(inputs).amin(0))
    for dim in (0, 1, -1):
        assert torch.equal(all_gather(x, tp, dim), torch.cat(inputs, dim))
    assert torch.equal(all_gather(x.transpose(0, 1), tp), torch.cat([y.transpose(0, 1) for y in inputs], -1))
    assert torch.equal(x, inputs[rank]), "an out-of-place collective changed its argument"


def _into(rank: int, world: int, group: Group, dtype: torch.dtype) -> None:
    inputs = [_input(r, dtype, 6 * world) for r in range(world)]
    total = torch.stack(inputs).sum(0).to(dtype)
    flat, gathered, alias = inputs[rank].clone(), torch.empty(6 * world, dtype=dtype), inputs[rank].clone()
    shard, sent, within = torch.empty(6, dtype=dtype), inputs[rank].clone(), inputs[rank].clone()
    mine = slice(6 * rank, 6 * rank + 6)
    pending = [  # all in flight at once
        reduce_scatter_into(shard, sent, group),
        reduce_scatter_into(within[mine], within, group),
        all_reduce_into(flat, group),
        all_gather_into(gathered, inputs[rank][mine].clone(), group),
        all_gather_into(alias, alias[mine], group),
        broadcast_into(sent_copy := sent.clone(), world - 1, group),
        all_to_all_into(swapped := torch.empty_like(sent).view(world, -1), sent.view(world, -1), group),
    ]
    for operation in pending:
        operation.wait()
        operation.wait()  # nothing more
    whole = torch.cat([inputs[r][6 * r:6 * r + 6] for r in range(world)])
    assert torch.equal(shard, total[mine]) and torch.equal(sent, inputs[rank])
    assert torch.equal(within, torch.cat([inputs[rank][:6 * rank], total[mine], inputs[rank][6 * rank + 6:]]))
    assert torch.equal(flat, total)
    assert torch.equal(gathered, whole) and torch.equal(alias, whole)
    assert torch.equal(sent_copy, inputs[world - 1])
    assert torch.equal(swapped, torch.stack([inputs[r].view(world, -1)[rank] for r in range(world)]))


def _random_sums(rank: int, world: int, native: bool, sum_in: torch.dtype | None = None) -> list[Tensor]:
    with accelerator_side(native):
        group = build(world).tp
        full = torch.randn(300_000 * world, generator=torch.Generator().manual_seed(rank))
        exact, wide, narrow = torch.empty(300_000), torch.empty(300_000), torch.empty(300_000, dtype=torch.bfloat16)
        for shard, x in ((exact, full), (wide, full.bfloat16()), (narrow, full.bfloat16())):
            sent = x.clone()
            reduce_scatter_into(shard, x, group, reduce_dtype=sum_in if x.dtype == torch.bfloat16 else None).wait()
            assert torch.equal(x, sent)
        return [exact, wide, narrow, all_reduce(full, group)[300_000 * rank:300_000 * (rank + 1)]]


def test_two_ranks_sum_to_the_same_bits_by_shard_and_by_all_reduce() -> None:
    for native in (False, True):
        for exact, _, _, reduced in run_ranks(_random_sums, 2, native):
            assert torch.equal(exact, reduced)


FULLS = [torch.randn(1_200_000, generator=torch.Generator().manual_seed(r)).bfloat16().float() for r in range(4)]


def test_sixteen_bit_shards_are_summed_in_fp32_unless_an_accelerator_is_asked_otherwise() -> None:
    total, exact = FULLS[0] + FULLS[1] + FULLS[2] + FULLS[3], torch.stack(FULLS).double().sum(0)
    runs = [run_ranks(_random_sums, 4, *how) for how in ((False,), (True,), (True, torch.bfloat16))]
    for rank, ((_, wide, narrow, _), (_, on_device, rounded, _), (_, asked, alike, _)) in enumerate(zip(*runs)):
        mine = slice(300_000 * rank, 300_000 * (rank + 1))
        assert torch.equal(wide, total[mine]) and torch.equal(narrow, total[mine].bfloat16())
        assert (on_device - exact[mine]).abs().max() < 1e-6 and torch.equal(rounded, on_device.bfloat16())
        assert (asked - exact[mine]).abs().max() > 1e-3, "the backend rounds every partial sum to 16 bits"
        assert torch.equal(alike.float(), asked)


@on_ranks(3)
def test_values_travel_as_json_whatever_their_lengths(rank: int, world: int) -> None:
    group = build(world).tp
    values = all_gather_json({"rank": rank, "text": "ü" * rank * 50, "none": None}, group)
    assert values == [{"rank": r, "text": "ü" * r * 50, "none": None} for r in range(world)]
    assert all_reduce_scalar(rank, group) == world - 1 and all_reduce_scalar(rank, group, "min") == 0
    assert all_reduce_scalar(0.25, group, "sum") == world / 4
    assert all_reduce_scalar(2**53 - 1 if rank else 0, group) == 2**53 - 1
    barrier(group)
    for src in range(world):
        given = values[src] if rank == src else object()  # what the others give is not even looked at
        assert broadcast_json(given, group, src) == values[src]


def test_a_group_of_one_needs_no_torch_distributed() -> None:
    x = torch.ones(3)
    assert all_reduce(x, SOLO) is x and all_gather(x, SOLO) is x
    y = torch.zeros(3)
    all_gather_into(y, x, SOLO).wait()
    assert torch.equal(x, y) and all_reduce_scalar(3, SOLO) == 3 and all_gather_json([1], SOLO) == [[1]]
    assert broadcast_json((1, "x"), SOLO) == [1, "x"]
    barrier(SOLO)
    with pytest.raises(ParallelError, match="5 elements does not hold 1 shards of 4"):
        all_gather_into(torch.zeros(5), torch.zeros(4), SOLO)


def test_functions_of_an_accelerators_tensors_go_by_the_host_where_ranks_have_gloo_alone() -> None:
    for device, by_gloo, detours in (("cuda", True, True), ("cuda", False, False), ("cpu", True, False)):
        x, collective, group = Mock(), Mock(), replace(SOLO, gpu_tensors_use_gloo=by_gloo)
        x.device.type = device
        result = via_host(collective)(x, group, "max")
        collective.assert_called_once_with(x.cpu() if detours else x, group, "max")
        assert result is (collective().to(x.device) if detours else collective())


@on_ranks(2)
def test_a_group_knows_which_backend_serves_which_device(rank: int, world: int) -> None:
    """(GPUs by gloo, the CPU by the same group) of groups with these backends; `fake` stands for NCCL."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401, which registers it
    for backend, serves in (("gloo", (True, True)), ("cpu:gloo,cuda:fake", (False, True)),
                            ("cuda:fake", (False, False))):
        group = group_from_process_group(torch.distributed.new_group(list(range(world)), backend=backend))
        assert (group.gpu_tensors_use_gloo, group.own_backend_serves_cpu) == serves
    assert not SOLO.gpu_tensors_use_gloo


@pytest.fixture
def numbers() -> Iterator[memoryview]:
    """This process's: (state, exchanges begun)."""
    with patch.object(collective_tracker, "_COUNTERS", [memoryview(array("Q", [0, 0]))]):
        shown = memoryview(array("Q", [9, 9]))
        collective_tracker.write_counters_to(shown)
        yield shown


def test_an_exchange_is_marked_while_it_lasts_and_counted(numbers: memoryview) -> None:
    inside = []
    exchange, send = (mark(lambda: inside.append(list(numbers)))
                      for mark in (collective_tracker.track_collective, collective_tracker.track_async_collective))
    exchange()
    send()
    collective_tracker.mark_waiting()
    inside.append(list(numbers))
    collective_tracker.mark_idle()
    assert inside == [[CollectiveState.WAITING, 1], [CollectiveState.LAUNCHING, 2],
                      [CollectiveState.WAITING, 2]]
    assert list(numbers) == [0, 2]


def test_an_error_that_comes_out_of_an_exchange_leaves_the_mark_until_the_next(numbers: memoryview) -> None:
    def fail() -> None:
        raise RuntimeError("Connection closed by peer")

    with pytest.raises(RuntimeError):
        collective_tracker.track_collective(fail)()
    assert list(numbers) == [CollectiveState.WAITING, 1]
    collective_tracker.track_collective(lambda: None)()
    assert list(numbers) == [0, 2]


def test_numbers_go_on_where_they_are_shown_from_now_on(numbers: memoryview) -> None:
    collective_tracker.track_collective(lambda: None)()
    collective_tracker.mark_waiting()
    collective_tracker.write_counters_to(elsewhere := memoryview(array("Q", [0, 0])))
    collective_tracker.mark_idle()
    assert list(elsewhere) == [0, 1] and list(numbers) == [CollectiveState.WAITING, 1]


# ---- the mean at one bit a number ------------------------------------------------------------------------------------

ROW, STEPS = 128, 20
SEGMENTS = {1: [[2, 1]], 2: [[1, 2], [3]], 3: [[1, 1], [2], [1, 1]]}
"""Ranks -> rows of each segment of each chunk."""


def given(rank: int, step: int, ranks: int) -> Tensor:
    """Numbers whose size differs from segment to segment."""
    rows = sum(map(sum, SEGMENTS[ranks]))
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(rows, ROW, generator=generator).mul_(torch.logspace(-4, 2, rows)[:, None]).view(-1)


def silent(ranks: int) -> Tensor:
    """A whole segment, some numbers here and there, and the end of the last row."""
    mask = torch.rand(ranks * ROW * sum(SEGMENTS[ranks][0]), generator=torch.Generator().manual_seed(5)) < 0.1
    mask[:ROW * SEGMENTS[ranks][0][0]] = True
    mask[-50:] = True
    return mask


def said(rank: int, world: int, on_accelerator: bool) -> list[tuple[Tensor, Tensor]]:
    """What all hear and this rank owes, step by step."""
    with accelerator_side(on_accelerator):
        mean = CompressedAllReduce(build(1).dp, SEGMENTS[world], torch.device("cpu"))
        mean._tile = ROW
        mean.exclude(silent(world))
        found = []
        for step in range(STEPS):
            mean.worker_error.add_(given(rank, step, world))
            out = exchanged(mean)
            mean.copy_result_to(own := torch.empty(mean.chunk_numel), rank)
            assert torch.equal(own, out.view(world, -1)[rank])
            found.append((out, mean.worker_error.clone()))
        return found


def exchanged(mean: CompressedAllReduce) -> Tensor:
    mean.send_to_servers()
    mean.reduce_and_send()
    mean.wait_for_result()
    mean.copy_result_to(out := torch.empty_like(mean.worker_error))
    return out


def test_an_accelerator_says_the_same_bits() -> None:
    for here, there in zip(*(run_ranks(said, 2, on_accelerator) for on_accelerator in (False, True)), strict=True):
        for (out, owed), (found, left) in zip(here, there, strict=True):
            assert torch.equal(out > 0, found > 0) and torch.equal(out == 0, found == 0)
            torch.testing.assert_close(found, out, rtol=1e-6, atol=0)
            assert (owed - left).abs().max() <= 1e-6 * owed.abs().max()


def test_a_group_of_one_says_everything_it_owes() -> None:
    mean = CompressedAllReduce(SOLO, SEGMENTS[1], torch.device("cpu"))
    mask = silent(1)
    mean.exclude(mask)
    mean.worker_error.copy_(numbers := given(0, 0, 1))
    mean.server_error.fill_(1.0)  # of a run on more ranks
    out = exchanged(mean)
    assert torch.equal(out, (numbers + 1).masked_fill(mask, 0.0))
    assert not mean.worker_error.any() and not mean.server_error.any()
    assert float(mean.squared_norms().sum()) == pytest.approx(float(out.double().square().sum()), rel=1e-6)


@on_ranks(3)
def test_bytes_on_the_wire_are_those_of_the_formula(rank: int, world: int) -> None:
    mean = CompressedAllReduce(build(1).dp, SEGMENTS[world], torch.device("cpu"))
    with patch("mpu.compressed_all_reduce.all_to_all_into", Mock(wraps=all_to_all_into)) as to_servers, \
            patch("mpu.compressed_all_reduce.all_gather_into", Mock(wraps=all_gather_into)) as to_all:
        exchanged(mean)
    (_, messages, _), (_, message, _) = to_servers.call_args.args, to_all.call_args.args
    assert messages.dtype == message.dtype == torch.uint8
    signs = 2 * mean.chunk_numel // 8
    sizes = 2 * 4 * max(map(len, SEGMENTS[world]))
    assert messages[0].numel() + message.numel() == signs + sizes, "to each other rank"
