"""Rates of machines that are made up, for tests: each does everything at one speed, whatever the size."""

from __future__ import annotations

from typing import Any

from megatron.plan.machine_rates import NUM_COLLECTIVE_COSTS, RateCurve, MachineRates, Surface, Where

FLOPS, BYTES = 1e11, 1e9


def level(rate: float) -> Surface:
    return Surface((1.0, 1e6), (1.0, 1e6), ((rate, rate), (rate, rate)))


def proportional(each: float) -> RateCurve:
    """So many seconds for each."""
    return RateCurve(((1.0, each), (1e15, each * 1e15)))


def machine(ranks: int = 1, **changes: Any) -> MachineRates:
    nothing = proportional(1e-30)
    told: dict[str, Any] = dict(
        where=Where("made up", "2.13.0", "cpu", "fp32", ranks, 1), seconds=0.0, forward=level(FLOPS),
        backward=level(FLOPS), attention_forward=nothing, attention_backward=nothing, dropping_forward=nothing,
        dropping_backward=nothing, block_forward=nothing, block_backward=nothing, replay=0.0, dropout_forward=nothing,
        dropout_backward=nothing, loss=nothing, update=nothing, a_pass=0.0, a_step=0.0, split_unit=0.0,
        meetings=(0.0,) * NUM_COLLECTIVE_COSTS, inner_sum=0.0,
        all_reduce=proportional(2 / BYTES), reduce_scatter=proportional(1 / BYTES), all_gather=proportional(1 / BYTES),
        hides=0.0, link=0.0, host_update=nothing)
    return MachineRates(**(told | changes))
