"""The stage table: which kind of state is split over data parallel. Nothing else asks which stage it is.

    stage  optimizer  gradients  parameters  reduction
    0      whole      whole      whole       at the accumulation boundary, all-reduce
    1      split      whole      whole       at the boundary, into the shard
    2      split      split      whole       after every backward, into the shard
    3      split      split      split       after every backward, into the shard
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from megatron.config import ZeroConfig, flag_name

SPLIT_FROM = {"optim": 1, "grads": 2, "params": 3}
"""Kind of state -> the stage from which it is split."""


@dataclass(frozen=True)
class Policy:
    """One row of the table. Each kind splits only together with those left of it."""

    split_optim: bool
    split_grads: bool
    split_params: bool


def policy(stage: int) -> Policy:
    return Policy(*(stage >= SPLIT_FROM[kind] for kind in ("optim", "grads", "params")))


HAS_EFFECT = {"zero_stage", "ignore_unused_parameters", "sub_group_size", "stage3_prefetch_bucket_size"}
"""Settings the engine acts on; another one that is set says that it does nothing yet."""


def notes(zero: ZeroConfig) -> list[str]:
    """One line for each setting that was given and has no effect."""
    idle = [item.name for item in fields(zero)
            if item.name not in HAS_EFFECT and getattr(zero, item.name) != item.default]
    return [f" note: {flag_name(name)} {getattr(zero, name)} has no effect yet" for name in idle]
