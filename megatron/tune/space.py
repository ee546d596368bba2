"""What can be tried: every legal choice of the settings that are tuned, as a run that the planner knows.

A *choice* says the micro-batch, the ZeRO stage, where the state is, whether blocks are recomputed, the tensor parallel
size and the size of buckets. The samples of a step and the model stay. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from megatron.errors import ConfigError
from megatron.plan.cheapest import HOMES
from megatron.plan.footprint import ON_DEVICE, Homes, Run

BUCKETS = (5_000_000, 50_000_000)
"""Elements, beside what was asked for."""


@dataclass(frozen=True)
class Choice:
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
    def homes(self) -> Homes:
        return Homes(self.optimizer, self.params)  # type: ignore[arg-type]

    def of(self, asked: Run, samples: int) -> Run:
        """The run that was asked for with this choice; ConfigError where there is no such run."""
        config = asked.config
        home = replace(config.offload, offload_optimizer_device="none", offload_param_device="none")
        zero = replace(config.zero, zero_stage=self.stage)
        if self.bucket != zero.reduce_bucket_size:
            zero = replace(zero, reduce_bucket_size=self.bucket, allgather_bucket_size=self.bucket)
        changed = replace(
            config, parallel=replace(config.parallel, model_parallel_size=self.tp),
            zero=zero,
            recompute=replace(config.recompute, checkpoint_activations=self.recomputes),
            train=replace(config.train, batch_size=self.batch, global_batch_size=samples), offload=home)
        changed.check_world(asked.ranks)
        return Run(changed, asked.ranks, asked.device, self.homes)

    def flags(self, asked: Run, samples: int) -> list[str]:
        """To type after the other flags."""
        words = ["--batch-size", str(self.batch), "--global-batch-size", str(samples), "--zero-stage", str(self.stage)]
        words += ["--checkpoint-activations" if self.recomputes else "--no-checkpoint-activations"]
        words += self.homes.flags(asked.config.offload).split()
        for kind, was, place in (("optimizer", asked.homes.optimizer, self.optimizer),
                                 ("param", asked.homes.params, self.params)):
            words += [f"--offload-{kind}-device", "none"] if place == "none" != was else []
        words += ["--model-parallel-size", str(self.tp)] if self.tp != asked.tp or self.tp > 1 else []
        if self.bucket != asked.config.zero.reduce_bucket_size:
            words += ["--reduce-bucket-size", str(self.bucket), "--allgather-bucket-size", str(self.bucket)]
        return words


def samples_of(asked: Run) -> int:
    """Of a step."""
    tuning, batch = asked.config.autotuning, asked.config.train.global_batch_size
    return batch or tuning.autotuning_max_train_batch_size or asked.config.global_batch_size(asked.dp)


def choices(asked: Run) -> dict[Choice, Run]:
    """Every one that is legal. Those that change nothing for these ranks are left out: stages of one data parallel
    rank that has all its state on the device, and buckets where nothing is exchanged, or whole blocks (on GPUs)."""
    samples, found = samples_of(asked), dict[Choice, Run]()
    for tp in _tensor_parallel_sizes(asked):
        dp = asked.ranks // tp
        if samples % dp:
            continue
        batches = [batch for batch in range(1, samples // dp + 1) if samples // dp % batch == 0]
        for (stage, homes), recomputes, bucket, batch in product(
                _homes(asked, dp), (False, True), _buckets(asked, dp), batches):
            choice = Choice(batch, stage, recomputes, homes.optimizer, homes.params, tp, bucket)
            try:
                found[choice] = choice.of(asked, samples)
            except ConfigError:
                continue
    return found


def _tensor_parallel_sizes(asked: Run) -> list[int]:
    given = asked.config.autotuning.autotuning_mp_size
    return [size for size in range(1, asked.ranks + 1)
            if asked.ranks % size == 0 and given in (None, size)]


def _homes(asked: Run, dp: int) -> Iterator[tuple[int, Homes]]:
    """Drives are tried where they were asked for: nothing is slower."""
    places = {"none", asked.homes.optimizer, asked.homes.params} | ({"cpu"} if asked.device == "cuda" else set())
    for stage in range(4):
        for homes in HOMES:
            is_legal = stage >= homes.least_stage and {homes.optimizer, homes.params} <= places
            if is_legal and (dp > 1 or stage == homes.least_stage or (homes != ON_DEVICE and stage == 3)):
                yield stage, homes


def _buckets(asked: Run, dp: int) -> list[int]:
    given = asked.config.zero.reduce_bucket_size
    has_one = asked.config.autotuning.autotuning_fast or dp == 1 or asked.device == "cuda"
    return [given] if has_one else sorted({given, *BUCKETS})
