"""Activation checkpointing, put on blocks from outside: keep a chunk's inputs, run the chunk again in backward.

keep.py (what waits, and where), replay.py (`Recomputation`: forward, and the same again), deepspeed.py
(DeepSpeed's module interface; `in_chunks` for the blocks of a GPT-2). Knows mpu and its config section, never the
engine.
"""

from megatron.recompute.deepspeed import checkpoint, configure, in_chunks, is_configured, report, reset
from megatron.recompute.replay import Recomputation, notes

__all__ = ["Recomputation", "checkpoint", "configure", "in_chunks", "is_configured", "notes", "report", "reset"]
