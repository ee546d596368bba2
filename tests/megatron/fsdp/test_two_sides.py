"""Beside an accelerator: nothing on the host meets what is on the device, and in a step nobody waits for a copy but for
what ranks compare, which came with an event, and in fp16 for the overflow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from megatron import fsdp
from megatron.fsdp.state_dict import summon_full_params
from tests.distributed import run_ranks
from tests.late_copy_streams import late_copy_streams
from tests.megatron.fsdp.loops import CLIP, around, by_shards, mixed
from tests.megatron.fsdp.test_equal import MODELS
from tests.megatron.zero.models import Net
from tests.two_sides import DEVICE, Sides, two_sides
from tests.wires import accelerator_side

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
COMPARED = "mpu/device.py:HostScalars.values: tolist"
"""On a GPU it comes by a copy with an event; in fp32 and bf16 that is looked at in the next forward."""
OVERFLOW = "megatron/fsdp/root.py:FSDPRoot._compare_backwards: _local_scalar_dense"


@contextmanager
def beside_a_device() -> Iterator[Sides]:
    with two_sides() as sides, patch("megatron.fsdp.sharding.compute_device_of", lambda module, group: DEVICE):
        yield sides


def arguments(way: str, offloads: bool, dtype: torch.dtype | None) -> dict[str, Any]:
    found = mixed(way, dtype) if dtype else {}
    if offloads:
        found |= {"offload_policy": fsdp.CPUOffloadPolicy()} if way == "torch" else {"cpu_offload": True}
    return found


def life(rank: int, world: int, way: str, offloads: bool, precision: str, folder: str) -> set[str]:
    """All that is done with a model; returns what made somebody wait in a step."""
    with beside_a_device() as sides:
        model = around(Net(), way, **arguments(way, offloads, DTYPES[precision]))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        x = torch.randn(4, 6, device=DEVICE)

        def step() -> None:
            model(x).backward()
            fsdp.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()

        step()
        step()
        with sides.watched() as waits:
            step()
        states(model, optimizer, folder)
        step()
        with summon_full_params(getattr(model, "module", model)), torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        step()
        return set(waits)


def states(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    for on_host in (True, False):
        options = fsdp.StateDictOptions(full_state_dict=True, cpu_offload=on_host, broadcast_from_rank0=on_host)
        weights, state = fsdp.get_state_dict(model, optimizer, options=options)
        fsdp.set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state, options=options)
    fsdp.save_checkpoint(model, optimizer, f"{folder}/ours")
    fsdp.load_checkpoint(model, optimizer, f"{folder}/ours")
    weights, state = fsdp.get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/torch's")
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/torch's")
    fsdp.set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)


CELLS = [*product(("torch", "nested"), (False, True), DTYPES)]


def check(cells: list[tuple[str, bool, str]], world: int, folder: Path) -> None:
    for cell in cells:
        _, on_host, dtype = cell
        waits = {OVERFLOW} if dtype == "fp16" and not on_host else set[str]()
        allowed = {COMPARED} if world > 1 else waits
        assert run_ranks(life, world, *cell, str(folder)) == [allowed] * world, cell


@pytest.mark.parametrize("world, cells", [(1, CELLS[::4]), (2, CELLS[3::4])], ids=["1", "2"])
def test_sides_do_not_mix_and_nobody_waits(world: int, cells: list[Any], tmp_path: Path) -> None:
    check(cells, world, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_nor_in_any_case(world: int, tmp_path: Path) -> None:
    check(CELLS, world, tmp_path)


# ---- state on the host: no bit is another one, and copies may end as late as they like -------------------------------

STEPS = 4
ON_HOST = [("odd sizes", "torch", None), ("tied", "nested", None), ("frozen", "torch", torch.bfloat16),
           ("odd sizes", "nested", torch.bfloat16), ("tied", "torch", torch.float16),
           ("root ends in a block", "twice nested", None)]


def outcome(name: str, way: str, rank: int, **given: Any) -> tuple[list[float], dict[str, list[float]]]:
    losses, weights = by_shards(MODELS[name], way, rank, STEPS, **given)
    return losses, {key: tensor.detach().double().flatten().tolist() for key, tensor in weights.items()}


def differing(rank: int, world: int, name: str, way: str, dtype: torch.dtype | None) -> bool:
    given = mixed(way, dtype) if dtype else {}
    with accelerator_side():
        expected = outcome(name, way, rank, **given)
        with late_copy_streams() as ferry:
            given |= {"offload_policy": fsdp.CPUOffloadPolicy()} if way == "torch" else {"cpu_offload": True}
            found = outcome(name, way, rank, **given)
        lanes: list[Any] = [ferry.to_device, ferry.to_host]
        assert all(lane.copied for lane in lanes)
        return found != expected


@pytest.mark.few(5)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name, way, dtype", ON_HOST, ids=str)
def test_a_home_on_the_host_changes_no_bit(name: str, way: str, dtype: torch.dtype | None, world: int) -> None:
    assert run_ranks(differing, world, name, way, dtype) == [False] * world
