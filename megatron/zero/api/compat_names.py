"""DeepSpeed engine names beyond the methods of `Engine` that training scripts use: name -> answer, or why not.

    MethodName        a method that returns a setting or a known value, or does nothing because it is done elsewhere
    AttributeName     an attribute
    UnsupportedName   raises with a reason; `hasattr` is False

`Engine.__getattr__` looks here before it asks the module. docs/deepspeed.md lists these names (a test compares).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatron.errors import ConfigError


@dataclass(frozen=True)
class MethodName:
    getter: Callable[[Any], Any]
    """Engine -> the returned value."""
    description: str


@dataclass(frozen=True)
class AttributeName:
    getter: Callable[[Any], Any]
    description: str


@dataclass(frozen=True)
class UnsupportedName:
    reason: str


CompatName = MethodName | AttributeName | UnsupportedName


class UnsupportedNameError(ConfigError, AttributeError):
    """An unsupported DeepSpeed name. An AttributeError as well, so that `hasattr` is False."""


def resolve_name(engine: Any, name: str) -> Any:
    """The attribute `name` of the engine. Raises KeyError if the table lacks it, UnsupportedNameError if it is
    unsupported."""
    row = COMPAT_NAMES[name]
    if isinstance(row, UnsupportedName):
        raise UnsupportedNameError(f"engine.{name} is not supported: {row.reason}")
    return row.getter(engine) if isinstance(row, AttributeName) else lambda *args, **kwargs: row.getter(engine)


def _setting_names(section: str, meaning: str, names: str) -> dict[str, CompatName]:
    """`zero_x` or `zero_x=field` -> methods that return the field `x` or `field` of a section."""

    def reader(field: str) -> Callable[[Any], Any]:
        return lambda engine: getattr(getattr(engine.config, section), field)

    rows = (name.partition("=")[::2] for name in names.split())
    return {name: MethodName(reader(field or name.removeprefix("zero_")), meaning) for name, field in rows}


def _constant_names(value: Any, reason: str, names: str) -> dict[str, CompatName]:
    return {name: MethodName(lambda engine: value, reason) for name in names.split()}


def _unsupported_names(reason: str, names: str) -> dict[str, CompatName]:
    return {name: UnsupportedName(reason) for name in names.split()}


def _offload_device(engine: Any, kind: str) -> str | None:
    """"cpu", "nvme", or None for the device."""
    device: str = getattr(engine.config.offload, f"offload_{kind}_device")
    return None if device == "none" else device


SETTINGS: dict[str, CompatName] = {
    **_setting_names("zero", "the setting of that name", """
        zero_reduce_scatter zero_overlap_comm zero_contiguous_gradients zero_load_from_fp32_weights
        zero_sub_group_size zero_reduce_bucket_size zero_allgather_bucket_size zero_allgather_partitions
        zero_round_robin_gradients zero_ignore_unused_parameters
        zero_max_live_parameters=stage3_max_live_parameters zero_max_reuse_distance=stage3_max_reuse_distance
        zero_prefetch_bucket_size=stage3_prefetch_bucket_size
        zero_param_persistence_threshold=stage3_param_persistence_threshold
        zero_gather_16bit_weights_on_model_save=stage3_gather_16bit_weights_on_model_save
        zero_gather_fp16_weights_on_model_save=stage3_gather_16bit_weights_on_model_save"""),
    "zero_optimization": MethodName(lambda e: e.zero_optimization_stage() > 0, "the stage is above 0"),
    "zero_optimization_partition_gradients": MethodName(lambda e: e.zero_optimization_stage() >= 2,
                                                        "the stage is 2 or 3"),
    "zero_optimization_partition_weights": MethodName(lambda e: e.zero_optimization_stage() == 3, "the stage is 3"),
    "zero_offload_optimizer": MethodName(lambda e: _offload_device(e, "optimizer"), "`\"cpu\"`, `\"nvme\"` or None"),
    "zero_offload_param": MethodName(lambda e: _offload_device(e, "param"), "`\"cpu\"`, `\"nvme\"` or None"),
    "zero_cpu_offload": MethodName(lambda e: _offload_device(e, "optimizer") == "cpu",
                                   "optimizer state is offloaded to the host"),
    "zero_nvme_offload_optimizer": MethodName(lambda e: _offload_device(e, "optimizer") == "nvme",
                                              "optimizer state is offloaded to NVMe"),
    "zero_has_nvme_offload": MethodName(
        lambda e: "nvme" in (_offload_device(e, "optimizer"), _offload_device(e, "param")),
        "optimizer state or parameters are offloaded to NVMe"),
    "zero_use_cpu_optimizer": MethodName(lambda e: _offload_device(e, "optimizer") is not None,
                                         "optimizer state is offloaded, to the host or to NVMe"),
    "gradient_clipping": MethodName(lambda e: e.config.optim.clip_grad, "the largest gradient norm; 0 is no clipping"),
    "dynamic_loss_scale": MethodName(lambda e: e.config.precision.fp16 and e.config.precision.loss_scale is None,
                                     "fp16 with a loss scale that adapts"),
    "initial_dynamic_scale": MethodName(lambda e: e.config.precision.initial_loss_scale,
                                        "the loss scale it starts from"),
    "dynamic_loss_scale_args": MethodName(lambda e: {
        "init_scale": e.config.precision.initial_loss_scale, "scale_window": e.config.precision.loss_scale_window,
        "delayed_shift": e.config.precision.hysteresis, "min_scale": e.config.precision.min_scale}, "as a dict"),
    "pld_enabled": MethodName(lambda e: e.config.layer_drop.progressive_layer_drop, "the setting"),
    "pld_theta": MethodName(lambda e: e.config.layer_drop.pld_theta, "what theta falls to"),
    "pld_gamma": MethodName(lambda e: e.config.layer_drop.pld_gamma, "how fast it falls"),
    "pld_params": MethodName(lambda e: e.progressive_layer_drop is not None and {
        "theta": e.config.layer_drop.pld_theta, "gamma": e.config.layer_drop.pld_gamma}, "as a dict, or False"),
    **_setting_names("profile", "the setting", """
        flops_profiler_enabled=flops_profiler flops_profiler_profile_step=flops_profiler_step
        flops_profiler_module_depth flops_profiler_top_modules flops_profiler_detailed flops_profiler_output_file"""),
    "flops_profiler": AttributeName(lambda e: e.profiled_step.profiler,
                                    "the FlopsProfiler of rank 0 where a profile is asked for, or None"),
    **_setting_names("quantize", "the setting", """
        quantize_training eigenvalue_enabled=quantize_eigenvalue eigenvalue_verbose eigenvalue_max_iter eigenvalue_tol
        eigenvalue_stability eigenvalue_layer_name eigenvalue_layer_num"""),
    "optimizer_name": MethodName(lambda e: e.get_type()[0], "the name of the optimizer"),
    "optimizer_params": MethodName(lambda e: {key: value for key, value in e.optimizer.param_groups[0].items()
                                              if key != "params"}, "hyper-parameters of the first param group"),
    "get_data_types": MethodName(lambda e: (e.working_dtype, torch.float32), "of the weights, and of sums over "
                                 "micro-batches"),
    "fp16_auto_cast": MethodName(lambda e: e.config.precision.auto_cast, "the setting"),
    "steps_per_print": MethodName(lambda e: e.monitor.config.steps_per_print or None, "the setting, or None"),
    "wall_clock_breakdown": MethodName(lambda e: e.monitor.config.times, "the setting"),
    "memory_breakdown": MethodName(lambda e: e.monitor.config.memory, "the setting"),
    "tensorboard_enabled": MethodName(lambda e: e.monitor.config.tensorboard_dir is not None, "the setting"),
    "wandb_enabled": MethodName(lambda e: e.monitor.config.wandb is not None, "the setting")}

RANKS_AND_GROUPS: dict[str, CompatName] = {
    "global_rank": AttributeName(lambda e: e.groups.world.rank, "this rank among all"),
    "world_size": AttributeName(lambda e: e.groups.world.size, "ranks of the job"),
    "dp_world_size": AttributeName(lambda e: e.groups.dp.size, "data parallel ranks"),
    "mp_world_size": AttributeName(lambda e: e.groups.tp.size, "tensor parallel ranks"),
    "data_parallel_group": AttributeName(lambda e: e.groups.dp.process_group, "the process group, of one rank too"),
    "get_data_parallel_rank": MethodName(lambda e: e.groups.dp.rank, "this rank in its data parallel group"),
    "get_data_parallel_world_size": MethodName(lambda e: e.groups.dp.size, "ranks of that group"),
    "get_data_parallel_group": MethodName(lambda e: e.groups.dp.process_group, "that group, of one rank too"),
    "get_model_parallel_rank": MethodName(lambda e: e.groups.tp.rank, "this rank in its tensor parallel group"),
    "get_tensor_parallel_rank": MethodName(lambda e: e.groups.tp.rank, "this rank in its tensor parallel group"),
    "pipeline_parallelism": AttributeName(lambda e: False, "there are no pipeline stages"),
    "has_moe_layers": AttributeName(lambda e: False, "there are no experts"),
    "enable_backward_allreduce": AttributeName(lambda e: True, "`backward` sums gradients over ranks")}

# The model is a child named `module`, as in DeepSpeed's engine.
MODULE: dict[str, CompatName] = {
    name: AttributeName(lambda e, name=name: getattr(nn.ModuleDict({"module": e.module}), name),  # type: ignore[misc]
                        "as torch's; names begin with `module.`, as in DeepSpeed and DDP")
    for name in ("named_parameters", "named_buffers", "named_modules", "modules", "children", "named_children")}
for _name, _dtype in (("half", torch.float16), ("bfloat16", torch.bfloat16), ("float", torch.float32)):
    MODULE[_name] = AttributeName(lambda e, dtype=_dtype: lambda: e.to(dtype),  # type: ignore[misc]
                                  "accepted where it is the working precision; otherwise refused, as `to`")
MODULE["cuda"] = AttributeName(lambda e: lambda device=None: e.to(torch.device("cuda") if device is None else device),
                               "accepted where the model is on that GPU; otherwise refused, as `to`")
MODULE["cpu"] = AttributeName(lambda e: lambda: e.to("cpu"), "accepted on the CPU; otherwise refused, as `to`")
MODULE |= _unsupported_names(
    "the engine has placed the parameters, in flat buffers; do this to the model before zero.initialize",
    "double type share_memory to_empty requires_grad_ xpu ipu")

CONSTANTS: dict[str, CompatName] = {
    **_constant_names(False, "there is no such thing here, so it is off", """
        amp_enabled curriculum_enabled_legacy curriculum_learning_enabled data_efficiency_enabled random_ltd_enabled
        elasticity_enabled sparse_gradients_enabled torch_autocast_enabled autotuning_enabled"""),
    **_constant_names(True, "every checkpoint can be loaded on any number of ranks", "load_universal_checkpoint"),
    **_constant_names(None, "no effect: `backward` has summed the gradients already", "allreduce_gradients"),
    **_constant_names(None, "no effect: `step` clips, at \"gradient_clipping\"", "clip_fp32_gradients"),
    **_constant_names(None, "no effect: parameters are released after their block", "empty_partition_cache")}

UNSUPPORTED: dict[str, CompatName] = {
    **_unsupported_names("call engine.backward(loss), which scales the loss", "scale"),
    **_unsupported_names("engine.monitor.write_events((name, value, samples), ...) writes scalars", "summary_events"),
    **_unsupported_names("engine.config has the settings, by the names of docs/flags.md", "_config"),
    **_unsupported_names("call engine.train_batch_size()", "get_train_batch_size"),
    **_unsupported_names("call engine.zero_offload_optimizer() and engine.zero_offload_param()",
                         "is_zero_offload zero_offload"),
    **_unsupported_names("`wall_clock_breakdown` prints times, and the monitors record them", "timers")}

COMPAT_NAMES: dict[str, CompatName] = {**SETTINGS, **RANKS_AND_GROUPS, **MODULE, **CONSTANTS, **UNSUPPORTED}
