"""The search space of the tuner: legal choices, the memory that each needs, and the memory of this machine.

A choice is a micro-batch, ZeRO stage, offload placement, recomputation, tensor parallel size and bucket size. The
samples of a step and the model are fixed.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product

from megatron import host_memory
from megatron.errors import ConfigError
from megatron.plan.alternatives import PLACEMENTS, format_bytes
from megatron.plan.footprint import ALL_ON_DEVICE, PlannedRun, StatePlacement
from megatron.plan.plan_report import USABLE_FRACTION


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes of one rank, available or needed."""

    device: float
    """Of the GPU, or of the host for a run on a CPU."""
    host: float = 0.0
    """Host memory of a run on a GPU."""

    def __str__(self) -> str:
        return format_bytes(int(self.device)) + (f" of the GPU and {format_bytes(int(self.host))} of the host"
                                                 if self.host else "")

    def can_hold(self, other: MemoryBudget) -> bool:
        return other.device <= self.device and other.host <= self.host

    def usage_of(self, budget: MemoryBudget) -> float:
        """The larger of both shares of the budget; more than 1 if this does not fit."""
        return max(self.device / max(budget.device, 1.0), self.host / max(budget.host, 1.0))


DRIVER_SECONDS = 60.0
"""Timeout of nvidia-smi, which takes some seconds a GPU if no process keeps the driver loaded."""
LIBRARY_BYTES = 300 << 20
"""Host memory of a rank beside its tensors."""


def available_memory(requested: PlannedRun, gb: float | None) -> MemoryBudget:
    """For tensors of one rank. `gb` overrides the free memory of the device."""
    given = None if gb is None else gb * 2**30
    if requested.device == "cpu":
        return MemoryBudget(_host_bytes_per_rank(requested.ranks) if given is None else given)
    return MemoryBudget((_free_gpu_bytes(requested.ranks) if given is None else given) * USABLE_FRACTION,
                        _host_bytes_per_rank(requested.ranks))


def _host_bytes_per_rank(ranks: int) -> float:
    available = host_memory.available_bytes()
    if available is None:
        raise ConfigError("the memory of this machine is not known here: give --card-gb")
    return max(0.0, available / ranks - LIBRARY_BYTES)


def _free_gpu_bytes(ranks: int) -> float:
    """Of the fullest of the GPUs that the ranks use, the first visible ones."""
    try:
        return min(map(float, query_gpus("memory.free")[:ranks])) * 2**20
    except ValueError as error:
        raise ConfigError("the memory of the GPUs is not known here: give --card-gb") from error


def query_gpus(field: str) -> list[str]:
    """A field of the visible GPUs, by the driver's tool, which takes no memory of them; [] where it does not answer."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits",
               *([] if visible is None else [f"--id={visible}"])]
    try:
        return subprocess.run(command, text=True, capture_output=True, check=True,
                              timeout=DRIVER_SECONDS).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []


BUCKET_SIZES = (5_000_000, 50_000_000)
"""Elements; tried beside the configured size."""


@dataclass(frozen=True)
class TuningChoice:
    batch: int
    """The micro-batch."""
    stage: int
    recomputes: bool
    optimizer: str
    """Device of the optimizer state."""
    params: str
    tp: int
    bucket: int
    """Of reductions and gathers; the configured size keeps both as configured."""

    @property
    def placement(self) -> StatePlacement:
        return StatePlacement(self.optimizer, self.params)  # type: ignore[arg-type]

    def apply_to(self, requested: PlannedRun, samples: int) -> PlannedRun:
        """The requested run with this choice; ConfigError if that is not allowed."""
        config = requested.config
        zero = replace(config.zero, zero_stage=self.stage)
        if self.bucket != zero.reduce_bucket_size:
            zero = replace(zero, reduce_bucket_size=self.bucket, allgather_bucket_size=self.bucket)
        changed = replace(config, zero=zero, parallel=replace(config.parallel, model_parallel_size=self.tp),
                          recompute=replace(config.recompute, checkpoint_activations=self.recomputes),
                          train=replace(config.train, batch_size=self.batch, global_batch_size=samples),
                          offload=self.placement.apply_to(config.offload))
        changed.check_world(requested.ranks)
        return replace(requested, config=changed)

    def flags(self, requested: PlannedRun, samples: int) -> list[str]:
        """To append to the requested flags."""
        flags = ["--batch-size", str(self.batch), "--global-batch-size", str(samples), "--zero-stage", str(self.stage)]
        flags += ["--checkpoint-activations" if self.recomputes else "--no-checkpoint-activations"]
        flags += self.placement.flags(requested.config.offload).split()
        for kind, was, place in (("optimizer", requested.placement.optimizer, self.optimizer),
                                 ("param", requested.placement.params, self.params)):
            flags += [f"--offload-{kind}-device", "none"] if place == "none" != was else []
        flags += ["--model-parallel-size", str(self.tp)] if self.tp != requested.tp or self.tp > 1 else []
        if self.bucket != requested.config.zero.reduce_bucket_size:
            flags += ["--reduce-bucket-size", str(self.bucket), "--allgather-bucket-size", str(self.bucket)]
        return flags


def samples_per_step(requested: PlannedRun) -> int:
    tuning, batch = requested.config.autotuning, requested.config.train.global_batch_size
    return batch or tuning.autotuning_max_train_batch_size or requested.config.global_batch_size(requested.dp)


def legal_choices(requested: PlannedRun) -> dict[TuningChoice, PlannedRun]:
    """Every legal choice, without those that change nothing: stages of a single data parallel rank with all state on
    the device, and bucket sizes without communication, or on GPUs, which exchange whole blocks."""
    samples, choices = samples_per_step(requested), dict[TuningChoice, PlannedRun]()
    given_tp, given_bucket = requested.config.autotuning.autotuning_mp_size, requested.config.zero.reduce_bucket_size
    for tp in range(1, requested.ranks + 1) if given_tp is None else [given_tp]:
        dp = requested.ranks // tp
        if requested.ranks % tp or samples % dp:
            continue
        batches = [batch for batch in range(1, samples // dp + 1) if samples // dp % batch == 0]
        has_one_bucket_size = requested.config.autotuning.autotuning_fast or dp == 1 or requested.device == "cuda"
        buckets = [given_bucket] if has_one_bucket_size else sorted({given_bucket, *BUCKET_SIZES})
        for (stage, placement), recomputes, bucket, batch in product(
                _placements(requested, dp), (False, True), buckets, batches):
            choice = TuningChoice(batch, stage, recomputes, placement.optimizer, placement.params, tp, bucket)
            with suppress(ConfigError):
                choices[choice] = choice.apply_to(requested, samples)
    return choices


def _placements(requested: PlannedRun, dp: int) -> Iterator[tuple[int, StatePlacement]]:
    """Drives only if they are configured: they are slower than anything else."""
    devices = {"none", requested.placement.optimizer, requested.placement.params
               } | ({"cpu"} if requested.device == "cuda" else set())
    for stage, placement in product(range(4), PLACEMENTS):
        is_legal = stage >= placement.min_stage and {placement.optimizer, placement.params} <= devices
        if is_legal and (dp > 1 or stage == placement.min_stage or (placement != ALL_ON_DEVICE and stage == 3)):
            yield stage, placement
