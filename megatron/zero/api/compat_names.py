"""DeepSpeed engine names beyond the methods of `Engine`: name -> answer, no effect (and why), or unsupported (and what
to do).

    MethodName        a method that returns a setting or a known value
    AttributeName     an attribute
    NoEffectName      a method that does nothing: its work happens elsewhere
    UnsupportedName   raises with a reason; `hasattr` is False

`Engine.__getattr__` looks here before it asks the module. docs/deepspeed.md lists all names (a test compares).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from megatron.errors import ConfigError
from mpu.groups import subgroup


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
class NoEffectName:
    reason: str


@dataclass(frozen=True)
class UnsupportedName:
    reason: str


CompatName = MethodName | AttributeName | NoEffectName | UnsupportedName


class UnsupportedNameError(ConfigError, AttributeError):
    """An unsupported DeepSpeed name. An AttributeError as well, so that `hasattr` is False."""


def resolve_name(engine: Any, name: str) -> Any:
    """The attribute `name` of the engine. Raises KeyError if the table lacks it, UnsupportedNameError if it is
    unsupported."""
    row = COMPAT_NAMES[name]
    if isinstance(row, UnsupportedName):
        raise UnsupportedNameError(f"engine.{name} is not supported: {row.reason}")
    if isinstance(row, NoEffectName):
        return lambda *args, **kwargs: None
    return row.getter(engine) if isinstance(row, AttributeName) else lambda: row.getter(engine)


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


def _no_effect_names(reason: str, names: str) -> dict[str, CompatName]:
    return {name: NoEffectName(reason) for name in names.split()}


def _offload_device(engine: Any, kind: str) -> str | None:
    """"cpu", "nvme", or None for the device."""
    device: str = getattr(engine.config.offload, f"offload_{kind}_device")
    return None if device == "none" else device


def _single_rank_group(engine: Any) -> ProcessGroup:
    return subgroup(engine.groups.world, 1).process_group


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
    "flops_profiler_recompute_fwd_factor": MethodName(lambda e: 0.0, "recomputation is counted as it runs"),
    "flops_profiler": AttributeName(lambda e: e.profiled_step.profiler,
                                    "the FlopsProfiler of rank 0 where a profile is asked for, or None"),
    **_setting_names("quantize", "the setting", """
        quantize_training eigenvalue_enabled=quantize_eigenvalue eigenvalue_verbose eigenvalue_max_iter eigenvalue_tol
        eigenvalue_stability eigenvalue_layer_name eigenvalue_layer_num"""),
    "eigenvalue_gas_boundary_resolution": MethodName(lambda e: 1, "eigenvalues are found when a bit is about to fall"),
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
    "seq_dp_world_size": AttributeName(lambda e: e.groups.dp.size, "data parallel ranks"),
    "data_parallel_group": AttributeName(lambda e: e.groups.dp.process_group, "the process group, of one rank too"),
    "seq_data_parallel_group": AttributeName(lambda e: e.groups.dp.process_group, "the process group, of one rank too"),
    "get_data_parallel_rank": MethodName(lambda e: e.groups.dp.rank, "this rank in its data parallel group"),
    "get_data_parallel_world_size": MethodName(lambda e: e.groups.dp.size, "ranks of that group"),
    "get_data_parallel_group": MethodName(lambda e: e.groups.dp.process_group, "that group, of one rank too"),
    "get_model_parallel_rank": MethodName(lambda e: e.groups.tp.rank, "this rank in its tensor parallel group"),
    "get_tensor_parallel_rank": MethodName(lambda e: e.groups.tp.rank, "this rank in its tensor parallel group"),
    "sequence_parallel_size": AttributeName(lambda e: 1, "a sequence is whole on each rank"),
    "get_sequence_parallel_group": MethodName(_single_rank_group, "this rank alone: a sequence is whole on each rank"),
    "seq_parallel_group": AttributeName(_single_rank_group, "this rank alone: a sequence is whole on each rank"),
    "autotp_size": MethodName(lambda e: 0, "tensor parallelism is the model's, by `mpu`"),
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
        amp_enabled curriculum_enabled curriculum_enabled_legacy
        curriculum_learning_enabled data_efficiency_enabled data_sampling_enabled random_ltd_enabled
        autotuning_enabled autotuning_profile_model_info elasticity_enabled
        sparse_gradients_enabled torch_autocast_enabled super_offload is_deepcompile_enabled
        is_deepcompile_active compile_autosp compile_autotp compile_zero_optimization_stage
        uses_parallelization_pass_only zero_quantized_weights zero_quantized_nontrainable_weights
        zero_quantized_gradients zero_legacy_stage1 zero_save_muon_momentum_buffer_in_memory
        zero_log_trace_cache_warnings zero_allgather_sequential is_sanity_checks_enabled use_node_local_storage
        optimizer_legacy_fusion checkpoint_serialization_enabled checkpoint_writer_enabled graph_harvesting"""),
    **_constant_names(False, "master weights, sums of gradients and moments are fp32",
                      "fp16_master_weights_and_gradients bf16_master_weights_and_gradients bf16_optimizer_states"),
    **_constant_names(False, "the last batch of an epoch is smaller, or repeats samples so that ranks agree",
                      "dataloader_drop_last"),
    **_constant_names(True, "whatever is accepted as optimizer is tested", "zero_allow_untested_optimizer"),
    **_constant_names(False, "the same optimizer runs on every device", "zero_force_ds_cpu_optimizer"),
    **_constant_names(True, "every checkpoint can be loaded on any number of ranks",
                      "zero_elastic_checkpoint load_universal_checkpoint"),
    **_constant_names(True, "ranks always agree on a tag, or the run ends",
                      "checkpoint_tag_validation_enabled checkpoint_tag_validation_fail"),
    **_constant_names(True, "always", "zero_compute_grad_norm managed_gradient_accumulation zero_grad_hooks"),
    **_constant_names(1, "parameters are split over all data parallel ranks", "zero_hpz_partition_size"),
    **_constant_names(1.0, "optimizer state moves as a whole, or not at all", "zero_partial_offload"),
    **_constant_names(0, "modules are cut by parameters alone", "zero_module_granularity_threshold"),
    **_constant_names(sys.maxsize, "unsplit parameters have no common limit", "zero_model_persistence_threshold"),
    "is_first_weights_partition_group": MethodName(lambda e: True, "parameters are split over one group"),
    "is_map_style_dataset": AttributeName(lambda e: lambda data: hasattr(data, "__getitem__"), "of a dataset"),
    "is_iterable_style_dataset": AttributeName(lambda e: lambda data: not hasattr(data, "__getitem__"), "of a dataset")}

