"""What the user makes of `parameter.grad` counts as in a plain loop, or is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.errors import ConfigError
from megatron.zero.utils import safe_get_full_grad
from tests.covering import pairs
from tests.distributed import run_ranks
from tests.megatron.zero.small import WIDTH, Model, engine_of
from tests.wires import accelerator_side


def batch(number: int) -> Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(number))


def made(stage: int, model: nn.Module | None = None, precision: str = "fp32") -> Any:
    return engine_of(stage, model, 2, precision)


@pytest.fixture(params=["cpu", "accelerator"])
def side(request: pytest.FixtureRequest) -> Iterator[str]:
    with accelerator_side(request.param == "accelerator"):
        yield request.param


EDITS: list[Callable[[Any], object]] = [
    lambda p: setattr(p, "grad", p.grad * 0.5), lambda p: p.grad.mul_(0.5),
    lambda p: setattr(p, "grad", torch.ones_like(p)), lambda p: setattr(p, "grad", None), nn.Module.zero_grad]


@pytest.mark.parametrize("stage", [0, 1])
def test_between_backwards_the_view_is_the_gradient(stage: int, side: str) -> None:
    for edit in EDITS:
        engine, plain = made(stage), Model()
        for number in range(2):
            engine.backward(engine(batch(number)))
            (plain(batch(number)) / 2).backward()
            if number == 0:
                engine.step()
                for net in (engine.module, plain):
                    for thing in [net] if edit is nn.Module.zero_grad else net.parameters():
                        edit(thing)
        for ours, theirs in zip(engine.module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(safe_get_full_grad(ours), theirs.grad, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("stage, when", pairs(  # at stage 3 torch refuses it: the parameter has no elements
    [0, 1, 2], ["before a backward", "before a step", "between micro-batches, where it is no view"], each=1))
def test_a_gradient_that_nobody_would_look_at_is_refused(when: str, stage: int, side: str) -> None:
    engine = made(stage, precision="bf16" if "no view" in when else "fp32")
    parameter = engine.module.head.bias

    def set_by_hand() -> None:
        parameter.grad = torch.ones_like(parameter)

    def backward(number: int) -> None:
        engine.backward(engine(batch(number).to(engine.working_dtype)))

    with pytest.raises(ConfigError, match="head.bias.grad was set by hand"):
        if when == "before a backward":
            set_by_hand()
        backward(0)
        engine.step()
        if when.endswith("view"):
            set_by_hand()
        backward(1)
        if when == "before a step":
            set_by_hand()
        engine.step()
        engine.finish_step()
    engine.zero_grad()
    assert parameter.grad is None


@pytest.mark.parametrize(("stage", "precision"), [(0, "bf16"), (2, "fp32")])
def test_after_a_refusal_the_step_begins_anew(stage: int, precision: str, side: str) -> None:
    """As the error of the step says: a micro-batch from before it does not count twice."""
    norms = []
    for refused in (False, True):
        engine = made(stage, precision=precision)
        if refused:
            engine.backward(engine(batch(7).to(engine.working_dtype)))
            engine.step()
            parameter = engine.module.head.bias
            parameter.grad = torch.ones_like(parameter)
            with pytest.raises(ConfigError, match="was set by hand"):
                engine.backward(engine(batch(8).to(engine.working_dtype)))
            with pytest.raises(ConfigError, match="what had been accumulated is gone"):
                engine.step()
        for number in range(2):
            engine.backward(engine(batch(number).to(engine.working_dtype)))
            engine.step()
        norms.append(engine.get_global_grad_norm())
    assert norms[0] == norms[1]


def on_one_rank(rank: int, world: int) -> str:
    engine = made(1)
    for number in range(2):
        engine.backward(engine(batch(number)))
        if rank == 1 and number == 1:
            engine.module.head.bias.grad = torch.ones(1)
        try:
            engine.step()
        except ConfigError as error:
            return str(error)
    return "no error"


def test_set_on_one_rank_it_is_refused_by_all() -> None:
    for said in run_ranks(on_one_rank, 2):
        assert said.startswith("head.bias.grad was set by hand") and said.endswith("(so on rank 1, not on all)")


@pytest.mark.parametrize("stage", [0, 3])
def test_those_of_a_backward_before_the_engine_are_dropped_with_a_word(stage: int, side: str) -> None:
    model = Model()
    model(batch(7)).backward()
    with pytest.warns(UserWarning, match="blocks.0.weight.grad, made before zero.initialize, is dropped"):
        engines = made(stage, model), made(stage)
    for engine in engines:
        for number in range(2):
            engine.backward(engine(batch(number)))
            engine.step()
    norms = [engine.get_global_grad_norm() for engine in engines]
    assert norms[0] == norms[1]
