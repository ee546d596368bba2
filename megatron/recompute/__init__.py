"""Activation checkpointing: store the inputs of a chunk of blocks, or what is expensive in a block, and run the rest
again in backward.

Knows mpu and its config section, not the engine.
"""

from megatron.recompute.activation_checkpoint import (Recomputation, checkpoint, configure, get_cuda_rng_tracker,
                                                      in_chunks, is_configured, model_parallel_cuda_manual_seed,
                                                      model_parallel_reconfigure_tp_seed, non_reentrant_checkpoint,
                                                      notes, partition_activations_in_checkpoint, report, reset,
                                                      set_num_layers)
from megatron.recompute.selective import recompute_selectively

__all__ = [
    "Recomputation", "checkpoint", "configure", "get_cuda_rng_tracker", "in_chunks", "is_configured",
    "model_parallel_cuda_manual_seed", "model_parallel_reconfigure_tp_seed", "non_reentrant_checkpoint", "notes",
    "partition_activations_in_checkpoint", "recompute_selectively", "report", "reset", "set_num_layers",
]
