"""The ZeRO engine: `zero.initialize`, `zero.Init`, `zero.GatheredParameters` and DeepSpeed's other names.

    from megatron import zero
    engine, optimizer, loader, scheduler = zero.initialize(model=model, config="ds_config.json")

In reading order: stages.py, layout.py, flat_buffers.py (arithmetic and memory of flat buffers); partitioned_param.py,
deferred_init.py (sharded parameters outside of a step); gradients.py, bucket.py (the buffers of one unit); hooks.py,
units.py, pass_coordinator.py (forward and backward); step_result.py, state.py, update.py, step.py (the optimizer
step); engine.py assembles them. offload/ stores state on the device, the host or NVMe; api/ is what a script sees.
Names are imported on first use: config and the planner need stages.py and layout.py without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatron.package import check_package_shadowing

if TYPE_CHECKING:
    from megatron.checkpoint.convert.fp32_state_dict import (
        convert_zero_checkpoint_to_fp32_state_dict as convert_zero_checkpoint_to_fp32_state_dict,
        get_fp32_state_dict_from_zero_checkpoint as get_fp32_state_dict_from_zero_checkpoint,
        load_state_dict_from_zero_checkpoint as load_state_dict_from_zero_checkpoint)
    from megatron.zero.accelerator import get_accelerator as get_accelerator
    from megatron.zero.api.engine import Engine as Engine
    from megatron.zero.api.init import (GatheredParameters as GatheredParameters, Init as Init,
                                        unwrap_model_for_generation as unwrap_model_for_generation)
    from megatron.zero.api.initialize import (add_config_arguments as add_config_arguments,
                                              init_distributed as init_distributed, initialize as initialize)
    from megatron.zero.estimate import (
        estimate_zero2_model_states_mem_needs_all_cold as estimate_zero2_model_states_mem_needs_all_cold,
        estimate_zero2_model_states_mem_needs_all_live as estimate_zero2_model_states_mem_needs_all_live,
        estimate_zero3_model_states_mem_needs_all_cold as estimate_zero3_model_states_mem_needs_all_cold,
        estimate_zero3_model_states_mem_needs_all_live as estimate_zero3_model_states_mem_needs_all_live)
    from megatron.zero.offload_states import (OffloadDeviceEnum as OffloadDeviceEnum,
                                              OffloadStateTypeEnum as OffloadStateTypeEnum)
    from megatron.zero.partitioned_param import (register_external_parameter as register_external_parameter,
                                                 unregister_external_parameter as unregister_external_parameter)
    from megatron.zero.tiling import TiledLinear as TiledLinear, TiledLinearReturnBias as TiledLinearReturnBias

check_package_shadowing()

_MODULES = {
    "megatron.zero.api.initialize": "initialize add_config_arguments init_distributed",
    "megatron.zero.api.engine": "Engine",
    "megatron.zero.accelerator": "get_accelerator",
    "megatron.zero.offload_states": "OffloadDeviceEnum OffloadStateTypeEnum",
    "megatron.zero.api.init": "Init GatheredParameters unwrap_model_for_generation",
    "megatron.zero.partitioned_param": "register_external_parameter unregister_external_parameter",
    "megatron.zero.tiling": "TiledLinear TiledLinearReturnBias",
    "megatron.checkpoint.convert.fp32_state_dict": "get_fp32_state_dict_from_zero_checkpoint "
    "load_state_dict_from_zero_checkpoint convert_zero_checkpoint_to_fp32_state_dict",
    "megatron.zero.estimate": "estimate_zero2_model_states_mem_needs_all_live "
    "estimate_zero2_model_states_mem_needs_all_cold estimate_zero3_model_states_mem_needs_all_live "
    "estimate_zero3_model_states_mem_needs_all_cold"}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}

# What DeepSpeed calls what: a name of a module, or the module itself.
_ALIASES = {
    "DeepSpeedEngine": ("megatron.zero.api.engine", "Engine"),
    "DeepSpeedOptimizer": ("megatron.zero.api.torch_interfaces", "ZeroOptimizer"),
    "accelerator": ("megatron.zero.accelerator", None),
    "utils": ("megatron.zero.utils", None),
    "ops": ("megatron.zero.ops", None),
    "checkpointing": ("megatron.recompute", None),
    "comm": ("megatron.zero.comm", None),
    "zero": (__name__, None),
    "__version__": ("megatron.package", "__version__")}

# Names of the package deepspeed that are not here -> why, and what to do.
_REFUSED = {name: why for names, why in {
    "init_inference": "this engine trains; `from megatron.inference import init_inference` (docs/inference.md)",
    "InferenceEngine": "this engine trains; megatron.inference.InferenceEngine is what init_inference returns",
    "PipelineModule PipelineEngine pipe": "there is no pipeline parallelism; stage 3 splits models by parameters",
    "tp_model_init": "tensor parallelism is the model's: build it of mpu's layers, and give mpu= to initialize",
    "OnDevice": "zero.Init makes a model in parts; torch.device(\"meta\") makes one without storage",
    "moe": "there are no experts",
    "runtime": "its modules are DeepSpeed's own; megatron.optim.schedulers has WarmupLR, OneCycle and their kin",
    "DeepSpeedConfig": "config= of initialize takes the path or the dict itself",
    "DeepSpeedHybridEngine": "this engine trains; megatron.zero has no inference engine",
    "DeepSpeedTransformerLayer DeepSpeedTransformerConfig replace_transformer_layer":
        "there are no fused layers; torch.compile fuses (engine.compile)",
}.items() for name in names.split()}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name in _ALIASES:
        module, member = _ALIASES[name]
        return getattr(import_module(module), member) if member else import_module(module)
    if name in _REFUSED:
        raise AttributeError(f"megatron.zero.{name} is not supported: {_REFUSED[name]}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)
