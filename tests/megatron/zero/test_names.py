"""DeepSpeed's names that training scripts use work, or are refused with what to do."""

from __future__ import annotations

import importlib
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron import recompute, zero
from megatron.distributed.process_group import read_environment
from megatron.errors import ConfigError
from megatron.package import __version__
from megatron.zero.api.compat_names import METHODS, NAMES, REFUSED
from megatron.zero.api.engine import Engine
from mpu.random import get_rng_tracker
from tests.distributed import run_ranks
from tests.megatron.zero import small
from tests.megatron.zero.small import WIDTH, Model


def small_model() -> nn.Module:
    """One parameter is frozen, and one attribute is the model's own."""
    model = Model()
    model.hidden_width = WIDTH  # type: ignore[assignment]
    model.head.bias.requires_grad_(False)
    return model


def made(stage: int = 0, **changes: Any) -> Engine:
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2}}
    return small.engine_of(stage, small_model(), keys={"gradient_clipping": 0.5, "optimizer": optimizer, **changes})


def step(engine: Engine, count: int = 1) -> None:
    for index in range(count):
        engine.backward(engine(torch.full((2, WIDTH), 1.0 + index)))
        engine.step()


@pytest.fixture(scope="module")
def engine() -> Engine:
    built = made(steps_per_print=100)
    step(built)
    return built


def test_every_name_is_answered_hides_nothing_and_is_on_the_page(engine: Engine) -> None:
    own = {name for name in dir(Engine) if not name.startswith("_")}
    assert not (own | vars(engine).keys()) & NAMES
    for name in NAMES.difference(REFUSED, ["cuda", "half", "bfloat16"]):
        value = getattr(engine, name)
        if name in METHODS:
            value()
    for name in REFUSED:
        assert not hasattr(engine, name)
        with pytest.raises(ConfigError, match=rf"^engine.{name} is not supported: .* before zero.initialize$"):
            getattr(engine, name)
    page = (Path(__file__).resolve().parents[3] / "docs" / "deepspeed.md").read_text()
    assert [name for name in {*NAMES, *own} if f"`{name}`" not in page] == []


def test_answers_are_those_of_the_configuration(engine: Any) -> None:
    assert (engine.global_rank, engine.local_rank, engine.world_size, engine.dp_world_size, engine.mp_world_size) == (
        0, 0, 1, 1, 1)
    assert engine.gradient_clipping() == 0.5 and engine.steps_per_print() == 100
    assert not engine.fp16_enabled() and not engine.bfloat16_enabled() and not engine.dynamic_loss_scale()
    assert not engine.zero_optimization() and engine.zero_offload_param() is None
    assert engine.optimizer_name() == "AdamW" and engine.optimizer_params()["lr"] == 1e-2
    assert engine.get_batch_info() == (2, 2, 1)
    half: Any = small.engine_of(2, keys={"fp16": {"enabled": True, "initial_scale_power": 4}},
                                offload_optimizer={"device": "cpu"})
    assert half.fp16_enabled() and half.dynamic_loss_scale() and half.initial_dynamic_scale() == 16
    assert half.zero_optimization() and half.zero_optimization_partition_gradients()
    assert half.zero_offload_optimizer() == "cpu" and half.zero_cpu_offload() and half.zero_offload_param() is None
    assert half.get_data_types()[0] == torch.half


def test_other_names_are_the_models_or_an_error_with_the_nearest(engine: Any) -> None:
    assert engine.hidden_width == WIDTH and engine.head is engine.module.head and engine.training
    engine.eval()
    assert not engine.module.training and not engine.training
    engine.train()
    with pytest.raises(AttributeError, match="neither the engine nor its Model has 'local_rnak'; did you mean local_"):
        engine.local_rnak
    names = [f"module.{name}" for name, _ in small_model().named_parameters()]
    assert [name for name, _ in engine.named_parameters()] == names
    assert engine.to("cpu") is engine and engine.to(device="cpu", dtype=torch.float32) is engine.float()
    for move in (lambda: engine.to("meta"), lambda: engine.to(torch.bfloat16), engine.cuda):
        with pytest.raises(ConfigError, match="the engine's parameters are in place, on cpu in torch.float32"):
            move()


def test_batch_sizes_change_between_steps_and_samples_are_counted(tmp_path: Path) -> None:
    engine, configured = made(), made(gradient_accumulation_steps=3)
    step(engine)
    engine.set_train_batch_size(6)
    assert engine.get_batch_info() == (6, 2, 3)
    step(engine, 2)
    for call in (engine.set_train_batch_size, engine.set_train_micro_batch_size):
        with pytest.raises(ConfigError, match="a step is under way"):
            call(2)
    step(engine)
    assert (engine.global_steps, engine.global_samples) == (2, 8)
    engine.backward(engine(torch.ones(2, WIDTH)))
    engine.zero_grad()  # no step is under way any longer
    engine.set_train_micro_batch_size(4)
    assert engine.train_batch_size() == 12 and engine.train_micro_batch_size_per_gpu() == 4
    with pytest.raises(ConfigError, match="7 is not a multiple of micro-batch 4 x data parallel 1 = 4"):
        engine.set_train_batch_size(7)
    engine.save_checkpoint(tmp_path)
    other = made()
    other.load_checkpoint(tmp_path)
    assert other.global_samples == 8
    changed = made()
    changed.set_train_batch_size(6)
    for each in (changed, configured):
        step(each, 6)
    assert all(map(torch.equal, changed.parameters(), configured.parameters()))
    with pytest.raises(ConfigError, match="need an fp32 sum"):
        made(bf16={"enabled": True}).set_train_batch_size(4)
    made(bf16={"enabled": True}, gradient_accumulation_steps=2).set_train_batch_size(8)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch's own
