"""The mean at one bit a number, beside the same written down for all ranks at once in NumPy."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from torch import Tensor

from mpu.collectives import all_gather_into, all_to_all_into
from mpu.compressed_all_reduce import CompressedAllReduce, pack_bits, unpack_bits
from mpu.groups import SOLO, build
from tests.distributed import on_ranks, run_ranks
from tests.wires import accelerator_side

ROW, STEPS = 128, 20
SEGMENTS = {1: [[2, 1]], 2: [[1, 2], [3]], 3: [[1, 1], [2], [1, 1]]}
"""Ranks -> rows of each segment of each chunk."""


def given(rank: int, step: int, ranks: int) -> Tensor:
    """Numbers whose size differs from segment to segment."""
    rows = sum(map(sum, SEGMENTS[ranks]))
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(rows, ROW, generator=generator).mul_(torch.logspace(-4, 2, rows)[:, None]).view(-1)


def silent(ranks: int) -> Tensor:
    """Some numbers here and there, and the end of the last row."""
    mask = torch.rand(ranks * ROW * sum(SEGMENTS[ranks][0]), generator=torch.Generator().manual_seed(5)) < 0.1
    mask[-50:] = True
    return mask


def said(rank: int, world: int, quiet: bool, tile: int, elsewhere: bool = False,
         ) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    with accelerator_side() if elsewhere else nullcontext():
        mean = CompressedAllReduce(build(1).dp, SEGMENTS[world], torch.device("cpu"))
        mean._tile = tile or mean._tile
        if quiet:
            mean.exclude(silent(world))
        found = []
        for step in range(STEPS):
            mean.worker_error.add_(given(rank, step, world))
            out = exchanged(mean)
            mean.copy_result_to(own := torch.empty(mean.chunk_numel), rank)
            assert torch.equal(own, out.view(world, -1)[rank])
            found.append((out, mean.worker_error.clone(), mean.server_error.clone(), mean.squared_norms()))
        return found


def exchanged(mean: CompressedAllReduce) -> Tensor:
    mean.send_to_servers()
    mean.reduce_and_send()
    mean.wait_for_result()
    mean.copy_result_to(out := torch.empty_like(mean.worker_error))
    return out


def one_bit(x: Any, rows: list[int], speaks: Any) -> Any:
    """What is said of a chunk, in fp64."""
    out, start = np.zeros_like(x), 0
    for count in rows:
        here = slice(start, start + count * ROW)
        live = speaks[here]
        size = np.sqrt((x[here][live] ** 2).sum() / max(1, live.sum()))
        out[here] = np.where(x[here] >= 0, size, -size) * live
        start = here.stop
    return out


def by_hand(ranks: int, quiet: bool) -> list[tuple[Any, list[Any], list[Any]]]:
    rows, numel = SEGMENTS[ranks], ranks * ROW * sum(SEGMENTS[ranks][0])
    speaks = ~silent(ranks).numpy() if quiet else np.ones(numel, dtype=bool)
    chunks = np.arange(numel).reshape(ranks, -1)
    owed, served = np.zeros((ranks, numel)), np.zeros((ranks, numel // ranks))
    found = []
    for step in range(STEPS):
        out = np.zeros(numel)
        owed += np.stack([given(rank, step, ranks).double().numpy() for rank in range(ranks)])
        owed *= speaks
        says = np.stack([np.concatenate([one_bit(owed[rank][chunk], rows[number], speaks[chunk])
                                         for number, chunk in enumerate(chunks)]) for rank in range(ranks)])
        owed -= says
        for number, chunk in enumerate(chunks):
            served[number] += says[:, chunk].mean(0)
            out[chunk] = one_bit(served[number], rows[number], speaks[chunk])
            served[number] -= out[chunk]
        found.append((out, list(owed.copy()), list(served.copy())))
    return found


@pytest.mark.parametrize("ranks, tile, quiet", [(2, 2 * ROW, False), (2, ROW, True), (3, 0, True)])
def test_what_is_said_and_owed_is_what_the_reference_says(ranks: int, tile: int, quiet: bool) -> None:
    """Also a tile at a time, of which the last of a chunk is smaller."""
    by_rank, wanted = run_ranks(said, ranks, quiet, tile), by_hand(ranks, quiet)
    largest = float(given(0, 0, ranks).abs().max())
    for step, (out, owed, served) in enumerate(wanted):
        for rank in range(ranks):
            found = by_rank[rank][step]
            assert torch.equal(found[0], by_rank[0][step][0]), "the ranks heard different things"
            for have, want in zip(found, (out, owed[rank], served[rank])):
                np.testing.assert_allclose(have.double().numpy(), want, rtol=1e-5, atol=1e-6 * largest)
            np.testing.assert_allclose(float(found[3].sum()), (out ** 2).sum(), rtol=1e-6)


def test_an_accelerator_says_the_same_bits() -> None:
    """What is owed differs by rounding: the norms of rows are taken in another way there."""
    for here, there in zip(*(run_ranks(said, 2, True, ROW, elsewhere) for elsewhere in (False, True)), strict=True):
        for (out, owed, *_), (found, left, *_) in zip(here, there, strict=True):
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


@on_ranks(2)
def test_a_segment_of_which_nothing_is_said_is_zero(rank: int, world: int) -> None:
    mean = CompressedAllReduce(build(1).dp, SEGMENTS[2], torch.device("cpu"))
    mask = torch.zeros(6 * ROW, dtype=torch.bool)
    mask[:ROW] = True
    mean.exclude(mask)
    mean.worker_error.fill_(3.0)
    out = exchanged(mean)
    assert not out[:ROW].any() and out.isfinite().all()


def test_bits_pack_alike_on_both_sides() -> None:
    bits = torch.rand(1024, generator=torch.Generator().manual_seed(0)) < 0.5
    here = pack_bits(bits)
    assert here.dtype == torch.uint8 and len(here) == 128 and torch.equal(unpack_bits(here), bits)
    with accelerator_side():
        assert torch.equal(pack_bits(bits), here) and torch.equal(unpack_bits(here), bits)


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
