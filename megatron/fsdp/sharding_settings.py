"""Settings of a sharded module: torch's MixedPrecisionPolicy and OffloadPolicy, and FairScale's arguments."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from megatron.errors import ConfigError
from megatron.zero.hooks import map_tensors


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """As torch's. `param_dtype`: parameters and gradients in compute (None: their own). `reduce_dtype`: gradient
    reduction. `output_dtype`: floating point outputs. `cast_forward_inputs`: cast inputs to `param_dtype`."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@dataclass(frozen=True)
class OffloadPolicy:
    """Sharded state stays on the device."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Sharded parameters, gradients and optimizer state are on the host, and the optimizer steps there."""

    pin_memory: bool = True


@dataclass(frozen=True)
class ShardingSettings:
    """Settings of one sharded module, for the parameters that no sharded module inside owns."""

    reshard_after_forward: bool | int = True
    """Free gathered parameters between forward and backward; with a number they stay sharded over that many
    neighbouring ranks."""
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    input_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    offload_to_host: bool = False
    pin_memory: bool = True
    grad_predivide_factor: float = 1.0
    sync_module_states: bool = False
    """All ranks start from rank 0's values."""
    argument_names: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """Field -> the argument that sets it, where the user's interface has another name."""

    def by_argument(self) -> dict[str, object]:
        """The values by the names that the user typed."""
        return {self.argument_names.get(item.name, item.name): getattr(self, item.name)
                for item in fields(self) if item.compare}

    @property
    def is_kept_for_backward(self) -> bool:
        """Parameters stay gathered from forward to backward."""
        return (self.reshard_after_forward is False or self.reshard_after_forward == 1
                and self.reshard_after_forward is not True)


