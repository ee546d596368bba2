"""Muon in the engine: what torch.optim.Muon and AdamW make of whole matrices on one process; at any stage, on any
layout, in any precision, and on from a checkpoint (offload/test_use.py: with state anywhere).

The model has every kind of matrix, and its gradients are given: -1, 0 or 1 for each number of each sample. Their means
are exact in any precision and in any order, so that what is compared is the optimizer, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch
from zlib import crc32

import pytest
import torch
from torch import Tensor, nn

from megatron import zero
from megatron.config.tree import Config
from megatron.errors import ConfigError
from megatron.optim import muon
from megatron.train import build
from megatron.zero.api.engine import Engine
from megatron.zero.muon_groups import hidden_matrices, split_muon_groups
from mpu import groups
from mpu.groups import SOLO, Group
from mpu.layers import ColumnParallelLinear, RowParallelLinear
from mpu.partition import local_slice, partition_of
from tests.distributed import on_ranks, run_ranks
from tests.megatron.zero.run import configure, configure_gpt2, engine_around, join_runs, master_runs, state

WIDTH, SAMPLES = 24, 8  # samples of a step, over all ranks and micro-batches


class Given(nn.Module):
    def __init__(self, prefix: str, tp: Group) -> None:
        super().__init__()
        self.prefix, self.tp = prefix, tp

    def given(self, samples: Tensor) -> Tensor:
        """A number whose gradients are the means over the samples."""
        total = torch.zeros((), device=samples.device)
        for name, parameter in self.named_parameters():
            if "blocks." not in name or self.prefix:
                grad = torch.stack([self.own(parameter, gradient(self.prefix + name, s)) for s in samples.tolist()])
                total = total + (parameter * grad.mean(0).to(samples.device, parameter.dtype)).float().sum()
        return total

    def own(self, parameter: nn.Parameter, whole: Callable[[torch.Size], Tensor]) -> Tensor:
        """This rank's slice of the whole tensor."""
        partition = partition_of(parameter)
        shape = [*parameter.shape]
        if partition is None:
            return whole(torch.Size(shape))
        shape[partition.dim] *= self.tp.size
        return local_slice(whole(torch.Size(shape)), partition, self.tp.rank, self.tp.size)


class Block(Given):
    def __init__(self, prefix: str, tp: Group) -> None:
        super().__init__(prefix, tp)
        self.qkv = ColumnParallelLinear(WIDTH, 3 * WIDTH, stride=3, tp=tp)
        self.tall = nn.Linear(WIDTH, 40, bias=False)
        self.down = RowParallelLinear(56, WIDTH, input_is_parallel=True, tp=tp)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, samples: Tensor) -> Tensor:
        return self.given(samples)


class Model(Given):
    """What is outside of blocks, or has one dimension, or is looked up, is no hidden matrix."""

    def __init__(self, tp: Group = SOLO) -> None:
        super().__init__("", tp)
        self.table = nn.Embedding(37, WIDTH)
        self.blocks = nn.ModuleList(Block(f"blocks.{number}.", tp) for number in range(2))
        self.head = nn.Linear(WIDTH, 37)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(self.own(parameter, first(name)))

    def forward(self, samples: Tensor) -> Tensor:
        total = self.given(samples)
        for block in self.blocks:
            total = total + block(samples)
        return total


HIDDEN = {f"blocks.{number}.{name}.weight" for number in range(2) for name in ("qkv", "tall", "down")}


def first(name: str) -> Callable[[torch.Size], Tensor]:
    return lambda shape: torch.randn(shape, generator=torch.Generator().manual_seed(crc32(name.encode()))) / 4


def gradient(name: str, sample: int) -> Callable[[torch.Size], Tensor]:
    seed = crc32(f"{name} {sample}".encode())
    return lambda shape: torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed)).float()


