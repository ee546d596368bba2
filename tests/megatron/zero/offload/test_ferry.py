"""On an accelerator: whatever is on the host, training is the same, bit for bit, however late copies are made."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch

from megatron.zero.offload import storage
from megatron.zero.offload.copy_streams import GradOffloader, _CudaCopyEvent, _CudaCopyStream
from megatron.zero.offload.storage import HostShard, HostStorage, StreamingHostStorage
from megatron.zero.offload.nvme import NvmeStorage
from mpu import groups
from tests.distributed import run_ranks
from tests.late_copy_streams import LateCopyStream, late_copy_streams
from tests.megatron.zero.offload.test_equal import PRECISIONS, ROWS, alike, batches, everywhere, on_params, outcome
from tests.megatron.zero.run import configure_gpt2, gpt2_engine
from tests.wires import accelerator_side
from tests.without_waits import Place, waits, without


def homes(folder: Path, stage: int, number: int) -> dict[str, dict[str, Any]]:
    few = {"sub_group_size": 3072}
    host, device = ({"offload_optimizer_device": "cpu", "offload_update": side, **few} for side in ("host", "device"))
    share = {"offload_optimizer_ratio": 0.3 + 0.1 * (number % 5)}
    found = {"host": host, "device": device, "nvme": everywhere(folder, stage), "host, a share": {**host, **share},
             "device, a share": {**device, **share}, "nvme, a share": {**everywhere(folder, stage), **share}}
    if stage == 3:
        params = {"offload_param_device": "cpu"}
        found |= {"params": params, "host, a share, params": {**host, **share, **params},
                  "device, a share, params": {**device, **share, **params},
                  "host, params": {**host, **params}, "device, params": {**device, **params},
                  "host, params on nvme": {**host, **on_params(folder, 3000 * (number % 4 + 1))},
                  "device, params on nvme": {**device, **on_params(folder, 5000)}}
    return found


HOMES = {"host": HostStorage, "device": StreamingHostStorage, "nvme": NvmeStorage}


def cells(world: int) -> Iterator[dict[str, Any]]:
    for number, (stage, precision) in enumerate(product((1, 2, 3), PRECISIONS)):
        tp, accumulation = 1 + number % 2 * (world - 1), 1 + number % 3 % 2
        yield {"zero_stage": stage, **PRECISIONS[precision], "model_parallel_size": tp,
               "checkpoint_activations": number % 2 == 1, "batch_size": ROWS // (world // tp) // accumulation,
               "global_batch_size": ROWS}


def differences(rank: int, world: int, folder: Path, numbers: Sequence[int], steps: int) -> list[str]:
    wrong = []
    for number, cell in [found for found in enumerate(cells(world)) if found[0] in numbers]:
        grid, rows = groups.build(cell["model_parallel_size"]), batches(steps)
        with accelerator_side():
            expected = outcome(gpt2_engine(configure_gpt2(**cell), grid), rows)
            assert cell.get("fp16") is None or expected[1] > 0, "no step was skipped"
            for name, home in homes(folder, cell["zero_stage"], number).items():
                with late_copy_streams():
                    engine = gpt2_engine(configure_gpt2(**cell, **home), grid)
                    assert name == "params" or isinstance(engine.engine_storage.optimizer,
                                                          HOMES[name.partition(",")[0]])
                    if "share" in name:
                        assert len({bucket.storage for bucket in engine.buckets}) == 2, name
                    if not alike(outcome(engine, rows), expected):
                        wrong.append(f"{name}: {cell}")
                    engine.detach()
    return wrong


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_home_beside_an_accelerator_changes_no_bit(tmp_path: Path, world: int) -> None:
    """Each stage and each precision once."""
    check(tmp_path, world, [0, 5, 7], steps=6)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_nor_in_any_cell(tmp_path: Path, world: int) -> None:
    check(tmp_path, world, range(9), steps=20)


def check(folder: Path, world: int, numbers: Sequence[int], steps: int) -> None:
    assert run_ranks(differences, world, folder, numbers, steps, timeout=900) == [[]] * world
    assert not list(folder.iterdir()), "something was left behind"


# -- every wait counts ---------------------------------------------------------------------------------------------

MODULES = ["bucket", "flat_buffers", "update", "offload.copy_streams", "offload.storage"]


ONLY_MEMORY = {"FlatBucket.prefetch", "_CudaCopyStream.copy", "GradOffloader.cancel_prefetch",
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
            found.append(life(cell | homes(folder, stage, 0)[name]))
    return [*found, life(cell | homes(folder, stage, 0)["host"] | {"delayed_param_update": True})]


def life(cell: dict[str, Any]) -> list[Any]:
    engine = gpt2_engine(configure_gpt2(**cell, num_layers=4), groups.build(1))
    found = outcome(engine, batches(4)[:, :2])
    engine.detach()
    return found


def mutated(rank: int, world: int, folder: Path, place: Place) -> str:
    with accelerator_side(), late_copy_streams():
        wanted = lives(folder)
        try:
            with without(place):
                return "" if alike(lives(folder), wanted) else "other numbers"
        except Exception as error:
            return f"{type(error).__name__}: {error}"


@pytest.mark.few(3)
@pytest.mark.parametrize("place", [*places()], ids=str)
def test_no_wait_can_be_left_out(place: Place, tmp_path: Path) -> None:
    assert run_ranks(mutated, 1, tmp_path, place) != [""], f"{place} without its wait"


def disordered(rank: int, world: int, folder: Path, what: str) -> str:
    with accelerator_side(), late_copy_streams():
        wanted = lives(folder)
        try:
            with ORDERS[what]():
                return "" if alike(lives(folder), wanted) else "other numbers"
        except Exception as error:
            return f"{type(error).__name__}: {error}"


ORDERS = {
    "a set comes before it has gone": lambda: patch.object(
        storage._DeviceChunkBuffers, "copies_to_host", property(lambda self: (), lambda self, value: None),
        create=True),
    "a part leaves before it came": lambda: patch.object(HostShard, "_overlapping_copies", lambda *args: []),
    "a sum goes up before it came": lambda: patch.object(
        GradOffloader, "_last_copy", property(lambda self: None, lambda self, value: None), create=True)
}
"""Copies that begin too soon."""


@pytest.mark.few(1)
@pytest.mark.parametrize("what", ORDERS)
def test_no_order_can_be_left_out(what: str, tmp_path: Path) -> None:
    assert run_ranks(disordered, 1, tmp_path, what) != [""], what


def gathered_too_soon(rank: int, world: int, folder: Path) -> str:
    cell = {"zero_stage": 3, "batch_size": 1, "global_batch_size": 2, **homes(folder, 3, 0)["params"]}
    with accelerator_side(), late_copy_streams(), patch.object(LateCopyStream, "collectives_after_copies",
                                                               lambda lane: nullcontext()):
        try:
            outcome(gpt2_engine(configure_gpt2(**cell), groups.build(1)), batches(2)[:, :2])
        except Exception as error:
            return type(error).__name__
    return ""


def test_a_gather_comes_after_what_it_sends(tmp_path: Path) -> None:
    assert set(run_ranks(gathered_too_soon, 2, tmp_path)) == {"NumericsError"}


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
