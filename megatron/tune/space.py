"""The search space of the tuner: legal choices, the memory that each needs, and the memory of this machine.

A choice is a micro-batch, ZeRO stage, offload placement, recomputation, tensor parallel size and bucket size. The
samples of a step and the model are fixed.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from megatron import host_memory
from megatron.errors import ConfigError
from megatron.plan.alternatives import PLACEMENTS, format_bytes
from megatron.plan.footprint import ALL_ON_DEVICE, PlannedRun, StatePlacement
from megatron.plan.gpus import DRIVER_SECONDS
from megatron.plan.memory import peak_memory
from megatron.plan.plan_report import USABLE_FRACTION


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes."""

    device: float
    """Of a GPU, or of the CPU where that is the device."""
    host: float = 0.0
    """Beside a GPU."""

    def __str__(self) -> str:
        return format_bytes(int(self.device)) + (f" of the GPU and {format_bytes(int(self.host))} of the host"
                                                 if self.host else "")

    def can_hold(self, other: MemoryBudget) -> bool:
        return other.device <= self.device and other.host <= self.host

    def usage_of(self, budget: MemoryBudget) -> float:
        """Of the place that is the tightest; more than 1 where this does not fit."""
        return max(self.device / max(budget.device, 1.0), self.host / max(budget.host, 1.0))


def memory_needed_by(run: PlannedRun) -> MemoryBudget:
    """At the fullest moment of the device."""
    return MemoryBudget(peak_memory(run).total, run.offloaded_bytes.host)


def least_exceeding(needs: Iterable[MemoryBudget], budget: MemoryBudget) -> MemoryBudget:
    """That of the choice which lacks least."""
    return min(needs, key=lambda one: one.usage_of(budget))


LIBRARY_BYTES = 300 << 20
"""Bytes of a rank on a host beside its tensors."""
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


def available_memory(requested: PlannedRun, gb: float | None) -> MemoryBudget:
    """For tensors. `gb`: what is said of the device."""
    given = None if gb is None else gb * 2**30
    if requested.device == "cpu":
        return MemoryBudget(_host_bytes_per_rank(requested.ranks) if given is None else given)
    return MemoryBudget((_free_gpu_bytes(requested.ranks) if given is None else given) * USABLE_FRACTION,
                        _host_bytes_per_rank(requested.ranks))


def _host_bytes_per_rank(ranks: int) -> float:
    found = host_memory.available_bytes()
    if found is None:
        raise ConfigError("the memory of this machine is not known here: give --card-gb")
    return max(0.0, found / ranks - LIBRARY_BYTES)


def _free_gpu_bytes(ranks: int) -> float:
    """Bytes of the fullest one of those that the ranks take, the first that are visible."""
    visible = os.environ.get(VISIBLE_DEVICES)
    query = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits",
             *([] if visible is None else [f"--id={visible}"])]
    try:
        output = subprocess.run(query, text=True, capture_output=True, check=True, timeout=DRIVER_SECONDS).stdout
        return min(map(float, output.split()[:ranks])) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ConfigError("the memory of the GPUs is not known here: give --card-gb") from error


BUCKET_SIZES = (5_000_000, 50_000_000)
"""Elements, beside what was asked for."""


