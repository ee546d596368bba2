"""Every optimizer of torch, in each of its forms, after backwards that were not summed over the ranks."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from megatron.errors import ConfigError
from megatron.fsdp import FSDP, FSDPModule
from megatron.fsdp.sharded_tensor import local_tensor, location_of
from tests.distributed import run_ranks
from tests.megatron.fsdp.loops import around, batch, whole
from tests.megatron.zero.models import Net

GIVEN: dict[str, dict[str, Any]] = {"SGD": {"lr": 0.1}, "LBFGS": {"max_iter": 1}}
REFUSED = {"Adafactor", "LBFGS", "Muon", "Rprop"}
"""Those that look at whole parameters: their step raises on shards."""

OPTIMIZERS = sorted(name for name, kind in vars(torch.optim).items() if inspect.isclass(kind)
                    and issubclass(kind, torch.optim.Optimizer)
                    and kind not in (torch.optim.Optimizer, torch.optim.SparseAdam))


def forms(name: str) -> Iterator[dict[str, bool]]:
    known = inspect.signature(getattr(torch.optim, name)).parameters
    yield {form: False for form in ("foreach", "fused") if form in known}
    for form in ("foreach", "fused"):
        if form in known:
            yield {form: True}


CELLS = [(name, form) for name in OPTIMIZERS for form in forms(name)]


@contextmanager
def unsummed(model: nn.Module) -> Iterator[None]:
    """Backwards inside are not summed, by the name that the face has for it."""
    if isinstance(model, FSDP):
        with model.no_sync():
            yield
    else:
        assert isinstance(model, FSDPModule)
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)


def made(name: str, form: dict[str, bool], model: nn.Module) -> torch.optim.Optimizer:
    parameters = [one for one in model.parameters() if name != "Muon" or one.dim() == 2]
    kind: Any = getattr(torch.optim, name)
    return kind(parameters, **GIVEN.get(name, {}), **form)  # type: ignore[no-any-return]


def steps(rank: int, world: int, cells: list[tuple[str, dict[str, bool]]], way: str) -> dict[str, str]:
    """What a step after an unsummed backward, and after a summed one, comes to; nothing where both are right."""
    found: dict[str, str] = {}
    for name, form in cells:
        model = around(Net(), way)
        optimizer, before = made(name, form, model), whole(model)

        def closure(model: nn.Module = model) -> torch.Tensor:
            loss: torch.Tensor = model(batch(rank, 0)).sum()
            with unsummed(model):
                loss.backward()
            return loss

        def step() -> str:
            try:
                optimizer.step(*([lambda: torch.tensor(0.0)] if name == "LBFGS" else []))
            except ConfigError as error:
                return "no_sync" if "no_sync" in str(error) else "refused"
            return "stepped"

        for _ in range(2):
            closure()
        said, after = step(), whole(model)
        if said == "stepped" or said == "refused" and name not in REFUSED:
            found[f"{name} {form} unsummed"] = said
        if not all(torch.equal(before[one], after[one]) for one in before):
            found[f"{name} {form} weights"] = "changed"
        model(batch(rank, 1)).sum().backward()
        if (said := step()) != ("refused" if name in REFUSED else "stepped"):
            found[f"{name} {form} summed"] = said
    return found


@pytest.mark.parametrize("way", ["nested", "torch"])
def test_a_step_on_gradients_that_are_not_summed_is_refused(way: str) -> None:
    sample = [("SGD", {"foreach": False, "fused": False}), ("AdamW", {"foreach": True}), ("Adam", {"fused": True}),
              ("ASGD", {"foreach": False})]
    assert run_ranks(steps, 2, sample, way) == [{}, {}]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["whole", "nested", "torch"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_of_any_optimizer_on_gradients_that_are_not_summed_is_refused(name: str, way: str) -> None:
    assert run_ranks(steps, 2, [cell for cell in CELLS if cell[0] == name], way) == [{}, {}]


READS: dict[str, Any] = {
    "plus": lambda p: p.grad + 1, "clone": lambda p: p.grad.clone(), "data": lambda p: p.grad.data,
    "detach": lambda p: p.grad.detach(), "cpu": lambda p: p.grad.cpu(), "sum": lambda p: p.grad.sum(),
    "tolist": lambda p: p.grad.tolist(), "numpy": lambda p: p.grad.numpy(), "item": lambda p: p.grad[0].item(),
    "tensor": lambda p: torch.tensor(p.grad), "deepcopy": lambda p: copy.deepcopy(p.grad),
    "pickle": lambda p: pickle.dumps(p.grad), "copy": lambda p: torch.zeros(p.shape).copy_(p.grad),
    "sgd": lambda p: p.data.add_(p.grad, alpha=-1), "operator": lambda p: p.data - p.grad,
    "behind": lambda p: torch.add(torch.zeros(3), p.data, out=p.grad), "foreach": lambda p: torch._foreach_add_(
        [p.data], [p.grad]), "edit": lambda p: p.grad.add_(1), "compare": lambda p: torch.equal(p.data, p.grad)}
"""Ways to read a gradient, or to edit it."""


def reads(rank: int, world: int, way: str) -> list[str]:
    """Those that find something."""
    model = around(Net(), way)
    with unsummed(model):
        model(batch(rank, 0)).sum().backward()
    parameter, found = next(model.parameters()), []
    for name, read in READS.items():
        try:
            with torch.no_grad():
                value = torch.as_tensor(read(parameter))
            if not value.isnan().all():
                found.append(name)
        except ConfigError as error:
            if "no_sync" not in str(error):
                found.append(f"{name}: {error}")
    return found


@pytest.mark.parametrize("way", ["torch", pytest.param("whole", marks=pytest.mark.slow)])
def test_a_gradient_that_is_not_summed_cannot_be_read(way: str) -> None:
    assert run_ranks(reads, 2, way) == [[], []]


ORDERS = ["".join(order) + "S" for length in (2, 3, 4) for order in product("SNF", repeat=length)
          if "F" in order[1:] and "FF" not in "".join(order)]
"""Of backwards that sum (S) or do not (N), and of one gradient being forgotten (F)."""


def wrong_sums(rank: int, world: int, orders: list[str], way: str) -> list[str]:
    """The orders after which a gradient is not that of the backwards since it was forgotten."""
    wrong = []
    for order, to_none in product(orders, (True, False)):
        torch.manual_seed(0)
        plain, model = nn.Linear(3, 2), around(nn.Linear(3, 2), way)
        plain.load_state_dict(whole(model))
        first, *_ = model.parameters()
        expected = [torch.zeros_like(one) for one in plain.parameters()]
        for number, letter in enumerate(order):
            if letter == "F":
                if first.grad is not None:
                    first.grad = None if to_none else first.grad.zero_()
                expected[0].zero_()
                continue
            inputs = [torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * number + one))
                      for one in range(world)]
            with unsummed(model) if letter == "N" else nullcontext():
                model(inputs[rank]).square().sum().backward()
            for total, *of_ranks in zip(expected, *(torch.autograd.grad(plain(x).square().sum(), [*plain.parameters()])
                                                    for x in inputs)):
                total.add_(sum(of_ranks) / world)
        for parameter, total in zip(model.parameters(), expected, strict=True):
            run, start = local_tensor(parameter.grad), location_of(parameter.grad).offset
            if not torch.allclose(run, total.flatten()[start : start + run.numel()], atol=1e-5):
                wrong.append(f"{order} {to_none}")
    return wrong


@pytest.mark.parametrize("way, orders", [("torch", ["SNFS", "SFNS", "NFS", "SNFNS"]), pytest.param(
    "whole", ORDERS, marks=pytest.mark.slow), pytest.param("torch", ORDERS, marks=pytest.mark.slow)])
def test_a_forgotten_gradient_is_forgotten_wherever_it_was_added_up(way: str, orders: list[str]) -> None:
    assert run_ranks(wrong_sums, 2, orders, way) == [[], []]
