"""`deepspeed.checkpointing`: one configuration for every `checkpoint` call of this process.

    recompute.configure(mpu, "ds_config.json", partition_activations=True)
    y = recompute.checkpoint(block, x, mask)

Before `configure` every switch is off. The trainer builds its own `Recomputation` instead.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from megatron.config import ds_json
from megatron.config.ds_keys import DS_KEYS
from megatron.config.schema import JsonKey
from megatron.config.tree import RecomputeConfig
from megatron.errors import ConfigError
from megatron.model.gpt2 import run_in_order
from megatron.recompute.activation_checkpoint import Recomputation
from mpu import random
from mpu.groups import SOLO, Groups
from mpu.parallel_state import tp_group_of

SECTION = "activation_checkpointing."


class HasModelParallelGroup(Protocol):
    """What `configure` needs of an mpu, such as our package `mpu`."""

    def get_model_parallel_group(self) -> dist.ProcessGroup | None: ...


class _ActiveRecomputation:
    """The configuration of this process."""

    config = RecomputeConfig()
    tp = SOLO
    recomputation = Recomputation(config)
    is_configured = False


def configure(mpu_: HasModelParallelGroup | None = None,
              deepspeed_config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
              partition_activations: bool | None = None, contiguous_checkpointing: bool | None = None,
              num_checkpoints: float | None = None, checkpoint_in_cpu: bool | None = None,
              synchronize: bool | None = None, profile: bool | None = None, *, mpu: HasModelParallelGroup | None = None,
              **misspelt: object) -> None:
    """Configure `checkpoint` from the section `activation_checkpointing` of a DeepSpeed file or dict; arguments
    override it. Without an mpu (`mpu_` is DeepSpeed's name, `mpu` ours) inputs are not sharded."""
    for name in misspelt:
        near = difflib.get_close_matches(name, signature(configure).parameters, n=1, cutoff=0.6)
        hint = f": did you mean {near[0]}?" if near else ""
        raise ConfigError(f"recompute.configure has no argument {name}{hint}")
    given = {
        "partition_activations": partition_activations,
        "contiguous_memory_optimization": contiguous_checkpointing,
        "number_checkpoints": None if num_checkpoints is None else math.ceil(num_checkpoints),  # scripts divide layers
        "cpu_checkpointing": checkpoint_in_cpu,
        "synchronize_checkpoint_boundary": synchronize,
        "profile_backward": profile,
    }
    values: dict[str, Any] = {}
    if deepspeed_config is not None:
        keys = ds_json.read_ds_json(deepspeed_config, "deepspeed_config").keys
        rows = ((DS_KEYS[path], value) for path, value in keys.items() if path.startswith(SECTION))
        values = {row.field: value for row, value in rows if isinstance(row, JsonKey)}
    values |= {name: value for name, value in given.items() if value is not None}
    layout = mpu_ or mpu
    _ActiveRecomputation.tp = SOLO if layout is None else tp_group_of(layout)
    _set_config(RecomputeConfig(**values))
    _ActiveRecomputation.is_configured = True


def _set_config(config: RecomputeConfig) -> None:
    _ActiveRecomputation.config, _ActiveRecomputation.recomputation = config, Recomputation(
        config, _ActiveRecomputation.tp)


def is_configured() -> bool:
    return _ActiveRecomputation.is_configured


def reset() -> None:
    """Call it after a forward without a backward: releases the contiguous buffers."""
    _ActiveRecomputation.recomputation.reset()


def set_num_layers(nlayers: int) -> None:
    """Set the number of checkpoints per forward, which is the number of rows of a contiguous buffer."""
    _set_config(replace(_ActiveRecomputation.config, number_checkpoints=nlayers))


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Set whether stored inputs are sharded over tensor parallel."""
    _set_config(replace(_ActiveRecomputation.config, partition_activations=partition_activation))


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed dropout. Ranks of the configured tensor parallel group get equal streams, except for sharded activations."""
    random.model_parallel_cuda_manual_seed(seed, Groups(tp=_ActiveRecomputation.tp))


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Reseed the RNG stream of sharded activations."""
    random.reseed_model_parallel_stream(seed, _ActiveRecomputation.tp)


def report() -> str:
    """The time of recomputation since the last report as a text; empty without `configure(profile=True)`."""
    return _ActiveRecomputation.recomputation.report()


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return function(*args, **kwargs), and recompute it in backward instead of storing its activations."""
    return _ActiveRecomputation.recomputation.checkpoint(function, *args, **kwargs)


get_cuda_rng_tracker = random.get_cuda_rng_tracker

non_reentrant_checkpoint = checkpoint
"""`checkpoint` is non-reentrant too."""


def in_chunks(chunk: int, checkpoint: Callable[..., Any] = checkpoint) -> Callable[..., Tensor]:
    """A function for `GPT2.run_blocks` that checkpoints `chunk` blocks at a time; the last chunk may be shorter."""

    def run(blocks: Sequence[Callable[..., Tensor]], x: Tensor, *args: Any) -> Tensor:
        for start in range(0, len(blocks), chunk):
            x = checkpoint(partial(run_in_order, blocks[start : start + chunk]), x, *args)
        return x

    return run
