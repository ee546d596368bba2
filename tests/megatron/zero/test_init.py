"""zero.Init, zero.GatheredParameters and external parameters: a split model is the model it would be whole. The
trainer's model is drawn by the engine, each rank its shard, from the numbers that one process has."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from megatron import zero
from megatron.config.tree import Config
from megatron.errors import ConfigError
from megatron.model import GPT2
from megatron.train import build
from megatron.zero import deferred_init
from megatron.zero.api.full_state_dict import gather_full_state_dict
from megatron.zero.partitioned_param import Placeholder
from mpu import groups, weight_init
from mpu.groups import Groups
from tests.distributed import on_ranks
from tests.megatron.zero.offload.swap_files import open_swap_files
from tests.megatron.zero.run import configure_gpt2, master
from tests.megatron.zero.small import gathered as whole

WIDTH = 16


class Assembled(nn.Module):
    """Built as plain modules of torch are: layers are copied, and their parents write to them."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.late, self.tail = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        for weight in self.encoder.parameters():
            if weight.dim() > 1:
                nn.init.xavier_uniform_(weight)
        with torch.no_grad():
            self.late.weight[2:4] = 7.0
            self.late.bias += 1
        self.late.weight.data.mul_(0.5)
        self.tail.weight.data = torch.ones(WIDTH, WIDTH)
        self.tail.bias = self.late.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tail(self.late(self.encoder(x))).square().mean()


LARGEST = 4 * WIDTH * WIDTH + 4 * WIDTH  # numbers of its attention, the largest module that is made at once


def halve(module: nn.Module) -> None:
    """An initialisation that reads what it changes."""
    if isinstance(module, nn.Linear):
        with torch.no_grad():
            module.weight.mul_(0.5)
            module.bias.fill_(float(module.weight.shape[0]))


def config(stage: int, **extra: Any) -> dict[str, Any]:
    return {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}, **extra}


def on_drive(folder: str) -> dict[str, Any]:
    found = config(3)
    found["zero_optimization"] |= {"offload_param": {"device": "nvme", "nvme_path": folder, "max_in_cpu": 0}}
    return found


def train(model: nn.Module, stage: int) -> list[torch.Tensor]:
    engine = zero.initialize(model=model, config=config(stage))[0]
    draw = torch.Generator().manual_seed(engine.groups.dp.rank)
    for _ in range(3):
        engine.backward(engine(torch.randn(4, WIDTH, generator=draw)))
        engine.step()
    return whole(model)


