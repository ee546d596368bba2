"""zero.Init, zero.GatheredParameters and external parameters: a split model is the model it would be whole. The
trainer's model is drawn by the engine, each rank its shard, from the numbers that one process has."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from megatron import zero
from megatron.config.tree import Config, build_config
from megatron.errors import ConfigError
from megatron.model import GPT2
from megatron.train import build
from megatron.zero import deferred_init
from megatron.zero.api.checkpoint_io import gather_full_state_dict
from megatron.zero.partitioned_param import Placeholder
from mpu import groups, weight_init
from mpu.groups import Groups
from tests.distributed import RankError, run_ranks
from tests.megatron.zero.offload.swap_files import open_swap_files
from tests.megatron.zero.run import master

WIDTH = 16


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        nn.init.constant_(self.scale, 2.0)  # after its child was made, before this module is finished

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * self.scale


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, 1)
        self.apply(halve)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x).square().mean()


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


def whole(module: nn.Module) -> list[torch.Tensor]:
    with zero.GatheredParameters(module.parameters()):
        return [p.detach().clone() for p in module.parameters()]


def train(model: nn.Module, stage: int) -> list[torch.Tensor]:
    engine = zero.initialize(model=model, config=config(stage))[0]
    draw = torch.Generator().manual_seed(engine.groups.dp.rank)
    for _ in range(3):
        engine.backward(engine(torch.randn(4, WIDTH, generator=draw)))
        engine.step()
    return whole(model)


def made_in_parts(rank: int, world: int) -> dict[str, Any]:
    torch.manual_seed(0)
    plain = Model()
    torch.manual_seed(rank)  # values are those of rank 0
    most = 0

    def look(*_: Any) -> None:
        nonlocal most
        most = max(most, sum(p.numel() for p in alive if not isinstance(p, Placeholder)))

    alive: list[nn.Parameter] = []
    seen = torch.nn.modules.module.register_module_parameter_registration_hook(
        lambda module, name, parameter: (alive.append(parameter), look())[1])
    with zero.Init():
        model = Model()
    seen.remove()
    found: dict[str, Any] = {"placeholders": all(isinstance(p, Placeholder) for p in model.parameters()), "most": most}
    found["values"] = all(map(torch.equal, whole(model), (p.detach() for p in plain.parameters())))
    existing = Model()
    zero.Init(existing)
    found["wrapped"] = all(isinstance(p, Placeholder) for p in existing.parameters())
    with zero.Init(enabled=False):
        found["disabled"] = Model().head.weight.numel() == WIDTH
    found["restored"] = nn.Linear(2, 2).weight.numel() == 4
    for stage in (1, 3):
        torch.manual_seed(0)
        wanted = train(Model(), stage)
        torch.manual_seed(0)
        with zero.Init():
            split = Model()
        found[f"stage {stage}"] = all(map(torch.equal, train(split, stage), wanted))
    return found


def test_a_model_made_in_parts_is_the_model_and_never_whole() -> None:
    layer = WIDTH * WIDTH + 2 * WIDTH
    for found in run_ranks(made_in_parts, 2):
        assert found.pop("most") <= layer
        assert all(found.values()), found


def all_edits(rank: int, world: int) -> list[bool]:
    return [fine for stage in (0, 2, 3) for fine in edits(rank, stage)]


def edits(rank: int, stage: int) -> list[bool]:
    """Edits of rank 1 inside GatheredParameters: seen by all, kept by the next step, which changes little."""
    model = Model()
    engine = zero.initialize(model=model, config=config(stage, bf16={"enabled": True}))[0]
    masters = [master(bucket) for bucket in engine.core.buckets]
    with zero.GatheredParameters([model.head.weight, model.head.weight], modifier_rank=1):
        model.head.weight.fill_(5.0 + rank)
    edited = whole(model.head)[0]
    untouched = [torch.equal(master(bucket)[~(master(bucket) > 4)], before[~(master(bucket) > 4)])
                 for bucket, before in zip(engine.core.buckets, masters, strict=True)]
    engine.backward(engine(torch.randn(4, WIDTH, dtype=torch.bfloat16)))
    engine.step()
    after = whole(model.head)[0]
    return [bool((edited == 6.0).all()), all(untouched), bool((after - 6.0).abs().max() < 0.1)]


def test_edits_inside_gathered_parameters_count_at_every_stage() -> None:
    assert run_ranks(all_edits, 2) == [[True] * 9] * 2


class Reader(nn.Module):
    """Its forward uses a parameter of another block."""

    def __init__(self, owner: nn.Linear, registered: bool) -> None:
        super().__init__()
        self.owner = [owner]  # in a list: no submodule
        if registered:
            zero.register_external_parameter(self, owner.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.owner[0].weight


def external(rank: int, world: int, registered: bool) -> bool:
    owner = nn.Linear(WIDTH, WIDTH)
    model = nn.Sequential(nn.ModuleList([owner, nn.Linear(WIDTH, WIDTH)]), Reader(owner, registered))
    model.forward = lambda x: model[1](model[0][1](model[0][0](x))).square().mean()  # type: ignore[method-assign]
    engine = zero.initialize(model=model, config=config(3))[0]
    before = whole(model)
    engine.backward(engine(torch.randn(4, WIDTH)))
    engine.step()
    return not torch.equal(before[0], whole(model)[0])


def test_an_external_parameter_is_there_once_it_is_registered() -> None:
    assert run_ranks(external, 2, True) == [True, True]
    with pytest.raises(RankError, match="cannot be used here"):  # a placeholder
        run_ranks(external, 2, False)


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


class Assembled(nn.Module):
    """Built as plain modules of torch are: layers are copied, and their parents write to them."""

    def __init__(self) -> None:
        super().__init__()

        class Late(nn.Linear):
            """Defined while the model is made."""

            def __init__(self) -> None:
                super().__init__(WIDTH, WIDTH)

        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True), 2,
                                             enable_nested_tensor=False)
        self.late, self.tail = Late(), Late()
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


def assembled(rank: int, world: int, folder: str, place: str) -> dict[str, bool]:
    torch.manual_seed(0)
    plain = Assembled().apply(halve)
    torch.manual_seed(rank)
    given = {"remote_device": place, **({"config_dict_or_path": on_drive(folder)} if place == "nvme" else {})}
    with zero.Init(**given), zero.Init():  # type: ignore[arg-type]
        model = Assembled()
        copied = copy.deepcopy(model)
    found = {"placeholders": all(isinstance(p, Placeholder) for p in model.parameters()),
             "on the drive": bool(open_swap_files(Path(folder))) == (place == "nvme")}
    model.apply(halve)
    with zero.GatheredParameters(model.late.weight, modifier_rank=1):
        model.late.weight[0] = rank
    with torch.no_grad():
        plain.late.weight[0] = 1
        values = [p.detach().clone() for p in plain.parameters()]
    found["values"] = all(map(torch.equal, whole(model), values))
    found["no longer"] = isinstance(_refusal(lambda: model.late.weight.mul_(2)), ConfigError)
    found["the copy's own"] = bool((whole(copied.late)[0][2:4] == 3.5).all()) and copied.tail.bias is copied.late.bias
    del copied
    zero.initialize(model=model, config=config(2))
    found["taken over"] = all(map(torch.equal, whole(model), values))
    found["drive left"] = not open_swap_files(Path(folder))
    return found


def _refusal(action: Any) -> Exception | None:
    try:
        action()
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize("place", ["cpu", "nvme"])
def test_any_module_can_be_made_in_parts_wherever_they_wait(tmp_path: Path, place: str) -> None:
    for found in run_ranks(assembled, 2, str(tmp_path), place):
        assert all(found.values()), found


def test_what_is_kept_has_the_precision_asked_for_and_integers_stay() -> None:
    model = nn.Linear(2, 2)
    model.count = nn.Parameter(torch.tensor([5]), requires_grad=False)
    zero.Init(model, dtype=torch.bfloat16)
    assert [p.dtype for p in model.parameters()] == [torch.bfloat16, torch.bfloat16, torch.int64]
    assert [p.dtype for p in whole(model)] == [torch.bfloat16, torch.bfloat16, torch.int64]


# ---- initial weights that the engine draws ---------------------------------------------------------------------------


CPU = torch.device("cpu")


def config_of(stage: int, precision: str, tp: int = 1) -> Config:
    return build_config({
        "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 16, "vocab_size": 61,
        "make_vocab_size_divisible_by": 8, "zero_stage": stage, "model_parallel_size": tp, "batch_size": 2,
        "stage3_param_persistence_threshold": 100, **({} if precision == "fp32" else {precision: True})})


def start(rank: int, world: int, stage: int, precision: str, tp: int) -> tuple[dict[str, torch.Tensor], int, int, int]:
    """The weights that the engine has, how many numbers were drawn, how many broadcasts there were, and how many
    elements this rank has to keep."""
    config = config_of(stage, precision, tp)
    grid = groups.build(tp)
    drawn, rows, sent = [0], weight_init.fill_normal_rows, mock.Mock(wraps=deferred_init.broadcast_into)

    def counted(out: torch.Tensor, *places: Any) -> None:
        drawn[0] += out.numel()
        rows(out, *places)

    with mock.patch.object(weight_init, "fill_normal_rows", counted), mock.patch.object(deferred_init, "broadcast_into",
                                                                                        sent):
        engine = build.engine(config, build.model(config, grid), grid, CPU)
    kept = sum(bucket.layout.shard_numel for bucket in engine.core.buckets)
    return gather_full_state_dict(engine.core), drawn[0], sent.call_count, kept


@pytest.mark.parametrize(("stage", "precision", "tp"), [
    (0, "fp32", 1), (1, "bf16", 1), (3, "fp32", 1), (2, "fp32", 2), (3, "bf16", 2)])
def test_every_stage_starts_from_the_weights_of_one_process(stage: int, precision: str, tp: int) -> None:
    config = config_of(stage, precision)
    model = GPT2(config.model, seed=config.train.seed)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    found = run_ranks(start, 2, stage, precision, tp)
    weights = found[0][0]
    for name, value in model.state_dict().items():
        rows = value[:config.model.known_vocab_size] if name == "wte.weight" else value
        assert torch.equal(weights[name], rows.to(dtype)), name
    for _, drawn, broadcasts, kept in found:
        assert drawn <= kept, "a rank draws what it keeps"
        assert broadcasts == 0, "nobody is told what all can draw"


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
