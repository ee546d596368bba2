"""Looking at what an engine holds of one parameter, and changing it, is the same at every stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron import zero
from megatron.errors import ConfigError
from megatron.zero.utils import (safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state,
                                 safe_get_local_fp32_param, safe_get_local_grad, safe_get_local_optimizer_state,
                                 safe_set_full_fp32_param, safe_set_full_grad, safe_set_full_optimizer_state,
                                 safe_set_local_fp32_param)
from tests.distributed import on_ranks

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
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ROWS, "gradient_accumulation_steps": ACCUMULATION,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.0}}, "gradient_clipping": 1e-3,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    if precision != "fp32":
        config[precision] = {"enabled": True}
    if precision == "fp16":
        config["fp16"]["loss_scale"] = 64
    engine, *_ = zero.initialize(model=model, model_parameters=model.parameters(), config=config)
    return model, engine


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
