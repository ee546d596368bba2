"""The ZeRO engine: one data-parallel mechanism whose stages are rows of a table (policy.py).

    from megatron import zero
    engine, optimizer, loader, scheduler = zero.initialize(model=model, config="ds_config.json")

In the order to read them: layout.py (what lives where), policy.py (what is split), bucket.py (the buffers of one unit),
hooks.py (module and gradient events), units.py (how a model is cut), residency.py (what is whole when), passes.py (a
forward and a backward), step.py (the optimizer step), state.py (what lasts from step to step), engine.py (all of it
together). holders.py and parked.py are about parameters outside of a step. api/ is what a training script sees.

Names are imported on first use: floor 0 of this package must not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatron.neighbours import check_neighbours

if TYPE_CHECKING:
    from megatron.checkpoint.interchange.fp32 import (
        convert_zero_checkpoint_to_fp32_state_dict,
        get_fp32_state_dict_from_zero_checkpoint,
        load_state_dict_from_zero_checkpoint,
    )
    from megatron.zero.api.engine import Engine
    from megatron.zero.api.estimate import (
        estimate_zero2_model_states_mem_needs_all_cold,
        estimate_zero2_model_states_mem_needs_all_live,
        estimate_zero3_model_states_mem_needs_all_cold,
        estimate_zero3_model_states_mem_needs_all_live,
    )
    from megatron.zero.api.init import GatheredParameters, Init
    from megatron.zero.api.initialize import add_config_arguments, init_distributed, initialize
    from megatron.zero.holders import register_external_parameter, unregister_external_parameter
    from megatron.zero.tiling import TiledLinear, TiledLinearReturnBias

check_neighbours()

_MODULES = {
    "megatron.zero.api.initialize": "initialize add_config_arguments init_distributed",
    "megatron.zero.api.engine": "Engine",
    "megatron.zero.api.init": "Init GatheredParameters",
    "megatron.zero.holders": "register_external_parameter unregister_external_parameter",
    "megatron.zero.tiling": "TiledLinear TiledLinearReturnBias",
    "megatron.checkpoint.interchange.fp32": "get_fp32_state_dict_from_zero_checkpoint "
                                            "load_state_dict_from_zero_checkpoint "
                                            "convert_zero_checkpoint_to_fp32_state_dict",
    "megatron.zero.api.estimate": "estimate_zero2_model_states_mem_needs_all_live "
                                  "estimate_zero2_model_states_mem_needs_all_cold "
                                  "estimate_zero3_model_states_mem_needs_all_live "
                                  "estimate_zero3_model_states_mem_needs_all_cold",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = [
    "Engine",
    "GatheredParameters",
    "Init",
    "TiledLinear",
    "TiledLinearReturnBias",
    "add_config_arguments",
    "convert_zero_checkpoint_to_fp32_state_dict",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "get_fp32_state_dict_from_zero_checkpoint",
    "init_distributed",
    "initialize",
    "load_state_dict_from_zero_checkpoint",
    "register_external_parameter",
    "unregister_external_parameter",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)
