"""What scripts do that few examples show: kinds of parameters, hooks of their own, evaluation alone, a GAN, and
arguments of the wrong kind."""

from __future__ import annotations

import copy
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
from tests.covering import pairs
from tests.distributed import run_ranks
from tests.megatron.helpers import tiny_model

CELLS = pytest.mark.parametrize("ranks, stage", pairs([1, 2], [0, 1, 2, 3], each=1))


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


def _weights(rank: int, world: int) -> bool:
    """Whether sparse gradients of an embedding train as dense ones do, at every stage."""
    table = torch.arange(32.0).view(8, 4).cos()
    is_same = True
    for stage, accumulation in ((0, 1), (1, 2), (2, 1), (3, 2)):
        dense, sparse = (trained(Model(nn.Embedding.from_pretrained(table, freeze=False, sparse=sparse)), stage,
                                 gradient_accumulation_steps=accumulation).module_state_dict()
                         for sparse in (False, True))
        is_same &= all(sparse[name].equal(dense[name]) for name in dense)
    return is_same


@pytest.mark.parametrize("ranks", [1, 2])
def test_sparse_gradients_of_an_embedding_are_those_of_a_dense_one(ranks: int) -> None:
    assert run_ranks(_weights, ranks) == [True] * ranks


# ---- hooks -----------------------------------------------------------------------------------------------------------


def _seen(rank: int, world: int, stage: int, late: bool) -> dict[str, list[float | None]]:
    """What hooks of a user see, whenever they are registered; tables write their gradients in place."""
    torch.manual_seed(0)
    model, seen = GPT2(tiny_model()), dict[str, list[float | None]]()
    names = {parameter: name for name, parameter in model.named_parameters()}

    def note(parameter: Tensor) -> None:
        norm = None if parameter.grad is None else float(parameter.grad.float().norm())
        seen.setdefault(names[parameter], []).append(norm)  # type: ignore[index]

    for is_late in (False, True):
        if is_late:
            engine = zero.initialize(model=model, config=config(stage, gradient_accumulation_steps=2))[0]
        for parameter in names if is_late == late else ():
            parameter.register_post_accumulate_grad_hook(note)
    for micro in range(4):
        rows = (torch.arange(16).view(2, 8) + rank + micro) % 7
        engine.backward(engine(rows, rows).mean())
        engine.step()
    assert len(seen) == len(names)
    return seen


@CELLS
def test_a_hook_sees_the_gradient_whenever_it_was_registered(ranks: int, stage: int) -> None:
    late, early = (run_ranks(_seen, ranks, stage, when) for when in (True, False))
    assert late == early and not any(None in values for seen in late for values in seen.values())


def test_a_hook_may_change_the_gradient() -> None:
    """Ours takes what it leaves."""
    engine = zero.initialize(model=Model(), config=config(2))[0]
    weight = engine.module.layers[0].weight  # type: ignore[index,union-attr]
    handle = weight.register_post_accumulate_grad_hook(lambda parameter: parameter.grad.zero_())
    before = weight.detach().clone()
    for removed in (False, True):
        engine.backward(engine(ROWS))
        engine.step()
        assert bool((weight - before).abs().max() > 5e-3) == removed
        handle.remove()


# ---- evaluation alone ------------------------------------------------------------------------------------------------


def _evaluated(rank: int, world: int, stage: int, folder: str, keys: dict[str, Any]) -> list[Any]:
    engine = trained(Model(), stage, **keys)
    engine.save_checkpoint(folder)
    wanted = engine.eval()(ROWS).item()
    model = Model()
    own, optimizer, _, _ = zero.initialize(
        model=model, config={name: value for name, value in config(stage, **keys).items() if name != "optimizer"})
    assert own.core.state.buckets == [] and not any(p.requires_grad for p in model.parameters())
    fresh = own.eval()(ROWS).item()
    for call in (lambda: own.backward(own(ROWS)), own.step):
        with pytest.raises(ConfigError, match=r"this engine only evaluates, .* no optimizer: give optimizer= to zero"):
            call()
    path, _ = own.load_checkpoint(folder)
    assert path is not None and optimizer.param_groups[0]["params"] == []
    return [wanted, fresh, own(ROWS).item(), own.module_state_dict(), own.device.type]


