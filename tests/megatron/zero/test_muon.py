"""Muon in the engine: what torch.optim.Muon and AdamW make of whole matrices on one process; at any stage, on any
layout, in any precision, with state anywhere, after an overflow, and on from a checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
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
from megatron.plan.footprint import PlannedRun as Plan
from megatron.train import build
from megatron.zero.api.engine import Engine
from megatron.zero.muon_groups import hidden_matrices, split_muon_groups
from mpu import groups
from tests.covering import pairs
from tests.distributed import run_ranks
from tests.late_copy_streams import late_copy_streams
from tests.megatron.zero.given_matrices import HIDDEN, SAMPLES, Model, first, gradient, samples_of
from tests.megatron.zero.offload.test_equal import storages
from tests.megatron.zero.offload.test_two_sides import REASONS
from tests.megatron.zero.run import (Run, assemble, configure, configure_gpt2, engine_around, gpt2_engine, gpt2_loss,
                                     join_tensor_parallel, master_runs, state)
from tests.two_sides import DEVICE, two_sides
from tests.wires import accelerator_side, counted as operations

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


LAYOUTS = [Layout(2, 1, 0), Layout(2, 1, 1, 2), Layout(1, 1, 3, 4), Layout(2, 1, 2, 4), Layout(2, 2, 0, 2),
           Layout(2, 2, 3, 2), Layout(4, 2, 1), Layout(4, 2, 2, 2), Layout(4, 1, 3)]


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


def products(*, in_bf16: bool) -> Any:
    """Inside, the processor multiplies bf16 fast, or does not."""
    return patch.object(muon, "has_fast_bf16_matmul", lambda device: in_bf16)


def _trained(rank: int, world: int, layout: Layout, settings: dict[str, Any], in_bf16: bool = True) -> Any:
    with products(in_bf16=in_bf16):
        engine = engine_of(layout, **settings)
    train(engine, 0, STEPS)
    return masters(engine)


def trained(layout: Layout, *, in_bf16: bool = True, **settings: Any) -> dict[str, Tensor]:
    return whole(run_ranks(_trained, layout.ranks, layout, settings, in_bf16), layout.tp, Model())


def different(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[str]:
    assert found.keys() == wanted.keys()
    return [name for name in wanted if not torch.equal(found[name], wanted[name])]


# ---- beside torch ----------------------------------------------------------------------------------------------------


def in_fp32(gradient: Tensor, coefficients: Any, steps: int, eps: float) -> Tensor:
    """torch's Newton-Schulz, which always is in bf16."""
    x = gradient.T if gradient.shape[0] > gradient.shape[1] else gradient
    x = x / x.norm()
    for a, b, c in steps * [coefficients]:
        product = x @ x.T
        x = a * x + (b * product + c * product @ product) @ x
    return x.T if gradient.shape[0] > gradient.shape[1] else x


def by_torch(steps: int, adjust: str, nesterov: bool, scales: tuple[float, float] = (1.0, 1.0),
             in_bf16: bool = True) -> dict[str, Tensor]:
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
        with nullcontext() if in_bf16 else patch("torch.optim._muon._zeropower_via_newtonschulz", in_fp32):
            for optimizer in optimizers:
                optimizer.step()
    return {name: torch.cat(parts).detach() for name, parts in pieces.items()}


@pytest.mark.parametrize("adjust, nesterov, in_bf16", [
    ("original", True, True), ("original", True, False), ("match_rms_adamw", False, True)])
def test_it_is_what_torch_makes_of_whole_matrices(adjust: str, nesterov: bool, in_bf16: bool) -> None:
    """A rounding in fp32 where a kernel multiplies and adds at once: it may turn one of bf16's, of a momentum."""
    own = (f"adjust_lr_fn={adjust}", f"nesterov={str(nesterov).lower()}")
    found = trained(Layout(2, 1, 3), optimizer_params=own, in_bf16=in_bf16)
    wanted = by_torch(STEPS, adjust, nesterov, in_bf16=in_bf16)
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


@pytest.mark.parametrize("layout, precision", pairs(
    [Layout(2, 1, 0, 2), Layout(2, 1, 1), Layout(4, 2, 2), Layout(2, 1, 3, 4)],
    [{"bf16": True}, {"fp16": True, "initial_loss_scale": 2.0**8}], each=1))
def test_so_do_masters_in_every_precision(layout: Layout, precision: dict[str, Any], alone: dict[str, Tensor]) -> None:
    """The gradients are exact in 16 bits, too."""
    assert not different(trained(layout, **precision), alone)


def _at_home(rank: int, world: int, folder: Path, stage: int, tp: int) -> list[str]:
    """Homes of the state that change something, beside an accelerator."""
    layout, found = Layout(world, tp, stage, 2), []
    with accelerator_side():
        wanted = _trained(rank, world, layout, {"bf16": True})
        for name, home in storages(folder, stage, stage, True).items():
            with late_copy_streams():
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
    there_and_back = ["megatron/zero/update.py:_local_values: to the host",
                      "megatron/zero/update.py:gather_full_params: to the device"]
    assert on_host == [there_and_back] * 2


