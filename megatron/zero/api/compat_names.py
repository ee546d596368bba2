"""DeepSpeed's engine names that training scripts use, beyond the methods of `Engine`. docs/deepspeed.md describes them.

`Engine.__getattr__` looks here before it asks the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from megatron.errors import ConfigError


def _offload_device(engine: Any, kind: str) -> str | None:
    """"cpu", "nvme", or None for the device."""
    device: str = getattr(engine.config.offload, f"offload_{kind}_device")
    return None if device == "none" else device


# Engine -> what the method of that name returns; its arguments are ignored.
METHODS: dict[str, Callable[[Any], Any]] = {
    "fp16_enabled": lambda e: e.config.precision.fp16,
    "bfloat16_enabled": lambda e: e.config.precision.bf16,
    "gradient_accumulation_steps": lambda e: e.core.accumulation_steps,
    "is_gradient_accumulation_boundary": lambda e: e.core.is_at_boundary,
    # Of the last optimizer step: it changed the weights (was not skipped for an overflow); the norm before clipping.
    "was_step_applied": lambda e: e.core.last_report is not None and e.core.last_report.applied,
    "get_global_grad_norm": lambda e: e.core.last_report and e.core.last_report.grad_norm,
    "get_batch_info": lambda e: (e.train_batch_size(), e.core.micro_batch, e.core.accumulation_steps),
    "zero_optimization": lambda e: e.zero_optimization_stage() > 0,
    "zero_optimization_partition_gradients": lambda e: e.zero_optimization_stage() >= 2,
    "zero_optimization_partition_weights": lambda e: e.zero_optimization_stage() == 3,
    "zero_offload_optimizer": lambda e: _offload_device(e, "optimizer"),
    "zero_offload_param": lambda e: _offload_device(e, "param"),
    "zero_cpu_offload": lambda e: _offload_device(e, "optimizer") == "cpu",
    "zero_gather_16bit_weights_on_model_save": lambda e: e.config.zero.stage3_gather_16bit_weights_on_model_save,
    "gradient_clipping": lambda e: e.config.optim.clip_grad,
    "dynamic_loss_scale": lambda e: e.config.precision.fp16 and e.config.precision.loss_scale is None,
    "initial_dynamic_scale": lambda e: e.config.precision.initial_loss_scale,
    # theta of the last step
    "get_pld_theta": lambda e: e.progressive_layer_drop and e.progressive_layer_drop.get_theta(
        max(0, e.global_steps - 1)),
    "pld_enabled": lambda e: e.config.layer_drop.progressive_layer_drop,
    "pld_theta": lambda e: e.config.layer_drop.pld_theta,
    "pld_gamma": lambda e: e.config.layer_drop.pld_gamma,
    "pld_params": lambda e: e.progressive_layer_drop is not None and {
        "theta": e.config.layer_drop.pld_theta, "gamma": e.config.layer_drop.pld_gamma},
    "quantize_training": lambda e: e.config.quantize.quantize_training,
    "optimizer_name": lambda e: e.core.rule.name,
    "get_type": lambda e: [e.core.rule.name] * len(e.core.param_groups),
    "optimizer_params": lambda e: {
        key: value for key, value in e.optimizer.param_groups[0].items() if key != "params"},
    "get_data_types": lambda e: (e.working_dtype, torch.float32),
    "steps_per_print": lambda e: e.monitor.config.steps_per_print or None,
    "wall_clock_breakdown": lambda e: e.monitor.config.times,
    "get_data_parallel_rank": lambda e: e.groups.dp.rank,
    "get_data_parallel_world_size": lambda e: e.groups.dp.size,
    "get_data_parallel_group": lambda e: e.groups.dp.process_group,
    "get_model_parallel_rank": lambda e: e.groups.tp.rank,
    "allreduce_gradients": lambda e: None,
    "empty_partition_cache": lambda e: None,
    "cpu": lambda e: e.to("cpu"),
    "half": lambda e: e.to(torch.float16),
    "bfloat16": lambda e: e.to(torch.bfloat16),
    "float": lambda e: e.to(torch.float32)}

ATTRIBUTES: dict[str, Callable[[Any], Any]] = {
    "flops_profiler": lambda e: e.profiled_step.profiler,
    "global_rank": lambda e: e.groups.world.rank,
    "world_size": lambda e: e.groups.world.size,
    "dp_world_size": lambda e: e.groups.dp.size,
    "mp_world_size": lambda e: e.groups.tp.size,
    "data_parallel_group": lambda e: e.groups.dp.process_group,
    "cuda": lambda e: lambda device=None: e.to(torch.device("cuda") if device is None else device),
    "micro_steps": lambda e: e.core.state.counters.micro_steps,
    "skipped_steps": lambda e: e.core.counters.skipped_steps,
    "applied_steps": lambda e: e.core.counters.applied_steps,
    "loss_scale": lambda e: e.cur_scale,
    # The model is a child named `module`, as in DeepSpeed's engine.
    **{name: lambda e, name=name: getattr(nn.ModuleDict({"module": e.module}), name)  # type: ignore[misc]
       for name in ("named_parameters", "named_buffers", "named_modules", "modules", "children", "named_children")}}

# Methods of a module that would move the model's parameters away from the engine's buffers.
REFUSED = ("double", "type", "share_memory", "to_empty", "requires_grad_", "xpu", "ipu")

NAMES = {*METHODS, *ATTRIBUTES, *REFUSED}


class UnsupportedNameError(ConfigError, AttributeError):
    """An AttributeError as well, so that `hasattr` is False."""


def resolve_name(engine: Any, name: str) -> Any:
    """The attribute of the engine for one of NAMES. Raises UnsupportedNameError for REFUSED."""
    if name in METHODS:
        return lambda *args, **kwargs: METHODS[name](engine)
    if name in ATTRIBUTES:
        return ATTRIBUTES[name](engine)
    raise UnsupportedNameError(f"engine.{name} is not supported: the engine has placed the parameters, in flat "
                               "buffers; do this to the model before zero.initialize")
