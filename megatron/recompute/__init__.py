"""Activation checkpointing: store only the inputs of a chunk of blocks, and run the chunk again in backward.

Begin with activation_checkpoint.py (`Recomputation`, and storage of the inputs); deepspeed_api.py has
`deepspeed.checkpointing`, and `in_chunks` for the blocks of a GPT-2. Knows mpu and its config section, not the engine.
"""

from megatron.recompute.activation_checkpoint import Recomputation, notes
from megatron.recompute.deepspeed_api import (checkpoint, configure, get_cuda_rng_tracker, in_chunks, is_configured,
                                              model_parallel_cuda_manual_seed, model_parallel_reconfigure_tp_seed,
                                              non_reentrant_checkpoint, partition_activations_in_checkpoint, report,
                                              reset, set_num_layers)

__all__ = [
    "Recomputation", "checkpoint", "configure", "get_cuda_rng_tracker", "in_chunks", "is_configured",
    "model_parallel_cuda_manual_seed", "model_parallel_reconfigure_tp_seed", "non_reentrant_checkpoint", "notes",
    "partition_activations_in_checkpoint", "report", "reset", "set_num_layers",
]