# ---- on a processor that is slow in bf16 -----------------------------------------------------------------------------


def _resumed(rank: int, world: int, folder: Path) -> list[Any]:
    """One rank is slow, and all take fp32; what goes on on another processor keeps that, and a GPU does not."""
    layout = Layout(world, 1, 3)
    with products(in_bf16=rank == 0):
        engine = engine_of(layout)
    train(engine, 0, 2)
    engine.save_checkpoint(folder)
    train(engine, 2, STEPS)
    with products(in_bf16=True):
        again = engine_of(layout)
    again.load_checkpoint(folder)
    train(again, 2, STEPS)
    rule = again.core.rule
    assert isinstance(rule, muon.Muon)
    rule.restore({"newton_schulz": "float32", "on": "cuda"})
    elsewhere = rule.scalars()["newton_schulz"]
    rule.restore({})  # what earlier versions saved
    same = alike(masters(again), masters(engine))
    return [engine.core.rule.scalars(), same, elsewhere, rule.scalars()["newton_schulz"]]


def test_the_precision_is_one_choice_and_resumed(tmp_path: Path) -> None:
    chosen = {"newton_schulz": "float32", "on": "cpu"}
    assert run_ranks(_resumed, 2, tmp_path) == [[chosen, True, "bfloat16", "bfloat16"]] * 2


# ---- it really runs --------------------------------------------------------------------------------------------------


@contextmanager
def counted() -> Iterator[list[tuple[int, ...]]]:
    """The shapes of what is made orthogonal."""
    shapes: list[tuple[int, ...]] = []
    original = muon.orthogonalize

    def orthogonal(matrix: Tensor, steps: int) -> Tensor:
        shapes.append(tuple(matrix.shape))
        return original(matrix, steps)

    with patch.object(muon, "orthogonalize", orthogonal):
        yield shapes


def _shapes(rank: int, world: int, layout: Layout, settings: dict[str, Any]) -> tuple[list[tuple[int, ...]], set[str]]:
    """Of one step, and the matrices that this rank has a part of."""
    engine = engine_of(layout, **settings)
    with counted() as shapes:
        train(engine, 0, 1)
    own = {segment.slot.name for bucket in engine.core.buckets
           for segment in bucket.layout.segments(bucket.shard_group.rank) if segment.slot.name in HIDDEN}
    return shapes, own


ORTHOGONAL = {"qkv": [(24, 24)] * 3, "tall": [(40, 24)], "down": [(24, 56)]}
"""Matrix -> what is made orthogonal."""


@pytest.mark.parametrize("layout, precision", pairs(
    [Layout(), Layout(2, 1, 0), Layout(2, 2, 1, 4), Layout(4, 2, 2, 2), Layout(4, 1, 3, 2)],
    [{}, {"bf16": True}, {"fp16": True, "initial_loss_scale": 2.0**8}], each=1))
def test_whole_matrices_are_made_orthogonal_once_a_step(layout: Layout, precision: dict[str, Any]) -> None:
    """Each by the ranks that have a part of it, and by no others."""
    by_rank = run_ranks(_shapes, layout.ranks, layout, precision)
    assert set().union(*(own for _, own in by_rank)) == HIDDEN
    for shapes, own in by_rank:
        assert Counter(shapes) == Counter(shape for name in own for shape in ORTHOGONAL[name.split(".")[2]])


def test_qkv_may_be_one_matrix() -> None:
    (shapes, _), *_ = run_ranks(_shapes, 2, Layout(2, 2), {"optimizer_params": ("split_qkv=false",)})
    assert Counter(shapes) == Counter([(72, 24), (40, 24), (24, 56)] * 2)


# ---- what it sends ---------------------------------------------------------------------------------------------------