def cast_floating_point(value: Any, dtype: torch.dtype | None) -> Any:
    """Cast floating point tensors, also inside tuples, lists, dicts and dataclasses; other values are unchanged."""
    if dtype is None:
        return value
    return map_tensors(value, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def check_dtype(name: str, dtype: Any) -> torch.dtype | None:
    if dtype is None or isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        return dtype
    raise ConfigError(f"{name} is {dtype!r}: give a floating point dtype of torch, or None for the parameters' own")


# ---- FairScale's arguments, by name ---------------------------------------------------------------------------------

_ARGUMENT_NAMES = {
    "param_dtype": "compute_dtype (mixed_precision)", "reduce_dtype": "fp32_reduce_scatter",
    "input_dtype": "force_input_to_fp32", "offload_to_host": "move_params_to_cpu (cpu_offload)",
    "grad_predivide_factor": "gradient_predivide_factor"}


@dataclass(frozen=True)
class FairScaleArguments:
    """The arguments as given, with FairScale's defaults."""

    reshard_after_forward: bool | int = True
    mixed_precision: Any = False
    fp32_reduce_scatter: bool = False
    flatten_parameters: bool = True
    cpu_offload: Any = False
    move_params_to_cpu: bool = False
    compute_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    move_grads_to_cpu: bool | None = None
    bucket_cap_mb: int = 25
    disable_reshard_on_root: bool = True
    gradient_predivide_factor: float | None = None
    force_input_to_fp32: bool = False
    state_dict_device: torch.device | str | None = None
    state_dict_on_rank_0_only: bool = False
    verbose: bool = False
    sync_module_states: bool = False
    """Not in FairScale: take rank 0's values instead of raising if ranks differ."""
    no_broadcast_optim_state: bool = False
    clear_autocast_cache: bool = False
    compute_device: torch.device | str | None = None
    allow_reset_parameters: bool = False
    process_group_reduce_scatter: Any = None

    @property
    def working_dtype(self) -> torch.dtype | None:
        """The dtype of parameters and gradients in compute."""
        named = getattr(self.mixed_precision, "param_dtype", None)  # torch's FSDP1
        return self.compute_dtype or named or (torch.float16 if self.mixed_precision is True else None)

    def to_settings(self, ranks: int) -> ShardingSettings:
        factor = 1.0 if self.gradient_predivide_factor is None else self.gradient_predivide_factor
        if not 0 < factor <= ranks:
            raise ConfigError(f"gradient_predivide_factor {factor}: give a number above 0, at most the number of ranks "
                              f"({ranks})")
        reduced = getattr(self.mixed_precision, "reduce_dtype", None)
        on_host = bool(self.move_params_to_cpu or getattr(self.cpu_offload, "offload_params", self.cpu_offload))
        buffers = self.buffer_dtype or getattr(self.mixed_precision, "buffer_dtype", None) or self.working_dtype
        return ShardingSettings(
            reshard_after_forward=self.reshard_after_forward,
            param_dtype=check_dtype("compute_dtype", self.working_dtype),
            reduce_dtype=torch.float32 if self.fp32_reduce_scatter else check_dtype("reduce_dtype", reduced),
            input_dtype=self.working_dtype or (torch.float32 if self.force_input_to_fp32 else None),
            buffer_dtype=check_dtype("buffer_dtype", buffers), offload_to_host=on_host,
            grad_predivide_factor=factor, sync_module_states=self.sync_module_states,
            argument_names=_ARGUMENT_NAMES)

    def notes(self) -> list[str]:
        """Notes on arguments that have no effect."""
        default = FairScaleArguments()
        return [f"note: FullyShardedDataParallel({name}={getattr(self, name)!r}) has no effect: {why}"
                for name, why in _NO_EFFECT.items() if getattr(self, name) != getattr(default, name)]


_NO_EFFECT = {
    "flatten_parameters": "parameters are always in flat buffers, and keep their names",
    "bucket_cap_mb": "the gradients of a wrapped module travel together",
    "disable_reshard_on_root": "the outermost module keeps its parameters until its backward",
    "no_broadcast_optim_state": "the optimizer's state is never broadcast",
    "clear_autocast_cache": "autocast finds parameters of the precision it wants, or casts them itself",
    "verbose": "what is sharded is shown by print(model)",
    "move_grads_to_cpu": "gradients are where the step is taken: with move_params_to_cpu on the host",
    "compute_device": "a module computes where it is, or on this rank's GPU",
    "allow_reset_parameters": "reset_parameters() works inside summon_full_params()",
    "process_group_reduce_scatter": "gradients and parameters take turns on one process group"}
"""Argument without effect -> reason."""

_UNSUPPORTED = {
    "sharding_strategy": "FULL_SHARD is reshard_after_forward=True, SHARD_GRAD_OP is False",
    "auto_wrap_policy": "wrap the model with megatron.fsdp.auto_wrap(model, policy) inside enable_wrap()",
    "backward_prefetch": "what is gathered ahead is what followed in the pass before",
    "forward_prefetch": "what is gathered ahead is what followed in the pass before",
    "limit_all_gathers": "one module is gathered ahead, at most",
    "ignored_modules": "use fully_shard(module, ignored_params=...)",
    "ignored_states": "use fully_shard(module, ignored_params=...)",
    "param_init_fn": "make the model inside megatron.zero.Init()",
    "device_id": "the device is that of the module, or this rank's GPU",
    "device_mesh": "give process_group=mesh.get_group()",
    "use_orig_params": "parameters are always the model's own",
    "find_unused_parameters": "parameters that no rank uses keep no gradient, without being told",
    "device_ids": "the device is that of the module, or this rank's GPU",
    "gradient_as_bucket_view": "gradients are always views of flat buffers"}
"""Argument of torch's FSDP1 or DistributedDataParallel -> what to do instead."""


def parse_arguments(given: Mapping[str, Any]) -> FairScaleArguments:
    known = {item.name for item in fields(FairScaleArguments)}
    for name in given:
        if name in _UNSUPPORTED:
            raise ConfigError(f"FullyShardedDataParallel({name}=...) is not an argument here: {_UNSUPPORTED[name]}")
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise ConfigError(f"FullyShardedDataParallel has no argument {name!r}" +
                              (f"; did you mean {near[0]!r}?" if near else f"; it has {', '.join(sorted(known))}"))
    return FairScaleArguments(**given)
