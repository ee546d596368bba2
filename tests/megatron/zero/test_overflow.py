"""One number that is not finite, in one gradient of one rank, and what all ranks make of it.

A *case* poisons one kind of parameter on one rank in one micro-batch. fp16 skips the step: nothing may change but the
loss scale. bf16 and fp32 end the run, with one error on all ranks.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.errors import NumericsError
from megatron.zero.engine import ZeroEngine
from mpu import groups
from mpu.collectives import all_gather_json
from mpu.groups import Group, Groups
from mpu.partition import partition_of
from tests.distributed import run_ranks
from tests.megatron.zero.run import configure_gpt2, gpt2_engine, gpt2_loss, state, weights

MICRO_BATCHES, ROWS, LENGTH, LR = 2, 2, 8, 1e-2
SCALE = 256.0
NEAR = 0.02
"""How far, as a share of the learning rate, a step at another loss scale may be off; measured at most 0.006."""

PARAMETERS = {
    "positions": "wpe.weight", "norm weight": "blocks.0.ln_1.weight", "norm bias": "blocks.1.ln_2.bias",
    "column weight": "blocks.0.attn.qkv.weight", "column bias": "blocks.1.mlp.fc.bias",
    "row weight": "blocks.1.mlp.proj.weight", "row bias": "blocks.0.attn.proj.bias",
    "last norm weight": "ln_f.weight", "last norm bias": "ln_f.bias",
}
"""Kind -> the parameter whose gradient is poisoned. The token table has no gradient of its own: it is summed up in
place, by the lookup (kind "lookup") and by the loss (kind "loss", which reaches every other gradient as well)."""

KINDS = (*PARAMETERS, "lookup", "loss")


@dataclass(frozen=True)
class Case:
    kind: str
    culprit: int
    value: float
    micro: int  # the micro-batch that is poisoned


def config(stage: int, tp: int, dp: int, precision: str) -> Any:
    settings = {"fp16": {"fp16": True, "initial_loss_scale": SCALE, "hysteresis": 2, "loss_scale_window": 100},
                "bf16": {"bf16": True}, "fp32": {}}[precision]
    return configure_gpt2(zero_stage=stage, model_parallel_size=tp, batch_size=ROWS,
                          global_batch_size=ROWS * MICRO_BATCHES * dp, **settings)


@contextmanager
def poisoned(module: nn.Module, kind: str, value: float) -> Iterator[None]:
    """Within, gradients of this kind get a column of `value` on their way (a number, where they are vectors)."""

    def spoil(gradient: Tensor) -> Tensor:
        spoilt = gradient.clone()
        spoilt[..., 3] = value  # a column: not every row of the table is looked up, and not every one is here
        return spoilt

    def spoil_lookup(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        output.register_hook(spoil)

    def spoil_loss(_module: nn.Module, _inputs: object, loss: Tensor) -> Tensor:
        return loss * value

    if kind == "lookup":
        handle: Any = module.get_submodule("wte").register_forward_hook(spoil_lookup)
    elif kind == "loss":
        handle = module.register_forward_hook(spoil_loss)
    else:
        handle = module.get_parameter(PARAMETERS[kind]).register_hook(spoil)
    try:
        yield
    finally:
        handle.remove()


def take_step(engine: ZeroEngine, grid: Groups, number: int, case: Case | None = None) -> Any:
    """Optimizer step `number`; with a case, one that goes wrong."""
    for group in engine.param_groups:
        group["lr"] = LR
    draw = torch.Generator().manual_seed(number)
    rows = torch.randint(61, (MICRO_BATCHES, grid.dp.size, ROWS, LENGTH + 1), generator=draw)
    for micro, part in enumerate(rows[:, grid.dp.rank]):
        if case is not None and (grid.world.rank, micro) == (case.culprit, case.micro):
            with poisoned(engine.module, case.kind, case.value):
                engine.backward(gpt2_loss(engine, part))
        else:
            engine.backward(gpt2_loss(engine, part))
        report = engine.step()
    return report


def same(one: list[Tensor], two: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def near(one: list[Tensor], two: list[Tensor]) -> bool:
    """Equal apart from what another loss scale does to gradients that fp16 rounds to multiples of 2^-24."""
    return all(torch.allclose(a, b, rtol=0, atol=NEAR * LR) for a, b in zip(one, two, strict=True))


def digest(tensors: list[Tensor]) -> str:
    return hashlib.sha256(b"".join(tensor.view(torch.uint8).numpy().tobytes() for tensor in tensors)).hexdigest()


def clean_states(stage: int, grid: Groups, precision: str) -> list[list[Tensor]]:
    """What this rank holds after 1, 2 and 3 steps without a fault."""
    engine = gpt2_engine(config(stage, grid.tp.size, grid.dp.size, precision), grid)
    states = []
    for number in range(3):
        assert take_step(engine, grid, number).applied
        states.append(state(engine))
    return states


def check_that_a_step_never_was(case: Case, stage: int, grid: Groups, clean: list[list[Tensor]]) -> None:
    """A clean step, then two steps that fail at first and are taken again without the fault."""
    engine = gpt2_engine(config(stage, grid.tp.size, grid.dp.size, "fp16"), grid)
    scales = []

    def take(number: int, fault: Case | None = None) -> None:
        before, counts = state(engine), (engine.counters.optimizer_steps, engine.counters.applied_steps)
        is_applied = take_step(engine, grid, number, fault).applied
        assert is_applied == (fault is None), f"{case}: a bad step is skipped by all ranks"
        scales.append(engine.state.counters.scaler.scale)
        if fault is not None:
            assert same(before, state(engine)), f"{case}: a skipped step changes no weight and no moment"
            assert counts == (engine.counters.optimizer_steps, engine.counters.applied_steps), f"{case}: counters"

    take(0)
    take(1, case)
    take(1)
    assert same(state(engine), clean[1]), f"{case}: the next step is that of a run without the fault"
    take(2, case)
    take(2)
    assert near(state(engine), clean[2]), f"{case}: the next step is that of a run without the fault"
    assert scales == [SCALE, SCALE, SCALE, SCALE / 2, SCALE / 2], f"{case}: hysteresis of 2"
    whole = weights(engine)
    common = [weight for name, weight in whole.items() if partition_of(engine.module.get_parameter(name)) is None]
    assert is_alike(digest([*whole.values()]), grid.dp), f"{case}: replicas differ"
    assert is_alike(digest(common), grid.world), f"{case}: what tensor parallel ranks share differs"


def is_alike(value: object, group: Group) -> bool:
    """Whether all ranks of the group have this value."""
    return all(other == value for other in all_gather_json(value, group))


def check_all(rank: int, world: int, stage: int, tp: int) -> None:
    grid = groups.build(tp)
    clean = clean_states(stage, grid, "fp16")
    for case in sample(tp):
        check_that_a_step_never_was(case, stage, grid, clean)


@pytest.mark.parametrize(("stage", "tp"), [(0, 1), (3, 2), *(
    pytest.param(*cell, marks=pytest.mark.slow) for cell in ((1, 2), (2, 1), (2, 2), (3, 1)))])
def test_an_overflow_anywhere_is_a_step_that_never_was(stage: int, tp: int) -> None:
    run_ranks(check_all, 2 * tp, stage, tp, timeout=300)


def check_the_end(rank: int, world: int, stage: int, tp: int, precision: str) -> None:
    """Each case ends with one error on all ranks, and changes nothing."""
    grid = groups.build(tp)
    for case in sample(tp):
        engine = gpt2_engine(config(stage, tp, grid.dp.size, precision), grid)
        assert take_step(engine, grid, 0).applied
        before, message = state(engine), "no error"
        try:
            take_step(engine, grid, 1, case)
            engine.finish_step()
        except NumericsError as error:
            message = str(error)
        assert same(before, state(engine)), f"{case}: weights are not unchanged"
        assert is_alike(message, grid.world), f"{case}: ranks report different errors"
        named = re.search(r"at step 2: first in ([\w.]+)(?: on tensor parallel rank (\d))?, in the sum over the ranks "
                          r"\((?:every loss is finite|the loss on rank (\d) is not finite)\); weights are unchanged",
                          message)
        assert named, f"{case}: {message}"
        if case.kind != "loss":  # which poisons everything, on all tensor parallel ranks
            assert named[1] == (PARAMETERS | {"lookup": "wte.weight"})[case.kind]
        assert named[3] == (str(case.culprit) if case.kind == "loss" else None)
        # Reduction spreads the number over data parallel, to the owner; tensor parallel slices stay apart.
        if case.kind not in {*SHARED, "loss"}:
            assert int(named[2] or 0) == case.culprit % tp


@pytest.mark.parametrize(("stage", "tp", "precision"), [
    (2, 1, "bf16"), *(pytest.param(*cell, marks=pytest.mark.slow) for cell in (
        (0, 2, "fp32"), (1, 1, "bf16"), (3, 2, "fp32")))])
def test_without_a_loss_scale_any_bad_number_ends_the_run(stage: int, tp: int, precision: str) -> None:
    run_ranks(check_the_end, 2 * tp, stage, tp, precision, timeout=300)


SHARED = {"positions", "norm weight", "norm bias", "row bias", "last norm weight", "last norm bias"}
"""Kinds whose parameter every tensor parallel rank has."""


def sample(tp: int) -> list[Case]:
    """One case of every other kind, on ranks, values and micro-batches in turns; the values of `tp` share the kinds."""
    return [Case(kind, number % (2 * tp), (math.nan, math.inf)[number % 2], number % MICRO_BATCHES)
            for number, kind in enumerate(KINDS[tp - 1 :: 2])]


def check_large(rank: int, world: int, stage: int, tp: int, precision: str) -> None:
    """A step whose gradients are large, and finite."""
    grid = groups.build(tp)
    for value in VALUES:
        chosen = config(stage, tp, grid.dp.size, precision)
        engine = gpt2_engine(chosen, grid)
        report = take_step(engine, grid, 0, Case("positions", 0, value, 0))
        engine.finish_step()
        held = list(weights(engine).values())
        assert report.applied and all(bool(weight.isfinite().all()) for weight in held), value
        sent = torch.tensor(value).to(torch.bfloat16 if precision == "bf16" else torch.float32).item()
        # A column of the table, on one of two ranks.
        expected = abs(sent) * math.sqrt(chosen.model.max_position_embeddings) / 2
        assert report.grad_norm == pytest.approx(expected, rel=1e-2) and is_alike(report.grad_norm, grid.world)
        assert is_alike(digest(held), grid.dp), "replicas differ"


VALUES = [1e18, 1e20, 1e30, -3e36]  # squares of the last three are infinite in fp32


@pytest.mark.parametrize(("stage", "tp", "precision"), [
    (0, 1, "fp32"), (1, 1, "bf16"), (2, 1, "fp32"), (3, 2, "bf16")])
def test_large_gradients_have_a_norm_and_are_clipped(stage: int, tp: int, precision: str) -> None:
    run_ranks(check_large, 2 * tp, stage, tp, precision)