@on_ranks(2)
def test_a_model_made_in_parts_is_the_model_and_never_whole(rank: int, world: int) -> None:
    torch.manual_seed(0)
    plain = Assembled().apply(halve)
    torch.manual_seed(rank)  # values are those of rank 0
    alive: list[nn.Parameter] = []
    most = [0]

    def look(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        alive.append(parameter)
        most[0] = max(most[0], sum(p.numel() for p in alive if not isinstance(p, Placeholder)))

    seen = torch.nn.modules.module.register_module_parameter_registration_hook(look)
    with zero.Init():
        model = Assembled().apply(halve)
    seen.remove()
    existing = Assembled()
    zero.Init(existing)
    assert all(isinstance(p, Placeholder) for made in (model, existing) for p in made.parameters())
    assert most[0] <= LARGEST < sum(p.numel() for p in plain.parameters()) / 4, "at most one module is whole"
    assert all(map(torch.equal, whole(model), (p.detach() for p in plain.parameters())))
    with zero.Init(enabled=False):
        assert Assembled().tail.weight.numel() == WIDTH * WIDTH
    assert not isinstance(nn.Linear(2, 2).weight, Placeholder)
    for stage in (1, 3):
        ends = []
        for enabled in (False, True):
            torch.manual_seed(0)
            with zero.Init(enabled=enabled):
                model = Assembled()
            ends.append(train(model, stage))
        assert all(map(torch.equal, *ends))


@on_ranks(2)
def test_edits_inside_gathered_parameters_count_at_every_stage(rank: int, world: int) -> None:
    """Edits of rank 1 are seen by all, and kept by the next step, which changes little."""
    for stage in (0, 2, 3):
        model = Assembled()
        engine = zero.initialize(model=model, config=config(stage, bf16={"enabled": True}))[0]
        masters = [master(bucket) for bucket in engine.core.buckets]
        with zero.GatheredParameters([model.tail.weight, model.tail.weight], modifier_rank=1):
            model.tail.weight.fill_(5.0 + rank)
        assert bool((whole(model.tail)[0] == 6.0).all())
        for bucket, before in zip(engine.core.buckets, masters, strict=True):
            untouched = ~(master(bucket) > 4)
            assert torch.equal(master(bucket)[untouched], before[untouched])
        engine.backward(engine(torch.randn(4, WIDTH, dtype=torch.bfloat16)))
        engine.step()
        assert bool((whole(model.tail)[0] - 6.0).abs().max() < 0.1)


class Reader(nn.Module):
    """Its forward uses a parameter of another block."""

    def __init__(self, owner: nn.Linear, registered: bool) -> None:
        super().__init__()
        self.owner = [owner]  # in a list: no submodule
        if registered:
            zero.register_external_parameter(self, owner.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.owner[0].weight


@on_ranks(2)
def test_an_external_parameter_is_there_once_it_is_registered(rank: int, world: int) -> None:
    for registered in (True, False):
        owner = nn.Linear(WIDTH, WIDTH)
        model = nn.Sequential(nn.ModuleList([owner, nn.Linear(WIDTH, WIDTH)]), Reader(owner, registered))
        model.forward = lambda x: model[1](model[0][1](model[0][0](x))).square().mean()  # type: ignore[method-assign]
        engine = zero.initialize(model=model, config=config(3))[0]
        before = whole(model)
        with nullcontext() if registered else pytest.raises(ConfigError, match="cannot be used here"):  # a placeholder
            engine.backward(engine(torch.randn(4, WIDTH)))
            engine.step()
            assert not torch.equal(before[0], whole(model)[0])


def test_wrong_arguments_are_refused() -> None:
    linear = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="takes parameters, not a Tensor"), \
            zero.GatheredParameters([torch.ones(2)]):  # type: ignore[list-item]
        pass
    with pytest.raises(ConfigError, match="remote_device is 'disk'"):
        zero.Init(remote_device="disk")
    for source in (None, config(3)):
        with pytest.raises(ConfigError, match="give config_dict_or_path= with zero_optimization.offload_param.nvme_pa"):
            zero.Init(remote_device="nvme", config_dict_or_path=source)
    with pytest.raises(ConfigError, match="is 'cpu', and zero_optimization.offload_param.device of .* 'nvme'"):
        zero.Init(remote_device="cpu", config_dict_or_path=on_drive("/nowhere"))
    with pytest.raises(ConfigError, match="nvme_path /nowhere: there is no such folder"):
        zero.Init(config_dict_or_path=on_drive("/nowhere"))
    with pytest.raises(ConfigError, match="takes a Module and a Parameter"):
        zero.register_external_parameter(linear, torch.ones(2))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="not registered"):
        zero.unregister_external_parameter(linear, linear.weight)
    zero.register_external_parameter(linear, linear.weight)
    zero.unregister_external_parameter(linear, linear.weight)


