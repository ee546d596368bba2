"""Tensor model parallelism: groups, collectives, split layers, split loss; usable without the rest of the tree.

Begin with groups.py (who communicates with whom) and layers.py, regions.py (split layers and activations). Below them
are collectives.py and backends.py; cross_entropy.py is the loss of a split vocabulary, random.py and weight_init.py are
the random streams and initial weights, parallel_state.py has Megatron's global names.

The modules are the interface (`mpu.layers`, `mpu.groups`, ...); this file adds Megatron's flat names, for scripts
written against its `mpu`. They are imported on first use: mpu.split must not import torch.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

_MODULES = {
    "mpu.parallel_state": "VocabUtility broadcast_data destroy_model_parallel get_data_parallel_group "
    "get_data_parallel_rank get_data_parallel_src_rank get_data_parallel_world_size get_model_parallel_group "
    "get_model_parallel_rank get_model_parallel_src_rank get_model_parallel_world_size "
    "get_pipeline_model_parallel_group get_pipeline_model_parallel_rank get_pipeline_model_parallel_world_size "
    "get_tensor_model_parallel_group get_tensor_model_parallel_rank get_tensor_model_parallel_src_rank "
    "get_tensor_model_parallel_world_size get_virtual_pipeline_model_parallel_rank "
    "get_virtual_pipeline_model_parallel_world_size initialize_model_parallel is_pipeline_first_stage "
    "is_pipeline_last_stage is_unitialized model_parallel_is_initialized copy_to_model_parallel_region "
    "gather_from_model_parallel_region reduce_from_model_parallel_region scatter_to_model_parallel_region",
    "mpu.cross_entropy": "linear_cross_entropy vocab_parallel_cross_entropy",
    "mpu.grads": "clip_grad_norm",
    "mpu.layers": "ColumnParallelLinear ParallelEmbedding RowParallelLinear VocabParallelEmbedding",
    "mpu.random": "get_cuda_rng_tracker model_parallel_cuda_manual_seed",
    "mpu.regions": "split_tensor_along_last_dim",
    "mpu.split": "divide ensure_divisibility"}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(import_module(_MODULE_OF[name]), name)
    if not name.startswith("_") and find_spec(f"mpu.{name}"):
        return import_module(f"mpu.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