NO_EFFECT: dict[str, CompatName] = {
    **_no_effect_names("`backward` has summed the gradients already", """
        allreduce_gradients allreduce_bucket allreduce_and_copy allreduce_no_retain buffered_allreduce_fallback"""),
    **_no_effect_names("`step` clips, at \"gradient_clipping\"", "clip_fp32_gradients"),
    **_no_effect_names("a parameter is let go as soon as its block has been computed", "empty_partition_cache"),
    **_no_effect_names("Python collects when it wants to; the engine keeps no cycles", "collect_python_gc"),
    **_no_effect_names("`wall_clock_breakdown` prints times", "print_forward_breakdown")}

UNSUPPORTED: dict[str, CompatName] = {
    **_unsupported_names("call engine.backward(loss): it scales the loss, and sums gradients as they are made",
                         "scale coalesce_grad_reduction"),
    **_unsupported_names("gradients are dense here, and summed by `backward`", """
        sparse_allreduce_no_retain sparse_allreduce_bucket sparse_allreduce sparse_all_gather all_gather_scalar"""),
    **_unsupported_names("samples are drawn in a fixed order and as they are: change them in the dataset or the "
                         "collate_fn", """
        set_data_post_process_func set_custom_curriculum_learning_schedule data_efficiency_config data_sampling_config
        curriculum_learning_config curriculum_params curriculum_params_legacy random_ltd_config random_ltd_initialize
        random_ltd_scheduler"""),
    **_unsupported_names("nothing of that kind exists here", """
        amp_params zenflow_config swap_tensor_config load_moe_state_dict
        all_to_all_group local_all_to_all_group expert_parallel_group expert_data_parallel_group gate_modules moe_layers
        num_experts torch_autocast_dtype torch_autocast_lower_precision_safe_modules tensor_parallel_config mesh_device
        get_optimizer_configuration"""),
    **_unsupported_names("nothing is tuned by the engine", """
        autotuning_start_profile_step autotuning_end_profile_step autotuning_metric_path autotuning_model_info_path
        autotuning_metric autotuning_model_info"""),
    **_unsupported_names("`wall_clock_breakdown` prints times, and the monitors record them",
                         "timers engine_timers tput_timer get_wall_clock_timers fwd_duration"),
    **_unsupported_names("engine.monitor.write_events((name, value, samples), ...) writes scalars",
                         "summary_events get_summary_writer tensorboard_output_path tensorboard_job_name"),
    **_unsupported_names("torch.compile compiles; call engine.compile()", """
        get_compile_time register_compile_pass get_autosp_backend get_autotp_backend get_deepcompile_backend
        get_deepspeed_compile_backend"""),
    **_unsupported_names("read it from the configuration you gave", """
        scheduler_name scheduler_params aio_config log_level zero_multi_rank_bucket_allreduce dump_state
        cpuadam_cores_perc zero_parameter_alignment postscale_gradients gradient_predivide_factor
        communication_data_type"""),
    **_unsupported_names("engine.config has the settings, by the names of docs/flags.md", "_config"),
    **_unsupported_names("call engine.train_batch_size()", "get_train_batch_size"),
    **_unsupported_names("call engine.zero_offload_optimizer() and engine.zero_offload_param()",
                         "is_zero_offload zero_offload"),
    **_unsupported_names("the optimizer that was given became the engine's rule; engine.optimizer has its param groups",
                         "basic_optimizer client_optimizer"),
    **_unsupported_names("engine.lr_scheduler is the scheduler", "client_lr_scheduler"),
    **_unsupported_names("checkpoint files are the engine's business; save_checkpoint and load_checkpoint are the "
                         "way", """
        checkpoint_engine checkpoint_mp_rank save_zero_checkpoint save_non_zero_checkpoint param_names
        loaded_checkpoint_dp_world_size loaded_checkpoint_mp_world_size"""),
    **_unsupported_names("`backward` returns the loss; keep it", "losses"),
    **_unsupported_names("parameters live in the engine's own flat buffers", "flatten unflatten"),
    **_unsupported_names("ask your own script, or torch.distributed",
                         "training_data collate_fn dist_backend use_ds_comm dont_change_device first_dataloader_check"),
    **_unsupported_names("it is internal to DeepSpeed", """
        engine_timers_cache flops gradient_average module_forward_post_hook module_forward_pre_hook
        optimized_linear_base_weight_sharding optimized_linear_lora_enabled scale_wrt_gas torch_autocast_z0_gradscaler
        warn_unscaled_loss""")}

COMPAT_NAMES: dict[str, CompatName] = {**SETTINGS, **RANKS_AND_GROUPS, **MODULE, **CONSTANTS, **NO_EFFECT,
                                       **UNSUPPORTED}
