"""Bytes between the device and its host in a step: those of the formula, none twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mpu import groups
from tests.distributed import run_ranks
from tests.late_copy_streams import late_copy_streams
from tests.megatron.zero.offload.test_equal import batches, train
from tests.megatron.zero.offload.test_ferry import homes
from tests.megatron.zero.run import configure_gpt2, gpt2_engine
from tests.wires import accelerator_side

STATE = 3 * 4
"""Bytes of the masters and moments of a parameter."""


def moved(rank: int, world: int, folder: Path, cell: dict[str, Any]) -> tuple[int, int, dict[str, int]]:
    """Bytes up and down in one step, and this rank's parameters whose state is elsewhere, by bucket."""
    with accelerator_side(), late_copy_streams() as ferry:
        engine = gpt2_engine(configure_gpt2(**cell), groups.build(1))
        rows = batches(3)
        train(engine, rows[:2])
        before = ferry.to_device.copied, ferry.to_host.copied
        train(engine, rows[2:])  # no step at which weights at work are compared with masters (1, 2, 4, ...)
        after = ferry.to_device.copied, ferry.to_host.copied
        sizes = {bucket.name: bucket.layout.shard_numel for bucket in engine.buckets
                 if bucket.storage is engine.engine_storage.optimizer}
        engine.detach()
    return after[0] - before[0], after[1] - before[1], sizes


@pytest.mark.few(16)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", ["host", "device", "nvme", "host, a share"])
def test_of_state_that_is_elsewhere(tmp_path: Path, world: int, stage: int, accumulation: int, name: str) -> None:
    """In 16 bits: gradients down and weights up where the host updates, the state both ways where the device does.
    Sums over micro-batches are fp32 and come up for the second one (at stage 1 they are taken where they are)."""
    home = homes(tmp_path, stage, 0)[name] | {"offload_param_device": "none"}
    cell = {"zero_stage": stage, "bf16": True, "batch_size": 4 // world // accumulation, "global_batch_size": 4, **home}
    for up, down, sizes in run_ranks(moved, world, tmp_path, cell):
        everything = sum(sizes.values())
        if name == "device":
            assert (up, down) == (STATE * everything, STATE * everything)
        elif accumulation == 1:
            assert (up, down) == (2 * everything, 2 * everything)
        elif stage == 1:
            assert (up, down) == (2 * everything, 4 * everything)
        else:
            assert (up, down) == ((4 + 2) * everything, 2 * 4 * everything)


@pytest.mark.parametrize("world", [1, 2])
def test_of_weights_on_the_host(tmp_path: Path, world: int) -> None:
    """Up for the forward and again for the backward, but for the root and the last block, which stay; and down never:
    the host has made them. Where the device makes them, once."""
    for name in ("host, params", "device, params"):
        cell = {"zero_stage": 3, "bf16": True, "batch_size": 4 // world, "global_batch_size": 4,
                "num_layers": 4, "stage3_max_reuse_distance": 0, **homes(tmp_path, 3, 0)[name]}
        for up, down, sizes in run_ranks(moved, world, tmp_path, cell):
            everything = sum(sizes.values())
            brought = 2 * (2 * everything - sizes["root"] - sizes["blocks.3"])
            if name.startswith("host"):
                assert (up, down) == (brought, 2 * everything)
            else:
                assert (up, down) == (brought + STATE * everything, (STATE + 2) * everything)
