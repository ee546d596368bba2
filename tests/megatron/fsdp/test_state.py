"""State dicts of sharded models: the unwrapped model's, on any number of ranks, to the bit."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, patch

import pytest
import torch
from torch import nn

from megatron.errors import ConfigError
from megatron.fsdp import (FSDP, StateDictOptions, clip_grad_norm_, get_optimizer_state_dict, get_state_dict,
                           set_optimizer_state_dict, set_state_dict)
from megatron.fsdp.sharded_tensor import gather_masters
from megatron.fsdp.sharded_tensor import ShardedParam
from megatron.fsdp.state_dict import full_state_dict, summon_full_params
from tests.distributed import run_ranks
from tests.megatron.fsdp.loops import CLIP, adamw, around, batch, mixed, train
from tests.megatron.zero.models import Net, OddSizes


class Everything(OddSizes):
    """Buffers, some of them not saved, frozen layers, a tied parameter, another precision, and extra state."""

    def change(self) -> None:
        super().change()
        self.register_buffer("counts", torch.arange(4))
        self.register_buffer("unsaved", torch.ones(2), persistent=False)
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
        return x * self.scalar + self.none.sum()


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Names, their order, shapes, precisions and bits."""
    return list(one) == list(other) and all(
        torch.equal(a, b) and a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()
        if isinstance(a, torch.Tensor) else a == b for a, b in zip(one.values(), other.values(), strict=True))


def on_the_first_rank_alone(rank: int, world: int) -> int:
    return len(FSDP(Net(), state_dict_on_rank_0_only=True).state_dict())


def test_a_full_state_dict_can_be_on_the_first_rank_alone() -> None:
    assert run_ranks(on_the_first_rank_alone, 2) == [len(Net().state_dict()), 0]


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


@pytest.mark.parametrize("way", ["whole", "nested"])
@pytest.mark.parametrize("world", [1, 2, 3])
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


def summoned(rank: int, world: int, way: str, volatile: bool) -> tuple[bool, bool, bool]:
    model = around(Everything(), way)
    inside = getattr(model, "module", model)
    plain = Everything()
    with summon_full_params(inside, volatile=volatile), torch.no_grad():
        seen = all(torch.equal(a, b) and type(a) is nn.Parameter and a.shape == b.shape
                   for a, b in zip(inside.parameters(), plain.parameters(), strict=True))
        for parameter in inside.parameters():
            parameter.add_(1)
        inside.last.bias.data = torch.zeros(6)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(1)
        plain.last.bias.zero_()
    unchanged = same(full_state_dict(inside), Everything().state_dict())
    edited = same(full_state_dict(inside), plain.state_dict())
    losses = [float(one(batch(0, 3)).detach()) for one in (model, Everything() if volatile else plain)]
    return seen, unchanged if volatile else edited, abs(losses[0] - losses[1]) < 1e-6


@pytest.mark.parametrize("volatile", [True, False])
@pytest.mark.parametrize("way", ["nested", "torch"])
def test_full_params_are_the_models_and_edits_last(way: str, volatile: bool) -> None:
    assert run_ranks(summoned, 2, way, volatile) == [(True, True, True)] * 2


def edited_in_16_bits(rank: int, world: int) -> tuple[float, float]:
    model = around(Net(), "torch", **mixed("torch", torch.bfloat16))
    with torch.no_grad():
        before = float(model(batch(0, 1)))
    with summon_full_params(model), torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    with torch.no_grad():
        return before, float(model(batch(0, 1)))


def test_edits_reach_the_16_bit_weights() -> None:
    for before, after in run_ranks(edited_in_16_bits, 2):
        assert before != 1.0 and after == 1.0


def broken_off(rank: int, world: int) -> bool:
    model = around(Net(), "torch")
    with patch("megatron.fsdp.state_dict.gather_masters", wraps=gather_masters, side_effect=[DEFAULT, MemoryError]):
        with pytest.raises(MemoryError), summon_full_params(model):
            pass
    assert all(isinstance(parameter, ShardedParam) for parameter in model.parameters())
    with pytest.raises(ConfigError, match="narrow.bias became a tensor of shape"), torch.no_grad(), \
            summon_full_params(model):
        model.first.weight.zero_()
        model.blocks[2].narrow.bias.data = torch.zeros(7)
    return same(full_state_dict(model), Net().state_dict())


def test_what_breaks_off_leaves_every_parameter_as_it_was() -> None:
    assert run_ranks(broken_off, 1) == [True]