@pytest.mark.parametrize("place", ["cpu", "nvme"])
@on_ranks(2)
def test_any_module_can_be_made_in_parts_wherever_they_wait(rank: int, world: int, tmp_path: Path, place: str) -> None:
    torch.manual_seed(0)
    plain = Assembled().apply(halve)
    torch.manual_seed(rank)
    source = on_drive(str(tmp_path)) if place == "nvme" else None
    with zero.Init(remote_device=place, config_dict_or_path=source), zero.Init():
        model = Assembled()
        copied = copy.deepcopy(model)
    assert all(isinstance(p, Placeholder) for p in model.parameters())
    assert bool(open_swap_files(tmp_path)) == (place == "nvme")
    model.apply(halve)
    with zero.GatheredParameters(model.late.weight, modifier_rank=1):
        model.late.weight[0] = rank
    with torch.no_grad():
        plain.late.weight[0] = 1
        values = [p.detach().clone() for p in plain.parameters()]
    assert all(map(torch.equal, whole(model), values))
    with pytest.raises(ConfigError):
        model.late.weight.mul_(2)
    assert bool((whole(copied.late)[0][2:4] == 3.5).all()) and copied.tail.bias is copied.late.bias
    del copied
    zero.initialize(model=model, config=config(2))
    assert all(map(torch.equal, whole(model), values)), "an engine takes them over"
    assert not open_swap_files(tmp_path)


def test_what_is_kept_has_the_precision_asked_for_and_integers_stay() -> None:
    model = nn.Linear(2, 2)
    model.count = nn.Parameter(torch.tensor([5]), requires_grad=False)
    zero.Init(model, dtype=torch.bfloat16)
    assert [p.dtype for p in model.parameters()] == [torch.bfloat16, torch.bfloat16, torch.int64]
    assert [p.dtype for p in whole(model)] == [torch.bfloat16, torch.bfloat16, torch.int64]


# ---- initial weights that the engine draws ---------------------------------------------------------------------------


CPU = torch.device("cpu")


def config_of(stage: int, precision: str, tp: int = 1) -> Config:
    return configure_gpt2(zero_stage=stage, model_parallel_size=tp, batch_size=2,
                          stage3_param_persistence_threshold=100, **({} if precision == "fp32" else {precision: True}))


@pytest.mark.parametrize(("stage", "precision", "tp"), [
    (0, "fp32", 1), (1, "bf16", 1), (3, "fp32", 1), (2, "fp32", 2), (3, "bf16", 2)])
@on_ranks(2)
def test_every_stage_starts_from_the_weights_of_one_process(rank: int, world: int, stage: int, precision: str,
                                                            tp: int) -> None:
    """A rank draws what it keeps, and nothing is sent that all can draw."""
    config, grid = config_of(stage, precision, tp), groups.build(tp)
    drawn, rows, sent = [0], weight_init.fill_normal_rows, mock.Mock(wraps=deferred_init.broadcast_into)

    def counted(out: torch.Tensor, *places: Any) -> None:
        drawn[0] += out.numel()
        rows(out, *places)

    with mock.patch.object(weight_init, "fill_normal_rows", counted), mock.patch.object(deferred_init, "broadcast_into",
                                                                                        sent):
        engine = build.engine(config, build.model(config, grid), grid, CPU)
    assert drawn[0] <= sum(bucket.layout.shard_numel for bucket in engine.core.buckets) and not sent.call_count
    weights = gather_full_state_dict(engine.core)
    for name, value in GPT2(config.model, seed=config.train.seed).state_dict().items() if rank == 0 else ():
        rows_of = value[:config.model.known_vocab_size] if name == "wte.weight" else value
        assert torch.equal(weights[name], rows_of.to(engine.working_dtype)), name


def test_edits_before_the_engine_count() -> None:
    config = config_of(1, "fp32")
    model = build.model(config, Groups())
    with zero.GatheredParameters(list(model.wpe.parameters()), modifier_rank=0):
        model.wpe.weight.zero_()
    with zero.GatheredParameters(list(model.ln_f.parameters())):
        assert torch.equal(model.ln_f.weight, torch.ones_like(model.ln_f.weight))
    with pytest.raises(ConfigError, match="edited inside GatheredParameters without modifier_rank"), \
            zero.GatheredParameters(list(model.ln_f.parameters())):
        model.ln_f.weight.zero_()
    build.engine(config, model, Groups(), CPU)
    assert not model.wpe.weight.any() and model.ln_f.weight.all() and model.wte.weight.any()
