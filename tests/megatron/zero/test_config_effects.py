"""Keys of a DeepSpeed file in the engine of zero.initialize: their effects, what they ask it to report, and errors and
notes in their words; progressive layer dropping: the keys, the names, what a model of one's own is given."""

from __future__ import annotations

import csv
import io
import math
import re
from collections import UserDict, namedtuple
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron import zero
from megatron.errors import ConfigError, StorageError
from megatron.zero.api.engine import Engine
from tests.distributed import on_ranks
from tests.megatron.zero import small


Pair = namedtuple("Pair", "one other")


@dataclass
class Record:
    x: Tensor


class Seen(nn.Module):
    """Remembers the dtypes of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.dtypes: list[torch.dtype] = []

    def forward(self, batch: tuple[Tensor, UserDict[str, Any]], *, weight: Tensor) -> Tensor:
        image, rest = batch
        self.dtypes = [x.dtype for x in (image, rest["more"][0], weight, rest["pair"].one, rest["record"].x,
                                         rest["label"])]
        return self.linear(image.to(self.linear.weight.dtype)).sum()


@pytest.mark.parametrize("auto_cast", [False, True])
def test_auto_cast_casts_floating_point_inputs_wherever_they_are(auto_cast: bool) -> None:
    config = {"train_batch_size": 1, "optimizer": {"type": "Adam"}, "fp16": {"enabled": True, "auto_cast": auto_cast}}
    model = Seen()
    engine = zero.initialize(model=model, config=config)[0]
    image, label = torch.ones(1, 2), torch.ones(1, dtype=torch.int64)
    for call in (engine, engine.forward):
        call((image, UserDict(label=label, more=[image.double()], pair=Pair(image, 1), record=Record(image))),
             weight=image)
        assert model.dtypes == [*([torch.float16] * 5 if auto_cast else [
            torch.float32, torch.float64, *[torch.float32] * 3]), torch.int64]
    assert image.dtype == torch.float32, "the caller's tensors are left alone"


@pytest.mark.parametrize(("kind", "expected"), [
    ("Adam", [(0.8, 0.99), (0.85, 0.99), (0.8, 0.99), (0.85, 0.99), (0.9, 0.99), (0.9, 0.99)]), ("SGD", [None] * 6)])
def test_one_cycle_moves_rate_and_momentum_of_the_engine(kind: str, expected: list[Any]) -> None:
    params = {"cycle_min_lr": 0.01, "cycle_max_lr": 0.03, "cycle_first_step_size": 2}
    config = {"train_batch_size": 1, "optimizer": {"type": kind, "params": {"lr": 0.5}},
              "scheduler": {"type": "OneCycle", "params": params}}
    engine = zero.initialize(model=nn.Linear(2, 1), config=config)[0]
    rates, momentum = [], []
    for _ in expected:
        rates.append(engine.get_lr()[0])
        momentum.append(engine.core.param_groups[0].get("betas"))
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
    assert rates == pytest.approx([0.01, 0.02, 0.03, 0.02, 0.01, 0.01])
    assert momentum == [pair and pytest.approx(pair) for pair in expected]


# ---- errors and notes name keys --------------------------------------------------------------------------------------

KEYS = {"train_batch_size": 1, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}


def initialized(**keys: Any) -> zero.Engine:
    return zero.initialize(model=nn.Linear(8, 8), config={**KEYS, "zero_optimization": {"stage": 3, **keys}})[0]


def test_errors_name_keys_alone() -> None:
    for section in ("zero_optimization.offload_optimizer", "zero_optimization.offload_param"):
        for more, told in (({}, f"{section}.device nvme needs {section}.nvme_path"),
                           ({"nvme_path": "/nowhere"}, f"{section}.nvme_path /nowhere: there is no such folder")):
            with pytest.raises(ConfigError) as caught:
                initialized(**{section.partition(".")[2]: {"device": "nvme", **more}})
            assert told in str(caught.value) and "--" not in str(caught.value)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    zeros = {"stage": 3, "stage3_max_live_parameters": 1, "stage3_param_persistence_threshold": 0}
    engine = zero.initialize(model=model, config={**KEYS, "zero_optimization": zeros})[0]
    with pytest.raises(ConfigError, match="and zero_optimization.stage3_max_live_parameters is 1: raise it"):
        engine(torch.ones(1, 8))


def test_an_engine_names_the_keys_that_nothing_reads_once(capsys: pytest.CaptureFixture[str]) -> None:
    initialized(offload_optimizer={"nvme_path": "/x", "buffer_count": 5}, offload_param={"max_in_cpu": 0})
    there = "zero_optimization.offload_"
    assert [line for line in capsys.readouterr().out.splitlines() if "no effect" in line] == [
        f"config: {there}optimizer.nvme_path and {there}optimizer.buffer_count have no effect without "
        f"{there}optimizer.device nvme",
        f"config: {there}param.max_in_cpu has no effect without {there}param.device nvme"]


# ---- progressive layer dropping --------------------------------------------------------------------------------------


class Listening(small.Model):
    """Takes what DeepSpeed gives, and remembers it."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[dict[str, Any]] = []

    def forward(self, x: Tensor, **given: Any) -> Tensor:
        self.given.append(given)
        return super().forward(x)