@dataclass(frozen=True)
class TuningChoice:
    batch: int
    """Of one data parallel rank: the micro-batch."""
    stage: int
    recomputes: bool
    optimizer: str
    """Home of its state."""
    params: str
    tp: int
    bucket: int
    """As was asked for, or both of this size."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def placement(self) -> StatePlacement:
        return StatePlacement(self.optimizer, self.params)  # type: ignore[arg-type]

    def apply_to(self, requested: PlannedRun, samples: int) -> PlannedRun:
        """The run that was asked for with this choice; ConfigError where there is no such run."""
        config = requested.config
        offload = replace(config.offload, offload_optimizer_device="none", offload_param_device="none")
        zero = replace(config.zero, zero_stage=self.stage)
        if self.bucket != zero.reduce_bucket_size:
            zero = replace(zero, reduce_bucket_size=self.bucket, allgather_bucket_size=self.bucket)
        changed = replace(config, parallel=replace(config.parallel, model_parallel_size=self.tp), zero=zero,
                          recompute=replace(config.recompute, checkpoint_activations=self.recomputes), train=replace(
                              config.train, batch_size=self.batch, global_batch_size=samples), offload=offload)
        changed.check_world(requested.ranks)
        return PlannedRun(changed, requested.ranks, requested.device, self.placement)

    def flags(self, requested: PlannedRun, samples: int) -> list[str]:
        """To type after the other flags."""
        words = ["--batch-size", str(self.batch), "--global-batch-size", str(samples), "--zero-stage", str(self.stage)]
        words += ["--checkpoint-activations" if self.recomputes else "--no-checkpoint-activations"]
        words += self.placement.flags(requested.config.offload).split()
        for kind, was, place in (("optimizer", requested.placement.optimizer, self.optimizer),
                                 ("param", requested.placement.params, self.params)):
            words += [f"--offload-{kind}-device", "none"] if place == "none" != was else []
        words += ["--model-parallel-size", str(self.tp)] if self.tp != requested.tp or self.tp > 1 else []
        if self.bucket != requested.config.zero.reduce_bucket_size:
            words += ["--reduce-bucket-size", str(self.bucket), "--allgather-bucket-size", str(self.bucket)]
        return words


def samples_per_step(requested: PlannedRun) -> int:
    """Of a step."""
    tuning, batch = requested.config.autotuning, requested.config.train.global_batch_size
    return batch or tuning.autotuning_max_train_batch_size or requested.config.global_batch_size(requested.dp)


def legal_choices(requested: PlannedRun) -> dict[TuningChoice, PlannedRun]:
    """Every one that is legal. Those that change nothing for these ranks are left out: stages of one data parallel
    rank that has all its state on the device, and buckets where nothing is exchanged, or whole blocks (on GPUs)."""
    samples, found = samples_per_step(requested), dict[TuningChoice, PlannedRun]()
    for tp in _tensor_parallel_sizes(requested):
        dp = requested.ranks // tp
        if samples % dp:
            continue
        batches = [batch for batch in range(1, samples // dp + 1) if samples // dp % batch == 0]
        for (stage, homes), recomputes, bucket, batch in product(
                _placements(requested, dp), (False, True), _bucket_sizes(requested, dp), batches):
            choice = TuningChoice(batch, stage, recomputes, homes.optimizer, homes.params, tp, bucket)
            try:
                found[choice] = choice.apply_to(requested, samples)
            except ConfigError:
                continue
    return found


def _tensor_parallel_sizes(requested: PlannedRun) -> list[int]:
    given = requested.config.autotuning.autotuning_mp_size
    return [size for size in range(1, requested.ranks + 1) if requested.ranks % size == 0 and given in (None, size)]


def _placements(requested: PlannedRun, dp: int) -> Iterator[tuple[int, StatePlacement]]:
    """Drives are tried where they were asked for: nothing is slower."""
    places = {"none", requested.placement.optimizer, requested.placement.params
              } | ({"cpu"} if requested.device == "cuda" else set())
    for stage in range(4):
        for homes in PLACEMENTS:
            is_legal = stage >= homes.min_stage and {homes.optimizer, homes.params} <= places
            if is_legal and (dp > 1 or stage == homes.min_stage or (homes != ALL_ON_DEVICE and stage == 3)):
                yield stage, homes


def _bucket_sizes(requested: PlannedRun, dp: int) -> list[int]:
    given = requested.config.zero.reduce_bucket_size
    has_one = requested.config.autotuning.autotuning_fast or dp == 1 or requested.device == "cuda"
    return [given] if has_one else sorted({given, *BUCKET_SIZES})
