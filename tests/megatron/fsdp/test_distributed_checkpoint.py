"""torch.distributed.checkpoint stores a sharded model, and reads it on other ranks and in torch's own models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from megatron import fsdp
from megatron.fsdp.sharded_tensor import split_into_boxes
from tests.distributed import run_ranks
from tests.megatron.fsdp.loops import CLIP, adamw, around, batch, train
from tests.megatron.fsdp.test_state import equal_state
from tests.megatron.zero.models import Net

SHAPES = [(), (1,), (7,), (3, 4), (1, 5), (5, 1), (2, 3, 4), (3, 1, 2), (2, 2, 2, 3)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rectangles_are_the_run(shape: tuple[int, ...]) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    flat = whole.flatten()
    for start in range(len(flat) + 1):
        for count in range(len(flat) + 1 - start):
            found = list(split_into_boxes(shape, start, count))
            assert len(found) <= max(1, 2 * len(shape) - 1)
            parts = [whole[tuple(slice(offset, offset + size) for offset, size in zip(*box, strict=True))].flatten()
                     for box in found]
            assert torch.equal(torch.cat([*parts, flat[:0]]), flat[start : start + count])
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
    whole(functions(way), model, optimizer, f"{folder}/{{}}")


def whole(their: Any, model: nn.Module, optimizer: torch.optim.Optimizer, path: str) -> tuple[Any, Any]:
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
    found = whole(their, model, optimizer, "")
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


@pytest.mark.few(2)
@pytest.mark.parametrize("ways", [
    ("torch", 2, "torch", 3), ("torch", 3, "nested", 2), ("nested", 2, "torch", 1), ("torch", 2, "torch's own", 2),
    ("torch's own", 2, "torch", 3), ("torch's own", 3, "torch", 2)], ids=str)
def test_a_checkpoint_of_torchs_kind_goes_to_other_ranks_and_programs(ways: Any, tmp_path: Path) -> None:
    saver, ranks, reader, readers = ways
    run_ranks(saved, ranks, saver, str(tmp_path))
    for sets in (True, False) if reader != "torch's own" else (True,):
        for weights, state, off in run_ranks(loaded, readers, reader, str(tmp_path), sets):
            assert weights and state and off < 1e-6, (weights, state, off)


def first(rank: int, world: int, folder: str) -> tuple[int, float]:
    """What an optimizer that has taken no step is given to load into does not make it one that has."""
    model, optimizer = new("torch")
    before = fsdp.get_model_state_dict(model, options=fsdp.StateDictOptions(full_state_dict=True))
    state = fsdp.get_optimizer_state_dict(model, optimizer)
    after = fsdp.get_model_state_dict(model, options=fsdp.StateDictOptions(full_state_dict=True))
    assert len(state["state"]) == len(before) and all(torch.equal(before[name], after[name]) for name in before)
    assert all(parameter.grad is None for parameter in model.parameters())
    return len(optimizer.state), optimizer.param_groups[0]["lr"]


def test_asking_for_the_state_leaves_an_optimizer_as_it_is(tmp_path: Path) -> None:
    assert run_ranks(first, 2, str(tmp_path)) == [(0, rated(7))] * 2