def plus_one(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if not isinstance(parameter, ShardedParam):
                parameter.add_(1)


def exported(rank: int, world: int, way: str, recurse: bool) -> list[bool]:
    """State dicts inside the block, of the model and of a module inside, by all ranks; of what is full, by one."""
    model, plain = around(Everything(), way, **mixed(way, torch.bfloat16)), Everything()
    with summon_full_params(getattr(model, "module", model), recurse):
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
    return [same(state, right) for state, right in zip(states, wanted, strict=True) if state is not None]


@pytest.mark.parametrize("way, recurse", [("whole", True), ("nested", False), ("twice nested", True), ("torch", True)])
def test_a_state_dict_inside_summon_full_params_is_that_of_the_unwrapped_model(way: str, recurse: bool) -> None:
    assert all(all(found) for found in run_ranks(exported, 2, way, recurse))


def exported_around_a_block(rank: int, world: int) -> bool:
    """Of the model, while a block of it is summoned: an outer module may have no parameters itself."""
    model = FSDP(nn.Sequential(FSDP(Net()), FSDP(Net())))
    plain = nn.Sequential(Net(), Net())
    with model.summon_full_params(recurse=False):
        outside = model.state_dict()
    with model[0].summon_full_params(volatile=True):
        plus_one(model)
        state = model.state_dict()
    unchanged = same(outside, plain.state_dict()) and same(model.state_dict(), plain.state_dict())
    plus_one(plain[0])
    return same(state, plain.state_dict()) and unchanged


def test_a_state_dict_of_a_module_around_the_summoned_one() -> None:
    assert all(run_ranks(exported_around_a_block, 2))


def loaded_inside(rank: int, world: int, way: str, recurse: bool) -> bool:
    wanted = {name: value * 2 if isinstance(value, torch.Tensor) and value.is_floating_point() else value
              for name, value in Everything().state_dict().items()}
    model = around(Everything(), way)
    inside = getattr(model, "module", model)
    with summon_full_params(inside, recurse):
        model.load_state_dict(wanted)
    with pytest.raises(ConfigError, match=r"load_state_dict\(\) inside summon_full_params\(volatile=True\)"), \
            summon_full_params(inside, recurse, volatile=True):
        model.load_state_dict(Everything().state_dict())
    with pytest.raises(ConfigError, match="inside summon_full_params"), summon_full_params(inside, recurse):
        set_state_dict(model, [], model_state_dict=wanted, optim_state_dict={},
                       options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    return same(full_state_dict(inside), wanted)


@pytest.mark.parametrize("recurse", [True, False])
@pytest.mark.parametrize("way", ["nested", "torch"])
def test_a_load_inside_summon_full_params_lasts_or_is_refused(way: str, recurse: bool) -> None:
    assert all(run_ranks(loaded_inside, 2, way, recurse))


# ---- torch's functions -------------------------------------------------------------------------------------------


def by_torchs_functions(rank: int, world: int, way: str, first_only: bool) -> tuple[bool, bool, int]:
    model, optimizer = trained(way, rank, 3)
    options = StateDictOptions(full_state_dict=True, cpu_offload=first_only)
    weights, state = get_state_dict(model, optimizer, options=options)
    expected = full_state_dict(getattr(model, "module", model))
    count = len(weights)
    if first_only:
        again = around(Everything(), way)
        with torch.no_grad(), summon_full_params(getattr(again, "module", again)):
            for parameter in again.parameters():
                parameter.zero_()
        other = adamw(again, rate=1.0)
        set_state_dict(again, other, model_state_dict=weights, optim_state_dict=state,
                       options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
        assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
        equal = equal_state(get_state_dict(again, other, options=options)[1], state)
        whole = full_state_dict(getattr(again, "module", again))
        return same(whole, expected), (not state) == (rank > 0) and equal, count
    again = around(Everything(), way)
    other = adamw(again)
    set_state_dict(again, other, model_state_dict=weights, optim_state_dict=state, options=options)
    loaded = get_state_dict(again, other, options=options)
    return same(loaded[0], expected), equal_state(loaded[1], state), count


@pytest.mark.parametrize("first_only", [False, True])
@pytest.mark.parametrize("way", ["nested", "torch"])
def test_torchs_functions_give_and_take_the_whole(way: str, first_only: bool) -> None:
    names = len(Everything().state_dict())
    found = run_ranks(by_torchs_functions, 2, way, first_only)
    assert found == [(True, True, names), (True, True, 0 if first_only else names)]


def of_another_model(rank: int, world: int) -> str:
    model, optimizer = trained("nested", rank, 1)
    state = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        state["state"]["last.bias"]["exp_avg"] = torch.ones(7)
    with pytest.raises(ConfigError) as caught:
        set_optimizer_state_dict(model, optimizer, state,
                                 options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    return str(caught.value)


def test_a_wrong_state_on_the_first_rank_is_refused_on_all() -> None:
    assert all("'exp_avg' of last.bias" in said for said in run_ranks(of_another_model, 2))


def in_parts(rank: int, world: int) -> bool:
    model, optimizer = trained("torch", rank, 3)
    weights, state = get_state_dict(model, optimizer)
    weights, state = deepcopy(weights), deepcopy(state)
    expected = full_state_dict(model), get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(full_state_dict=True))
    again = around(Everything(), "torch")
    other = adamw(again)
    set_state_dict(again, other, model_state_dict=weights, optim_state_dict=state)
    return same(full_state_dict(again), expected[0]) and equal_state(
        get_optimizer_state_dict(again, other, options=StateDictOptions(full_state_dict=True)), expected[1])


def test_torchs_functions_give_and_take_parts() -> None:
    assert all(run_ranks(in_parts, 2))
