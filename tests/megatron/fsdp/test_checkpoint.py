"""Checkpoints of sharded models: of any number of ranks, the engine's, and those of torch.distributed.checkpoint, which
also go to torch's own models and come from them."""

from __future__ import annotations

import subprocess
import sys
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from megatron import fsdp
from megatron.checkpoint.commit import Keep
from megatron.checkpoint.reader import open_checkpoint
from megatron.checkpoint.tags import tag_names
from megatron.errors import CheckpointError, ConfigError
from megatron.fsdp import clip_grad_norm_, fully_shard, load_checkpoint, save_checkpoint
from megatron.fsdp.sharded_tensor import split_into_boxes
from megatron.zero.api.initialize import initialize
from tests.distributed import on_ranks, run_ranks
from tests.megatron.checkpoint.made import load_candidates
from tests.megatron.fsdp.loops import CLIP, adamw, around, batch, train, whole
from tests.megatron.fsdp.test_state import Everything, equal_state, same
from tests.megatron.zero.models import Net


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    from megatron.fsdp.sharding import unwrap
    from megatron.fsdp.state_dict import buckets_of, gather_full_states
    return whole(model), {index: state for index, (_, state) in enumerate(
        gather_full_states(optimizer, buckets_of(unwrap(model)), collects=True))}, [
            {name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def trained(way: str, rank: int, steps: int, make: type[nn.Module] = Everything) -> tuple[nn.Module, Any, Any]:
    model = around(make(), way)
    optimizer = adamw(model)
    train(model, lambda: clip_grad_norm_(model.parameters(), CLIP), rank, steps, optimizer=optimizer)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)


def save(rank: int, world: int, folder: str, way: str) -> Any:
    model, optimizer, scheduler = trained(way, rank, 3)
    tag = save_checkpoint(model, optimizer, folder, scheduler=scheduler, client_state={"epoch": 7})
    return tag, state_of(model, optimizer)


def load(rank: int, world: int, folder: str, way: str) -> Any:
    model = around(Everything(), way)
    optimizer = adamw(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state = load_checkpoint(model, optimizer, folder, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2))
    return state, state_of(model, optimizer)


@on_ranks(1)
def test_every_parameter_keeps_its_own_step_count(rank: int, world: int, tmp_path: Path) -> None:
    model = around(nn.Linear(4, 4), "whole")
    optimizer = adamw(model)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    parameters = list(optimizer.state)
    for number, parameter in enumerate(parameters):
        optimizer.state[parameter]["step"] += number % 2
    save_checkpoint(model, optimizer, tmp_path)
    load_checkpoint(model, optimizer, tmp_path)
    assert [float(optimizer.state[parameter]["step"]) for parameter in parameters] == [2.0, 3.0]


@pytest.mark.parametrize("way, other, worlds", [
    ("nested", "torch", (2, 3)), ("torch", "whole", (1, 2)),
    pytest.param("whole", "twice nested", (3, 4), marks=pytest.mark.slow)])
def test_a_checkpoint_loads_on_any_number_of_ranks_to_the_bit(way: str, other: str, worlds: tuple[int, int],
                                                              tmp_path: Path) -> None:
    before = run_ranks(save, worlds[0], str(tmp_path), way)
    after = run_ranks(load, worlds[1], str(tmp_path), other)
    assert before[0][0] == "global_step3"
    for client_state, state in after:
        assert client_state == {"epoch": 7}
        assert same(state[0], before[0][1][0]) and state[2] == before[0][1][2]
        by_shape = [sorted((str(one), one["step"]) for one in found.values()) for found in (state[1], before[0][1][1])]
        assert by_shape[0] == by_shape[1]
    verified = subprocess.run([sys.executable, "-m", "megatron.checkpoint", "verify", tmp_path], capture_output=True)
    assert verified.returncode == 0, verified.stderr


CONFIG = {"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-3}},
          "zero_optimization": {"stage": 2}}


def by_the_engine(rank: int, world: int, first: int, last: int, load: str | None, save: str | None) -> Any:
    """The weights before and after these steps, and how many steps there have been."""
    engine = initialize(model=Net(), config=CONFIG)[0]
    if load is not None:
        engine.load_checkpoint(load)
    before = {name: value.clone() for name, value in engine.module_state_dict().items()}
    for number in range(first, last):
        engine.backward(engine(batch(rank, number)))
        engine.step()
    if save is not None:
        engine.save_checkpoint(save)
    return before, {name: value.clone() for name, value in engine.module_state_dict().items()}, engine.global_steps


def into_shards(rank: int, world: int, folder: str) -> Any:
    model = around(Net(), "torch")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    load_checkpoint(model, optimizer, folder)
    loaded = whole(model)
    steps = {float(state["step"]) for state in optimizer.state.values()}
    model(batch(rank, 3)).backward()
    optimizer.step()
    save_checkpoint(model, optimizer, folder)
    return loaded, steps, whole(model)


def test_the_engine_and_the_face_go_on_from_each_others_checkpoints(tmp_path: Path) -> None:
    folder = str(tmp_path)
    _, first, _ = run_ranks(by_the_engine, 2, 0, 3, None, folder)[0]
    loaded, steps, after = run_ranks(into_shards, 2, folder)[0]
    assert equal_state(loaded, first) and steps == {3.0}
    again, last, count = run_ranks(by_the_engine, 2, 4, 6, folder, None)[0]
    assert equal_state(again, after) and count == 6
    _, plain, _ = run_ranks(by_the_engine, 2, 0, 6, None, None)[0]
    assert max(float((plain[name] - last[name]).abs().max()) for name in plain) < 1e-6


@on_ranks(2)
def test_the_names_of_a_module_that_shares_a_parameter_are_those_of_the_model(rank: int, world: int, tmp_path: Path
                                                                              ) -> None:
    """The module inside gives up the tied parameter and keeps the other one."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4))
    model[1].weight = model[0][0].weight
    for module in (model[0][0], model[0], model):
        fully_shard(module)
    model(torch.ones(2, 4)).sum().backward()
    save_checkpoint(model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path)
    assert {*open_checkpoint(tmp_path).names("weight")} == {"0.0.weight", "0.0.bias", "1.bias"}


@on_ranks(2)
def test_what_does_not_fit_is_refused(rank: int, world: int, tmp_path: Path) -> None:
    by_the_engine(rank, world, 0, 1, None, str(tmp_path))
    model: Any = around(Net(), "torch")
    with pytest.raises((CheckpointError, ConfigError), match="outermost"):
        save_checkpoint(model.blocks[0], adamw(model), tmp_path)
    with pytest.raises((CheckpointError, ConfigError), match="AdamW"):
        load_checkpoint(model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path)
    other = around(Everything(), "torch")
    with pytest.raises((CheckpointError, ConfigError), match="another model"):
        load_checkpoint(other, adamw(other), tmp_path)


def with_buffer(size: int) -> Any:
    model: Any = Net()
    model.register_buffer("scale", torch.full((size,), 5.0))
    return around(model, "torch")


@on_ranks(2)
def test_a_buffer_of_another_shape_is_refused_before_anything_changes(rank: int, world: int, tmp_path: Path) -> None:
    model, other = with_buffer(1), with_buffer(4)
    save_checkpoint(model, adamw(model), tmp_path)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2)
    before = whole(other)
    with pytest.raises(CheckpointError, match=r"buffer 'scale': shape expected \[4\], found \[1\]"):
        load_checkpoint(other, adamw(other), tmp_path)
    assert same(whole(other), before)


@on_ranks(1)
def test_saves_follow_one_another_and_old_ones_are_deleted(rank: int, world: int, tmp_path: Path) -> None:
    model, optimizer, _ = trained("nested", rank, 1)
    for step in range(1, 5):
        save_checkpoint(model, optimizer, tmp_path, f"global_step{step}", keep=Keep(2))
    load_checkpoint(model, optimizer, tmp_path, "global_step3")
    save_checkpoint(model, optimizer, tmp_path, "global_step5")
    assert tag_names(tmp_path) == ["global_step3", "global_step4", "global_step5"]
    assert load_candidates(tmp_path) == ["global_step5", "global_step3"], "4 is on a branch that was left"


# ---- torch.distributed.checkpoint --------------------------------------------------------------------------------

SHAPES = [(), (1,), (7,), (3, 4), (1, 5), (5, 1), (2, 3, 4), (3, 1, 2), (2, 2, 2, 3)]


def test_rectangles_are_the_run() -> None:
    for shape in SHAPES:
        whole = torch.arange(torch.Size(shape).numel()).view(shape)
        flat = whole.flatten()
        for start, stop in combinations_with_replacement(range(len(flat) + 1), 2):
            found = list(split_into_boxes(shape, start, stop - start))
            assert len(found) <= max(1, 2 * len(shape) - 1)
            parts = [whole[tuple(slice(offset, offset + size) for offset, size in zip(*box, strict=True))].flatten()
                     for box in found]
            assert torch.equal(torch.cat([*parts, flat[:0]]), flat[start:stop])
            assert all(part.numel() == torch.Size(sizes).numel() for part, (_, sizes) in zip(parts, found))


def rated(number: int) -> float:
    return 0.01 * number


def new(way: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """`way` is "torch's own", "plain" or one of ours; the values are not those that were trained."""
    model: Any = Net()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    if way == "torch's own":
        from torch.distributed.fsdp import fully_shard
        mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif way != "plain":
        model = around(model, way)
    return model, adamw(model, rated(7))


def functions(way: str) -> Any:
    from torch.distributed.checkpoint import state_dict
    return state_dict if way in ("torch's own", "plain") else fsdp


def saved(rank: int, world: int, way: str, folder: str) -> None:
    model, optimizer = new(way)
    with torch.no_grad():
        for name, value in Net().state_dict().items():
            if way == "torch's own":
                model.get_parameter(name).copy_(dist.tensor.distribute_tensor(
                    value, model.get_parameter(name).device_mesh, model.get_parameter(name).placements))  # type: ignore
            else:
                model.get_parameter(name).copy_(value)
    clip = nn.utils.clip_grad_norm_ if way == "torch's own" else fsdp.clip_grad_norm_
    train(model, lambda: clip(model.parameters(), CLIP), rank, 3, optimizer=optimizer)
    weights, state = functions(way).get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    full_states(functions(way), model, optimizer, f"{folder}/{{}}")


def full_states(their: Any, model: nn.Module, optimizer: torch.optim.Optimizer, path: str) -> tuple[Any, Any]:
    """To compare with; what was saved is written beside the checkpoint, by the first rank."""
    options = their.StateDictOptions(full_state_dict=True)
    found = their.get_state_dict(model, optimizer, options=options)
    if path and (not dist.is_initialized() or dist.get_rank() == 0):
        torch.save(found, path.format("whole.pt"))
    return found  # type: ignore[no-any-return]


def loaded(rank: int, world: int, way: str, folder: str, sets: bool) -> tuple[bool, bool, float]:
    """A fresh program: nothing has been trained."""
    model, optimizer = new(way)
    their = functions(way)
    weights, state = their.get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    if sets:
        their.set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    else:
        their.set_optimizer_state_dict(model, optimizer, state)
    expected = torch.load(f"{folder}/whole.pt", weights_only=True)
    found = full_states(their, model, optimizer, "")
    loss = float(model(batch(0, 5)).detach())
    plain = Net()
    plain.load_state_dict(expected[0])
    return equal_state(found[0], expected[0]), equal_numbers(found[1], expected[1]), abs(loss - float(
        plain(batch(0, 5)).detach()))


def equal_numbers(one: Any, other: Any) -> bool:
    """States by name, and rates; a plain optimizer's groups say more."""
    return equal_state(one["state"], other["state"]) and all(
        a["lr"] == b["lr"] and a["weight_decay"] == b["weight_decay"] and set(a["params"]) == set(b["params"])
        for a, b in zip(one["param_groups"], other["param_groups"], strict=True))


@pytest.mark.parametrize("ways", [
    ("nested", 2, "torch", 1), ("torch's own", 3, "torch", 2), pytest.param(("torch", 2, "torch's own", 2),
                                                                            marks=pytest.mark.slow)], ids=str)
def test_a_checkpoint_of_torchs_kind_goes_to_other_ranks_and_programs(ways: Any, tmp_path: Path) -> None:
    saver, ranks, reader, readers = ways
    run_ranks(saved, ranks, saver, str(tmp_path))
    for sets in (True, False) if reader != "torch's own" else (True,):
        for weights, state, off in run_ranks(loaded, readers, reader, str(tmp_path), sets):
            assert weights and state and off < 1e-6, (weights, state, off)


@on_ranks(2)
def test_asking_for_the_state_leaves_an_optimizer_as_it_is(rank: int, world: int) -> None:
    """What an optimizer that has taken no step is given to load into does not make it one that has."""
    model, optimizer = new("torch")
    before = fsdp.get_model_state_dict(model, options=fsdp.StateDictOptions(full_state_dict=True))
    state = fsdp.get_optimizer_state_dict(model, optimizer)
    after = fsdp.get_model_state_dict(model, options=fsdp.StateDictOptions(full_state_dict=True))
    assert len(state["state"]) == len(before) and all(torch.equal(before[name], after[name]) for name in before)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not optimizer.state and optimizer.param_groups[0]["lr"] == rated(7)
