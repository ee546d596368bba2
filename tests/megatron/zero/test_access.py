"""Looking at what an engine holds, and changing it, is the same at every stage: one parameter, or all weights as a
state dict, given on one rank or on all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron import zero
from megatron.errors import ConfigError
from megatron.zero.api.engine import Engine
from megatron.zero.utils import (safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state,
                                 safe_get_local_fp32_param, safe_get_local_grad, safe_get_local_optimizer_state,
                                 safe_set_full_fp32_param, safe_set_full_grad, safe_set_full_optimizer_state,
                                 safe_set_local_fp32_param)
from tests.covering import pairs
from tests.distributed import on_ranks
from tests.megatron.zero.small import WIDTH, Model, engine_of

RANKS, ROWS, ACCUMULATION, LR = 2, 3, 2, 1e-2


class Net(nn.Module):
    """An odd size in each dimension, and a parameter that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, 13), nn.Linear(13, 5, bias=False)
        self.fixed = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))) * self.fixed[0]


def made(stage: int, precision: str) -> tuple[Net, Any]:
    torch.manual_seed(0)
    model = Net()
    keys: dict[str, Any] = {"optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.0}},
                            "train_micro_batch_size_per_gpu": ROWS, "gradient_clipping": 1e-3}
    if precision == "fp16":
        keys["fp16"] = {"enabled": True, "loss_scale": 64}
    return model, engine_of(stage, model, ACCUMULATION, precision, keys=keys)


