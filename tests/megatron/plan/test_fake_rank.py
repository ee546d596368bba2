"""The planner against the real engine at sizes and numbers of ranks that no machine of a developer holds
(docs/decisions/007-planner-by-arithmetic.md): rank 0 of many, alone, on tensors that have a shape and no memory.

torch's fake process group answers every collective at once, and its fake tensors carry no numbers, so what the program
reads back on the host is filled in here (a scalar, the gradient norm, an agreement). What is alive is counted by
LiveBytes as in a real run. All of it is on the CPU: a fake "cuda" tensor needs a torch that is built for CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import megatron.distributed.consistency
import megatron.zero.api.engine
import mpu.weight_init
from megatron.config.tree import Config, build_config
from megatron.plan.footprint import PlannedRun
from megatron.plan.memory import all_phases
from megatron.train.build import engine as build_engine, model as build_model
from mpu import groups
from mpu.device import HostScalars
from mpu.random import get_rng_tracker
from tests.megatron.live_bytes import LiveBytes

CPU = torch.device("cpu")


class Scalars(TorchDispatchMode):
    """Whoever reads a scalar gets 1; whoever compares two tensors finds them equal."""

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].dtype.is_floating_point else 1
        if func is torch.ops.aten.equal.default:
            return True
        return func(*args, **(kwargs or {}))


def _place(tensor: torch.Tensor) -> int:
    """Fake tensors have no address, and all of them would be at 0."""
    return tensor.untyped_storage()._cdata + tensor.storage_offset() * tensor.element_size()


@contextmanager
def rank_0_of(world: int) -> Iterator[LiveBytes]:
    """No memory is taken inside, and rank 0 of `world` ranks finds the others in order."""
    with ExitStack() as stack:
        stack.callback(get_rng_tracker().set_states, get_rng_tracker().get_states())  # those made inside are fake
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(HostScalars, "values", property(lambda scalars: [1.0] * 4 + [0.0]))
        patch.setattr(torch.UntypedStorage, "data_ptr", lambda storage: storage._cdata)
        patch.setattr(torch.Tensor, "data_ptr", _place)
        patch.setattr(mpu.weight_init, "fill_normal_rows", lambda out, *places: None)
        patch.setattr(megatron.zero.api.engine, "broadcast_json", lambda value, group: value)
        patch.setattr(megatron.distributed.consistency, "all_reduce_scalars",
                      lambda numbers, group, op: list(numbers))
        if world > 1:
            dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
            stack.callback(dist.destroy_process_group)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(Scalars())
        yield stack.enter_context(LiveBytes())


def fake_peaks(config: Config, world: int) -> tuple[int, int]:
    """(bytes at the peak of building, at the peak of two steps) of rank 0."""
    with rank_0_of(world) as live:
        grid = groups.build(config.parallel.model_parallel_size)
        engine = build_engine(config, build_model(config, grid), grid, CPU).core
        building = live.peak
        live.reset_peak()
        tokens = torch.zeros(config.train.batch_size, config.seq_length, dtype=torch.int64)
        for _ in range(2):
            report = None
            while report is None:
                engine.backward(engine(tokens, tokens.clone(), grad_scale=engine.backward_scale))
                report = engine.step()
        engine.wait_for_param_gathers()
        return building, live.peak


SHAPE: dict[str, Any] = {"vocab_size": 50257, "attention_dropout": 0.0, "hidden_dropout": 0.0, "bf16": True}
SMALL = {**SHAPE, "num_layers": 6, "hidden_size": 768, "num_attention_heads": 12, "batch_size": 4}
LARGE = {**SHAPE, "num_layers": 48, "hidden_size": 1600, "num_attention_heads": 25, "batch_size": 8}
KEPT = {"checkpoint_activations": True}

TOLERANCE = 0.03


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("world, values", [
    (8, {**SMALL, "zero_stage": 2}),
    (64, {**SMALL, **KEPT, "zero_stage": 3, "num_layers": 3}),
    (8, {**SMALL, **KEPT, "model_parallel_size": 4, "partition_activations": True, "zero_stage": 1, "batch_size": 32}),
    (8, {**LARGE, **KEPT, "zero_stage": 2}),
], ids=str)
def test_the_plan_is_what_the_engine_does_on_fake_tensors(world: int, values: dict[str, Any]) -> None:
    config = build_config(values)
    building, stepping = fake_peaks(config, world)
    at_building, *others = all_phases(PlannedRun(config, world, "cpu"))
    assert at_building.total == pytest.approx(building, rel=TOLERANCE)
    assert max(moment.total for moment in others) == pytest.approx(stepping, rel=TOLERANCE)
