"""Muon in the engine: what torch.optim.Muon and AdamW make of whole matrices on one process; at any stage, on any
layout, in any precision, with state anywhere, after an overflow, and on from a checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from megatron import zero
from megatron.config.tree import Config
from megatron.errors import ConfigError
from megatron.optim import muon
from megatron.train import build
from megatron.zero.api.engine import Engine
from megatron.zero.hidden import hidden_matrices, split_groups
from mpu import groups
from mpu.groups import Group
from tests.distributed import run_ranks
from tests.late_ferry import late_ferry
from tests.megatron.zero.given_matrices import HIDDEN, SAMPLES, Model, first, gradient, samples_of
from tests.megatron.zero.homes.test_ferry import homes
from tests.megatron.zero.homes.test_two_sides import REASONS
from tests.megatron.zero.run import (Run, assemble, configure, configure_gpt2, engine_around, gpt2_engine, gpt2_loss,
                                     join_tensor_parallel, master_runs, state)
from tests.two_sides import DEVICE, two_sides
from tests.wires import accelerator_side

STEPS, LR, DECAY, BETAS, EPS = 4, 2.0**-5, 0.125, (0.875, 0.9375), 1e-4
SETTINGS: dict[str, Any] = {"optimizer": "muon", "clip_grad": 0.0, "weight_decay": DECAY, "adam_beta1": BETAS[0],
                            "adam_beta2": BETAS[1], "adam_eps": EPS, "lr": LR}


@dataclass(frozen=True)
class Layout:
    ranks: int = 1
    tp: int = 1
    stage: int = 0
    accumulation: int = 1

    def __str__(self) -> str:
        return f"{self.ranks} ranks, tp {self.tp}, stage {self.stage}, {self.accumulation} micro-batches"


LAYOUTS = [Layout(2, 1, stage) for stage in range(4)] + [
    Layout(1, 1, 3, 4), Layout(2, 1, 0, 2), Layout(2, 1, 2, 4), Layout(2, 1, 3, 2),
    Layout(2, 2, 0), Layout(2, 2, 3, 2), Layout(4, 2, 1), Layout(4, 2, 2, 2), Layout(4, 2, 3),
    Layout(4, 1, 3), Layout(4, 1, 1)]


def engine_of(layout: Layout, device: torch.device | None = None, **settings: Any) -> Engine:
    grid = groups.build(layout.tp)
    config = configure(**{**SETTINGS, "zero_stage": layout.stage, **settings})
    return engine_around(Model(grid.tp), config, grid, layout.accumulation, device)


def train(engine: Engine, first_step: int, last_step: int) -> None:
    accumulation, dp = engine.gradient_accumulation_steps(), engine.groups.dp
    for step in range(first_step, last_step):
        for micro in range(accumulation):
            engine.backward(engine(samples_of(step, micro, accumulation, dp)))
            engine.step()


def masters(engine: Engine) -> Any:
    return master_runs(engine.core)


def whole(by_rank: list[Any], tp: int, model: nn.Module) -> dict[str, Tensor]:
    """The logical weights, from what the ranks would write to a checkpoint."""
    pieces = [assemble([run for runs in by_rank[rank::tp] for run in runs]) for rank in range(tp)]
    return join_tensor_parallel(pieces, model) if tp > 1 else pieces[0]


def _trained(rank: int, world: int, layout: Layout, settings: dict[str, Any]) -> Any:
    engine = engine_of(layout, **settings)
    train(engine, 0, STEPS)
    return masters(engine)


def trained(layout: Layout, **settings: Any) -> dict[str, Tensor]:
    return whole(run_ranks(_trained, layout.ranks, layout, settings), layout.tp, Model())


def different(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[str]:
    assert found.keys() == wanted.keys()
    return [name for name in wanted if not torch.equal(found[name], wanted[name])]


# ---- beside torch ----------------------------------------------------------------------------------------------------


def by_torch(steps: int, adjust: str, nesterov: bool, scales: tuple[float, float] = (1.0, 1.0)) -> dict[str, Tensor]:
    """Whole matrices on one process; q, k and v are three."""
    model = Model()
    pieces = {name: [nn.Parameter(piece.clone()) for piece in parameter.detach().chunk(3 if "qkv.w" in name else 1)]
              for name, parameter in model.named_parameters()}
    optimizers: list[torch.optim.Optimizer] = [torch.optim.Muon(
        [p for name in HIDDEN for p in pieces[name]], lr=LR * scales[0], weight_decay=DECAY, momentum=0.95,
        nesterov=nesterov, ns_steps=5, adjust_lr_fn=adjust)]
    for decay in (DECAY, 0.0):
        members = [p for name in pieces.keys() - HIDDEN for p in pieces[name] if (p.dim() >= 2) == (decay > 0)]
        optimizers.append(torch.optim.AdamW(members, lr=LR * scales[1], betas=BETAS, eps=EPS, weight_decay=decay))
    for step in range(steps):
        for name, parts in pieces.items():
            samples = range(step * SAMPLES, (step + 1) * SAMPLES)
            shape = torch.cat(parts).shape
            mean = torch.stack([gradient(name, sample)(shape) for sample in samples]).mean(0)
            for part, grad in zip(parts, mean.chunk(len(parts))):
                part.grad = grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    return {name: torch.cat(parts).detach() for name, parts in pieces.items()}


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_it_is_what_torch_makes_of_whole_matrices(adjust: str, nesterov: bool) -> None:
    """A rounding in fp32 where a kernel multiplies and adds at once: it may turn one of bf16's, of a momentum."""
    own = (f"adjust_lr_fn={adjust}", f"nesterov={str(nesterov).lower()}")
    found, wanted = trained(Layout(2, 1, 3), optimizer_params=own), by_torch(STEPS, adjust, nesterov)
    for name, weight in wanted.items():
        moved = (weight - first(name)(weight.shape)).norm() if name in HIDDEN else weight.norm()
        assert (found[name] - weight).norm() <= 1e-5 * moved, name


