"""Keys of a DeepSpeed file in the engine of zero.initialize: their effects, and errors and notes in their words."""

from __future__ import annotations

from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron import zero
from megatron.config.cli import parse_args
from megatron.errors import ConfigError
from megatron.zero.hooks import iter_tensors, map_tensors


class Seen(nn.Module):
    """Remembers the dtypes of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.dtypes: list[torch.dtype] = []

    def forward(self, batch: tuple[Tensor, dict[str, Any]], *, weight: Tensor) -> Tensor:
        image, rest = batch
        self.dtypes = [image.dtype, rest["label"].dtype, rest["more"][0].dtype, weight.dtype]
        return self.linear(image.to(self.linear.weight.dtype)).sum()


@pytest.mark.parametrize("auto_cast", [False, True])
def test_auto_cast_casts_floating_point_inputs_wherever_they_are(auto_cast: bool) -> None:
    config = {"train_batch_size": 1, "optimizer": {"type": "Adam"}, "fp16": {"enabled": True, "auto_cast": auto_cast}}
    model = Seen()
    engine = zero.initialize(model=model, config=config)[0]
    image, label = torch.ones(1, 2), torch.ones(1, dtype=torch.int64)
    for call in (engine, engine.forward):
        call((image, {"label": label, "more": [image.double()]}), weight=image)
        floats = [torch.float16] * 3 if auto_cast else [torch.float32, torch.float64, torch.float32]
        assert model.dtypes == [floats[0], torch.int64, *floats[1:]]
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


# ---- tensors inside of arguments -------------------------------------------------------------------------------------

Pair = namedtuple("Pair", "one other")


@dataclass
class Record:
    one: Any
    name: str = "record"


def test_a_tensor_is_found_and_changed_in_a_copy_of_the_same_kind() -> None:
    x = torch.zeros(2)
    for value in (x, (x,), [x], Pair(1, x), {"x": x}, UserDict(x=x), Record(x), {"a": [UserDict(x=(x,))]}):
        changed = map_tensors(value, lambda tensor: tensor + 1)
        assert type(changed) is type(value)
        for found, wanted in ((value, x), (changed, x + 1)):
            assert [tensor.tolist() for tensor in iter_tensors(found)] == [wanted.tolist()]


# ---- errors and notes name keys --------------------------------------------------------------------------------------

KEYS = {"train_batch_size": 1, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}


def initialized(**keys: Any) -> zero.Engine:
    """Of a dict, at stage 3."""
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


ON_DRIVE = "--offload-optimizer-device nvme --offload-optimizer-nvme-path /x --no-offload-optimizer-pin-memory"


UNREAD = [
    ("--offload-optimizer-nvme-path /x --offload-optimizer-buffer-count 5",
     ["--offload-optimizer-nvme-path and --offload-optimizer-buffer-count have no effect without "
      "--offload-optimizer-device nvme"]),
    ("--offload-update host --delayed-param-update --no-offload-optimizer-pin-memory",
     ["--offload-update and --delayed-param-update have no effect without --offload-optimizer-device cpu",
      "--offload-optimizer-pin-memory has no effect without --offload-optimizer-device cpu or nvme"]),
    ("--offload-param-device cpu --offload-param-buffer-size 1e6 --cpu-optimizer "
     "--no-offload-optimizer-pipeline-write --no-offload-optimizer-pin-memory",
     ["--offload-optimizer-pipeline-write has no effect without --offload-optimizer-device nvme",
      "--offload-param-buffer-size has no effect without --offload-param-device nvme"]),
    ("--aio-queue-depth 32 --cpu-optimizer",
     ["--aio-queue-depth has no effect without --offload-optimizer-device nvme or --offload-param-device nvme"]),
    (f"--aio-queue-depth 32 {ON_DRIVE} --no-offload-optimizer-pipeline-read", []),
]


def test_settings_that_nothing_reads_are_named_with_what_is_missing() -> None:
    for argv, sentences in UNREAD:
        notes = parse_args(["--zero-stage", "3", *argv.split()]).notes
        assert sorted(notes) == sorted(f" note: {sentence}" for sentence in sentences)


def test_an_engine_names_the_keys_that_nothing_reads_once(capsys: pytest.CaptureFixture[str]) -> None:
    initialized(offload_optimizer={"nvme_path": "/x", "buffer_count": 5}, offload_param={"max_in_cpu": 0})
    there = "zero_optimization.offload_"
    assert [line for line in capsys.readouterr().out.splitlines() if "no effect" in line] == [
        f"config: {there}optimizer.nvme_path and {there}optimizer.buffer_count have no effect without "
        f"{there}optimizer.device nvme",
        f"config: {there}param.max_in_cpu has no effect without {there}param.device nvme"]


def test_defaults_that_are_written_out_are_no_news(capsys: pytest.CaptureFixture[str]) -> None:
    """The sections of DeepSpeed's guide, whose switches are off."""
    guide = {"device": "cpu", "nvme_path": None, "pin_memory": False, "buffer_count": 4, "fast_init": False}
    for device in ("cpu", "none"):
        initialized(offload_optimizer={**guide, "device": device, "pipeline_read": False, "pipeline_write": False},
                    offload_param={"device": device, "nvme_path": None, "buffer_count": 5, "buffer_size": 1e8,
                                   "max_in_cpu": 1e9, "pin_memory": False})
    said = [line for line in capsys.readouterr().out.splitlines() if "no effect" in line]
    assert len(said) == 2 and all(line.endswith("the device is the host") for line in said)