@pytest.mark.parametrize("stage", (0, 3))
def test_a_compiled_engine_computes_the_same(stage: int) -> None:
    plain, compiled = made(stage), made(stage)
    assert not compiled.is_compiled
    compiled.compile(backend="eager")
    assert compiled.is_compiled
    for engine in (plain, compiled):
        step(engine, 2)
    with zero.GatheredParameters([*plain.parameters(), *compiled.parameters()]):
        assert all(map(torch.equal, plain.parameters(), compiled.parameters()))


# ---- the package ---------------------------------------------------------------------------------------------------


def test_the_package_has_deepspeeds_names() -> None:
    deepspeed: Any = zero
    assert deepspeed.zero.Init is zero.Init and deepspeed.DeepSpeedEngine is Engine
    assert deepspeed.checkpointing.checkpoint is recompute.checkpoint
    assert deepspeed.ops.adam.DeepSpeedCPUAdam is importlib.import_module("megatron.zero.ops.adam").DeepSpeedCPUAdam
    assert deepspeed.comm.is_available() and deepspeed.get_accelerator().device_name() in ("cpu", "cuda")
    assert deepspeed.accelerator.get_accelerator is deepspeed.get_accelerator
    assert importlib.import_module("megatron.zero.accelerator").get_accelerator is deepspeed.get_accelerator
    comm: Any = importlib.import_module("megatron.zero.comm")
    assert comm is deepspeed.comm and comm.all_reduce is torch.distributed.all_reduce
    assert comm.init_distributed is zero.init_distributed
    for module, name, told in ((deepspeed, "init_inference", "zero.init_inference is not supported: "),
                               (comm, "all_redcue", "all_redcue")):
        with pytest.raises(AttributeError, match=told):
            getattr(module, name)
    assert deepspeed.__version__ == __version__


def meets(rank: int, world: int, launcher: dict[str, str], given: dict[str, Any]) -> tuple[Any, ...]:
    """What the rank finds after `init_distributed`: its place in torch and in the environment, or the error."""
    for name in PLACE:
        os.environ.pop(name, None)
    os.environ.update(launcher)
    before = read_environment()
    try:
        zero.init_distributed(dist_backend="gloo", timeout=timedelta(seconds=30), distributed_port=12345, verbose=False,
                              **given)
        zero.init_distributed()
    except ConfigError as error:
        return (str(error),)
    assert given or read_environment() == before
    return (torch.distributed.get_rank(), torch.distributed.get_world_size(), torch.distributed.get_backend(),
            *(os.environ.get(name) for name in PLACE))


PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


@pytest.mark.parametrize("launcher", [
    {}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, {"RANK": "0", "WORLD_SIZE": "1"}], ids="-".join)
def test_one_rank_has_a_process_group_too_and_the_environment_says_its_place(launcher: dict[str, str]) -> None:
    assert run_ranks(meets, 1, launcher, {}, init=False) == [(0, 1, "gloo", "0", "0", "1", "1")]


def test_a_place_that_is_not_the_launchers_is_refused() -> None:
    (said,), = run_ranks(meets, 1, {"RANK": "0", "WORLD_SIZE": "1"}, {"rank": 1, "world_size": 2}, init=False)
    assert "rank is 1, but the launcher set RANK to 0" in said


# ---- recomputation ------------------------------------------------------------------------------------------------


class Solo:
    def get_model_parallel_group(self) -> None:
        return None


def test_recomputation_has_deepspeeds_names() -> None:
    try:
        zero.checkpointing.configure(mpu_=Solo(), partition_activations=False)
        zero.checkpointing.configure(Solo())
        zero.checkpointing.set_num_layers(2)
        zero.checkpointing.partition_activations_in_checkpoint(True)
        drawn, tracker = [], zero.checkpointing.get_cuda_rng_tracker()
        assert tracker is get_rng_tracker()
        for seed in (zero.checkpointing.model_parallel_cuda_manual_seed, 7), (
                zero.checkpointing.model_parallel_reconfigure_tp_seed, 7 + 2718):
            seed[0](seed[1])
            with tracker.fork():
                drawn.append(torch.rand(3))
        assert torch.equal(*drawn)
        x = torch.ones(3, requires_grad=True)
        zero.checkpointing.non_reentrant_checkpoint(torch.sin, x).sum().backward()
        assert torch.equal(x.grad, torch.cos(torch.ones(3)))  # type: ignore[arg-type]
    finally:
        zero.checkpointing.configure()
        get_rng_tracker().reset()