def samples_of(step: int, micro: int, accumulation: int, dp: Group) -> Tensor:
    """Those of one micro-batch of one rank."""
    everything = torch.arange(step * SAMPLES, (step + 1) * SAMPLES)
    return everything.chunk(dp.size)[dp.rank].chunk(accumulation)[micro]


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


def products(*, in_bf16: bool) -> Any:
    """Inside, the processor multiplies bf16 fast, or does not."""
    return patch.object(muon, "has_fast_bf16_matmul", lambda device: in_bf16)


def _trained(rank: int, world: int, layout: Layout, settings: dict[str, Any], in_bf16: bool = True) -> Any:
    with products(in_bf16=in_bf16):
        engine = engine_of(layout, **settings)
    train(engine, 0, STEPS)
    return master_runs(engine.core)


def trained(layout: Layout, *, in_bf16: bool = True, **settings: Any) -> dict[str, Tensor]:
    return join_runs(run_ranks(_trained, layout.ranks, layout, settings, in_bf16), layout.tp, Model())


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


def by_torch(own: dict[str, Any], in_bf16: bool) -> dict[str, Tensor]:
    """Whole matrices on one process; q, k and v are three where they are split."""
    model, parts_of_qkv = Model(), 1 if "split_qkv" in own else 3
    pieces = {name: [nn.Parameter(piece.clone())
                     for piece in parameter.detach().chunk(parts_of_qkv if "qkv.w" in name else 1)]
              for name, parameter in model.named_parameters()}
    optimizers: list[torch.optim.Optimizer] = [torch.optim.Muon(
        [p for name in HIDDEN for p in pieces[name]], lr=own.get("muon_lr", LR), weight_decay=DECAY, momentum=0.95,
        ns_steps=5, nesterov="nesterov" not in own, adjust_lr_fn=own.get("adjust_lr_fn", "original"))]
    for decay in (DECAY, 0.0):
        members = [p for name in pieces.keys() - HIDDEN for p in pieces[name] if (p.dim() >= 2) == (decay > 0)]
        optimizers.append(torch.optim.AdamW(members, lr=own.get("adam_lr", LR), betas=BETAS, eps=EPS,
                                            weight_decay=decay))
    for step in range(STEPS):
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


@pytest.mark.parametrize("own, in_bf16", [
    ({}, True), ({}, False), ({"adjust_lr_fn": "match_rms_adamw", "nesterov": "false"}, True),
    ({"muon_lr": 2 * LR, "adam_lr": LR / 4, "split_qkv": "false"}, True)], ids=str)
def test_it_is_what_torch_makes_of_whole_matrices(own: dict[str, Any], in_bf16: bool) -> None:
    """A rounding in fp32 where a kernel multiplies and adds at once: it may turn one of bf16's, of a momentum."""
    found = trained(Layout(2, 1, 3), optimizer_params=tuple(f"{key}={value}" for key, value in own.items()),
                    in_bf16=in_bf16)
    for name, weight in by_torch(own, in_bf16).items():
        moved = (weight - first(name)(weight.shape)).norm() if name in HIDDEN else weight.norm()
        assert (found[name] - weight).norm() <= 1e-5 * moved, name


# ---- any layout, any precision ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone() -> dict[str, Tensor]:
    return trained(Layout())


BF16, FP16 = {"bf16": True}, {"fp16": True, "initial_loss_scale": 2.0**8}


@pytest.mark.parametrize("layout, precision", [
    (Layout(1, 1, 3, 4), BF16), (Layout(2, 1, 0), FP16), (Layout(2, 1, 1, 2), {}), (Layout(2, 1, 2, 4), BF16),
    (Layout(2, 2, 3, 2), {}), (Layout(4, 2, 1), FP16), (Layout(4, 1, 3), {})], ids=str)
def test_every_layout_and_precision_makes_the_same_bits(layout: Layout, precision: dict[str, Any],
                                                        alone: dict[str, Tensor]) -> None:
    assert not different(trained(layout, **precision), alone)


