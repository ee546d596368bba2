"""Copies between device and host: each wait and each order counts. An update that runs beside the next pass: the
numbers are those of a loop whose gradients lack one step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor

from megatron.errors import ConfigError, NumericsError
from megatron.zero import GatheredParameters
from megatron.zero.api.engine import Engine
from megatron.zero.engine import ZeroEngine
from megatron.zero.offload import storage
from megatron.zero.offload.copy_streams import GradOffloader, _CudaCopyEvent, _CudaCopyStream
from megatron.zero.offload.storage import HostShard
from megatron.zero.update import DelayedOptimizerUpdate
from megatron.zero.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from mpu import groups
from tests.distributed import on_ranks
from tests.late_copy_streams import LateCopyStream, late_copy_streams
from tests.late_wire import late_wire
from tests.megatron.zero.offload.test_equal import ROWS, alike, batches, outcome, storages, train
from tests.megatron.zero.run import built, configure_gpt2, gpt2_engine, gpt2_loss, weights
from tests.wires import accelerator_side
from tests.without_waits import Place, waits, without

MODULES = ["bucket", "flat_buffers", "update", "offload.copy_streams", "offload.storage"]


ONLY_MEMORY = {"FlatBucket.start_gather", "_CudaCopyStream.copy", "GradOffloader.cancel_prefetch",
               "StreamingHostStorage.iter_chunks"}
"""There a wait keeps memory from being freed, at the end or after an error; the late ferry holds what it copies."""


def places() -> Iterator[Place]:
    for module in MODULES:
        for place in waits(f"megatron.zero.{module}", {"wait_on_device", "wait_on_host"}):
            if place.function not in ONLY_MEMORY:
                yield place


def lives(folder: Path) -> list[Any]:
    """Everything that goes up and down: sums over micro-batches, blocks that take turns, weights on each side."""
    found = []
    both = {2: ("host", "device"), 3: ("host, params", "device, params")}
    for stage, rows in product(both, (1, 2)):
        cell = {"zero_stage": stage, "bf16": True, "batch_size": rows, "global_batch_size": 2}
        for name in both[stage]:
            found.append(life(cell | storages(folder, stage, 0, True)[name]))
    return [*found, life(cell | storages(folder, stage, 0, True)["host"] | {"delayed_param_update": True})]


def life(cell: dict[str, Any]) -> list[Any]:
    engine = gpt2_engine(configure_gpt2(**cell, num_layers=4), groups.build(1))
    found = outcome(engine, batches(4)[:, :2])
    engine.detach()
    return found


def is_seen(folder: Path, fault: AbstractContextManager[Any]) -> bool:
    with accelerator_side(), late_copy_streams():
        wanted = lives(folder)
        try:
            with fault:
                return not alike(lives(folder), wanted)
        except Exception:
            return True


@pytest.mark.few(3)
@pytest.mark.parametrize("place", [*places()], ids=str)
@on_ranks(1)
def test_no_wait_can_be_left_out(rank: int, world: int, place: Place, tmp_path: Path) -> None:
    assert is_seen(tmp_path, without(place)), f"{place} without its wait"


ORDERS = {
    "a set comes before it has gone": lambda: patch.object(
        storage._DeviceChunkBuffers, "copies_to_host", property(lambda self: (), lambda self, value: None)),
    "a part leaves before it came": lambda: patch.object(HostShard, "_overlapping_copies", lambda *args: []),
    "a sum goes up before it came": lambda: patch.object(
        GradOffloader, "_last_copy", property(lambda self: None, lambda self, value: None), create=True)
}
"""Copies that begin too soon."""


@pytest.mark.few(1)
@pytest.mark.parametrize("what", ORDERS)
@on_ranks(1)
def test_no_order_can_be_left_out(rank: int, world: int, what: str, tmp_path: Path) -> None:
    assert is_seen(tmp_path, ORDERS[what]()), what


@on_ranks(2)
def test_a_gather_comes_after_what_it_sends(rank: int, world: int, tmp_path: Path) -> None:
    cell = {"zero_stage": 3, "batch_size": 1, "global_batch_size": 2, **storages(tmp_path, 3, 0, True)["params"]}
    with accelerator_side(), late_copy_streams(), pytest.raises(NumericsError), \
            patch.object(LateCopyStream, "collectives_after_copies", lambda lane: nullcontext()):
        outcome(gpt2_engine(configure_gpt2(**cell), groups.build(1)), batches(2)[:, :2])


def test_an_event_that_is_waited_for_again_frees_no_later_source() -> None:
    """The bookkeeping of a CUDA stream, without CUDA: sources stay until a wait for their copy or a later one."""
    stream = _CudaCopyStream.__new__(_CudaCopyStream)
    events = [_CudaCopyEvent(Mock(), torch.device("cpu"), stream) for _ in range(3)]
    stream._held_sources = deque((torch.zeros(1), event) for event in events)
    events[1].wait_on_host()
    assert [event for _, event in stream._held_sources] == [events[2]]
    for event in events[:2]:
        event.wait_on_host()
    assert [event for _, event in stream._held_sources] == [events[2]]
    events[2].wait_on_host()
    assert not stream._held_sources


# ---- an update beside the next pass ----------------------------------------------------------------------------------

STEPS, RATE = 6, 2e-3
DELAYED = {"offload_optimizer_device": "cpu", "delayed_param_update": True, "sub_group_size": 3072}


def core_of(world: int, **settings: Any) -> ZeroEngine:
    return built(configure_gpt2(batch_size=ROWS // world, global_batch_size=ROWS, **settings)).core


def lagging(engine: ZeroEngine, rows: Tensor) -> list[float]:
    """The reference: every forward and backward is with the weights of one step ago, put into an exact engine."""
    dp = engine.groups.dp
    for group in engine.param_groups:
        group["lr"] = RATE
    before: dict[str, Tensor] | None = None
    losses = []
    for batch in rows:
        newest = {name: value.clone() for name, value in weights(engine).items()}
        if before is not None:
            put(engine, before)
        loss = gpt2_loss(engine, batch.chunk(dp.size)[dp.rank]).mean()
        losses.append(engine.backward(loss).item())
        if before is not None:
            put(engine, newest)
        before = newest
        engine.step()
    return losses


def put(engine: ZeroEngine, values: dict[str, Tensor]) -> None:
    """Behind the engine's back, as far as backwards are concerned: gradients stay."""
    with torch.no_grad():
        for name, parameter in engine.module.named_parameters():
            parameter.data.copy_(values[name])


