"""Which modules are wrapped, what a module has beside its parameters, and what it is given after it was sharded:
buffers, modules, hooks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.errors import ConfigError
from megatron.fsdp import (FSDP, auto_wrap, checkpoint_wrapper, config_auto_wrap_policy, default_auto_wrap_policy,
                           disable_checkpointing, enable_wrap, fully_shard, transformer_auto_wrap_policy, wrap)
from megatron.fsdp.sharded_tensor import local_tensor
from tests.distributed import on_ranks
from tests.megatron.fsdp.loops import around, batch, whole
from tests.megatron.zero.models import Block, Net


# ---- buffers -----------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_values_that_differ_are_refused_or_taken_from_the_first_rank(rank: int, world: int) -> None:
    for way, persistent, sync in (("nested", True, True), ("torch", False, True), ("nested", False, False)):
        model = Net()
        model.blocks[0].register_buffer("scale", torch.full((2,), float(rank)), persistent=persistent)
        with torch.no_grad():
            model.last.bias += rank * sync
        if sync:
            assert torch.equal(whole(around(model, way, sync_module_states=True))["last.bias"], Net().last.bias)
            assert model.get_buffer("blocks.0.scale").tolist() == [0.0, 0.0]
        else:
            with pytest.raises(ConfigError) as caught:
                around(model, way)
            assert all(word in str(caught.value) for word in ("buffers", "scale", "sync_module_states"))


class Quantiser(nn.Module):
    """A moving mean that its output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))
        self.runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        self.mean.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)  # type: ignore[operator, union-attr]
        return (self.layer(x) * self.mean.clone()).square()  # type: ignore[operator]


RECOMPUTED: dict[str, Callable[[Any], Any]] = {
    "plain": checkpoint_wrapper, "wrapped": lambda module: FSDP(checkpoint_wrapper(module)),
    "outside": lambda module: checkpoint_wrapper(FSDP(module)), "torch": lambda module: fully_shard(
        checkpoint_wrapper(module))}


@pytest.mark.parametrize("way, disabled", [*((way, False) for way in RECOMPUTED), ("wrapped", True)])
def test_recomputation_reads_the_buffers_of_its_forward_and_changes_none(way: str, disabled: bool) -> None:
    found = []
    for make in (lambda module: module, RECOMPUTED[way]):
        torch.manual_seed(0)
        module = Quantiser()
        model = make(module)
        with disable_checkpointing() if disabled else nullcontext():
            losses = [model(batch(0, number)).sum() for number in range(2)]
        for loss in losses:
            if way == "plain":
                loss.backward(retain_graph=True)
            loss.backward()
        found.append([local_tensor(module.layer.weight.grad).view(6, 6), module.mean])
    assert all(map(torch.equal, *found))
    assert module.runs == (2 if disabled else 6 if way == "plain" else 4)


# ---- modules and parameters that came late -----------------------------------------------------------------------


CHANGES: dict[str, Callable[[Any], None]] = {
    "a new module": lambda model: setattr(
        model.blocks[1], "wide", nn.Sequential(model.blocks[1].wide, nn.Linear(7, 7))),
    "a replaced module": lambda model: setattr(model.blocks[0], "narrow", nn.Linear(7, 6)),
    "a replaced parameter": lambda model: setattr(model.last, "bias", nn.Parameter(torch.zeros(6))),
    "a new parameter": lambda model: setattr(model.blocks[0], "adapter", nn.Parameter(torch.zeros(3)))}


@on_ranks(2)
def test_what_is_added_after_sharding_is_refused(rank: int, world: int) -> None:
    for way, change in product(("nested", "torch"), CHANGES.values()):
        model = around(Net(), way)
        model(batch(rank, 0)).sum().backward()
        change(model)
        with pytest.raises(ConfigError, match="after it was sharded"):
            model(batch(rank, 1)).sum().backward()


