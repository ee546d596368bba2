"""Copies between device and host: each wait and each order counts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch

from megatron.errors import NumericsError
from megatron.zero.offload import storage
from megatron.zero.offload.copy_streams import GradOffloader, _CudaCopyEvent, _CudaCopyStream
from megatron.zero.offload.storage import HostShard
from mpu import groups
from tests.distributed import on_ranks
from tests.late_copy_streams import LateCopyStream, late_copy_streams
from tests.megatron.zero.offload.test_equal import alike, batches, outcome, storages
from tests.megatron.zero.run import configure_gpt2, gpt2_engine
from tests.wires import accelerator_side
from tests.without_waits import Place, waits, without


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
