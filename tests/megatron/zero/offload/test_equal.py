"""Wherever the optimizer's state is stored, training is the same, bit for bit: losses, norms, weights and states; on an
accelerator also if copies between device and host are as late as allowed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.zero.engine import ZeroEngine
from megatron.zero.offload.nvme import NvmeStorage
from megatron.zero.offload.storage import DeviceStorage, HostStorage, StreamingHostStorage
from mpu import groups
from tests.distributed import run_ranks
from tests.late_copy_streams import late_copy_streams
from tests.megatron.zero.offload.swap_files import open_swap_files
from tests.megatron.zero.run import configure_gpt2, gpt2_engine, gpt2_loss, kept, work
from tests.wires import accelerator_side

ROWS, LENGTH, VOCABULARY = 4, 8, 61

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {}, "bf16": {"bf16": True},
    "fp16": {"fp16": True, "initial_loss_scale": 2.0 ** 24, "loss_scale_window": 5}}  # overflows, shrinks and grows

WAYS: tuple[dict[str, Any], ...] = (
    {}, {"offload_optimizer_pipeline_read": False}, {"offload_optimizer_pipeline_write": False},
    {"aio_block_size": 4096, "aio_intra_op_parallelism": 2})


def on_nvme(kind: str, folder: Path) -> dict[str, Any]:
    return {f"offload_{kind}_device": "nvme", f"offload_{kind}_nvme_path": str(folder)}


def everywhere(folder: Path, stage: int) -> dict[str, Any]:
    """All that can be on NVMe, in parts of some thousand numbers: a block has 12,672."""
    few = {"sub_group_size": 3072, "offload_optimizer_buffer_count": 12}
    optimizer = {**on_nvme("optimizer", folder), **few}
    return {**optimizer, **on_params(folder, 5000)} if stage == 3 else optimizer


def on_params(folder: Path, size: int) -> dict[str, Any]:
    """Weights on NVMe, three buffers of this many numbers in front of them."""
    return {**on_nvme("param", folder), "offload_param_max_in_cpu": 0, "offload_param_buffer_count": 3,
            "offload_param_buffer_size": size}


def storages(folder: Path, stage: int, number: int, on_accelerator: bool) -> dict[str, dict[str, Any]]:
    """Settings to compare, by name; the name begins with the class of storage."""
    everything = everywhere(folder, stage)
    ratio = {"offload_optimizer_ratio": 0.3 + 0.1 * (number % 5)}
    if not on_accelerator:
        found = {"cpu": {"offload_optimizer_device": "cpu"}, "nvme": {**everything, **WAYS[number % 4]},
                 "nvme, a part": {**everything, **ratio}}
        return found if stage < 3 else {
            **found, "params": on_params(folder, 3000 * (number % 4 + 1)),
            "both on cpu": {"offload_optimizer_device": "cpu", "offload_param_device": "cpu"}}
    host, device = ({"offload_optimizer_device": "cpu", "offload_update": side, "sub_group_size": 3072}
                    for side in ("host", "device"))
    found = {"host": host, "device": device, "nvme": everything, "host, a part": {**host, **ratio},
             "device, a part": {**device, **ratio}, "nvme, a part": {**everything, **ratio}}
    params = {"offload_param_device": "cpu"}
    return found if stage < 3 else {
        **found, "params": params, "host, a part, params": {**host, **ratio, **params},
        "device, a part, params": {**device, **ratio, **params},
        "host, params": {**host, **params}, "device, params": {**device, **params},
        "host, params on nvme": {**host, **on_params(folder, 3000 * (number % 4 + 1))},
        "device, params on nvme": {**device, **on_params(folder, 5000)}}


CLASSES = {"host": HostStorage, "device": StreamingHostStorage, "nvme": NvmeStorage, "cpu": DeviceStorage,
           "both on cpu": DeviceStorage, "params": DeviceStorage}


@contextmanager
def on_side(is_accelerator: bool) -> Iterator[None]:
    """The device is an accelerator whose copies are late; or the host."""
    with accelerator_side(is_accelerator), late_copy_streams() if is_accelerator else nullcontext():
        yield


def cells(world: int) -> Iterator[dict[str, Any]]:
    """Stage x precision, and among them every tensor parallel size, accumulation and recomputation."""
    for number, (stage, precision) in enumerate(product((1, 2, 3), PRECISIONS)):
        tp, accumulation = 1 + number % 2 * (world - 1), 1 + number % 3 % 2
        yield {"zero_stage": stage, **PRECISIONS[precision], "model_parallel_size": tp,
               "checkpoint_activations": number % 2 == 1, "batch_size": ROWS // (world // tp) // accumulation,
               "global_batch_size": ROWS}


def batches(steps: int) -> Tensor:
    return torch.randint(VOCABULARY, (steps, ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(5))


def train(engine: ZeroEngine, rows: Tensor) -> list[float]:
    """Loss and norm of every step."""
    seen = []
    dp = engine.groups.dp
    for group in engine.param_groups:
        group["lr"] = 2e-3
    for batch in rows:
        mine = batch.chunk(dp.size)[dp.rank]
        for part in mine.chunk(engine.accumulation_steps):
            loss = gpt2_loss(engine, part).mean()
            seen.append(engine.backward(loss).item())
            report = engine.step()
        assert report is not None
        seen.append(report.grad_norm)
    return seen


def outcome(engine: ZeroEngine, rows: Tensor) -> list[Any]:
    losses = train(engine, rows)
    numbers = [kept(bucket, kind) for bucket in engine.buckets for kind in bucket.master_state.kinds]
    return [losses, engine.counters.skipped_steps, numbers, [work(bucket) for bucket in engine.buckets]]


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(alike, one, other))
    return one == other or one != one and other != other


def differences(rank: int, world: int, folder: Path, numbers: Sequence[int], steps: int,
                on_accelerator: bool) -> list[str]:
    """Cells in which a storage changed something."""
    wrong = []
    for number, cell in [found for found in enumerate(cells(world)) if found[0] in numbers]:
        grid, rows = groups.build(cell["model_parallel_size"]), batches(steps)
        with accelerator_side(on_accelerator):
            expected = outcome(gpt2_engine(configure_gpt2(**cell), grid), rows)
        assert cell.get("fp16") is None or expected[1] > 0, "no step was skipped"
        for name, settings in storages(folder, cell["zero_stage"], number, on_accelerator).items():
            with on_side(on_accelerator):
                engine = gpt2_engine(configure_gpt2(**cell, **settings), grid)
                assert type(engine.engine_storage.optimizer) is CLASSES[name.partition(",")[0]]
                assert len({bucket.storage for bucket in engine.buckets}) == 1 + ("a part" in name)
                if not alike(outcome(engine, rows), expected):
                    wrong.append(f"{name}: {cell}")
                engine.detach()
    return wrong


@pytest.mark.parametrize("on_accelerator", [False, True])
@pytest.mark.parametrize("world, all_cells", [pytest.param(1, True, marks=pytest.mark.slow),
                                              pytest.param(2, True, marks=pytest.mark.slow), (2, False)])
def test_storage_changes_no_bit(tmp_path: Path, world: int, all_cells: bool, on_accelerator: bool) -> None:
    numbers = range(9) if all_cells else [0, 5, 7] if on_accelerator else [0, 4, 8]
    steps = 6 if on_accelerator and not all_cells else 20
    assert run_ranks(differences, world, tmp_path, numbers, steps, on_accelerator, timeout=900) == [[]] * world
    assert not open_swap_files(tmp_path), "something was left behind"