def dropping(accumulation: int = 1, model: nn.Module | None = None, **pld: Any) -> Engine:
    keys = {"progressive_layer_drop": {"enabled": True, **pld}} if pld else {}
    return small.engine_of(0, model or Listening(), accumulation, keys=keys)


def step(engine: Engine, count: int = 1) -> None:
    for index in range(count):
        engine.backward(engine(small.rows(0, index)))
        engine.step()


def test_the_forward_gets_theta_of_its_step_in_training_only() -> None:
    engine = dropping(2, theta=0.5, gamma=0.1)
    model = engine.module
    step(engine, 6)
    thetas = [0.5 * math.exp(-0.1 * count) + 0.5 for count in (0, 0, 1, 1, 2, 2)]
    assert model.given == [{"progressive_layer_drop": True, "pld_theta": theta} for theta in thetas]
    engine.eval()
    engine(small.rows(0, 0))
    assert model.given[-1] == {}


def test_the_names_of_deepspeed_answer() -> None:
    engine = dropping(theta=0.5, gamma=0.1)
    step(engine, 3)
    last, now = (0.5 * math.exp(-0.1 * step) + 0.5 for step in (2, 3))
    assert engine.get_pld_theta() == pytest.approx(last)
    assert engine.progressive_layer_drop.get_theta() == pytest.approx(now)  # type: ignore[union-attr]
    assert engine.progressive_layer_drop.get_state() == {  # type: ignore[union-attr]
        "progressive_layer_drop": True, "pld_theta": pytest.approx(now)}
    assert engine.pld_enabled() and engine.pld_theta() == 0.5 and engine.pld_gamma() == 0.1
    assert engine.pld_params() == {"theta": 0.5, "gamma": 0.1}
    off = dropping()
    assert off.progressive_layer_drop is None and off.get_pld_theta() is None
    assert off.pld_enabled() is False and off.pld_params() is False
    step(off)
    assert off.module.given == [{}]


def test_a_model_that_does_not_take_it_is_refused_by_name() -> None:
    with pytest.raises(ConfigError) as caught:
        dropping(model=small.Model(), theta=0.5)
    assert str(caught.value).startswith("progressive_layer_drop.enabled: forward of Model takes no "
                                        "progressive_layer_drop and no pld_theta") and "\n" not in str(caught.value)


# ---- what an engine is asked to report -------------------------------------------------------------------------------

