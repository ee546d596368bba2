"""zero.initialize: any model, any loop, the names that DeepSpeed's tutorials use, and training equal to plain torch."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from megatron import zero
from megatron.errors import CheckpointError, ConfigError, StorageError
from megatron.zero.api.engine import Engine
from tests.distributed import on_ranks, run_ranks
from tests.megatron.zero.small import gathered

WIDTH, ROWS = 12, 8
CONFIG = {"train_micro_batch_size_per_gpu": ROWS // 2, "gradient_accumulation_steps": 1, "gradient_clipping": 0.5,
          "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}}


class Model(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inlet = nn.Linear(4, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(3))
        self.outlet = nn.Linear(WIDTH, 1)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.tensor([seed == 0, True]))
        self.register_buffer("third", torch.ones(4) / 3)

    def head_is_trained(self) -> bool:
        return self.outlet.weight.grad is not None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.inlet(x) + 0 * self.third.sum()
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.outlet(x).square().mean()


def config(stage: int = 0, **changes: Any) -> dict[str, Any]:
    return {**CONFIG, "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}, **changes}


def batches(count: int) -> torch.Tensor:
    return torch.randn(count, ROWS, 4, generator=torch.Generator().manual_seed(5))


def three_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Hyper-parameters that cut across the layers, so that each flat buffer holds parameters of all groups."""
    named = list(model.named_parameters())
    return [{"params": [p for _, p in named if p.dim() == 2]},
            {"params": [p for name, p in named if p.dim() == 1 and "layers" in name], "lr": 3e-3, "weight_decay": 0.0},
            {"params": [p for name, p in named if p.dim() == 1 and "layers" not in name], "betas": (0.5, 0.7)}]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(three_groups(model), lr=1e-2, eps=1e-6)