def test_each_kind_has_a_rate_of_its_own_on_the_same_schedule() -> None:
    found = trained(Layout(), optimizer_params=(f"muon_lr={2 * LR}", f"adam_lr={LR / 4}"))
    for name, weight in by_torch(STEPS, "original", True, (2.0, 0.25)).items():
        torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-6)


# ---- any layout, any precision, any home -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone() -> dict[str, Tensor]:
    return trained(Layout())


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_makes_the_same_bits(layout: Layout, alone: dict[str, Tensor]) -> None:
    assert not different(trained(layout), alone)


@pytest.mark.parametrize("precision", [{"bf16": True}, {"fp16": True, "initial_loss_scale": 2.0**8}],
                         ids=["bf16", "fp16"])
@pytest.mark.parametrize("layout", [Layout(2, 1, 0, 2), Layout(2, 1, 1), Layout(4, 2, 2), Layout(2, 1, 3, 4)], ids=str)
def test_so_do_masters_in_every_precision(layout: Layout, precision: dict[str, Any], alone: dict[str, Tensor]) -> None:
    """The gradients are exact in 16 bits, too."""
    assert not different(trained(layout, **precision), alone)


def _borders(rank: int, world: int, layout: Layout) -> list[tuple[str, int]]:
    return [(segment.slot.name, segment.count) for bucket in engine_of(layout).core.buckets
            for segment in bucket.layout.segments(bucket.shard_group.rank) if segment.slot.name in HIDDEN]


def test_shards_of_these_layouts_have_borders_inside_of_matrices() -> None:
    for layout in (Layout(2, 1, 1), Layout(4, 1, 3), Layout(4, 2, 3)):
        holders = Counter(name for found in run_ranks(_borders, layout.ranks, layout) for name, _ in found)
        assert max(holders.values()) > layout.tp, layout


def _gpt2(rank: int, world: int, layout: Layout, steps: int) -> Any:
    grid = groups.build(layout.tp)
    settings = {**SETTINGS, "zero_stage": layout.stage, "model_parallel_size": layout.tp, "clip_grad": 0.5,
                "batch_size": 8 // grid.dp.size // layout.accumulation, "global_batch_size": 8}
    engine = gpt2_engine(configure_gpt2(**settings), grid)
    for step in range(steps):
        rows = torch.randint(0, 61, (8, 17), generator=torch.Generator().manual_seed(step)).chunk(grid.dp.size)
        for part in rows[grid.dp.rank].chunk(layout.accumulation):
            engine.backward(gpt2_loss(engine, part))
            engine.step(LR)
    return master_runs(engine)


@pytest.mark.parametrize("layout", [Layout(2, 1, 0), Layout(2, 1, 3, 4), Layout(2, 2, 0), Layout(4, 2, 2, 2)], ids=str)
def test_gpt2_trains_alike(layout: Layout) -> None:
    """Its gradients are sums in other orders, which turn roundings to bf16, and what is small in a momentum is multiplied
    by up to 3.44^5 when it is made orthogonal, roundings with it. Measured at most 0.025 of a parameter's way."""
    model = build.model(configure_gpt2(), groups.build(1))
    begin, wanted = (assemble(run_ranks(_gpt2, 1, Layout(), steps)[0]) for steps in (0, STEPS))
    found = whole(run_ranks(_gpt2, layout.ranks, layout, STEPS), layout.tp, model)
    for name, weight in wanted.items():
        off = (found[name] - weight).norm() / (weight - begin[name]).norm()
        assert off < 6e-2, name


def _at_home(rank: int, world: int, folder: Path, stage: int, tp: int) -> list[str]:
    """Homes of the state that change something, beside an accelerator."""
    layout, found = Layout(world, tp, stage, 2), []
    with accelerator_side():
        wanted = _trained(rank, world, layout, {"bf16": True})
        for name, home in homes(folder, stage, stage).items():
            with late_ferry():
                if not alike(_trained(rank, world, layout, {"bf16": True, **home}), wanted):
                    found.append(name)
    return found


def alike(one: list[Run], other: list[Run]) -> bool:
    return all(a[:3] == b[:3] and torch.equal(a[3], b[3]) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("stage, tp", [(1, 1), (3, 1), (3, 2)])
def test_no_home_of_the_state_changes_a_bit(tmp_path: Path, stage: int, tp: int) -> None:
    assert run_ranks(_at_home, 2, tmp_path, stage, tp) == [[], []]


def _two_sides(rank: int, world: int, home: dict[str, Any]) -> list[str]:
    """What made the host wait in a step, and is no number of the verdict."""
    with two_sides() as sides:
        engine = engine_of(Layout(world, 1, 3), device=DEVICE, **home)
        engine.backward(engine(samples_of(0, 0, 1, engine.groups.dp).to(DEVICE)))
        with sides.watched() as waits:
            engine.step()
        engine.destroy()
    return sorted({*waits} - REASONS.keys())


def test_matrices_are_made_orthogonal_on_the_device_wherever_state_is() -> None:
    assert run_ranks(_two_sides, 2, {}) == [[], []]
    on_host = run_ranks(_two_sides, 2, {"offload_optimizer_device": "cpu", "offload_update": "host"})
    there_and_back = ["megatron/zero/wholes.py:_run: to the host", "megatron/zero/wholes.py:wholes: to the device"]
    assert on_host == [there_and_back] * 2