@pytest.mark.parametrize("stage, optimizer", [(1, "adamw"), (2, "nadam"), (3, "adamw")])
@on_ranks(2)
def test_gradients_are_of_the_weights_one_step_before(rank: int, world: int, stage: int, optimizer: str) -> None:
    """The last step's weights are published while those of the step before are still on their way."""
    rows = batches(STEPS)
    with accelerator_side(), late_copy_streams(), late_wire():
        exact = core_of(world, zero_stage=1, optimizer=optimizer)
        wanted = lagging(exact, rows)
        engine = core_of(world, zero_stage=stage, optimizer=optimizer, **DELAYED)
        assert isinstance(engine.update, DelayedOptimizerUpdate)
        assert train(engine, rows)[::2] == wanted
        engine.finish_step()
        assert all(map(torch.equal, weights(engine).values(), weights(exact).values()))
        engine.detach()


@on_ranks(2)
def test_whoever_needs_the_weights_gets_those_of_the_last_step(rank: int, world: int) -> None:
    rows = batches(8)
    with accelerator_side(), late_copy_streams():
        for stage in (2, 3):
            engine = core_of(world, zero_stage=stage, offload_param_device="cpu" if stage == 3 else "none", **DELAYED)
            train(engine, rows[:2])
            assert engine.update.running is not None
            weight = engine.module.wpe.weight
            newest = safe_get_full_fp32_param(weight)
            with GatheredParameters(weight):
                assert torch.equal(newest, weight.float()), "those of the last step are lent"
            train(engine, rows[2:4])
            with GatheredParameters(weight, modifier_rank=0):
                weight.data.fill_(0.5)
            train(engine, rows[4:5])
            assert bool((safe_get_full_fp32_param(weight) - 0.5).abs().max() <= 0.01), "an edit"
            safe_set_full_fp32_param(weight, torch.full_like(newest, 0.25))
            engine.finish_step()
            with GatheredParameters(weight):
                assert bool((weight == 0.25).all()), "a setter"
            train(engine, rows[5:6])
            loss = gpt2_loss(engine, rows[6].chunk(world)[rank]).mean()
            engine.finish_step()  # the weights change between a forward and its backward
            with pytest.raises(ConfigError):
                engine.backward(loss)
            engine.detach()