def batch(rank: int, micro: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(ROWS, 7, generator=torch.Generator().manual_seed(10 * rank + micro)).to(dtype)


def run_backward(engine: Any, rank: int, micro: int) -> None:
    engine.backward(engine(batch(rank, micro, engine.working_dtype)).float().square().mean())


def expected_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Of the mean loss over ranks and micro-batches, in fp64, without an engine."""
    losses = [model(batch(rank, micro).double()).square().mean()
              for rank in range(RANKS) for micro in range(ACCUMULATION)]
    torch.stack(losses).mean().backward()
    return {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}


TOLERANCE = {"fp32": 1e-6, "bf16": 2e-2, "fp16": 3e-3}  # of the largest gradient: the precision of the activations


@pytest.mark.parametrize("precision", TOLERANCE)
@on_ranks(RANKS)
def test_what_is_seen_is_the_mean_gradient_the_masters_and_the_moments(rank: int, world: int, precision: str) -> None:
    torch.manual_seed(0)
    wanted = expected_gradients(Net().double())
    for stage in range(4):
        model, engine = made(stage, precision)
        names = dict(model.named_parameters())
        for micro in range(ACCUMULATION):
            assert all(safe_get_full_grad(p) is None for p in names.values()), "not complete yet"
            run_backward(engine, rank, micro)
            if micro < ACCUMULATION - 1:
                engine.step()
        for name, wants in wanted.items():
            found = safe_get_full_grad(names[name])
            assert found is not None and found.dtype == torch.float32
            assert (found - wants).abs().max() <= TOLERANCE[precision] * wants.abs().max(), (stage, precision, name)
            local = safe_get_local_grad(names[name])
            assert local is not None and (stage > 0 or len(local) == wants.numel())
        weight = names["first.weight"]
        before, first = safe_get_full_fp32_param(weight), safe_get_full_grad(weight)
        engine.step()
        assert all(safe_get_full_grad(p) is None for p in names.values()), "spent"
        moment, after = safe_get_full_optimizer_state(weight, "exp_avg"), safe_get_full_fp32_param(weight)
        assert moment is not None and first is not None and after is not None and before is not None
        assert after.shape == moment.shape == (13, 7)
        torch.testing.assert_close(moment / moment.norm(), first / first.norm(), rtol=1e-5, atol=1e-6)  # clipped
        way = after - before  # Adam's first step: about the rate, against the gradient
        assert torch.equal(way.sign(), -first.sign()) and LR / 2 < way.abs().max() <= LR * 1.001
        assert safe_get_full_fp32_param(model.fixed) is None and safe_get_local_grad(model.fixed) is None
        assert safe_get_full_fp32_param(nn.Parameter(torch.ones(2))) is None
        with pytest.raises(ConfigError, match="keeps no 'momentum'; it keeps exp_avg, exp_avg_sq"):
            safe_get_full_optimizer_state(weight, "momentum")


def changed(rank: int, stage: int, precision: str) -> dict[str, Tensor]:
    """The masters after a step in which everything has been set once."""
    model, engine = made(stage, precision)
    weight, bias = model.first.weight, model.first.bias
    safe_set_full_fp32_param(weight, torch.arange(91.0).view(13, 7) / 91)
    shown = safe_get_full_fp32_param(weight)
    assert shown is not None and torch.equal(shown, torch.arange(91.0).view(13, 7) / 91)
    with zero.GatheredParameters([weight]):
        assert torch.equal(weight.float(), shown.to(weight.dtype).float()), "the model has them too"
    safe_set_full_optimizer_state(bias, torch.full((13,), 0.25), "exp_avg_sq")
    mine = safe_get_local_fp32_param(bias)
    assert mine is not None
    safe_set_local_fp32_param(bias, torch.full_like(mine, 0.5))
    for micro in range(ACCUMULATION):
        run_backward(engine, rank, micro)
        if micro < ACCUMULATION - 1:
            engine.step()
    safe_set_full_grad(model.second.weight, torch.full((5, 13), 1e-4))
    seen = safe_get_full_grad(model.second.weight)
    assert seen is not None
    torch.testing.assert_close(seen, torch.full((5, 13), 1e-4), rtol=1e-2 if precision != "fp32" else 1e-6, atol=0)
    engine.step()
    squares = safe_get_full_optimizer_state(bias, "exp_avg_sq")
    assert squares is not None and bool((squares >= 0.25 * 0.998).all())
    return {name: value for name, p in model.named_parameters() if (value := safe_get_full_fp32_param(p)) is not None}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@on_ranks(RANKS)
def test_what_is_set_is_trained_with_alike_at_every_stage(rank: int, world: int, precision: str) -> None:
    expected, *others = (changed(rank, stage, precision) for stage in range(4))
    for found in others:
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)


def test_values_of_another_shape_and_gradients_that_are_not_there_are_refused() -> None:
    model, engine = made(1, "fp32")
    with pytest.raises(ConfigError, match=r"'first.weight' of shape \(13, 7\) needs a value of shape \[13, 7\], not"):
        safe_set_full_fp32_param(model.first.weight, torch.ones(7, 13))
    with pytest.raises(ConfigError, match="no complete gradient"):
        safe_set_full_grad(model.first.weight, torch.ones(13, 7))
    with pytest.raises(ConfigError, match="no engine trains"):
        safe_set_full_fp32_param(model.fixed, torch.ones(3))
    with zero.GatheredParameters([model.first.weight]), pytest.raises(ConfigError, match="inside zero.Gathered"):
        safe_set_full_fp32_param(model.first.weight, torch.ones(13, 7))
    assert safe_get_local_optimizer_state(model.first.bias, "exp_avg") is not None


# ---- weights as a state dict -----------------------------------------------------------------------------------------


def model_with_buffer(seed: int) -> nn.Module:
    model = Model()
    torch.manual_seed(seed)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    model.register_buffer("scale", torch.tensor(float(seed)))
    return model


def engine_with(stage: int, seed: int, bf16: bool = False) -> Engine:
    return engine_of(stage, model_with_buffer(seed), precision="bf16" if bf16 else "fp32", lr=0.03,
                     stage3_gather_16bit_weights_on_model_save=True)


def train_on_ones(engine: Engine) -> float:
    x = torch.ones(2, WIDTH, dtype=engine.working_dtype)
    loss = engine(x)
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


@pytest.mark.parametrize("stage, bf16", pairs(range(4), [False, True], each=1))
@on_ranks(2)
def test_what_state_dict_gave_is_taken_at_every_stage(rank: int, world: int, stage: int, bf16: bool) -> None:
    giver, taker = engine_with(stage, 1, bf16), engine_with(stage, 2 + rank, bf16)
    for engine in (giver, taker):
        train_on_ones(engine)
    state = giver.state_dict()
    taker.load_state_dict(state)
    again = engine_with(stage, 3)
    again.load_module_state_dict({name.removeprefix("module."): value for name, value in state.items()}
                                 if rank == 0 else {})
    loaded = again.module_state_dict()  # collective where it is gathered, and of rank 0
    assert float(taker.module.scale) == 1.0, "buffers come along, on every rank"
    given = float(giver(torch.ones(2, WIDTH, dtype=giver.working_dtype)).detach())
    assert train_on_ones(taker) == given, "the same weights give the same loss"
    assert train_on_ones(taker) < given, "they are trained on: the masters are the new weights, too"
    assert all(torch.equal(loaded[name.removeprefix("module.")].float(), value.float())
               for name, value in state.items() if rank == 0)
    assert train_on_ones(again) > train_on_ones(again)


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_what_does_not_fit_is_an_error_on_every_rank_and_changes_nothing(rank: int, world: int, stage: int) -> None:
    engine = engine_with(stage, 1)
    good = {name: value.clone() for name, value in engine.state_dict().items()}
    other = {name: value + 1 for name, value in good.items()}
    first = train_on_ones(engine_with(stage, 1))
    for bad, told in (({"module.head.weight": torch.zeros(1, WIDTH)}, "names are missing, blocks.0.bias first"),
                      ({}, "an empty state dict on the first data parallel rank"),
                      ({**other, "module.head.bias": torch.zeros(3)},
                       r"head.bias has shape \[3\] in the state dict, and shape \[1\] in the model"),
                      ({**other, "module.three": torch.zeros(3)}, "not the model's, three first")):
        with pytest.raises(ConfigError, match=told):
            engine.load_state_dict(bad if rank == 0 else good)
    assert train_on_ones(engine) == first, "nothing was changed, and the engine goes on"


LOANS: dict[str, tuple[str, str]] = {
    "raises": ("^in the middle of an edit$", "ValueError: in the middle of an edit"),
    "reads": ("head.weight was edited", "head.weight was edited"),
    "shape": ("head.weight became a tensor", "head.weight became a tensor"),
    "dtype": ("head.weight became a tensor", "head.weight became a tensor"), "assigns": ("", "")}
"""What rank 0 does in a loan, and what is said there and on the other rank."""


@pytest.mark.parametrize("what, stage", pairs([*LOANS], [0, 1, 3], each=1))
@on_ranks(2)
def test_what_one_rank_does_in_a_loan_ends_it_on_all(rank: int, world: int, stage: int, what: str) -> None:
    engine = engine_with(stage, 1, bf16=True)
    weight = engine.module.head.weight

    def lend() -> None:
        with zero.GatheredParameters([weight, engine.module.head.bias], None if what == "reads" else 0):
            if rank == 0 and what == "raises":
                weight.fill_(2.0)
                raise ValueError("in the middle of an edit")
            if rank == 0 and what == "reads":
                torch.no_grad()(weight.fill_)(2.0)
            if rank == 0 and what == "shape":
                weight.data = torch.ones(2, 2)
            if rank == 0 and what == "dtype":
                weight.data = weight.data.double()
            if rank == 0 and what == "assigns":
                weight.data = torch.full_like(weight, 2.0)

    if what == "assigns":
        lend()
    else:
        with pytest.raises((ConfigError, ValueError), match=LOANS[what][rank]):
            lend()
    wanted = model_with_buffer(1).head.weight.bfloat16() if what != "assigns" else torch.full((1, WIDTH), 2.0)
    with zero.GatheredParameters(weight):
        assert torch.equal(weight.float(), wanted.float())
    train_on_ones(engine)
