"""Shard groups with replicas: their time limits, their sums, and calls that only some ranks make."""

from __future__ import annotations

from datetime import timedelta
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from megatron.zero.api.engine import Engine
from megatron.zero.utils import safe_get_local_fp32_param, safe_set_local_fp32_param
from mpu import groups
from mpu.groups import _timeout_of, split_into_replicas
from tests.distributed import RankError, on_ranks, run_ranks
from tests.late_wire import Clock, timed_wire
from tests.megatron.zero.run import configure, engine_around, gradient_runs
from tests.megatron.zero.small import Model
from tests.wires import accelerator_side


def hybrid(size: int | None, **settings: object) -> Engine:
    torch.manual_seed(0)
    return engine_around(Model(width=24), configure(zero_stage=2, zero_shard_group_size=size, **settings),
                         groups.build(1))


@on_ranks(4)
def test_subgroups_have_the_time_limit_of_their_group_now_and_later(rank: int, world: int) -> None:
    grid = groups.build(1, timedelta(seconds=77))
    parts = split_into_replicas(grid.dp, 2)
    assert [part.ranks for part in parts] == [(rank // 2 * 2, rank // 2 * 2 + 1), (rank % 2, rank % 2 + 2)]
    assert [_timeout_of(part) for part in parts] == 2 * [timedelta(seconds=77)]
    groups.set_timeout(grid, timedelta(seconds=55))
    assert [_timeout_of(part) for part in (grid.dp, *parts)] == 3 * [timedelta(seconds=55)]
    assert split_into_replicas(grid.dp, 2) == parts


@on_ranks(4)
def test_sums_over_groups_are_rounded_to_16_bits_once(rank: int, world: int) -> None:
    found = []
    for size in (None, 2):
        engine = hybrid(size, bf16=True)
        x = torch.randn(4, 24, generator=torch.Generator().manual_seed(rank)).bfloat16()
        engine.backward(engine(x))
        found.append({(segment.slot.name, segment.slot_offset + at): value for segment, values in
                      gradient_runs(engine.core) for at, value in enumerate(values.tolist())})
    flat, parts = found
    shared = flat.keys() & parts.keys()
    # fp32 sums in another order are rarely on the other side of a border between two 16-bit numbers
    assert len(shared) > 100 or rank, "other ranks have another quarter than half, or share less"
    assert sum(flat[key] != parts[key] for key in shared) <= len(shared) / 50


BLOCKS = 8


class Deep(Model):
    """Each block takes `seconds` of the clock in its backward."""

    clock, seconds = Clock(), 0.0

    def __init__(self) -> None:
        super().__init__(width=24)
        self.blocks = nn.ModuleList(nn.Linear(24, 24) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x.register_hook(self._compute)
        return self.head(x).square().mean()

    def _compute(self, gradient: Tensor) -> None:
        self.clock.now += self.seconds


def backward_seconds(engine: Engine, x: Tensor, clock: Clock, compute: float) -> float:
    loss = engine(x.to(engine.working_dtype))
    engine.module.clock, engine.module.seconds, clock.now = clock, compute, 0.0
    clock.free_at.clear()
    engine.backward(loss)
    engine.step()
    return clock.now


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(4)
def test_sums_over_replicas_overlap_the_backward_and_what_groups_reduce(rank: int, world: int, stage: int) -> None:
    """A backward takes as long as the slowest of the three, and a part of each at its ends."""
    x = torch.randn(4, 24, generator=torch.Generator().manual_seed(rank))
    for (compute, scatter, between), bf16 in product(((1, 0.5, 1), (2, 0.5, 1), (1, 2, 0.5), (1, 0.5, 3)), (0, 1)):
        with accelerator_side(), timed_wire({"reduce_scatter": scatter, "all_reduce": between}) as clock:
            engine = engine_around(Deep(), configure(zero_stage=stage, zero_shard_group_size=2, bf16=bool(bf16)),
                                   groups.build(1), accumulation=2)
            first, last = (backward_seconds(engine, x, clock, compute) for _ in range(2))
        slowest = max(BLOCKS * compute, (BLOCKS + 1) * scatter, (BLOCKS + 1) * between)
        for found in (last, *[first] * (stage > 1)):
            assert slowest < found <= slowest + compute + 2 * scatter + between
        assert stage > 1 or first == BLOCKS * compute


@on_ranks(2)
def test_gathers_overlap_reductions_and_both_overlap_the_backward(rank: int, world: int) -> None:
    """With one reduction at a time and one block gathered ahead, at stage 3."""
    x = torch.randn(4, 24, generator=torch.Generator().manual_seed(rank))
    for compute, scatter, gather in ((2, 1, 1), (1, 1, 1), (1, 2, 1), (1, 1, 2), (0, 1, 1)):
        with accelerator_side(), timed_wire({"reduce_scatter": scatter, "all_gather": gather}) as clock:
            engine = engine_around(Deep(), configure(zero_stage=3), groups.build(1))
            backward_seconds(engine, x, clock, compute)
            found = backward_seconds(engine, x, clock, compute)
        slowest = max(BLOCKS * compute, (BLOCKS + 1) * scatter, BLOCKS * gather)
        assert found <= slowest + compute + 2 * scatter + gather, (compute, scatter, gather)


def set_different_ones(rank: int, world: int) -> None:
    parameter = [*hybrid(2).module.parameters()][rank % 2]
    safe_set_local_fp32_param(parameter, safe_get_local_fp32_param(parameter))


def test_ranks_that_set_other_parameters_are_refused() -> None:
    with pytest.raises(RankError, match="exit code 2"):  # of a configuration error: nothing was set
        run_ranks(set_different_ones, 4)
