"""Tensor model parallelism: groups, collectives, split layers, split loss; usable without the rest of the tree.

The modules are the interface (`mpu.layers`, `mpu.groups`, ...); this file adds the classic flat names, for
scripts written against Megatron's `mpu`.
"""

from torch import Tensor

from mpu.classic import (
    VocabUtility,
    current_groups,
    destroy_model_parallel,
    get_data_parallel_group,
    get_data_parallel_rank,
    get_data_parallel_world_size,
    get_model_parallel_group,
    get_model_parallel_rank,
    get_model_parallel_src_rank,
    get_model_parallel_world_size,
    get_tensor_model_parallel_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_src_rank,
    get_tensor_model_parallel_world_size,
    initialize_model_parallel,
    model_parallel_is_initialized,
)
from mpu.cross_entropy import linear_cross_entropy, vocab_parallel_cross_entropy
from mpu.data import broadcast_data
from mpu.grads import clip_grad_norm
from mpu.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear, VocabParallelEmbedding
from mpu.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from mpu.regions import (
    copy_to_region,
    gather_from_region,
    reduce_from_region,
    scatter_to_region,
    split_tensor_along_last_dim,
)
from mpu.split import divide, ensure_divisibility

__all__ = [
    "ColumnParallelLinear",
    "ParallelEmbedding",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "VocabUtility",
    "broadcast_data",
    "clip_grad_norm",
    "copy_to_model_parallel_region",
    "destroy_model_parallel",
    "divide",
    "ensure_divisibility",
    "gather_from_model_parallel_region",
    "get_cuda_rng_tracker",
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
    "get_model_parallel_group",
    "get_model_parallel_rank",
    "get_model_parallel_src_rank",
    "get_model_parallel_world_size",
    "get_tensor_model_parallel_group",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_src_rank",
    "get_tensor_model_parallel_world_size",
    "initialize_model_parallel",
    "linear_cross_entropy",
    "model_parallel_cuda_manual_seed",
    "model_parallel_is_initialized",
    "reduce_from_model_parallel_region",
    "scatter_to_model_parallel_region",
    "split_tensor_along_last_dim",
    "vocab_parallel_cross_entropy",
]


def copy_to_model_parallel_region(x: Tensor) -> Tensor:
    return copy_to_region(x, current_groups().tp)


def reduce_from_model_parallel_region(x: Tensor) -> Tensor:
    return reduce_from_region(x, current_groups().tp)


def scatter_to_model_parallel_region(x: Tensor) -> Tensor:
    return scatter_to_region(x, current_groups().tp)


def gather_from_model_parallel_region(x: Tensor) -> Tensor:
    return gather_from_region(x, current_groups().tp)
