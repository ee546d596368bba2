"""Tensor model parallelism: groups, collectives, split layers, split loss; usable without the rest of the tree.

The modules are the interface (`mpu.layers`, `mpu.groups`, ...); this file adds the classic flat names, for
scripts written against Megatron's `mpu`.
"""

from mpu.cross_entropy import vocab_parallel_cross_entropy
from mpu.data import broadcast_data
from mpu.facade import (
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
