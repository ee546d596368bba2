"""What else looks at the state, or changes it, where it is on NVMe: saves, loads, loans, the safe_ functions.

Runs in one process are compared with the same run whose state is on the device.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from megatron.config.tree import Config
from megatron.optim.adam import AdamW
from megatron.optim.rule import StepScalars, UpdateSegment
from megatron.train.build import engine as build_engine, model as build_model
from megatron.zero import GatheredParameters
from megatron.zero.api.checkpoint_io import gather_full_state_dict
from megatron.zero.api.engine import Engine
from megatron.zero.utils import (safe_get_full_fp32_param, safe_get_full_optimizer_state,
                                 safe_set_full_fp32_param, safe_set_full_optimizer_state)
from mpu import groups
from tests.distributed import run_ranks
from tests.megatron.zero.offload.test_equal import alike, batches, everywhere, on_params, outcome, train
from tests.megatron.zero.run import configure_gpt2

Change = Callable[[Engine], None]


def built(config: Config) -> Engine:
    grid = groups.build(config.parallel.model_parallel_size)
    return build_engine(config, build_model(config, grid), grid, torch.device("cpu"))


def configured(folder: Path | None, **cell: Any) -> Config:
    cell = {"batch_size": 2, "zero_stage": 3, **cell}
    return configure_gpt2(**cell, **(everywhere(folder, cell["zero_stage"]) if folder else {}))


def edit(engine: Engine) -> None:
    with GatheredParameters(engine.module.parameters(), modifier_rank=0):
        engine.module.wte.weight[3:5] = 0.25
        engine.module.blocks[1].mlp.fc.bias.add_(1)


def put(engine: Engine) -> None:
    for weight in (engine.module.wte.weight, engine.module.blocks[0].attn.qkv.weight):
        value = safe_get_full_fp32_param(weight)
        assert value is not None
        safe_set_full_fp32_param(weight, value * 1.5)
        moment = safe_get_full_optimizer_state(weight, "exp_avg_sq")
        assert moment is not None and moment.any()
        safe_set_full_optimizer_state(weight, moment * 2, "exp_avg_sq")


def load(engine: Engine) -> None:
    with GatheredParameters(engine.module.parameters()):
        new = {name: value * 0.5 for name, value in engine.module.state_dict().items()}
    engine.load_module_state_dict(new)


def forget(engine: Engine) -> None:
    engine.core.reset_optimizer_state()


def test_an_engine_tells_what_it_has_used_its_drives_for(tmp_path: Path) -> None:
    on_host = {**on_params(tmp_path, 5000), "offload_param_max_in_cpu": 10**9}
    for config in (configured(None), configured(None, **on_host)):
        engine = built(config)
        assert engine.drive_use() is None
        engine.destroy()
    engine = built(configured(tmp_path))
    before = engine.drive_use()
    train(engine.core, batches(1))
    after = engine.drive_use()
    assert before is not None and after is not None
    used = after - before
    everything = 12 * sum(bucket.layout.shard_numel for bucket in engine.core.buckets)
    assert used.wait_seconds > 0 and used.read_bytes > 0 and used.written_bytes > everything, "weights go there, too"
    engine.destroy()


KEPT: list[Engine] = []


def train_and_return(folder: Path) -> None:
    engine = built(configured(folder, zero_stage=3))
    train(engine.core, batches(2))
    KEPT.append(engine)  # nothing ends with the function


@pytest.mark.slow
@pytest.mark.parametrize("how", ["spawn", "forkserver"])
def test_a_child_that_returns_without_destroy_leaves_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str],
                                                             how: Literal["spawn", "forkserver"]) -> None:
    child = multiprocessing.get_context(how).Process(target=train_and_return, args=(tmp_path,))
    child.start()
    child.join(100)
    assert child.exitcode == 0
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr().err == ""


RATES = {"lamb": 1e-2, "lion": 1e-3, "sgd": 0.5, "adagrad": 1e-2, "nadam": 1e-3}


def trained_by(rank: int, world: int, folder: Path) -> list[str]:
    """Optimizers that do other things where their state is on NVMe."""
    found = []
    for number, (name, rate) in enumerate(RATES.items()):
        cell = {"optimizer": name, "lr": rate, "zero_stage": 1 + number % 3}
        ends = []
        for home in (None, folder):
            engine = built(configured(home, **cell))
            ends.append(outcome(engine.core, batches(4)))
            engine.destroy()
        if not alike(*ends):
            found.append(name)
    return found


def test_every_kind_of_optimizer_keeps_its_state_there(tmp_path: Path) -> None:
    """Rules of one operation, rules of torch's optimizers, and Lamb, which looks at whole parameters."""
    assert run_ranks(trained_by, 2, tmp_path) == [[]] * 2


def frozen(rank: int, world: int, folder: Path) -> bool:
    """Weights that nobody trains go to the drive as well; a save holds them."""
    ends = []
    for home in (None, folder):
        config = configured(home, bf16=True)
        grid = groups.build(1)
        model = build_model(config, grid)
        for weight in model.blocks[0].parameters():
            weight.requires_grad_(False)
        engine = build_engine(config, model, grid, torch.device("cpu"))
        ends.append([train(engine.core, batches(4)), [*gather_full_state_dict(engine.core).values()]])
        engine.save_checkpoint(folder / f"saved {home is None}")
        again = build_model(config, grid)
        for weight in again.blocks[0].parameters():
            weight.requires_grad_(False)
        engine.destroy()
        engine = build_engine(config, again, grid, torch.device("cpu"))
        engine.load_checkpoint(folder / "saved True")
        ends[-1].append(train(engine.core, batches(6)[4:]))
        engine.destroy()
    return alike(*ends)


def test_frozen_weights_live_there_too(tmp_path: Path) -> None:
    assert run_ranks(frozen, 2, tmp_path) == [True] * 2


def test_a_rule_that_writes_the_weights_at_work_cannot_write_those_on_a_drive(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the fused kernel does: it says that it has written what it was given a place for."""

    step_many = AdamW.step_many

    def update_and_write(rule: AdamW, spans: Sequence[UpdateSegment], hyper: Mapping[str, Any],
                         at: StepScalars) -> bool:
        step_many(rule, spans, hyper, at)
        for span in spans:
            if span.lp_out is not None:
                span.lp_out.copy_(span.master)
        return True

    expected = outcome(built(configured(None, bf16=True)).core, batches(3))
    monkeypatch.setattr(AdamW, "step_many", update_and_write)
    engine = built(configured(tmp_path, bf16=True))
    assert alike(outcome(engine.core, batches(3)), expected)
    engine.destroy()


@pytest.mark.parametrize("threshold, in_memory, said", [
    (10 ** 6, 0, "every parameter is smaller than --stage3-param-persistence-threshold 1000000"),
    (0, 10 ** 9, "within --offload-param-max-in-cpu 1000000000, and stay on the host"), (0, 0, None)])
def test_a_drive_that_gets_no_weights_is_told_why(tmp_path: Path, threshold: int, in_memory: int,
                                                  said: str | None) -> None:
    cell = {**on_params(tmp_path, 5000), "offload_param_max_in_cpu": in_memory,
            "stage3_param_persistence_threshold": threshold}
    engine = built(configured(None, **cell))
    notes = [note for note in engine.notes if note.startswith(" note:")]
    assert len(notes) == (said is not None) and all(said in note for note in notes)
    engine.destroy()
