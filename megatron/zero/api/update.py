"""Where offloaded state is updated: by the host, or on the device, through which it then travels in parts.

The host needs the gradients and returns the weights, 2 bytes each way in 16 bits; the device needs all state, 12 bytes
each way, and keeps the gradients. Which takes longer depends on cores, memory and bus, so both are tried with the real
thing, a small shelf of the size of some parts, on all ranks at once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from megatron.checkpoint.agree import all_succeed_or_raise as together
from megatron.config.tree import Config
from megatron.launch.distributed import read_environment
from megatron.optim.adam import AdamW
from megatron.optim.rule import StepScalars, UpdateRule, UpdateSegment
from megatron.zero.holders import full_shape
from megatron.zero.homes.ferry import CopyStreams
from megatron.zero.homes.host import HostShard, HostStorage
from megatron.zero.homes.memory import page_aligned_zeros
from megatron.zero.homes.parts import HOST_CHUNK_NUMEL, STEP_BUFFER_SETS
from megatron.zero.homes.passing import StagingDoubleBuffer
from megatron.zero.homes.shelf import WEIGHT, StorageBackend
from megatron.zero.homes.streamed import StreamingHostStorage
from megatron.zero.precision import DTYPES
from mpu.collectives import all_reduce_scalar
from mpu.groups import Group, Groups

UpdateSide = Literal["host", "device"]

TRIAL_CHUNKS = 4
"""On trial."""
TRIAL_SECONDS = 0.4
"""For each side."""
DEVICE_MEMORY_DIVISOR = 4
"""What stays on the device for its arithmetic may take one part in so many of the memory that is free there."""


def choose_update_side(config: Config, rule: UpdateRule, model: nn.Module, device: torch.device, groups: Groups,
                       copy_streams: CopyStreams | None) -> tuple[UpdateSide, list[str]]:
    """And a line that says why, where there was a choice. Collective: all ranks do the same."""
    offload = config.offload
    if copy_streams is None or offload.offload_optimizer_device == "none" or offload.offload_update == "device":
        return "device", []
    if device.type == "cuda":
        set_cpu_threads()
    threads = f"{torch.get_num_threads()} threads"
    if offload.delayed_param_update and rule.elementwise and offload.offload_optimizer_device == "cpu":
        return "host", [f" offload: the host updates a step behind, with {threads} a rank"]
    if offload.offload_update == "host" or offload.offload_optimizer_device == "nvme":
        return "host", [f" offload: the host updates, with {threads} a rank"]
    if device.type != "cuda" or not isinstance(rule, AdamW):
        return "host", [f" offload: the host updates, with {threads} a rank: only Adam is tried on both sides"]
    numel = int(sum(full_shape(parameter).numel() for parameter in model.parameters()) / groups.dp.size
                * offload.offload_optimizer_ratio)
    work = DTYPES[config.precision.name]
    on_host, on_device = (numel * seconds for seconds in time_both_sides(rule, device, copy_streams, work, groups.world,
                                                                         pinned=offload.offload_optimizer_pin_memory))
    needed = _device_update_bytes(config, numel, groups)
    fits = all_reduce_scalar(needed * DEVICE_MEMORY_DIVISOR <= torch.cuda.mem_get_info(device)[0], groups.world, "min")
    side: UpdateSide = "device" if on_device < on_host and fits else "host"
    why = "" if fits or on_device >= on_host else f", which would keep {needed / 2**30:.1f} GiB there"
    return side, [f" offload: the {side} updates; a step's update takes about {on_host:.2f} s by the host with "
                  f"{threads} a rank, {on_device:.2f} s on the device{why} (--offload-update)"]


def _device_update_bytes(config: Config, numel: int, groups: Groups) -> int:
    """Bytes: gradients, and the parts on the device."""
    wide = config.accumulation(groups.dp.size) > 1 or config.precision.name == "fp32"
    return numel * (4 if wide else 2) + STEP_BUFFER_SETS * 3 * 4 * HOST_CHUNK_NUMEL


def set_cpu_threads() -> None:
    """An equal share of the cores for each rank of a node: launchers leave one thread to each. Who asks for another
    number is heard."""
    if os.environ.get("OMP_NUM_THREADS", "1") == "1":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        ranks = read_environment().local_world_size
        is_bound = cores * ranks <= (os.cpu_count() or 1)  # each rank to its share already
        torch.set_num_threads(cores if is_bound else max(1, cores // ranks))


def time_both_sides(rule: AdamW,
                    device: torch.device,
                    copy_streams: CopyStreams,
                    work: torch.dtype,
                    world: Group,
                    *,
                    pinned: bool,
                    chunk: int = HOST_CHUNK_NUMEL) -> tuple[float, float]:
    """Seconds a number takes, updated by the host, and on the device, on the slowest rank. Collective: all are at it at
    the same time, as they will be."""
    def prepare() -> tuple[HostStorage, HostShard]:
        host = HostStorage(torch.float32, chunk, pinned=pinned)
        shelf = host.allocate_shard("trial", chunk * TRIAL_CHUNKS)
        shelf.add_kinds(rule.states)
        return host, shelf

    host, shelf = together(prepare, world)
    found = []
    for home, there in ((host, torch.device("cpu")), (StreamingHostStorage(host, copy_streams, device), device)):
        rule.bind_device(there, world)
        trial_step = partial(_run_trial_step, there, rule, home, shelf, copy_streams,
                             torch.zeros(chunk, dtype=work, device=device), pinned)
        found.append(all_reduce_scalar(together(lambda: _best_seconds(trial_step), world), world, "max") / shelf.numel)
    return found[0], found[1]


def _run_trial_step(update_device: torch.device, rule: AdamW, storage: StorageBackend, shard: HostShard,
                    copy_streams: CopyStreams, on_device: Tensor, pinned: bool) -> None:
    """One update of all parts, with the way of the new weights; gradients have come down before."""
    on_host = isinstance(storage, HostStorage)
    grads = page_aligned_zeros(len(on_device), on_device.dtype, pinned=pinned) if on_host else on_device
    staging = StagingDoubleBuffer(len(on_device) if on_host else 0, on_device.dtype, None, pinned=pinned)
    at = StepScalars.for_applied_step(0.5, 1, update_device)
    for kept, in storage.iter_chunks([(shard, its)] for its in shard.chunks):
        lp_out = staging.acquire(len(on_device)) if on_host else on_device
        states = {kind: kept[kind] for kind in rule.states}
        span = UpdateSegment(0, kept[WEIGHT], grads, states, (), 1, lambda sums: sums, lp_out)
        if not rule.step_many([span], {"lr": 0.0, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}, at):
            lp_out.copy_(kept[WEIGHT])
        if on_host:
            staging.mark_sent(last := copy_streams.to_device.copy(on_device, lp_out))
    if on_host:
        last.wait_on_host()
    storage.wait_for_writes()


def _best_seconds(action: Callable[[], None]) -> float:
    """The shortest of some runs, after one that is not counted."""
    action()
    best, end = float("inf"), time.monotonic() + TRIAL_SECONDS
    while True:
        start = time.monotonic()
        action()
        best = min(best, time.monotonic() - start)
        if time.monotonic() >= end:
            return best
