"""What scripts do that few examples show: kinds of parameters, hooks of their own, evaluation alone, a GAN, and
arguments of the wrong kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from megatron import zero
from megatron.errors import ConfigError
from megatron.model import GPT2
from megatron.zero import utils
from megatron.zero.api.engine import Engine
from tests.distributed import on_ranks
from tests.megatron.helpers import tiny_model


def config(stage: int, **keys: Any) -> dict[str, Any]:
    parts = {"stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True}
    return {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "zero_optimization": {"stage": stage, **(parts if stage == 3 else {})}, **keys}


class Model(nn.Module):
    def __init__(self, table: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = table or nn.Embedding(8, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, rows: Tensor) -> Tensor:
        x = self.table(rows)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().mean()


ROWS = torch.tensor([[1, 2, 2], [5, 1, 0]])


def trained(model: nn.Module, stage: int, steps: int = 2, **keys: Any) -> Engine:
    engine = zero.initialize(model=model, config=config(stage, **keys))[0]
    for _ in range(steps * engine.gradient_accumulation_steps()):
        engine.backward(engine(ROWS))
        engine.step()
    return engine


# ---- parameters ------------------------------------------------------------------------------------------------------


def unusable(parameter: Any, requires_grad: bool = True) -> Model:
    model = Model()
    model.extra = nn.Parameter(parameter, requires_grad)
    return model


UNTRAINABLE: list[tuple[Callable[[], Model], str]] = [
    (lambda: Model(nn.Sequential(nn.Embedding(8, 3), nn.LazyLinear(4))), "table.1.weight is a lazy parameter .*: run"),
    (lambda: unusable(TwoTensor(torch.ones(2), torch.ones(2))), "extra is a TwoTensor of torch.float32"),
    (lambda: unusable(torch.eye(2).to_sparse()), "extra is a Parameter .* torch.sparse_coo: .*to_dense"),
    (lambda: unusable(torch.ones(2) + 0j), "extra is a Parameter of torch.complex64 .* torch.view_as_real"),
    (lambda: unusable(torch.ones(2, dtype=torch.int8), False), "a Parameter of torch.int8 .* keep it as a buffer"),
    (lambda: Model(nn.Embedding(8, 4, max_norm=1.0)), r"table has max_norm=1: .*; set max_norm = None, and scale"),
    (lambda: Model(nn.EmbeddingBag(8, 4, max_norm=1.0)), r"table has max_norm=1: .*; set max_norm = None, and scale"),
]


@pytest.mark.parametrize("stage", [0, 3])
def test_parameters_that_cannot_be_trained_are_refused(stage: int) -> None:
    for make, told in UNTRAINABLE:
        model = make()
        with pytest.raises(ConfigError, match=told) as caught:
            zero.initialize(model=model, config=config(stage))
        assert "\n" not in str(caught.value) and not any(module._forward_hooks for module in model.modules())


@on_ranks(2)
def test_sparse_gradients_of_an_embedding_are_those_of_a_dense_one(rank: int, world: int) -> None:
    table = torch.arange(32.0).view(8, 4).cos()
    for stage, accumulation in ((0, 1), (1, 2), (2, 1), (3, 2)):
        dense, sparse = (trained(Model(nn.Embedding.from_pretrained(table, freeze=False, sparse=sparse)), stage,
                                 gradient_accumulation_steps=accumulation).module_state_dict()
                         for sparse in (False, True))
        assert all(sparse[name].equal(dense[name]) for name in dense)


# ---- hooks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 2, 3])
@on_ranks(2)
def test_a_hook_sees_the_gradient_whenever_it_was_registered(rank: int, world: int, stage: int) -> None:
    ends = []
    for late in (False, True):
        torch.manual_seed(0)
        model, seen = GPT2(tiny_model()), dict[str, list[float]]()
        names = {parameter: name for name, parameter in model.named_parameters()}

        def note(parameter: Tensor) -> None:
            assert parameter.grad is not None
            seen.setdefault(names[parameter], []).append(float(parameter.grad.float().norm()))  # type: ignore[index]

        def listen() -> None:
            for parameter in names:
                parameter.register_post_accumulate_grad_hook(note)

        if not late:
            listen()
        engine = zero.initialize(model=model, config=config(stage, gradient_accumulation_steps=2))[0]
        if late:
            listen()
        for micro in range(4):
            rows = (torch.arange(16).view(2, 8) + rank + micro) % 7
            engine.backward(engine(rows, rows).mean())
            engine.step()
        assert len(seen) == len(names)
        ends.append(seen)
    assert ends[0] == ends[1]


def test_a_hook_may_change_the_gradient() -> None:
    def forget(parameter: Any) -> None:
        parameter.grad.zero_()

    engine = zero.initialize(model=Model(), config=config(2))[0]
    weight = engine.module.layers[0].weight  # type: ignore[index,union-attr]
    handle = weight.register_post_accumulate_grad_hook(forget)
    before = weight.detach().clone()
    for removed in (False, True):
        engine.backward(engine(ROWS))
        engine.step()
        assert bool((weight - before).abs().max() > 5e-3) == removed
        handle.remove()


# ---- evaluation alone ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage, keys", [(0, {"bf16": {"enabled": True}}), (3, {})])
@on_ranks(2)
def test_an_engine_without_an_optimizer_evaluates(rank: int, world: int, tmp_path: Path, stage: int,
                                                  keys: dict[str, Any]) -> None:
    engine = trained(Model(), stage, **keys)
    engine.save_checkpoint(tmp_path)
    wanted = engine.eval()(ROWS).item()
    model = Model()
    own, optimizer, _, _ = zero.initialize(
        model=model, config={name: value for name, value in config(stage, **keys).items() if name != "optimizer"})
    assert own.core.state.buckets == [] and not any(p.requires_grad for p in model.parameters())
    fresh = own.eval()(ROWS).item()
    assert fresh == pytest.approx(Model()(ROWS).item(), rel=1e-2 if keys else 1e-6)
    for call in (lambda: own.backward(own(ROWS)), own.step):
        with pytest.raises(ConfigError, match=r"this engine only evaluates, .* no optimizer: give optimizer= to zero"):
            call()
    path, _ = own.load_checkpoint(tmp_path)
    assert path is not None and optimizer.param_groups[0]["params"] == []
    assert own(ROWS).item() == wanted != fresh and len(own.module_state_dict()) in (0, 5)


# ---- two engines -----------------------------------------------------------------------------------------------------


def test_engines_of_a_gan_have_their_own_gradients() -> None:
    torch.manual_seed(0)
    make, judge = (zero.initialize(model=nn.Linear(2, out), config=config(1))[0] for out in (2, 1))
    noise = torch.ones(2, 2)
    with pytest.raises(ConfigError, match=r"got a gradient in the backward of another engine.*requires_grad_\(False\)"):
        make.backward(judge(make(noise)).mean())
    for _ in range(2):
        before = judge.module.weight.detach().clone()
        judge.backward(judge(make(noise).detach()).mean())
        judge.step()
        judge.module.requires_grad_(False)
        make.backward(judge(make(noise)).mean())
        make.step()
        judge.module.requires_grad_(True)
        assert not torch.equal(judge.module.weight, before)
    assert (make.global_steps, judge.global_steps) == (2, 2)


# ---- names of DeepSpeed's --------------------------------------------------------------------------------------------


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor, called: list[int]) -> Tensor:
        return x + torch.stack([self.experts[number](x) for number in called]).sum(0)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inlet, self.inside = nn.Linear(4, 4), Experts()

    def forward(self, x: Tensor, called: list[int]) -> Tensor:
        return self.inside(self.inlet(x), called).square().mean()


@on_ranks(2)
def test_ranks_may_call_other_experts_of_a_leaf(rank: int, world: int) -> None:
    ends = []
    for stage in (0, 3):
        model = Mixture()
        assert utils.set_z3_leaf_modules(model, [Experts]) == [model.inside]
        engine = zero.initialize(model=model, config=config(stage))[0]
        for step in range(3):
            engine.backward(engine(torch.ones(2, 4), [step, step + 1] if rank else [3 - step]))
            engine.step()
        with zero.unwrap_model_for_generation(engine) as unwrapped, torch.no_grad():
            found = [unwrapped(torch.ones(2, 4), [rank]).item() for _ in range(2 + rank)]
            ends.append([p.detach().clone() for p in engine.module.parameters()])
        ends[-1].append(torch.tensor(found))
        assert len({*found}) == 1
    assert len(engine.core.units) == 2, "the experts are no units"
    assert all(torch.allclose(split, plain, atol=1e-6) for plain, split in zip(*ends, strict=True))


def test_leaves_are_marked_and_told() -> None:
    model = Mixture()
    assert utils.set_z3_leaf_modules(model, ["Experts", f"{__name__}.Experts"]) == [model.inside]
    assert utils.get_z3_leaf_modules(model) == [model.inside] and utils.z3_leaf_module(model.inside)
    assert utils.z3_leaf_parameter(model.inside.experts[0].weight) and not utils.z3_leaf_parameter(model.inlet.weight)
    assert utils.unset_z3_leaf_modules(model, [nn.Module], raise_if_not_found=False) and \
        utils.get_z3_leaf_modules(model) == []
    utils.set_z3_leaf_module(model, True)
    assert [unit.module for unit in zero.initialize(model=model, config=config(3))[0].core.units] == [model]
    with pytest.raises(ConfigError, match="no module of Mixture is of the classes .*Conv2d.*: name one"):
        utils.set_z3_leaf_modules(model, [nn.Conv2d])


# ---- arguments -------------------------------------------------------------------------------------------------------


def test_plain_arguments_of_the_wrong_kind_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    engine: Any = trained(Model(), 0)
    calls: list[tuple[Callable[..., object], dict[str, Any], str]] = [
        (engine.backward, {"loss": (engine(ROWS),)}, r"was given \(tensor.* \(tuple\): give it the loss"),
        (engine.backward, {"loss": 3.0}, r"backward\(\) was given 3.0 \(float\)"),
        (engine.backward, {"loss": engine(ROWS) * torch.ones(2)}, r"of shape \[2\]: take the mean"),
        (engine.backward, {"loss": torch.ones(())}, "a loss that requires no gradient: run the forward outside"),
        (engine.save_16bit_model, {"save_dir": "x", "save_filename": ""},
         "save_filename is None: expected the name of a file"),
        (engine.load_module_state_dict, {"state_dict": [1]}, "state dict of load_module_state_dict is"),
        (lambda: engine.set_train_batch_size("8"), {}, "set_train_batch_size: '8'; expected an integer"),
        (lambda: engine.set_train_micro_batch_size(2.5), {}, "set_train_micro_batch_size: 2.5; expected"),
        *((lambda name=name, folder=folder: getattr(engine, name)(folder), {},
           f"the folder of {name} is {told}: expected the path of a folder")
          for name, folder, told in (("save_checkpoint", None, None), ("load_checkpoint", "", None),
                                     ("save_16bit_model", 3, r"3 \(int\)"))),
        *((zero.initialize, {"model": Model(), "config": None if name == "config_params" else config(0), name: 3},
           rf"^{name} is 3 \(int\): expected ")
          for name in ("model", "training_data", "lr_scheduler", "config", "config_params"))]
    for call, arguments, told in calls:
        with pytest.raises(ConfigError, match=told) as caught:
            call(**arguments)
        assert "\n" not in str(caught.value)
    assert not any(tmp_path.iterdir())
    engine.module.requires_grad_(False)
    with pytest.raises(ConfigError, match=r"all parameters are frozen: call module\.requires_grad_\(True\)"):
        engine.backward(engine(ROWS).mean())
    engine.module.requires_grad_(True)
    engine.save_checkpoint(".")
    assert any(tmp_path.iterdir())