@pytest.mark.parametrize("ranks, stage, keys", [(1, 0, {"bf16": {"enabled": True}}), (2, 3, {})])
def test_an_engine_without_an_optimizer_evaluates(ranks: int, stage: int, keys: dict[str, Any], tmp_path: Path) -> None:
    for wanted, fresh, loaded, state, device in run_ranks(_evaluated, ranks, stage, str(tmp_path), keys):
        assert fresh == pytest.approx(Model()(ROWS).item(), rel=1e-2 if keys else 1e-6)
        assert loaded == wanted != fresh and device == "cpu" and len(state) in (0, 5)


# ---- two engines -----------------------------------------------------------------------------------------------------


def _two(rank: int, world: int, stage: int) -> tuple[list[float], list[float], str]:
    """A GAN: losses of both models, beside those of plain torch; and one loss through both engines."""
    bce = nn.functional.binary_cross_entropy_with_logits
    noise, real, ones, zeros = torch.ones(2, 2), torch.zeros(2, 2), torch.ones(2, 1), torch.zeros(2, 1)
    torch.manual_seed(0)
    maker, judge = (nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, out)) for out in (2, 1))
    plain = copy.deepcopy(maker), copy.deepcopy(judge)
    engines = [zero.initialize(model=model, config=config(stage))[0] for model in (maker, judge)]
    optimizers = {model: torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0) for model in plain}

    def step(model: Any, loss: Tensor) -> float:
        if model in optimizers:
            loss.backward()  # type: ignore[no-untyped-call]
            optimizers[model].step()
            optimizers[model].zero_grad()
        else:
            model.backward(loss)
            model.step()
        return loss.item()

    def losses(make: Any, judge: Any, frozen: nn.Module) -> list[float]:
        found = []
        for _ in range(3):
            found.append(step(judge, bce(judge(real), ones) + bce(judge(make(noise).detach()), zeros)))
            frozen.requires_grad_(False)
            found.append(step(make, bce(judge(make(noise)), ones)))
            frozen.requires_grad_(True)
        return found

    ours = losses(*engines, judge)
    with pytest.raises(ConfigError) as caught:
        engines[0].backward(engines[1](engines[0](noise)).mean())
    return ours, losses(*plain, plain[1]), str(caught.value)


@pytest.mark.parametrize("ranks, stage", [(1, 1), (2, 0), (2, 3)])
def test_a_gan_of_two_engines_trains_as_plain_models_do(ranks: int, stage: int) -> None:
    for ours, plain, told in run_ranks(_two, ranks, stage):
        assert ours == pytest.approx(plain, abs=1e-6)
        assert "got a gradient in the backward of another engine" in told and "requires_grad_(False)" in told


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


def _mixed(rank: int, world: int, stage: int) -> tuple[dict[str, Tensor], list[float], int]:
    """Ranks call other experts, and other numbers of them; and run other numbers of forwards with all gathered."""
    model = Mixture()
    assert utils.set_z3_leaf_modules(model, [Experts]) == [model.inside]
    engine = zero.initialize(model=model, config=config(stage))[0]
    for step in range(3):
        engine.backward(engine(torch.ones(2, 4), [step, step + 1] if rank else [3 - step]))
        engine.step()
    with zero.unwrap_model_for_generation(engine) as unwrapped, torch.no_grad():
        found = [unwrapped(torch.ones(2, 4), [rank]).item() for _ in range(2 + rank)]
    return engine.module_state_dict(), found, len(engine.core.units)


def test_ranks_may_call_other_experts_of_a_leaf() -> None:
    plain, split = (run_ranks(_mixed, 2, stage) for stage in (0, 3))
    assert all(torch.allclose(plain[0][0][name], split[0][0][name], atol=1e-6) for name in plain[0][0])
    for (_, found, _), (_, wanted, _) in zip(split, plain, strict=True):
        assert found == pytest.approx(wanted, abs=1e-6) and len({*found}) == 1
    assert {units for _, _, units in split} == {2}, "the experts are no units"


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
          for name in ("model", "args", "optimizer", "model_parameters", "training_data", "lr_scheduler", "config",
                       "config_params"))]
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
