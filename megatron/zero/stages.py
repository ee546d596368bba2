"""The ZeRO stage table: which of optimizer state, gradients and parameters are sharded over data parallel.

    stage  optimizer  gradients  parameters  reduction
    0      full       full       full        at the accumulation boundary, all-reduce
    1      sharded    full       full        at the boundary, reduce-scatter into the shard
    2      sharded    sharded    full        in every backward, reduce-scatter as buckets complete
    3      sharded    sharded    sharded     in every backward, reduce-scatter as buckets complete

Buckets and the step ask this table instead of the stage number.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.tree import PrecisionConfig, ZeroConfig, flag_name


@dataclass(frozen=True)
class StagePolicy:
    """One row of the table. Each kind is sharded only together with those left of it."""

    optim_is_sharded: bool
    grads_are_sharded: bool
    params_are_sharded: bool

    @property
    def for_frozen_params(self) -> StagePolicy:
        """For parameters that have neither gradients nor optimizer state."""
        return StagePolicy(self.params_are_sharded, False, self.params_are_sharded)


def stage_policy(stage: int) -> StagePolicy:
    return StagePolicy(optim_is_sharded=stage >= 1, grads_are_sharded=stage >= 2, params_are_sharded=stage >= 3)


def gradient_precisions(policy: StagePolicy, precision: PrecisionConfig, accumulation: int) -> tuple[str, str]:
    """(of the full gradient that backward fills, of its sum). Sums over several 16-bit micro-batches are in fp32, and
    so are sums over ranks of gradients that are sent in another precision than that of the parameters."""
    wide = accumulation > 1 or precision.communication not in (None, precision.name)
    sums = "fp32" if wide else precision.name
    in_place = precision.communication == "fp32" or not policy.grads_are_sharded  # micro-batches accumulate there
    return sums if in_place else precision.name, sums


def ineffective_on_gpu_notes(zero: ZeroConfig) -> list[str]:
    """One line for each setting that is not at its default and has no effect on GPUs."""
    names = ("reduce_bucket_size", *(["allgather_bucket_size"] if zero.zero_stage else ()))
    reasons = {**dict.fromkeys(names, "where a bucket is sent at once"),
               "contiguous_gradients": "where one operation moves the gradients of a bucket"}
    return [f" note: {flag_name(name)} {getattr(zero, name)} has no effect on GPUs, {why}"
            for name, why in reasons.items() if getattr(zero, name) != getattr(ZeroConfig, name)]