def _sent(rank: int, world: int, layout: Layout) -> tuple[int, int]:
    """Bytes that a step of GPT-2 has in gathers of bf16, which its weights are not, over all ranks of one; planned."""
    settings = {**SETTINGS, "zero_stage": layout.stage, "model_parallel_size": layout.tp, "batch_size": 1,
                "global_batch_size": world // layout.tp}
    config = configure_gpt2(**settings)
    with products(in_bf16=True):
        engine = gpt2_engine(config, groups.build(layout.tp))
    engine.backward(gpt2_loss(engine, torch.ones(1, 17, dtype=torch.int64)))
    with accelerator_side(), operations() as sent:
        engine.step()
    gathered = sum(2 * found.numel for found in sent if found.kind == "all_gather" and found.dtype == torch.bfloat16)
    return gathered, Plan(config, world).traffic().matrices


@pytest.mark.parametrize("layout", [Layout(2, 1, 0), Layout(2, 1, 1), Layout(4, 1, 3)], ids=str)
def test_matrices_travel_once_in_16_bits_as_the_planner_says(layout: Layout) -> None:
    peers = layout.ranks - 1
    for gathered, planned in run_ranks(_sent, layout.ranks, layout):
        assert gathered * peers == planned * layout.ranks and bool(planned) == (layout.stage > 0)


# ---- checkpoints, and models made in parts ---------------------------------------------------------------------------


def _saves(rank: int, world: int, layout: Layout, folder: Path) -> tuple[Any, list[Tensor]]:
    engine = engine_of(layout)
    train(engine, 0, 3)
    engine.save_checkpoint(folder)
    train(engine, 3, 6)
    return masters(engine), state(engine.core)


def _resumes(rank: int, world: int, layout: Layout, folder: Path) -> tuple[Any, list[Tensor]]:
    engine = engine_of(layout)
    engine.load_checkpoint(folder)
    train(engine, 3, 6)
    return masters(engine), state(engine.core)


@pytest.mark.parametrize("before, after", [
    (Layout(2, 2, 3), Layout(2, 2, 3)), (Layout(4, 2, 3, 2), Layout(1, 1, 0, 4)), (Layout(), Layout(4, 2, 2))], ids=str)
def test_a_run_goes_on_bit_for_bit_on_any_layout(before: Layout, after: Layout, tmp_path: Path) -> None:
    kept, again = (run_ranks(work, layout.ranks, layout, tmp_path)
                   for work, layout in ((_saves, before), (_resumes, after)))
    found, wanted = ([runs for runs, _ in by_rank] for by_rank in (again, kept))
    assert not different(whole(found, after.tp, Model()), whole(wanted, before.tp, Model()))
    if before == after:
        for (_, one), (_, other) in zip(kept, again, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# ---- which parameters ------------------------------------------------------------------------------------------------


def names_of(model: nn.Module) -> set[str]:
    hidden = hidden_matrices(model)
    return {name for name, parameter in model.named_parameters() if parameter in hidden}


def test_gpt2s_hidden_matrices_are_those_of_its_blocks() -> None:
    found = names_of(build.model(configure_gpt2(num_layers=1), groups.build(1)))
    assert found == {f"blocks.0.{name}.weight" for name in ("attn.qkv", "attn.proj", "mlp.fc", "mlp.proj")}


def test_without_blocks_names_tell_the_head() -> None:
    """Also of a model whose parameters are placeholders."""
    for enabled in (False, True):
        with zero.Init(enabled=enabled):
            model = nn.ModuleDict({"embed": nn.Embedding(5, 4), "body": nn.Linear(4, 4), "lm_head": nn.Linear(4, 5)})
        assert names_of(model) == {"body.weight"}


def test_a_table_inside_of_a_block_and_a_tied_matrix_are_none() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.positions, self.up, self.tied = nn.Embedding(6, 4), nn.Linear(4, 8), nn.Linear(4, 9, bias=False)
            self.kernel = nn.Parameter(torch.zeros(2, 4, 4))

    model = nn.ModuleDict({"table": nn.Embedding(9, 4), "blocks": nn.ModuleList([Block()])})
    model["table"].weight = model["blocks"][0].tied.weight
    assert names_of(model) == {"blocks.0.up.weight"}


def group_of(parameters: list[nn.Parameter], **own: Any) -> dict[str, Any]:
    hyper = Config(optim=configure(optimizer="muon").optim).optim.hyper_parameters()
    return {**hyper, "lr": LR, "params": parameters, **own}


def test_groups_are_split_and_may_decide() -> None:
    model = Model()
    everything = [*model.parameters()]
    split = split_muon_groups(model, [group_of(everything, muon_lr=4 * LR)], LR)
    assert [(group["use_muon"], group["lr_scale"]) for group in split] == [(True, 4.0), (False, 1.0)]
    assert len(split[0]["params"]) == len(HIDDEN) and sum(len(group["params"]) for group in split) == len(everything)
    assert {"momentum", "ns_steps"} <= split[0].keys() and "betas" not in split[0] and "momentum" not in split[1]
    chosen = split_muon_groups(model, [group_of([model.head.weight], use_muon=True),
                                       group_of(everything[:3], use_muon=False)], LR)
    assert [group["use_muon"] for group in chosen] == [True, False]


def test_what_cannot_be_made_orthogonal_is_refused_by_name() -> None:
    model = Model()
    with pytest.raises(ConfigError, match=r"head\.bias of shape \(37,\) is in a param group that says .use_muon.: "):
        split_muon_groups(model, [group_of([*model.head.parameters()], use_muon=True)], LR)
    with pytest.raises(ConfigError, match="the model has no hidden matrix"):
        split_muon_groups(nn.LayerNorm(4), [group_of([*nn.LayerNorm(4).parameters()])], LR)
    tiled = nn.ModuleDict({"blocks": nn.ModuleList([nn.ModuleDict({"up": zero.TiledLinear(8, 8, in_splits=2)})])})
    with pytest.raises(ConfigError, match=r"blocks\.0\.up is a linear layer in tiles, whose full matrix never exists"):
        split_muon_groups(tiled, [group_of([*tiled.parameters()])], LR)
