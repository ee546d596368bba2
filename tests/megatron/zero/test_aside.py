"""What is set aside between two steps comes back bit for bit, and is not used in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from enum import Enum
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megatron import zero
from megatron.errors import ConfigError
from megatron.zero import offload_states
from megatron.zero.api.engine import Engine
from megatron.zero.api.init import GatheredParameters
from megatron.zero.engine import ZeroEngine
from megatron.zero.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from mpu import groups
from tests.distributed import on_ranks
from tests.late_copy_streams import late_copy_streams
from tests.megatron.zero.offload.test_equal import PRECISIONS, alike, batches, everywhere, on_params, outcome, train
from tests.megatron.zero.models import WIDTH, Net
from tests.megatron.zero.run import configure, configure_gpt2, engine_around, gpt2_engine
from tests.wires import accelerator_side
from tests.without_waits import Place, waits, without

STATES = [one.value for one in zero.OffloadStateTypeEnum]


def on_device(engine: ZeroEngine) -> int:
    """Bytes of all storages that the engine has, its homes on the host left out."""
    found = {}
    for bucket in (*engine.buckets, *engine.frozen_buckets):
        states = [shard.view(kind) for shard in (bucket.master_state, bucket.param_shard) if shard.is_on_device
                  for kind in shard.kinds]
        for tensor in (bucket.gathered_params, *states):
            storage = tensor.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return sum(found.values())


# -- training ------------------------------------------------------------------------------------------------------


def cells(folder: Path) -> list[dict[str, Any]]:
    host = {"offload_optimizer_device": "cpu", "offload_update": "host", "sub_group_size": 3072}
    return [{"zero_stage": 0, **PRECISIONS["bf16"]}, {"zero_stage": 1, **PRECISIONS["fp16"], "model_parallel_size": 2},
            {"zero_stage": 2, **host, "checkpoint_activations": True}, {"zero_stage": 3, **PRECISIONS["bf16"]},
            {"zero_stage": 3, **PRECISIONS["fp16"], **everywhere(folder, 3), "model_parallel_size": 2},
            {"zero_stage": 3, **on_params(folder, 5000)}]


@on_ranks(2, timeout=300)
def test_training_goes_on_bit_for_bit(rank: int, world: int, tmp_path: Path) -> None:
    with accelerator_side(), late_copy_streams() as ferry, patch("megatron.zero.offload_states.create_copy_streams",
                                                                 lambda device: ferry):
        for cell in cells(tmp_path):
            grid, rows = groups.build(cell.get("model_parallel_size", 1)), batches(6)
            plain = {key: value for key, value in cell.items() if "offload" not in key}
            expected = outcome(gpt2_engine(configure_gpt2(**plain, batch_size=1, global_batch_size=4), grid), rows)
            engine = gpt2_engine(configure_gpt2(**cell, batch_size=1, global_batch_size=4), grid)
            losses = train(engine, rows[:3])
            for states in (STATES, STATES[:1], STATES[1:3]):
                assert engine.offload_states(states, pinned=True, non_blocking=False)
                assert states is not STATES or on_device(engine) == 0, cell
                engine.state_offloader.reload(non_blocking=states is not STATES)
            rest = outcome(engine, rows[3:])
            assert alike([losses + rest[0], *rest[1:]], expected), cell
            engine.detach()


NEEDED = [place for place in waits("megatron.zero.offload_states", {"wait_on_device"})
          if place.function != "StateOffloader._offload_state"]
"""The lane holds what it copies to the host, so a join there only frees memory."""


@pytest.mark.parametrize("place", [None, *NEEDED], ids=str)
def test_what_comes_back_is_waited_for(place: Place | None) -> None:
    with accelerator_side(), late_copy_streams() as ferry, patch("megatron.zero.offload_states.create_copy_streams",
                                                                 lambda device: ferry):
        made = [engine_around(Net(), configure(zero_stage=2, bf16=True), groups.build(1), 2) for _ in range(2)]
        with nullcontext() if place is None else without(place):
            try:
                made[0].offload_states(non_blocking=True)
                made[0].reload_states(non_blocking=True)
                is_right = step(made[0]) == step(made[1])
            except AssertionError:  # of the ferry
                is_right = False
        assert is_right == (place is None)


# -- uses ----------------------------------------------------------------------------------------------------------

@pytest.fixture(params=[0, 3])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with accelerator_side():
        made = engine_around(Net(), configure(zero_stage=request.param, bf16=True), groups.build(1), 2)
        step(made)
        yield made


def step(engine: Engine) -> list[float]:
    seen = []
    for micro in range(2):
        loss = engine(row(engine, micro))
        engine.backward(loss)
        engine.step()
        seen.append(loss.item())
    return seen


def row(engine: Engine, seed: int = 3) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed)).to(engine.working_dtype)


def first(engine: Engine) -> torch.nn.Parameter:
    return next(engine.module.parameters())


def lent(engine: Engine) -> None:
    with GatheredParameters([first(engine)]):
        pass


USES: dict[str, Callable[[Engine, Path], object]] = {
    "forward": lambda engine, folder: engine(row(engine)),
    "eval": lambda engine, folder: engine.eval()(row(engine)),
    "part of the model": lambda engine, folder: engine.module.first(row(engine)),
    "a parameter": lambda engine, folder: first(engine) + 1,
    "state_dict": lambda engine, folder: engine.module.state_dict(),
    "step": lambda engine, folder: engine.step(),
    "save": lambda engine, folder: engine.save_checkpoint(folder / "new"),
    "load": lambda engine, folder: engine.load_checkpoint(folder / "old"),
    "load of weights": lambda engine, folder: engine.load_module_state_dict({}),
    "16-bit model": lambda engine, folder: engine.save_16bit_model(folder, "model.safetensors"),
    "loan": lambda engine, folder: lent(engine),
    "master": lambda engine, folder: safe_get_full_fp32_param(first(engine)),
    "moment": lambda engine, folder: safe_get_full_optimizer_state(first(engine), "exp_avg"),
}


def test_no_use_in_between(engine: Engine, tmp_path: Path) -> None:
    engine.config = configure(zero_stage=engine.zero_optimization_stage(), bf16=True,
                              stage3_gather_16bit_weights_on_model_save=True)
    engine.save_checkpoint(tmp_path / "old")
    loss = engine(row(engine))
    engine.offload_states()
    for name, use in {**USES, "backward": lambda engine, folder: engine.backward(loss)}.items():
        with pytest.raises(ConfigError, match=r"engine\.reload_states\(\)"):
            use(engine, tmp_path)
            pytest.fail(f"{name} was not refused")
    engine.reload_states()
    engine.train()
    for name in ("forward", "eval", "save", "load", "16-bit model", "loan", "master", "moment"):
        USES[name](engine, tmp_path)


def test_within_a_step_it_is_refused(engine: Engine) -> None:
    engine.backward(engine(row(engine)))
    for go_on in (engine.step, engine.zero_grad):
        with pytest.raises(ConfigError, match="within a step"):
            engine.offload_states()
        go_on()
    with pytest.raises(ConfigError, match="inside zero.GatheredParameters"), GatheredParameters([first(engine)]):
        engine.offload_states()


def test_without_the_optimizer_the_model_still_answers(engine: Engine) -> None:
    expected = engine(row(engine)).item()
    engine.offload_states(["optim_states", "hp_params"])
    assert engine(row(engine)).item() == expected
    with pytest.raises(ConfigError, match="hp_params, optim_states aside"):
        engine.step()
    engine.offload_states(["lp_params"])
    assert on_device(engine.core) == 0
    engine.reload_states()
    assert engine(row(engine)).item() == expected


def test_what_no_room_is_found_for_stays(engine: Engine) -> None:
    before, expected, calls = on_device(engine.core), engine(row(engine)).item(), list[int]()
    allot = offload_states.page_aligned_zeros

    def little(nbytes: int, *arguments: Any, **named: Any) -> Tensor:
        calls.append(nbytes)
        if len(calls) == 5:
            raise MemoryError("can't allocate memory")
        return allot(nbytes, *arguments, **named)

    with patch.object(offload_states, "page_aligned_zeros", little), pytest.raises(MemoryError):
        engine.offload_states()
    assert (on_device(engine.core), engine(row(engine)).item()) == (before, expected)
    step(engine)


def test_names_may_be_theirs_or_ours_and_others_are_refused(engine: Engine) -> None:
    theirs: Any = Enum("theirs", {name: name for name in ("cpu", "nvme", "optim_states")}, type=str)  # as DeepSpeed's
    for include, device in ((["optim_states"], "cpu"), ("optim_states", torch.device("cpu")),
                            ([theirs.optim_states], theirs.cpu),
                            ({zero.OffloadStateTypeEnum.optim_states}, zero.OffloadDeviceEnum.cpu)):
        engine.offload_states(include, device, pin_memory=False)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="optim_states aside"):
            engine.step()
        engine.reload_states()
    refused: list[tuple[dict[str, Any], str]] = [
        ({"device": "nvme"}, "'nvme'.*to the host only"), ({"device": theirs.nvme}, "'nvme'"),
        ({"include": ["moments"]}, "unknown state 'moments'"), ({"include": 3}, "a list of optim_states")]
    for given, why in refused:
        with pytest.raises(ConfigError, match=why):
            engine.offload_states(**given)
    engine.offload_states(["lp_grads", "contiguous_grad_buffer"])
    step(engine)  # nothing is away
    expected = engine(row(engine)).item()
    engine.offload_states()
    engine.destroy()  # which brings the weights back
    assert engine.module(row(engine)).item() == expected


def test_on_the_host_nothing_happens_and_that_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    engine = engine_around(Net(), configure(zero_stage=2), groups.build(1), 2)
    before = on_device(engine.core)
    for _ in range(2):
        engine.offload_states()
    assert capsys.readouterr().out.count("has no effect here: the device is the host") == 1
    assert on_device(engine.core) == before
    step(engine)
    engine.reload_states()