@on_ranks(2)
def test_a_new_module_that_is_sharded_trains_as_others_do(rank: int, world: int) -> None:
    model: Any = around(Net(), "torch")
    torch.manual_seed(0)
    model.last = fully_shard(nn.Linear(6, 6))
    before = whole(model.last)["weight"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(2):
        model(batch(rank, number)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    after = whole(model.last)["weight"]
    dist.broadcast(of_the_first := after.clone(), 0)
    assert torch.equal(after, of_the_first) and not torch.equal(before, after)


# ---- hooks that came late ----------------------------------------------------------------------------------------


@on_ranks(2)
def test_hooks_registered_after_sharding_see_full_weights(rank: int, world: int) -> None:
    """In a forward; what they see elsewhere is an error that says so."""
    expected = Net().blocks[1].wide.weight.detach()
    for way in ("nested", "torch"):
        model: Any = around(Net(), way)
        seen: list[bool] = []

        def look(module: Any, *more: Any) -> None:
            seen.append(torch.equal(module.wide.weight, expected))

        block = getattr(model.blocks[1], "module", model.blocks[1])
        block.register_forward_pre_hook(look)
        block.register_forward_hook(look)
        block.wide.register_forward_hook(lambda *given: look(block))
        with torch.no_grad():
            model(batch(rank, 0))
        for number in range(2):
            model(batch(rank, number)).sum().backward()
        assert seen == [True] * 9
        with pytest.raises(ConfigError, match="forward hooks"):
            look(block)


# ---- names of the faces ------------------------------------------------------------------------------------------


def test_names_of_fairscale_and_torch() -> None:
    model: Any = FSDP(Net(), mixed_precision=True, compute_dtype=torch.bfloat16)
    assert model.mixed_precision is True and model.flatten_parameters is True
    assert model.compute_dtype is torch.bfloat16 and model.reshard_after_forward is True
    assert model.append_shared_param(model.first.weight) is None
    with pytest.raises(AttributeError, match="nothing_like_it"):
        model.nothing_like_it


# ---- which modules are wrapped -----------------------------------------------------------------------------------


def wrapped(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, FSDP)]


def test_wrap_takes_the_arguments_of_the_context_the_modules_and_its_own() -> None:
    layer = nn.Linear(2, 2)
    assert wrap(layer) is layer and auto_wrap(layer) is layer, "it does nothing elsewhere"
    layer.wrapper_config = {"fp32_reduce_scatter": True}
    with enable_wrap(reshard_after_forward=False, compute_dtype=torch.float16, mixed_precision=True):
        with enable_wrap():
            assert wrap(nn.Linear(2, 2)).arguments.reshard_after_forward is True
        given = wrap(layer, compute_dtype=torch.bfloat16).arguments
    assert given.reshard_after_forward is False and given.compute_dtype is torch.bfloat16 and given.fp32_reduce_scatter
    assert wrap(layer) is layer


def test_auto_wrap_wraps_from_the_inside_out_what_its_policy_names() -> None:
    """By size, by configuration and by class; neither lists nor attention, whose forward reads the weights of a child.
    """
    everything = partial(default_auto_wrap_policy, min_num_params=0)
    model = Net()
    model.blocks[1].wrapper_config = {"reshard_after_forward": False}
    blocks = ["blocks.0", "blocks.1", "blocks.2"]
    for given, policy, names in (
            (Net(), partial(default_auto_wrap_policy, min_num_params=80), ["", *blocks]),
            (Net(), partial(default_auto_wrap_policy, min_num_params=10**6), []),
            (nn.Sequential(nn.ModuleList([nn.Linear(2, 2)])), everything, ["", "0.0"]),  # type: ignore[arg-type]
            (nn.Sequential(nn.MultiheadAttention(4, 2)), everything, [""]),
            (model, config_auto_wrap_policy, ["blocks.1"]),
            (Net(), partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}), blocks)):
        with enable_wrap():
            assert wrapped(auto_wrap(given, policy)) == names
    with enable_wrap():
        assert wrapped(auto_wrap(Net())) == []  # 1e8 elements
        with pytest.raises(ConfigError, match="wrapped"):
            auto_wrap(FSDP(Net()))


def test_names_are_those_of_the_model_inside_and_parameters_are_found_once() -> None:
    with enable_wrap():
        model = FSDP(auto_wrap(Net(), partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})))
    found, expected = ([(name, one.numel()) for name, one in net.named_parameters()] for net in (model, Net()))
    assert found == expected and model.first is model.module.first and model.blocks[1].wide is not None


def test_what_can_do_nothing_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    FSDP(Net(), flatten_parameters=False, bucket_cap_mb=50, disable_reshard_on_root=False)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and all("has no effect" in line for line in lines)
    FSDP(Net(), flatten_parameters=True, bucket_cap_mb=25)
    assert not capsys.readouterr().out


class Odd(nn.Module):
    """Keyword arguments, and outputs that are no tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.runs = 0

    def forward(self, x: torch.Tensor, *, scale: float, names: tuple[str, ...], mask: torch.Tensor | None = None,
                ) -> tuple[torch.Tensor, dict[str, object]]:
        self.runs += 1
        y = (self.layer(x) * scale).tanh()
        return y if mask is None else y * mask, {"names": names, "rows": len(x), "twice": 2 * y}


def test_checkpoint_wrapper_passes_everything_through() -> None:
    plain, x, results = Odd(), torch.randn(2, 3), []
    kept = [checkpoint_wrapper(deepcopy(plain), offload_to_cpu=offload_to_cpu) for offload_to_cpu in (False, True)]
    for module in (plain, *kept):
        mine = x.clone().requires_grad_()
        y, more = module(mine, scale=2.0, names=("a", "b"), mask=torch.ones(3))
        assert more["names"] == ("a", "b") and more["rows"] == 2
        (y.sum() + more["twice"].square().sum()).backward()
        results.append([mine.grad, *(parameter.grad for parameter in module.parameters())])
        assert module.runs == (1 if module is plain else 2) and list(module.state_dict()) == list(plain.state_dict())
    assert all(torch.equal(*pair) for other in results[1:] for pair in zip(results[0], other, strict=True))