def plain_training(count: int) -> list[torch.Tensor]:
    model = Model()
    optimizer = adamw(model)
    for batch in batches(count):
        optimizer.zero_grad()
        model(batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def train(engine: Engine, count: int, start: int = 0) -> list[torch.Tensor]:
    rank, size = engine.groups.dp.rank, engine.groups.dp.size
    for batch in batches(start + count)[start:]:
        for part in batch.view(engine.gradient_accumulation_steps(), size, -1, 4)[:, rank]:
            engine.backward(engine(part))
            engine.step()
    return gathered(engine.module)


@on_ranks(2)
def test_every_stage_trains_a_users_model_as_plain_torch_does(rank: int, world: int) -> None:
    wanted = plain_training(8)
    for stage in range(4):
        model = Model(seed=rank)  # every rank takes the values of the first
        optimizer = adamw(model)
        engine, wrapped, _, _ = zero.initialize(model=model, optimizer=optimizer, config=config(stage))
        assert wrapped.param_groups is optimizer.param_groups
        assert engine.get_lr() == [1e-2, 3e-3, 1e-2] and model.mask.all()
        # 2e-6: halves of the batch are summed in another order; 8 steps of 1e-2 (measured 4e-7).
        torch.testing.assert_close(train(engine, 8), wanted, rtol=0, atol=2e-6)


@on_ranks(2)
def test_counters_boundaries_and_rates(rank: int, world: int) -> None:
    engine, optimizer, _, _ = zero.initialize(
        model=Model(), config=config(1, gradient_accumulation_steps=2, scheduler={
            "type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4, "warmup_type": "linear"}}))
    expected = [(False, False, 2.5e-3, (1, 0, 0, 0)), (True, True, 5e-3, (2, 1, 16, 0)),
                (False, True, 5e-3, (3, 1, 16, 0)), (True, True, 7.5e-3, (4, 2, 32, 0))]
    for batch, (is_boundary, is_applied, rate, counters) in zip(batches(4), expected, strict=True):
        loss = engine(batch[:4])
        assert engine.is_gradient_accumulation_boundary() == is_boundary
        assert engine.backward(loss) * 2 == loss
        engine.step()
        assert engine.was_step_applied() == is_applied and engine.get_lr() == [pytest.approx(rate)]
        assert (engine.micro_steps, engine.global_steps, engine.global_samples, engine.skipped_steps) == counters
    assert engine.train_batch_size() == 16 and engine.get_type() == ["AdamW"] and engine.get_global_grad_norm() > 0
    assert (engine.loss_scale, optimizer.cur_scale, optimizer.loss_scale, optimizer.overflow) == (1.0, 1.0, 1.0, False)


def with_loader(size: int = 16) -> tuple[Engine, Any]:
    engine, _, loader, _ = zero.initialize(model=Model(), training_data=list(range(size)), config=config())
    return engine, loader


def train_step(engine: Engine) -> None:
    engine.backward(engine(torch.ones(ROWS, 4)))
    engine.step()


def epoch_of(engine: Engine, loader: Any, batches: int | None = None) -> list[int]:
    """The samples of an epoch that is trained on, or of its first batches."""
    seen: list[int] = []
    for number, batch in enumerate(loader, 1):
        seen += batch.tolist()
        train_step(engine)
        if number == batches:
            break
    return seen


def orders(rank: int, world: int) -> list[list[int]]:
    """The samples of three epochs, and of the second again."""
    engine, loader = with_loader()
    found = [epoch_of(engine, loader) for _ in range(3)]
    loader.sampler.set_epoch(1)
    return [*found, epoch_of(engine, loader)]


def test_the_loaders_order_changes_with_the_epoch() -> None:
    mine, theirs = run_ranks(orders, 2)
    assert len({tuple(epoch) for epoch in mine[:3]}) == 3 and mine[3] == mine[1]
    assert all(sorted(one + other) == list(range(16)) for one, other in zip(mine, theirs, strict=True))


def test_a_resume_in_mid_epoch_has_the_order_of_that_epoch_as_a_loop_that_is_left_early(tmp_path: Path) -> None:
    engine, loader = with_loader()
    first, second = epoch_of(engine, loader), []
    assert epoch_of(*with_loader(), batches=2) == first[: 2 * ROWS // 2]
    for number, batch in enumerate(loader):
        second += batch.tolist()
        train_step(engine)
        engine.save_checkpoint(tmp_path, tag=f"at{number}")
    third = epoch_of(engine, loader, batches=2)
    assert epoch_of(engine, loader)[: len(third)] == third, "it begins the same order again"
    last = len(loader) - 1
    for number, expected in ((0, second), (last - 1, second), (last, third)):
        again, resumed = with_loader()
        again.load_checkpoint(tmp_path, tag=f"at{number}")
        assert [int(value) for batch in resumed for value in batch][: len(expected)] == expected, f"after {number}"


@on_ranks(2)
def test_a_checkpoint_brings_back_everything_at_any_stage(rank: int, world: int, tmp_path: Path) -> None:
    first = zero.initialize(model=Model(), config=config(2))[0]
    train(first, 3)
    first.save_checkpoint(tmp_path, client_state={"epoch": 7, "best": 0.25})
    first.save_checkpoint(tmp_path, tag="named", client_state={"epoch": 8})
    wanted = train(first, 3, start=3)
    for stage in range(4):
        second = zero.initialize(model=Model(seed=9), config=config(stage))[0]
        path, state = second.load_checkpoint(tmp_path, tag="global_step3")
        assert Path(str(path)).name == "global_step3" and state == {"epoch": 7, "best": 0.25}
        assert int(second.module.calls) == 3, "buffers are part of a checkpoint"
        assert all(map(torch.equal, train(second, 3, start=3), wanted)) and second.global_steps == 6
        assert second.load_checkpoint(tmp_path)[1] == {"epoch": 8}
        # Loading what the same engine saved must work too, at every stage.
        second.save_checkpoint(tmp_path / f"again{stage}")
        second.load_checkpoint(tmp_path / f"again{stage}", load_module_only=True)
    assert second.load_checkpoint(tmp_path / "empty") == (None, None)
    with pytest.raises(CheckpointError, match="never"):
        second.load_checkpoint(tmp_path, tag="never")


MISFITS: dict[str, tuple[Callable[[Model], object], Callable[[Model], object], str, dict[str, bool]]] = {
    "one layer more": (lambda saved: None, lambda model: model.layers.append(nn.Linear(2, 2)),
                       "2 parameters are not in the checkpoint, layers.3.bias first", {"load_module_strict": False}),
    "shape": (lambda saved: None, lambda model: setattr(model, "outlet", nn.Linear(WIDTH, 2)),
              r"weight 'outlet...+': shape expected \[.*\], found \[", {}),
    "buffer": (lambda saved: None, lambda model: model.register_buffer("calls", torch.zeros(2, dtype=torch.int64)),
               "buffer 'calls': shape expected", {}),
    "frozen then": (lambda saved: saved.outlet.requires_grad_(False), lambda model: None,
                    "holds no exp_avg of 'outlet...+': it was frozen then; load_optimizer_states=False",
                    {"load_optimizer_states": False}),
    "another optimizer": (lambda saved: None, lambda model: None, "holds the optimizer state of AdamW, not of Lion",
                          {"load_optimizer_states": False})}
"""What is changed in the saved model and in the one that loads, the refusal, and options that make it fit."""


@pytest.mark.parametrize("what", MISFITS)
def test_what_does_not_fit_is_refused_before_anything_changes(what: str, tmp_path: Path) -> None:
    """The last parameter, the last buffer, the last moment: all that comes before them would fit."""
    change_saved, change, told, options = MISFITS[what]
    saved, model = Model(), Model(seed=1)
    change_saved(saved)
    change(model)
    zero.initialize(model=saved, config=config())[0].save_checkpoint(tmp_path)
    lion = {"optimizer": {"type": "Lion", "params": {"lr": 1e-3}}} if what == "another optimizer" else {}
    engine = zero.initialize(model=model, config=config(**lion))[0]
    before = gathered(engine.module)
    with pytest.raises(CheckpointError, match=told):
        engine.load_checkpoint(tmp_path)
    assert all(map(torch.equal, gathered(engine.module), before)) and engine.global_steps == 0
    if options:
        engine.load_checkpoint(tmp_path, **options)


@on_ranks(2)
def test_save_16bit_model_writes_a_state_dict_or_says_that_it_did_not(rank: int, world: int, tmp_path: Path) -> None:
    keys = config(3, bf16={"enabled": True})
    assert not zero.initialize(model=Model(), config=keys)[0].save_16bit_model(tmp_path)
    keys["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    engine = zero.initialize(model=Model(), config=keys)[0]
    assert engine.save_16bit_model(tmp_path) and engine.save_fp16_model(tmp_path, "model.safetensors")
    pickled, wanted = torch.load(tmp_path / "pytorch_model.bin", weights_only=True), Model().state_dict()
    for found in (pickled, load_file(tmp_path / "model.safetensors")):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name].float(), value.bfloat16().float()) for name, value in wanted.items())


MISUSES: list[tuple[Callable[[Model], dict[str, Any]], str]] = [
    (lambda model: {}, "needs one configuration, found none"),
    (lambda model: {"args": argparse.Namespace(deepspeed_config="x.json"), "config": config()},
     "found args.deepspeed_config and config"),
    (lambda model: {"config": "nofile.json"}, "^config=nofile.json cannot be read: .*; give the path"),
    (lambda model: {"config_params": "nofile.json"}, "^config_params=nofile.json cannot be read: .*; give the path"),
    (lambda model: {"model_parameters": model.parameters(), "config": {"train_batch_size": 4}},
     "^no optimizer: give optimizer= to zero.initialize"),
    (lambda model: {"config": {"optimizer": CONFIG["optimizer"], "gradient_cliping": 1}},
     "2 errors:\n.* unknown key gradient_cliping; .*\n.* give train_batch_size or train_micro_batch_size_per_gpu as a"),
    (lambda model: {"config": config(), "optimizer": torch.optim.AdamW([*model.layers.parameters(),
                                                                        *model.outlet.parameters()])},
     "2 parameters are in no param group of the optimizer, inlet.weight first"),
    (lambda model: {"config": config(), "optimizer": torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)},
     "1 parameters that are not the model's"),
    (lambda model: {"config": config(), "mpu": object()}, "without get_model_parallel_rank"),
    (lambda model: {"config": {"train_batch_size": 4, "scheduler": {"type": "WarmupLR", "params": {}}}},
     "^no optimizer: give optimizer= to zero.initialize"),
    (lambda model: {"config": {"train_batch_size": 4}, "lr_scheduler": lambda optimizer: None},
     "^no optimizer: give optimizer= to zero.initialize")]


def test_misuse_is_told_with_its_remedy() -> None:
    model = Model()
    for arguments, told in MISUSES:
        with pytest.raises(ConfigError, match=told):
            zero.initialize(model=model, **arguments(model))
    engine, optimizer, _, _ = zero.initialize(model=model, config=config())
    with pytest.raises(ConfigError, match="call engine.backward"):
        engine(batches(1)[0]).backward()
    with pytest.raises(ConfigError, match="call engine.step"):
        optimizer.step()
    with pytest.raises(ConfigError, match="belongs to another engine already"):
        zero.initialize(model=model, config=config())


# ---- what a `zero.initialize` leaves that is refused, or fails, and an engine that is destroyed ----------------------

STAGES = pytest.mark.parametrize("stage", [0, 1, 3])


def copied(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def is_still(model: nn.Module, before: dict[str, torch.Tensor]) -> bool:
    now = model.state_dict()
    return all(now[name].dtype == value.dtype and now[name].equal(value) for name, value in before.items())


@STAGES
def test_a_refused_one_leaves_every_bit(stage: int) -> None:
    """A buffer that was rounded to bf16 would stay so in the corrected call, without a word."""
    model = Model()
    before = copied(model)
    with pytest.raises(ConfigError, match="in no param group"):
        zero.initialize(model=model, config=config(stage, bf16={"enabled": True}),
                        model_parameters=[model.outlet.weight])
    assert is_still(model, before) and not any(module._forward_pre_hooks for module in model.modules())
    zero.initialize(model=model, config=config(stage))


@STAGES
def test_one_that_shares_a_part_with_another_engine_is_refused_whole(stage: int) -> None:
    actor, critic = Model(), Model()
    engine = zero.initialize(model=actor, config=config(stage))[0]
    critic.inlet = actor.inlet
    before = copied(critic.outlet)
    with pytest.raises(ConfigError, match="inlet.weight belongs to another engine already"):
        zero.initialize(model=critic, config=config(stage))
    assert is_still(critic.outlet, before)
    critic.inlet = nn.Linear(4, WIDTH)
    zero.initialize(model=critic, config=config(stage))
    train_step(engine)


def refuses(*_: Any) -> NoReturn:
    raise ValueError("of the user's")


class Endless:
    def __len__(self) -> int:
        raise TypeError("endless")


@pytest.mark.parametrize("keys, arguments, kind, stage", [
    ({}, {"lr_scheduler": refuses}, ValueError, 0),
    ({"csv_monitor": {"enabled": True, "output_path": "file", "job_name": "x"}}, {}, StorageError, 1),
    ({}, {"training_data": Endless()}, TypeError, 3)], ids=["scheduler", "monitor", "data"])
def test_one_that_fails_later_leaves_a_model_that_says_so(
        keys: dict[str, Any], arguments: dict[str, Any], kind: type[Exception], stage: int, tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    model = Model()
    with pytest.raises(kind):
        zero.initialize(model=model, config=config(stage, bf16={"enabled": True}, **keys), **arguments)
    with pytest.raises(ConfigError, match=rf"inlet.weight is of an engine that failed half way \({kind.__name__}: "):
        zero.initialize(model=model, config=config(stage))
    zero.initialize(model=Model(), config=config(stage))


@on_ranks(2)
def test_a_destroyed_engine_leaves_an_ordinary_model(rank: int, world: int) -> None:
    for stage in range(4):
        model = Model()
        engine = zero.initialize(model=model, config=config(stage))[0]
        trained = train(engine, 2)
        engine.destroy()
        model(batches(1)[0]).backward()  # no engine listens
        assert all(map(torch.equal, model.parameters(), trained)) and model.head_is_trained()
        zero.initialize(model=model, config=config(stage))
        engine.destroy()  # of the first engine alone


def test_args_name_the_configuration_file(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config(1)))
    parser = zero.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(path)])
    assert zero.initialize(args=args, model=Model())[0].zero_optimization_stage() == 1