CONFIG: dict[str, Any] = {"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 0.5}}}


def trained(steps: int = 4, **keys: Any) -> zero.Engine:
    torch.manual_seed(0)
    engine = zero.initialize(model=nn.Linear(2, 1), config={**CONFIG, **keys})[0]
    dtype = torch.half if engine.fp16_enabled() else torch.float
    for _ in range(steps * engine.gradient_accumulation_steps()):
        engine.backward(engine(torch.ones(engine.train_micro_batch_size_per_gpu(), 2, dtype=dtype)).square().mean())
        engine.step()
    return engine


def test_a_line_has_step_skipped_rate_momentum_and_the_mean_loss_over_the_micro_batches(capsys: Any) -> None:
    torch.manual_seed(0)
    built = zero.initialize(model=nn.Linear(1, 1, bias=False),
                            config={**CONFIG, "steps_per_print": 1, "gradient_accumulation_steps": 2})[0]
    losses = []
    for value in (1.0, 3.0):
        loss = built(torch.full((2, 1), value)).square().mean()
        losses.append(loss.item())
        built.backward(loss)
        built.step()
    line = f"step=1, skipped=0, lr=[0.5], mom=[(0.9, 0.999)], loss={sum(losses) / 2:.6g}"
    assert line in capsys.readouterr().out.splitlines()


def test_breakdowns_name_every_phase(capsys: Any) -> None:
    trained(20, wall_clock_breakdown=True, memory_breakdown=True)
    out = capsys.readouterr().out.splitlines()
    assert [line.partition(" ")[0] for line in out] == ["step=10,", "time", "memory", "step=20,", "time", "memory"]
    for line in out[1:3]:
        assert re.fullmatch(r"(time|memory) \(\w+\) \| forward: [\d.]+ \| backward: [\d.]+ \| step: [\d.]+", line), line


def test_nothing_is_printed_that_nobody_asked_for(capsys: Any) -> None:
    trained()
    assert capsys.readouterr() == ("", "")


class NoReading(nn.Module):
    """A loss that may not be read from the device."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self) -> torch.Tensor:
        return Unreadable(self.weight.sum())


class Unreadable(torch.Tensor):
    def __new__(cls, value: torch.Tensor) -> Unreadable:
        return value.as_subclass(cls)

    def item(self) -> float:
        raise AssertionError("a loss was read from the device")

    __float__ = item


def test_a_loss_is_read_only_where_a_line_or_a_scalar_is_due() -> None:
    def run(**keys: Any) -> None:
        engine = zero.initialize(model=NoReading(), config={**CONFIG, **keys})[0]
        engine.backward(engine())
        engine.step()

    run()
    run(steps_per_print=2)
    with pytest.raises(AssertionError, match="was read"):
        run(steps_per_print=1)


def test_scalars_have_deepspeeds_names_and_count_samples(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monitor = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    engine = trained(3, tensorboard=monitor, csv_monitor=monitor, fp16={"enabled": True, "initial_scale_power": 4})
    engine.monitor.write_events([("Train/Samples/mine", 7.0, engine.global_samples)])
    engine.destroy()
    names = ["train_loss", "lr", "loss_scale", "mine"]
    for name in names:
        rows = list(csv.reader((tmp_path / "job" / f"Train_Samples_{name}.csv").read_text().splitlines()))
        assert rows[0] == ["step", name]
        assert [row[0] for row in rows[1:]] == (["12"] if name == "mine" else ["4", "8", "12"])
    assert rows[1] == ["12", "7.0"]
    events = EventAccumulator(str(tmp_path / "job"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {f"Train/Samples/{name}" for name in names}
    assert [event.step for event in events.Scalars("Train/Samples/lr")] == [4, 8, 12]
    assert {event.value for event in events.Scalars("Train/Samples/loss_scale")} == {16.0}


@on_ranks(2)
def test_every_rank_ends_with_the_error_of_the_one_that_writes(rank: int, world: int, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for section in ("tensorboard", "csv_monitor"):
        with pytest.raises(StorageError, match=rf"{section}.output_path: .*file/job cannot be written"):
            trained(0, **{section: {"enabled": True, "output_path": str(tmp_path / "file"), "job_name": "job"}})


@on_ranks(2)
def test_rank_0_alone_speaks_and_names_what_has_no_effect(rank: int, world: int, tmp_path: Path) -> None:
    with redirect_stdout(io.StringIO()) as told:
        trained(1, steps_per_print=1, csv_monitor={"enabled": True, "output_path": str(tmp_path)}, zero_optimization={
            "stage": 2, "cpu_offload": False, "stage3_max_live_parameters": 5})
    said = told.getvalue()
    assert len(said.splitlines()) == (0 if rank else 4)
    for text in () if rank else ("zero_optimization.cpu_offload is deprecated", "2 ranks on this node compute on",
                                 "stage3_max_live_parameters has no effect without zero_optimization.stage 3"):
        assert text in said