# ---- on a processor that is slow in bf16 -----------------------------------------------------------------------------


@on_ranks(2)
def test_the_precision_is_one_choice_and_resumed(rank: int, world: int, tmp_path: Path) -> None:
    """One rank is slow, and all take fp32; what goes on on another processor keeps that, and a GPU does not."""
    layout = Layout(world, 1, 3)
    with products(in_bf16=rank == 0):
        engine = engine_of(layout)
    train(engine, 0, 2)
    engine.save_checkpoint(tmp_path)
    train(engine, 2, STEPS)
    assert engine.core.rule.scalars() == {"newton_schulz": "float32", "on": "cpu"}
    with products(in_bf16=True):
        again = engine_of(layout)
    again.load_checkpoint(tmp_path)
    train(again, 2, STEPS)
    assert all(a[:3] == b[:3] and torch.equal(a[3], b[3])
               for a, b in zip(master_runs(again.core), master_runs(engine.core), strict=True))
    rule = again.core.rule
    assert isinstance(rule, muon.Muon)
    for saved in ({"newton_schulz": "float32", "on": "cuda"}, {}):  # the last is of earlier versions
        rule.restore(saved)
        assert rule.scalars()["newton_schulz"] == "bfloat16"


# ---- checkpoints, and models made in parts ---------------------------------------------------------------------------


def _goes_on(rank: int, world: int, layout: Layout, folder: Path, is_new: bool) -> tuple[Any, list[Tensor]]:
    """Three steps after those that a new run saves, or after a load of them."""
    engine = engine_of(layout)
    if is_new:
        train(engine, 0, 3)
        engine.save_checkpoint(folder)
    else:
        engine.load_checkpoint(folder)
    train(engine, 3, 6)
    return master_runs(engine.core), state(engine.core)


@pytest.mark.parametrize("before, after", [
    (Layout(2, 2, 3), Layout(2, 2, 3)), (Layout(4, 2, 3, 2), Layout(1, 1, 0, 4))], ids=str)
def test_a_run_goes_on_bit_for_bit_on_any_layout(before: Layout, after: Layout, tmp_path: Path) -> None:
    kept, again = (run_ranks(_goes_on, layout.ranks, layout, tmp_path, is_new)
                   for layout, is_new in ((before, True), (after, False)))
    found, wanted = ([runs for runs, _ in by_rank] for by_rank in (again, kept))
    assert not different(join_runs(found, after.tp, Model()), join_runs(wanted, before.tp, Model()))
    if before == after:
        for (_, one), (_, other) in zip(kept, again, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# ---- which parameters ------------------------------------------------------------------------------------------------


def names_of(model: nn.Module) -> set[str]:
    hidden = hidden_matrices(model)
    return {name for name, parameter in model.named_parameters() if parameter in hidden}


def test_hidden_matrices_are_those_of_blocks_that_are_no_table_and_not_tied() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.positions, self.up, self.tied = nn.Embedding(6, 4), nn.Linear(4, 8), nn.Linear(4, 9, bias=False)
            self.kernel = nn.Parameter(torch.zeros(2, 4, 4))

    model = nn.ModuleDict({"table": nn.Embedding(9, 4), "blocks": nn.ModuleList([Block()])})
    model["table"].weight = model["blocks"][0].tied.weight
    assert names_of(model) == {"blocks.0.up.weight"}
    gpt2 = build.model(configure_gpt2(num_layers=1), groups.build(1))
    assert names_of(gpt2) == {f"blocks.0.{name}.weight" for name in ("attn.qkv", "attn.proj", "mlp.fc", "mlp.proj")}
    for enabled in (False, True):  # without blocks names tell the head, also of placeholders
        with zero.Init(enabled=enabled):
            model = nn.ModuleDict({"embed": nn.Embedding(5, 4), "body": nn.Linear(4, 4), "lm_head": nn.Linear(4, 5)})
        assert names_of(model) == {"body.weight"}


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
