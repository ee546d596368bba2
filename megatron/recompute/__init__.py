"""Activation checkpointing, applied to blocks from outside: keep a chunk's inputs, run the chunk again in backward.

keep.py (what is kept, and where), replay.py (`Recomputation`: a forward and its replay), deepspeed.py
(DeepSpeed's module interface; `in_chunks` for the blocks of a GPT-2). Knows mpu and its config section, never the
engine.
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