@on_ranks(2)
def test_whoever_looks_at_the_weights_sees_those_of_the_last_step(rank: int, world: int) -> None:
    rows = batches(5)
    for stage in (1, 3):
        with accelerator_side(), late_copy_streams():
            one, other = engines = [engine_of(world, zero_stage=stage, stage3_gather_16bit_weights_on_model_save=True)
                                    for _ in range(2)]

            def step_of_both(number: int) -> None:
                for engine in engines:
                    engine.train()
                    train(engine.core, rows[number : number + 1])
                one.finish_step()

            def losses() -> list[Tensor]:
                return [gpt2_loss(engine.core, rows[4].chunk(world)[rank]).mean() for engine in engines]

            for engine in engines:  # whose updates run beside the next step
                train(engine.core, rows[:1])
            step_of_both(1)
            with torch.no_grad():
                assert torch.equal(*losses()), "a forward without gradients"
            step_of_both(2)
            for engine in engines:
                engine.eval()
            assert torch.equal(*losses()), "a forward in eval mode"
            step_of_both(3)
            states = [engine.module_state_dict() for engine in (one, other)]
            assert all(map(torch.equal, states[0].values(), states[1].values())) and (rank > 0 or states[0])
            for engine in engines:
                engine.destroy()


@on_ranks(2)
def test_a_resumed_run_goes_on_as_the_saved_one(rank: int, world: int, tmp_path: Path) -> None:
    rows = batches(6)
    with accelerator_side(), late_copy_streams():
        one, other = (engine_of(world) for _ in range(2))
        train(one.core, rows[:3])
        one.save_checkpoint(tmp_path, tag="three")
        other.load_checkpoint(tmp_path, tag="three")
        assert train(one.core, rows[3:]) == train(other.core, rows[3:])
        for engine in (one, other):
            engine.core.finish_step()
        assert all(map(torch.equal, weights(one.core).values(), weights(other.core).values()))
        for engine in (one, other):
            engine.destroy()


def engine_of(world: int, **settings: Any) -> Engine:
    return built(configure_gpt2(**{"zero_stage": 2, "bf16": True, "batch_size": ROWS // world,
                                   "global_batch_size": ROWS, **DELAYED, **settings}))


@on_ranks(1)
def test_an_update_that_fails_is_told(rank: int, world: int) -> None:
    rows = batches(3)
    with accelerator_side():
        engine = core_of(world, zero_stage=1, **DELAYED)
        train(engine, rows[:1])
        engine.finish_step()
        with patch.object(engine.rule, "step", side_effect=MemoryError("no room")):
            train(engine, rows[1:2])
            wait([engine.update.running])
        with pytest.raises(MemoryError, match="no room"):
            train(engine, rows[2:])
        with pytest.raises(ConfigError, match="ended half way"):
            train(engine, rows[2:])
