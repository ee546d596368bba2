"""Optimizers of torch, in each of their forms, after backwards that were not summed over the ranks."""

from __future__ import annotations

import copy
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
from tests.distributed import on_ranks
from tests.megatron.fsdp.loops import around, batch, whole
from tests.megatron.zero.models import Net


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


@on_ranks(2)
def test_a_step_on_gradients_that_are_not_summed_is_refused(rank: int, world: int) -> None:
    for way, (kind, form) in product(("nested", "torch"), (
            (torch.optim.SGD, {"foreach": False, "fused": False}), (torch.optim.AdamW, {"foreach": True}),
            (torch.optim.Adam, {"fused": True}), (torch.optim.ASGD, {"foreach": False}))):
        model = around(Net(), way)
        optimizer, before = kind(model.parameters(), **form), whole(model)
        for _ in range(2):
            loss = model(batch(rank, 0)).sum()
            with unsummed(model):
                loss.backward()
        with pytest.raises(ConfigError, match="no_sync"):
            optimizer.step()
        after = whole(model)
        assert all(torch.equal(before[one], after[one]) for one in before), (way, form)
        model(batch(rank, 1)).sum().backward()
        optimizer.step()


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


@on_ranks(2)
def test_a_gradient_that_is_not_summed_cannot_be_read(rank: int, world: int) -> None:
    for way in ("torch", "whole"):
        model = around(Net(), way)
        with unsummed(model):
            model(batch(rank, 0)).sum().backward()
        parameter = next(model.parameters())
        for name, read in READS.items():
            try:
                with torch.no_grad():
                    assert torch.as_tensor(read(parameter)).isnan().all(), (name, way)
            except ConfigError as error:
                assert "no_sync" in str(error), (name, way)


ORDERS = ["".join(order) + "S" for length in (2, 3, 4) for order in product("SNF", repeat=length)
          if "F" in order[1:] and "FF" not in "".join(order)]
"""Of backwards that sum (S) or do not (N), and of one gradient being forgotten (F)."""


@pytest.mark.parametrize("orders", [["SNFS", "SFNS", "NFS", "SNFNS"], pytest.param(ORDERS, marks=pytest.mark.slow)],
                         ids=["some", "all"])
@on_ranks(2)
def test_a_forgotten_gradient_is_forgotten_wherever_it_was_added_up(rank: int, world: int, orders: list[str]) -> None:
    for order, to_none, way in product(orders, (True, False), ("torch", "whole")):
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
            assert torch.allclose(run, total.flatten()[start : start + run.numel()], atol=1e-5), (order, to_none, way)
