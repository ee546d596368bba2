"""State dicts of sharded models: the unwrapped model's, on any number of ranks, to the bit."""

from __future__ import annotations

from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, patch

import pytest
import torch
from torch import nn

from megatron.errors import ConfigError
from megatron.fsdp import (FSDP, StateDictOptions, clip_grad_norm_, get_optimizer_state_dict, get_state_dict,
                           set_optimizer_state_dict, set_state_dict)
from megatron.fsdp.sharded_tensor import ShardedParam, gather_masters
from megatron.fsdp.state_dict import full_state_dict, summon_full_params
from tests.distributed import on_ranks, run_ranks
from tests.megatron.fsdp.loops import CLIP, adamw, around, batch, mixed, train
from tests.megatron.zero.models import Net, OddSizes


class Everything(OddSizes):
    """Buffers, some of them not saved, frozen layers, a tied parameter, another precision, extra state, and a parameter
    that several ranks share."""

    def change(self) -> None:
        super().change()
        self.register_buffer("counts", torch.arange(4))
        self.register_buffer("unsaved", torch.ones(2), persistent=False)
        self.large = nn.Parameter(torch.linspace(-1, 1, 1000))
        self.first.requires_grad_(False)
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.last.weight
        self.blocks[1].wide.to(torch.float64)
        self.blocks[1].narrow.to(torch.float64)

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": 3}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"seen": 3}

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x.to(block.wide.weight.dtype)).float()
        return x * self.scalar + self.none.sum() + self.large.sum() * 1e-3


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Names, their order, shapes, precisions and bits."""
    return list(one) == list(other) and all(
        torch.equal(a, b) and a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()
        if isinstance(a, torch.Tensor) else a == b for a, b in zip(one.values(), other.values(), strict=True))


def inner(model: Any) -> Any:
    """The module that a wrapper wraps."""
    return getattr(model, "module", model)


@on_ranks(2)
def test_a_full_state_dict_can_be_on_the_first_rank_alone(rank: int, world: int) -> None:
    names = len(FSDP(Net(), state_dict_on_rank_0_only=True).state_dict())
    assert names == (len(Net().state_dict()) if rank == 0 else 0)


# ---- from layout to layout ---------------------------------------------------------------------------------------


def trained(way: str, rank: int, steps: int, start: Any = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = around(Everything(), way)
    optimizer = adamw(model)
    if start is not None:
        model.load_state_dict(start["model"])
        optimizer.load_state_dict(model.get_shard_from_optim_state_dict(start["optimizer"]))
    train(model, lambda: clip_grad_norm_(model.parameters(), CLIP), rank, steps, optimizer=optimizer)
    return model, optimizer


def save(rank: int, world: int, path: str, load: str | None, steps: int) -> None:
    start = None if load is None else torch.load(load, weights_only=True)
    model, optimizer = trained("nested", rank, steps, start)
    state = {"model": model.state_dict(), "optimizer": model.gather_full_optim_state_dict(optimizer)}
    assert (state["optimizer"] is None) == (rank != 0)
    if rank == 0:
        torch.save(state, path)


def equal_state(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal_state(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal_state, one, other))
    return bool(one == other)


def test_state_goes_from_two_ranks_to_three_to_one_to_four_to_the_bit(tmp_path: Path) -> None:
    run_ranks(save, 2, str(tmp_path / "2"), None, 3)
    before = torch.load(tmp_path / "2", weights_only=True)
    assert before["optimizer"]["state"] and all(
        state["exp_avg"].abs().max() > 0 for state in before["optimizer"]["state"].values() if state["exp_avg"].numel())
    for old, new in ((2, 3), (3, 1), (1, 4)):
        run_ranks(save, new, str(tmp_path / str(new)), str(tmp_path / str(old)), 0)
        assert equal_state(torch.load(tmp_path / str(new), weights_only=True), before)


# ---- in parts ----------------------------------------------------------------------------------------------------


def local(rank: int, world: int, way: str) -> Any:
    model = around(Everything(), way)
    state, about = model.local_state_dict(), model.local_metadata_dict()
    with summon_full_params(model), torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_local_state_dict(state)
    return state, about, same(model.state_dict(), Everything().state_dict())


@pytest.mark.parametrize("way, world", [("whole", 1), ("whole", 2), ("nested", 3)])
def test_local_state_dicts_load_again_and_make_a_full_one(way: str, world: int) -> None:
    weights, about, again = zip(*run_ranks(local, world, way), strict=True)
    assert all(again)
    whole = FSDP.consolidate_shard_weights(list(reversed(weights)), list(reversed(about)))
    expected = Everything().state_dict()
    assert whole.keys() == expected.keys() and all(equal_state(whole[name], expected[name]) for name in expected)
    if world > 1:
        with pytest.raises(ConfigError, match="ranks"):
            FSDP.consolidate_shard_weights(weights[:1], about[:1])
        with pytest.raises(ConfigError, match="ranks"):
            FSDP.consolidate_shard_weights([weights[0]] * world, [about[0]] * world)


# ---- summon_full_params ------------------------------------------------------------------------------------------


@on_ranks(2)
def test_full_params_are_the_models_and_edits_last(rank: int, world: int) -> None:
    for way, volatile in product(("nested", "torch"), (True, False)):
        model, plain = around(Everything(), way), Everything()
        with summon_full_params(inner(model), volatile=volatile), torch.no_grad():
            for parameter, expected in zip(inner(model).parameters(), plain.parameters(), strict=True):
                assert type(parameter) is nn.Parameter and torch.equal(parameter, expected)
            for one in (inner(model), plain):
                for parameter in one.parameters():
                    parameter.add_(1)
                one.last.bias.data = torch.zeros(6)
        expected = Everything() if volatile else plain
        assert same(full_state_dict(inner(model)), expected.state_dict()), (way, volatile)
        losses = [float(one(batch(0, 3)).detach()) for one in (model, expected)]
        assert abs(losses[0] - losses[1]) < 1e-6, (way, volatile)


@on_ranks(2)
def test_edits_reach_the_16_bit_weights(rank: int, world: int) -> None:
    model = around(Net(), "torch", **mixed("torch", torch.bfloat16))
    with torch.no_grad():
        assert float(model(batch(0, 1))) != 1.0
        with summon_full_params(model):
            for parameter in model.parameters():
                parameter.zero_()
        assert float(model(batch(0, 1))) == 1.0


@on_ranks(1)
def test_what_breaks_off_leaves_every_parameter_as_it_was(rank: int, world: int) -> None:
    model: Any = around(Net(), "torch")
    with patch("megatron.fsdp.state_dict.gather_masters", wraps=gather_masters, side_effect=[DEFAULT, MemoryError]):
        with pytest.raises(MemoryError), summon_full_params(model):
            pass
    assert all(isinstance(parameter, ShardedParam) for parameter in model.parameters())
    with pytest.raises(ConfigError, match="narrow.bias became a tensor of shape"), torch.no_grad(), \
            summon_full_params(model):
        model.first.weight.zero_()
        model.blocks[2].narrow.bias.data = torch.zeros(7)
    assert same(full_state_dict(model), Net().state_dict())


def plus_one(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if not isinstance(parameter, ShardedParam):
                parameter.add_(1)


@on_ranks(2)
def test_a_state_dict_inside_summon_full_params_is_that_of_the_unwrapped_model(rank: int, world: int) -> None:
    """Of the model and of a module inside, by all ranks; of what is full, by one."""
    for way, recurse in (("whole", True), ("nested", False), ("torch", True)):
        model: Any = around(Everything(), way, **mixed(way, torch.bfloat16))
        plain = Everything()
        with summon_full_params(inner(model), recurse):
            plus_one(model)
            names = {name for name, parameter in model.named_parameters() if not isinstance(parameter, ShardedParam)}
            states = [model.state_dict(), get_state_dict(model, [], options=StateDictOptions(full_state_dict=True))[0]
                      if recurse and rank == 0 else None, model.blocks[1].state_dict() if way != "whole" else None]
            if way == "torch":  # the parameters themselves, as torch's
                states = deepcopy(states)
            else:
                with pytest.raises(ConfigError, match=r"inside summon_full_params\(\)"):
                    model.local_state_dict()
            plus_one(model)
        with torch.no_grad():
            for name, parameter in plain.named_parameters():
                if name in names:
                    parameter.add_(1)
        wanted = plain.state_dict(), plain.state_dict(), plain.blocks[1].state_dict()
        assert all(same(state, right) for state, right in zip(states, wanted, strict=True) if state is not None), way


@on_ranks(2)
def test_a_state_dict_of_a_module_around_the_summoned_one(rank: int, world: int) -> None:
    model: Any = FSDP(nn.Sequential(FSDP(Net()), FSDP(Net())))
    plain = nn.Sequential(Net(), Net())
    with model.summon_full_params(recurse=False):
        assert same(model.state_dict(), plain.state_dict())
    with model[0].summon_full_params(volatile=True):
        plus_one(model)
        state = model.state_dict()
    assert same(model.state_dict(), plain.state_dict())
    plus_one(plain[0])
    assert same(state, plain.state_dict())


@on_ranks(2)
def test_a_load_inside_summon_full_params_lasts_or_is_refused(rank: int, world: int) -> None:
    wanted = {name: value * 2 if isinstance(value, torch.Tensor) and value.is_floating_point() else value
              for name, value in Everything().state_dict().items()}
    for way, recurse in (("nested", True), ("nested", False), ("torch", True)):
        model = around(Everything(), way)
        with summon_full_params(inner(model), recurse):
            model.load_state_dict(wanted)
        with pytest.raises(ConfigError, match=r"load_state_dict\(\) inside summon_full_params\(volatile=True\)"), \
                summon_full_params(inner(model), recurse, volatile=True):
            model.load_state_dict(Everything().state_dict())
        with pytest.raises(ConfigError, match="inside summon_full_params"), summon_full_params(inner(model), recurse):
            set_state_dict(model, [], model_state_dict=wanted, optim_state_dict={},
                           options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
        assert same(full_state_dict(inner(model)), wanted), (way, recurse)


# ---- torch's functions -------------------------------------------------------------------------------------------


FULL = StateDictOptions(full_state_dict=True)
OF_THE_FIRST = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_THE_FIRST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


@on_ranks(2)
def test_torchs_functions_give_and_take_the_whole_and_parts(rank: int, world: int) -> None:
    for way, saves, loads in (("nested", FULL, FULL), ("torch", FULL, FULL), ("nested", OF_THE_FIRST, FROM_THE_FIRST),
                              ("torch", OF_THE_FIRST, FROM_THE_FIRST), ("torch", None, None)):
        model, optimizer = trained(way, rank, 3)
        weights, state = deepcopy(get_state_dict(model, optimizer, options=saves))
        names = 0 if saves is OF_THE_FIRST and rank > 0 else len(Everything().state_dict())
        assert len(weights) == names and bool(state) == (names > 0)
        again = around(Everything(), way)
        with torch.no_grad(), summon_full_params(inner(again)):
            for parameter in again.parameters():
                parameter.zero_()
        other = adamw(again, rate=1.0)
        set_state_dict(again, other, model_state_dict=weights, optim_state_dict=state, options=loads)
        assert same(full_state_dict(inner(again)), full_state_dict(inner(model)))
        assert equal_state(*(get_optimizer_state_dict(one, its, options=FULL)
                             for one, its in ((again, other), (model, optimizer)))), (way, saves)
        assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


@on_ranks(2)
def test_a_wrong_state_on_the_first_rank_is_refused_on_all(rank: int, world: int) -> None:
    model, optimizer = trained("nested", rank, 1)
    state = get_optimizer_state_dict(model, optimizer, options=OF_THE_FIRST)
    if rank == 0:
        state["state"]["last.bias"]["exp_avg"] = torch.ones(7)
    with pytest.raises(ConfigError, match="'exp_avg' of last.bias"):
        set_optimizer_state_dict(model, optimizer, state, options=FROM_THE_FIRST)
