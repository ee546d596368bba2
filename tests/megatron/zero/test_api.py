"""zero.initialize: any model, any loop, the names that DeepSpeed's tutorials use, and training equal to plain torch."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron import zero
from megatron.errors import CheckpointError, ConfigError
from megatron.optim.schedulers import WarmupLR
from megatron.zero.api.engine import Engine
from tests.distributed import run_ranks

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

    def head_is_trained(self) -> bool:
        return self.outlet.weight.grad is not None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.inlet(x)
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


def plain_training(make: Any, count: int) -> list[torch.Tensor]:
    """The loop everyone knows, on the whole batch."""
    model = Model()
    optimizer = make(three_groups(model))
    for batch in batches(count):
        optimizer.zero_grad()
        model(batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def adamw(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-6)


def nadam(groups: Any) -> torch.optim.Optimizer:
    groups = [{key: value for key, value in group.items() if key != "weight_decay"} for group in groups]
    return torch.optim.NAdam(groups, lr=1e-2, eps=1e-6)


def weights_of(engine: Engine) -> list[torch.Tensor]:
    with zero.GatheredParameters(engine.module.parameters()):
        return [p.detach().clone() for p in engine.module.parameters()]


def train(engine: Engine, count: int, start: int = 0) -> list[torch.Tensor]:
    rank, size = engine.groups.dp.rank, engine.groups.dp.size
    for batch in batches(start + count)[start:]:
        for part in batch.view(engine.gradient_accumulation_steps(), size, -1, 4)[:, rank]:
            engine.backward(engine(part))
            engine.step()
    return weights_of(engine)


def every_stage(rank: int, world: int, make: Any) -> list[list[torch.Tensor]]:
    found = []
    for stage in range(4):
        model = Model(seed=rank)  # every rank takes the values of the first
        engine = zero.initialize(model=model, optimizer=make(three_groups(model)), config=config(stage))[0]
        assert engine.get_lr() == [1e-2, 3e-3, 1e-2] and model.mask.all()
        found.append(train(engine, 8))
    return found


@pytest.mark.parametrize("make", [adamw, nadam])
def test_every_stage_trains_a_users_model_as_plain_torch_does(make: Any) -> None:
    wanted = plain_training(make, 8)
    for found in run_ranks(every_stage, 2, make):
        for weights in found:
            # 2e-6: halves of the batch are summed in another order; 8 steps of 1e-2 (measured 4e-7).
            torch.testing.assert_close(weights, wanted, rtol=0, atol=2e-6)


def counted(rank: int, world: int) -> dict[str, Any]:
    engine, optimizer, loader, scheduler = zero.initialize(
        model=Model(), config=config(1, gradient_accumulation_steps=2, scheduler={
            "type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4, "warmup_type": "linear"}}))
    seen: dict[str, list[Any]] = {"boundary": [], "applied": [], "lr": [], "steps": [], "returned": []}
    for batch in batches(4):
        loss = engine(batch[:4])
        seen["boundary"].append(engine.is_gradient_accumulation_boundary())
        seen["returned"].append((engine.backward(loss) * 2 - loss).abs().item())
        engine.step()
        seen["applied"].append(engine.was_step_applied())
        seen["lr"].append(engine.get_lr()[0])
        seen["steps"].append((engine.micro_steps, engine.global_steps, engine.global_samples, engine.skipped_steps))
    norm = engine.get_global_grad_norm()
    return {**seen, "norm": norm, "type": engine.get_type(), "batch": engine.train_batch_size(),
            "scale": (engine.loss_scale, optimizer.cur_scale, optimizer.loss_scale, optimizer.overflow)}


def test_counters_boundaries_and_rates() -> None:
    found = run_ranks(counted, 2)[0]
    assert found["boundary"] == [False, True, False, True]
    assert found["applied"] == [False, True, True, True]
    assert found["returned"] == [0.0] * 4
    assert found["steps"] == [(1, 0, 0, 0), (2, 1, 16, 0), (3, 1, 16, 0), (4, 2, 32, 0)]
    assert found["lr"] == pytest.approx([2.5e-3, 5e-3, 5e-3, 7.5e-3])
    assert found["batch"] == 16 and found["type"] == ["AdamW"] and found["scale"] == (1.0, 1.0, 1.0, False)
    assert found["norm"] > 0


def test_the_loader_gives_each_rank_its_share_and_a_users_scheduler_is_stepped() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine, wrapped, loader, scheduler = zero.initialize(
        model=model, optimizer=optimizer, training_data=list(torch.randn(16, 4)), config=config(2),
        lr_scheduler=lambda optimizer: WarmupLR(optimizer, 0.0, 1e-2, 4, "linear"))
    assert loader is not None and wrapped.param_groups is optimizer.param_groups
    rates = []
    for batch in loader:
        assert batch.shape == (ROWS // 2, 4)
        engine.backward(engine(batch))
        engine.step()
        rates.append(engine.get_lr()[0])
    assert rates == pytest.approx([0.0, 2.5e-3, 5e-3, 7.5e-3])
    torch.optim.lr_scheduler.LambdaLR(wrapped, lambda step: 0.5)  # torch's schedulers accept it as an optimizer


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


def looked_at(loader: Any) -> list[int]:
    return [int(value) for batch in loader for value in batch]


def orders(rank: int, world: int, folder: str) -> list[Any]:
    """The samples of four epochs: of one run, and of one that resumes after the second."""
    engine, loader = with_loader()
    begun = [epoch_of(engine, loader), epoch_of(engine, loader)]
    engine.save_checkpoint(folder)
    whole = [*begun, epoch_of(engine, loader), epoch_of(engine, loader)]
    engine, loader = with_loader()
    engine.load_checkpoint(folder)
    resumed = [*begun, epoch_of(engine, loader), epoch_of(engine, loader)]
    loader.sampler.set_epoch(1)
    return [whole, resumed, epoch_of(engine, loader)]


def test_the_loaders_order_changes_with_the_epoch_and_goes_on_after_a_resume(tmp_path: Path) -> None:
    (whole, resumed, second), (other, _, _) = run_ranks(orders, 2, str(tmp_path))
    assert len({tuple(epoch) for epoch in whole}) == 4, "each epoch has an order of its own"
    assert resumed == whole and second == whole[1]
    assert all(sorted(mine + theirs) == list(range(16)) for mine, theirs in zip(whole, other, strict=True))


def test_a_resume_in_mid_epoch_has_the_order_of_that_epoch(tmp_path: Path) -> None:
    engine, loader = with_loader()
    first, second = epoch_of(engine, loader), []
    for number, batch in enumerate(loader):
        second += batch.tolist()
        train_step(engine)
        engine.save_checkpoint(tmp_path, tag=f"at{number}")
    third = epoch_of(engine, loader)
    assert len({tuple(first), tuple(second), tuple(third)}) == 3
    last = len(loader) - 1
    for number, expected in ((0, second), (last - 1, second), (last, third)):
        again, resumed = with_loader()
        again.load_checkpoint(tmp_path, tag=f"at{number}")
        assert looked_at(resumed) == expected, f"after batch {number}"


def test_a_loop_that_is_left_early_begins_the_same_order_again(tmp_path: Path) -> None:
    engine, loader = with_loader()
    parts = [epoch_of(engine, loader, batches=2) for _ in range(2)]
    kept = iter(loader)
    next(kept)
    whole = epoch_of(engine, loader)
    assert parts[0] == parts[1] == whole[:len(parts[0])]
    assert epoch_of(engine, loader) != whole, "an iteration that is kept somewhere holds up nothing"


def test_a_batch_size_that_was_set_is_named_when_the_checkpoint_is_loaded(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine, _ = with_loader()
    engine.save_checkpoint(tmp_path, tag="as_configured")
    engine.set_train_batch_size(3 * engine.train_batch_size())
    engine.save_checkpoint(tmp_path, tag="set")
    engine.load_checkpoint(tmp_path, tag="set")
    again, _ = with_loader()
    again.load_checkpoint(tmp_path, tag="as_configured")
    assert capsys.readouterr().err == ""
    again.load_checkpoint(tmp_path, tag="set")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and f"took {engine.train_batch_size()} samples a step; this one takes" in lines[0]


def saved_and_loaded(rank: int, world: int, folder: str) -> dict[str, Any]:
    first = zero.initialize(model=Model(), config=config(2))[0]
    train(first, 3)
    first.save_checkpoint(folder, client_state={"epoch": 7, "best": 0.25})
    first.save_checkpoint(folder, tag="named", client_state={"epoch": 8})
    wanted = train(first, 3, start=3)
    found: dict[str, Any] = {}
    for stage in range(4):
        second = zero.initialize(model=Model(seed=9), config=config(stage))[0]
        path, state = second.load_checkpoint(folder, tag="global_step3")
        assert int(second.module.calls) == 3, "buffers are part of a checkpoint"
        found[f"stage {stage}"] = all(map(torch.equal, train(second, 3, start=3), wanted))
        found["path"], found["state"], found["steps"] = path, state, second.global_steps
        assert second.load_checkpoint(folder)[1] == {"epoch": 8}
        # Loading what the same engine saved must work too, at every stage.
        second.save_checkpoint(f"{folder}/again{stage}")
        second.load_checkpoint(f"{folder}/again{stage}", load_module_only=True)
    found["nothing"] = second.load_checkpoint(f"{folder}/empty")
    return found


def test_a_checkpoint_brings_back_everything_at_any_stage(tmp_path: Path) -> None:
    for found in run_ranks(saved_and_loaded, 2, str(tmp_path)):
        # Two ranks, no accumulation: stages are bit-equal.
        assert all(found[f"stage {stage}"] for stage in range(4)), found
        assert Path(found["path"]).name == "global_step3"
        assert found["state"] == {"epoch": 7, "best": 0.25} and found["steps"] == 6
        assert found["nothing"] == (None, None)


def test_what_cannot_be_loaded_or_saved_is_refused(tmp_path: Path) -> None:
    engine = zero.initialize(model=Model(), config=config())[0]
    train(engine, 1)
    with pytest.raises(ConfigError, match="client_state: optimizer is the engine's own"):
        engine.save_checkpoint(tmp_path, client_state={"optimizer": 1})
    with pytest.raises(CheckpointError, match="client_state/model: a value of type object"):
        engine.save_checkpoint(tmp_path, client_state={"model": object()})
    engine.save_checkpoint(tmp_path, client_state={"mean": torch.ones(3)})
    assert torch.equal(engine.load_checkpoint(tmp_path)[1]["mean"], torch.ones(3))  # type: ignore[index]
    with pytest.raises(CheckpointError, match="never"):
        engine.load_checkpoint(tmp_path, tag="never")
    larger = Model()
    larger.layers.append(nn.Linear(2, 2))
    other = zero.initialize(model=larger, config=config())[0]
    with pytest.raises(CheckpointError, match="2 parameters are not in the checkpoint, layers.3.bias first"):
        other.load_checkpoint(tmp_path)
    other.load_checkpoint(tmp_path, load_module_strict=False)
    lion = {"optimizer": {"type": "Lion", "params": {"lr": 1e-3}}}
    with pytest.raises(CheckpointError, match="holds the optimizer state of AdamW, not of Lion"):
        zero.initialize(model=Model(), config=config(**lion))[0].load_checkpoint(tmp_path)
    zero.initialize(model=Model(), config=config(**lion))[0].load_checkpoint(tmp_path, load_optimizer_states=False)


@pytest.mark.parametrize("change", ["shape", "buffer", "frozen then"])
def test_what_does_not_fit_is_refused_before_anything_changes(change: str, tmp_path: Path) -> None:
    """The last parameter, the last buffer, the last moment: all that comes before them would fit."""
    saved, model = Model(), Model(seed=1)
    if change == "frozen then":
        saved.outlet.requires_grad_(False)
    zero.initialize(model=saved, config=config())[0].save_checkpoint(tmp_path)
    if change == "shape":
        model.outlet = nn.Linear(WIDTH, 2)
    if change == "buffer":
        model.register_buffer("calls", torch.zeros(2, dtype=torch.int64))
    engine = zero.initialize(model=model, config=config())[0]
    before = weights_of(engine)
    words = {"shape": r"weight 'outlet...+': shape expected \[.*\], found \[",
             "buffer": "buffer 'calls': shape expected",
             "frozen then": "holds no exp_avg of 'outlet...+': it was frozen then; load_optimizer_states=False"}
    with pytest.raises(CheckpointError, match=words[change]):
        engine.load_checkpoint(tmp_path)
    assert all(map(torch.equal, weights_of(engine), before)) and engine.global_steps == 0


def whole_model(rank: int, world: int, folder: str) -> list[bool]:
    refused = zero.initialize(model=Model(), config=config(3, bf16={"enabled": True}))[0]
    results = [refused.save_16bit_model(folder)]
    allowed = config(3, bf16={"enabled": True})
    allowed["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    engine = zero.initialize(model=Model(), config=allowed)[0]
    results += [engine.save_16bit_model(folder), engine.save_fp16_model(folder, "model.safetensors")]
    return results


def test_save_16bit_model_writes_a_state_dict_or_says_that_it_did_not(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    assert run_ranks(whole_model, 2, str(tmp_path)) == [[False, True, True]] * 2
    pickled = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    for found in (pickled, load_file(tmp_path / "model.safetensors")):
        wanted = Model().state_dict()
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name].float(), value.bfloat16().float()) for name, value in wanted.items())


def sums_by_hand(rank: int, world: int) -> list[bool]:
    """Three ways to make one step of two micro-batches."""
    def engine_of(accumulation: int) -> Engine:
        return zero.initialize(model=Model(), config=config(1, gradient_accumulation_steps=accumulation))[0]

    parts = batches(1)[0].view(2, world, -1, 4)[:, rank]
    counted, unsynced, told = engine_of(2), engine_of(1), engine_of(1)
    for part in parts:
        counted.backward(counted(part))
        counted.step()
    with unsynced.no_sync():
        with unsynced.no_sync():
            pass  # the outer block goes on
        unsynced.backward(unsynced(parts[0]) / 2)
    assert unsynced.global_steps == 0
    unsynced.backward(unsynced(parts[1]) / 2)
    unsynced.step()
    for index, part in enumerate(parts):
        told.set_gradient_accumulation_boundary(index == 1)
        told.backward(told(part) / 2)
        told.step()
    wanted = weights_of(counted)
    return [all(map(torch.equal, weights_of(engine), wanted)) for engine in (unsynced, told)]


def test_no_sync_and_boundaries_by_hand_equal_accumulation() -> None:
    assert run_ranks(sums_by_hand, 2) == [[True, True]] * 2
    with pytest.raises(ConfigError, match="no_sync needs stage 0 or 1"), \
            zero.initialize(model=Model(), config=config(2))[0].no_sync():
        pass


def test_misuse_is_told_with_its_remedy(tmp_path: Path) -> None:
    model = Model()
    with pytest.raises(ConfigError, match="needs one configuration, found none"):
        zero.initialize(model=model)
    with pytest.raises(ConfigError, match="found args.deepspeed_config and config"):
        zero.initialize(args=argparse.Namespace(deepspeed_config="x.json"), model=model, config=config())
    for argument in ("config", "config_params"):
        with pytest.raises(ConfigError, match=f"^{argument}=nofile.json cannot be read: .*; give the path"):
            zero.initialize(model=model, **{argument: "nofile.json"})
    with pytest.raises(ConfigError, match="no optimizer: give optimizer= to zero.initialize"):
        zero.initialize(model=model, model_parameters=model.parameters(), config={"train_batch_size": 4})
    with pytest.raises(ConfigError, match="give train_batch_size or train_micro_batch_size_per_gpu as a number"):
        zero.initialize(model=model, config={"optimizer": CONFIG["optimizer"]})
    with pytest.raises(ConfigError, match="2 errors:\n.* unknown key gradient_cliping; .*\n.* give train_batch_size"):
        zero.initialize(model=model, config={"optimizer": CONFIG["optimizer"], "gradient_cliping": 1})
    with pytest.raises(ConfigError, match="2 parameters are in no param group of the optimizer, inlet.weight first"):
        zero.initialize(model=model, config=config(),
                        optimizer=torch.optim.AdamW([*model.layers.parameters(), *model.outlet.parameters()]))
    with pytest.raises(ConfigError, match="1 parameters that are not the model's"):
        zero.initialize(model=model, config=config(), optimizer=torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0))
    with pytest.raises(ConfigError, match="without get_model_parallel_rank"):
        zero.initialize(model=model, config=config(), mpu=object())
    engine, optimizer, _, _ = zero.initialize(model=model, config=config())
    with pytest.raises(ConfigError, match="call engine.backward"):
        engine(batches(1)[0]).backward()
    with pytest.raises(ConfigError, match="call engine.step"):
        optimizer.step()
    with pytest.raises(ConfigError, match="belongs to another engine already"):
        zero.initialize(model=model, config=config())


def plain_again(rank: int, world: int) -> list[bool]:
    results = []
    for stage in range(4):
        model = Model()
        engine = zero.initialize(model=model, config=config(stage))[0]
        trained = train(engine, 2)
        engine.destroy()
        model(batches(1)[0]).backward()  # no engine listens
        results.append(all(map(torch.equal, model.parameters(), trained)) and model.head_is_trained())
        zero.initialize(model=model, config=config(stage))
    return results


def test_a_destroyed_engine_leaves_an_ordinary_model() -> None:
    assert run_ranks(plain_again, 2) == [[True] * 4] * 2


def test_args_name_the_configuration_file(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config(1)))
    parser = zero.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(path)])
    assert zero.initialize(args=args, model=Model())[0].zero_optimization_stage() == 1
