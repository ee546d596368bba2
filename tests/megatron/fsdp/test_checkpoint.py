"""Checkpoints of sharded models: of any number of ranks, and the engine's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron.checkpoint.commit import Keep
from megatron.checkpoint.tags import tag_names
from megatron.errors import CheckpointError, ConfigError
from megatron.fsdp import clip_grad_norm_, load_checkpoint, save_checkpoint
from megatron.zero.api.initialize import initialize
from tests.distributed import run_ranks
from tests.megatron.checkpoint.made import load_candidates
from tests.megatron.fsdp.loops import CLIP, adamw, around, batch, train, whole
from tests.megatron.fsdp.test_state import Everything, equal_state, same
from tests.megatron.zero.models import Net


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    from megatron.fsdp.optim_state import gather_full_states
    from megatron.fsdp.sharding import unwrap
    from megatron.fsdp.state_dict import buckets_of
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


def of_the_engine(rank: int, world: int, folder: str) -> Any:
    engine = initialize(model=Net(), config=CONFIG)[0]
    for number in range(3):
        engine.backward(engine(batch(rank, number)))
        engine.step()
    engine.save_checkpoint(folder)
    return {name: value.clone() for name, value in engine.module_state_dict().items()}


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


def back_into_the_engine(rank: int, world: int, folder: str) -> Any:
    engine = initialize(model=Net(), config=CONFIG)[0]
    engine.load_checkpoint(folder)
    loaded = {name: value.clone() for name, value in engine.module_state_dict().items()}
    for number in range(4, 6):
        engine.backward(engine(batch(rank, number)))
        engine.step()
    return loaded, engine.global_steps, dict(engine.module_state_dict())


def straight_on(rank: int, world: int) -> Any:
    engine = initialize(model=Net(), config=CONFIG)[0]
    for number in range(6):
        engine.backward(engine(batch(rank, number)))
        engine.step()
    return dict(engine.module_state_dict())


def test_the_engine_and_the_face_go_on_from_each_others_checkpoints(tmp_path: Path) -> None:
    folder = str(tmp_path)
    first = run_ranks(of_the_engine, 2, folder)[0]
    loaded, steps, after = run_ranks(into_shards, 2, folder)[0]
    assert equal_state(loaded, first) and steps == {3.0}
    again, count, last = run_ranks(back_into_the_engine, 2, folder)[0]
    assert equal_state(again, after) and count == 6
    plain = run_ranks(straight_on, 2)[0]
    assert max(float((plain[name] - last[name]).abs().max()) for name in plain) < 1e-6


def refused(rank: int, world: int, folder: str, mistake: str) -> str:
    model = around(Net() if mistake != "another model" else Everything(), "torch")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if mistake == "another optimizer" else adamw(model)
    try:
        if mistake == "an inner module":
            save_checkpoint(model.blocks[0], optimizer, folder)
        else:
            load_checkpoint(model, optimizer, folder)
    except (CheckpointError, ConfigError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("mistake, word", [("another model", "another model"), ("another optimizer", "AdamW"),
                                           ("an inner module", "outermost")])
def test_what_does_not_fit_is_refused(mistake: str, word: str, tmp_path: Path) -> None:
    run_ranks(of_the_engine, 2, str(tmp_path))
    assert all(word in said for said in run_ranks(refused, 2, str(tmp_path), mistake))


def save_often(rank: int, world: int, folder: str) -> None:
    model, optimizer, _ = trained("nested", rank, 1)
    for step in range(1, 5):
        save_checkpoint(model, optimizer, folder, f"global_step{step}", keep=Keep(2))
    load_checkpoint(model, optimizer, folder, "global_step3")
    save_checkpoint(model, optimizer, folder, "global_step5")


def test_saves_follow_one_another_and_old_ones_are_deleted(tmp_path: Path) -> None:
    run_ranks(save_often, 1, str(tmp_path))
    assert tag_names(tmp_path) == ["global_step3", "global_step4", "global_step5"]
    assert load_candidates(tmp_path) == ["global_step5", "global_step3"], "4 is on a branch that was left"
