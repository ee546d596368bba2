"""What gradients are sent in, and what they are divided by before: an oracle casts, sums and compares."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from megatron import zero
from megatron.zero.api.engine import Engine
from megatron.zero.gradients import FlatGradients
from tests.distributed import run_ranks
from tests.megatron.zero.run import gradient_runs, master
from tests.wires import accelerator_side, counted

N, STAGES = 200, (0, 1, 2, 3)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Dot(nn.Module):
    """Its gradient is its input, whatever the weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(N))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def engine_of(stage: int, work: str = "fp32", accumulation: int = 1, **keys: Any) -> Engine:
    precision: dict[str, Any] = {} if work == "fp32" else {work: {"enabled": True}}
    if work == "fp16":
        precision["fp16"] |= {"initial_scale_power": 0, "loss_scale_window": 1000}
    return zero.initialize(model=Dot(), config={
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}}, **precision, **keys,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}})[0]


def inputs(rank: int, number: int, work: str) -> Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(10 * rank + number)).to(DTYPES[work])


def summed(engine: Engine) -> dict[int, Tensor]:
    """Start in the parameter -> run of the gradient, summed over the ranks and micro-batches, that this rank has."""
    return {segment.slot_offset: run.clone() for segment, run in gradient_runs(engine.core)}


def oracle(stage: int, work: str, sent: str | None, accumulation: int, world: int, native: bool) -> Tensor:
    """The sum over ranks and micro-batches as the guide describes it, for two ranks."""
    micro = [[inputs(rank, number, work) / accumulation for number in range(accumulation)] for rank in range(world)]
    if stage < 2:  # micro-batches are added up on each rank, in fp32 if there are several, and then sent
        wide = torch.float32 if accumulation > 1 or sent not in (None, work) else DTYPES[work]
        leaving = [[torch.stack([x.to(wide) for x in of_rank]).sum(0)] for of_rank in micro]
    else:
        leaving = micro
    total = torch.zeros(N)
    for number in range(len(leaving[0])):
        cast = [of_rank[number].to(DTYPES[sent] if sent else of_rank[number].dtype) for of_rank in leaving]
        over_ranks = torch.stack([x.float() for x in cast]).sum(0)
        is_backends = stage == 0 if not native else sent is not None
        if is_backends or accumulation == 1 and sent in (None, work):  # the backend's sum, or 16-bit sums
            over_ranks = over_ranks.to(cast[0].dtype).float()
        total += over_ranks
    return total


def differences(rank: int, world: int, native: bool) -> list[str]:
    with accelerator_side(native):
        return [text for case in product(STAGES, DTYPES, (None, *DTYPES), (1, 2))
                for text in different(rank, world, native, *case)]


def different(rank: int, world: int, native: bool, stage: int, work: str, sent: str | None,
              accumulation: int) -> Iterator[str]:
    """What is not as it should be in one case; `native`: on the accelerator's wire."""
    engine = engine_of(stage, work, accumulation, communication_data_type=sent)
    case = f"stage {stage}, {work} sent as {sent}, {accumulation} micro-batches"
    with counted() as operations:
        for number in range(accumulation):
            engine.backward(engine(inputs(rank, number, work)))
            if number < accumulation - 1:
                engine.step()
    wanted = oracle(stage, work, sent, accumulation, world, native)
    runs = summed(engine)
    if not all(torch.equal(run.float(), wanted[start:start + len(run)]) for start, run in runs.items()):
        yield f"{case}: other sums"
    seen = {dtype for kind, _, dtype in operations if kind in ("isend", "all_reduce", "reduce_scatter")}
    as_accumulated = torch.float32 if native or stage < 2 and accumulation > 1 else DTYPES[work]
    if seen != {DTYPES[sent] if sent else as_accumulated}:
        yield f"{case}: sent as {seen}"
    if any(master(bucket).dtype != torch.float32 for bucket in engine.core.buckets):
        yield f"{case}: masters"


@pytest.mark.few(1)
@pytest.mark.parametrize("native", [False, True], ids=["cpu", "accelerator"])
def test_gradients_are_sent_in_the_precision_that_is_asked_for(native: bool) -> None:
    assert run_ranks(differences, 2, native) == [[], []]


def trained(rank: int, engine: Engine, work: str = "fp32") -> Tensor:
    for number in range(4):
        engine.backward(engine(inputs(rank, number, work)))
        engine.step()
    with zero.GatheredParameters(engine.module.parameters()):
        return engine.module.get_parameter("weight").detach().clone()


def divided(rank: int, world: int) -> dict[str, float]:
    """By how much dividing before the sum changes the weights, relative to their size."""
    found = {}
    for stage, work, accumulation in product(STAGES, ("fp32", "bf16"), (1, 2)):
        plain = trained(rank, engine_of(stage, work, accumulation), work).float()
        for keys in ({"prescale_gradients": True}, *({"gradient_predivide_factor": by} for by in (4.0, 3.0))):
            weights = trained(rank, engine_of(stage, work, accumulation, **keys), work).float()
            off = float((weights - plain).norm() / plain.norm())
            found[f"{keys}, stage {stage}, {work}, {accumulation}"] = off
    return found


def test_dividing_before_the_sum_gives_the_same_weights_up_to_rounding() -> None:
    for found in run_ranks(divided, 2):
        exact = {case: off for case, off in found.items() if "3.0" not in case}
        assert set(exact.values()) == {0.0}, "powers of two round nothing"
        assert all(off < (1e-6 if "fp32" in case else 1e-2) for case, off in found.items())
        assert any(off > 0 for off in found.values()), "a third does round: it was divided before the sum"


WAYS: list[dict[str, Any]] = [
    {}, {"prescale_gradients": True}, {"gradient_predivide_factor": 2}, {"communication_data_type": "fp32"},
    {"communication_data_type": "bf16"}]


def overflows(rank: int, world: int) -> list[tuple[bool, float]]:
    """Gradients of 40,000 on two ranks: their sum is above the largest fp16 number, their mean is not."""
    found = []
    for stage, keys in product(STAGES, WAYS):
        engine = engine_of(stage, "fp16", **keys)
        engine.backward(engine(torch.full((N,), 40_000.0).half()))
        report = engine.step()
        assert report is not None
        found.append((report.applied, report.grad_norm / N**0.5))
    return found


def test_an_fp16_sum_that_overflows_fits_when_divided_before_or_sent_wider() -> None:
    for ends in run_ranks(overflows, 2):
        for (_, keys), (applied, norm) in zip(product(STAGES, WAYS), ends, strict=True):
            assert (applied, norm) == ((True, pytest.approx(40_000, rel=2e-3)) if keys else (False, float("inf")))


class Dots(nn.Module):
    """Six units."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Dot() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([part(x) for part in self.parts]).sum()


@pytest.mark.parametrize("stage, sent, most", [(0, "bf16", 2), (0, "fp32", 6), (1, "bf16", 2), (2, "bf16", 2)])
def test_few_copies_exist_at_a_time(stage: int, sent: str, most: int) -> None:
    """One that is under way, and one that is being made; what is sent where it is costs nothing."""
    engine = zero.initialize(model=Dots(), config={
        "train_micro_batch_size_per_gpu": 1, "communication_data_type": sent, "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}}})[0]
    alive, reduce = [], FlatGradients.start_reduction

    def counted(grads: FlatGradients) -> None:
        reduce(grads)
        alive.append(sum(bucket.grads._pending_reduction is not None for bucket in engine.core.buckets))

    with patch.object(FlatGradients, "start_reduction", counted):
        engine.backward(engine(torch.ones(N)))
    assert max(alive) == most
